"""Part `kept`: positions of a text that each layer and head retains at its end."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.result import HeatMap, Numbers, PartResult, Table
from benchmarks.eviction.config import RetainedConfig
from benchmarks.eviction.rules import Rule
from benchmarks.eviction.texts import RunningText, cut_texts
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel

Retained = NDArray[np.bool_]  # [texts, lanes, positions]
SINKS = 4


def run_retained(model: LoadedModel, config: RetainedConfig, running: RunningText) -> PartResult:
    """Run the part."""
    texts = cut_texts(model, running, config.tokens, config.texts)
    found = {rule: retained_positions(model, config, texts, rule) for rule in config.rules}
    maps = {rule.text: binned(retained, config.bins) for rule, retained in found.items()}
    return PartResult(
        claims=claims(found, model.spec.num_kv_heads),
        tables=(_table(config, running.name, found, model.spec.num_kv_heads),),
        maps=(_map(config, maps, model.spec.num_kv_heads),),
        raw={"kept_share": {name: shares.tolist() for name, shares in maps.items()}},
    )


def retained_positions(
    model: LoadedModel, config: RetainedConfig, texts: Sequence[list[int]], rule: Rule
) -> Retained:
    """Positions retained at the last eviction of each text; later positions count as retained.

    Raises:
        InvariantError: a text is shorter than the cap.
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
    return np.stack([_retained_of(engine, text) for text in texts])


def _retained_of(engine: Engine, text: list[int]) -> NDArray[np.bool_]:
    options = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request_id = engine.submit(GenerationRequest(text, options))
    while engine.has_work:
        engine.step()
    sets = engine.eviction_trace(request_id)
    if not sets:
        raise InvariantError("expected an eviction in each text, got a text below the cap")
    last = sets[-1]
    retained = np.zeros((len(last.retained), len(text)), dtype=bool)
    retained[:, last.num_computed :] = True
    for lane, positions in enumerate(last.retained):
        retained[lane, positions] = True
    spec = engine.model.spec
    num_evicting = sum(layer.window is None for layer in spec.layers)
    # a rule with one retained set for all heads has one lane per layer
    return retained.repeat(num_evicting * spec.num_kv_heads // len(retained), axis=0)


def binned(retained: Retained, bins: int) -> NDArray[np.float64]:
    """Retained fraction of each section of the text: [lanes, bins], mean over texts."""
    parts = np.array_split(retained.mean(axis=0), bins, axis=1)
    return np.stack([part.mean(axis=1) for part in parts], axis=1).round(4)


def agreement(retained: Retained, heads: int) -> float:
    """Agreement of a layer's heads: retained by both over retained by either, mean over pairs.

    Args:
        retained: retained tokens of each lane; lanes are layer-major.
        heads: KV heads of a layer; with 1 head the agreement is 1.
    """
    by_layer = retained.reshape(len(retained), -1, heads, retained.shape[2])
    pairs = [(a, b) for a in range(heads) for b in range(a)]
    if not pairs:
        return 1.0
    both = [(by_layer[:, :, a] & by_layer[:, :, b]).sum(axis=-1) for a, b in pairs]
    either = [(by_layer[:, :, a] | by_layer[:, :, b]).sum(axis=-1) for a, b in pairs]
    return float(np.mean(np.stack(both) / np.stack(either)))


def _summary(retained: Retained, heads: int) -> tuple[float, float, float, float]:
    """Retained fractions of the sinks, the oldest half and the newest tenth; agreement of heads."""
    tokens = retained.shape[2]
    parts = slice(0, SINKS), slice(0, tokens // 2), slice(tokens - tokens // 10, tokens)
    sinks, old, new = (float(retained[:, :, part].mean()) for part in parts)
    return sinks, old, new, agreement(retained, heads)


def claims(found: dict[Rule, Retained], heads: int) -> Numbers:
    """Per policy: retained fraction of the oldest half, and agreement of a layer's heads."""
    made: Numbers = {}
    for rule, retained in found.items():
        _, old, _, head_agreement = _summary(retained, heads)
        made[f"kept_{rule.name}_old_half"] = old
        made[f"kept_{rule.name}_head_agreement"] = head_agreement
    return made


def _table(config: RetainedConfig, name: str, found: dict[Rule, Retained], heads: int) -> Table:
    return Table(
        name="eviction-kept",
        caption=(
            f"Retained positions of {config.texts} texts of {config.tokens:,} tokens from {name} "
            f"at their end, cap {config.cap} ({100 * config.budget:g} %), {config.every} tokens "
            f"evicted at once: fraction of the first {SINKS} tokens, the oldest half, the newest "
            "tenth; and tokens that two heads of a layer both retain, over those that either "
            "retains."
        ),
        columns=("rule", f"first {SINKS}", "oldest half", "newest tenth", "heads agree"),
        rows=tuple((rule.text, *_summary(retained, heads)) for rule, retained in found.items()),
    )


def _map(config: RetainedConfig, maps: dict[str, NDArray[np.float64]], heads: int) -> HeatMap:
    return HeatMap(
        name="eviction-kept",
        title=f"Retained tokens after {config.tokens:,} tokens, cap {config.cap}",
        x_label=f"position, in {config.bins} sections of the text",
        y_label=f"layer and KV head ({heads} per layer), first layer on top",
        panels={name: tuple(map(tuple, shares.tolist())) for name, shares in maps.items()},
    )
