"""Part `kept`: which positions of a text each layer and head still holds at its end."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.result import HeatMap, Numbers, PartResult, Table
from benchmarks.eviction.config import KeptConfig
from benchmarks.eviction.rules import Rule
from benchmarks.eviction.texts import RunningText, pieces
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel

Kept = NDArray[np.bool_]  # [texts, lanes, positions]
SINKS = 4


def run_kept(model: LoadedModel, config: KeptConfig, running: RunningText) -> PartResult:
    """The part."""
    texts = pieces(model, running, config.tokens, config.texts)
    found = {rule: retained_positions(model, config, texts, rule) for rule in config.rules}
    maps = {rule.text: binned(kept, config.bins) for rule, kept in found.items()}
    return PartResult(
        claims=claims(found, model.spec.num_kv_heads),
        tables=(_table(config, running.name, found, model.spec.num_kv_heads),),
        maps=(_map(config, maps, model.spec.num_kv_heads),),
        raw={"kept_share": {name: shares.tolist() for name, shares in maps.items()}},
    )


def retained_positions(
    model: LoadedModel, config: KeptConfig, texts: Sequence[list[int]], rule: Rule
) -> Kept:
    """What a rule has kept at the last eviction of each text; what was read since counts as kept.

    Raises:
        InvariantError: a text did not reach the cap.
    """
    evict = rule.evict(config.cap, config.every, PREFILL_AND_DECODE)
    memory = 2 * model.spec.kv_bytes(config.tokens, model.decoder.dtype.itemsize) + (8 << 20)
    kv = KVConfig(
        memory=memory,
        evict=evict,
        prefix_cache=PrefixCacheConfig(enabled=False),
        record_evictions=True,
    )
    engine = Engine(model, kv)
    return np.stack([_kept_of(engine, text) for text in texts])


def _kept_of(engine: Engine, text: list[int]) -> NDArray[np.bool_]:
    options = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request_id = engine.submit(GenerationRequest(text, options))
    while engine.has_work:
        engine.step()
    sets = engine.eviction_trace(request_id)
    if not sets:
        raise InvariantError("a text of a bench did not reach its cap")
    last = sets[-1]
    kept = np.zeros((len(last.retained), len(text)), dtype=bool)
    kept[:, last.num_computed :] = True
    for lane, positions in enumerate(last.retained):
        kept[lane, positions] = True
    spec = engine.model.spec
    evicting = sum(layer.window is None for layer in spec.layers)
    # a rule with one set for all heads has one lane a layer
    return kept.repeat(evicting * spec.num_kv_heads // len(kept), axis=0)


def binned(kept: Kept, bins: int) -> NDArray[np.float64]:
    """Share of each part of the text that is kept: [lanes, bins], mean over texts."""
    parts = np.array_split(kept.mean(axis=0), bins, axis=1)
    return np.stack([part.mean(axis=1) for part in parts], axis=1).round(4)


def agreement(kept: Kept, heads: int) -> float:
    """Agreement of a layer's heads: retained by both over retained by either, mean over pairs.

    Args:
        kept: retained tokens of each lane; lanes are layer-major.
        heads: KV heads of a layer; with 1 head the agreement is 1.
    """
    by_layer = kept.reshape(len(kept), -1, heads, kept.shape[2])
    pairs = [(a, b) for a in range(heads) for b in range(a)]
    if not pairs:
        return 1.0
    both = [(by_layer[:, :, a] & by_layer[:, :, b]).sum(axis=-1) for a, b in pairs]
    either = [(by_layer[:, :, a] | by_layer[:, :, b]).sum(axis=-1) for a, b in pairs]
    return float(np.mean(np.stack(both) / np.stack(either)))


def _numbers(kept: Kept, heads: int) -> tuple[float, float, float, float]:
    """Kept of the sinks, of the oldest half, of the newest tenth; agreement of heads."""
    tokens = kept.shape[2]
    parts = slice(0, SINKS), slice(0, tokens // 2), slice(tokens - tokens // 10, tokens)
    sinks, old, new = (float(kept[:, :, part].mean()) for part in parts)
    return sinks, old, new, agreement(kept, heads)


def claims(found: dict[Rule, Kept], heads: int) -> Numbers:
    """Per policy: retained fraction of the oldest half, and agreement of a layer's heads."""
    made: Numbers = {}
    for rule, kept in found.items():
        _, old, _, alike = _numbers(kept, heads)
        made[f"kept_{rule.name}_old_half"] = old
        made[f"kept_{rule.name}_head_agreement"] = alike
    return made


def _table(config: KeptConfig, name: str, found: dict[Rule, Kept], heads: int) -> Table:
    return Table(
        name="eviction-kept",
        caption=(
            f"What is kept of {config.texts} texts of {config.tokens:,} tokens from {name} at "
            f"their ends, cap {config.cap} ({100 * config.budget:g} %), {config.every} leave at a "
            f"time: share of the first {SINKS} tokens, of the oldest half, of the newest tenth; "
            "and of two heads of a layer, tokens that both keep over tokens that either keeps."
        ),
        columns=("rule", f"first {SINKS}", "oldest half", "newest tenth", "heads agree"),
        rows=tuple((rule.text, *_numbers(kept, heads)) for rule, kept in found.items()),
    )


def _map(config: KeptConfig, maps: dict[str, NDArray[np.float64]], heads: int) -> HeatMap:
    return HeatMap(
        name="eviction-kept",
        title=f"Kept at the end of {config.tokens:,} tokens, cap {config.cap}",
        x_label=f"position, in {config.bins} parts of the text",
        y_label=f"layer and KV head ({heads} a layer), first layer on top",
        panels={name: tuple(map(tuple, shares.tolist())) for name, shares in maps.items()},
    )
