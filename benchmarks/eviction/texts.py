"""Parts `perplexity` and `kept`: texts processed under a cap, block by block, with real eviction.

Each token is predicted from the KV that its lanes still hold. Once the cap is reached, every policy
evicts `every` tokens and then processes as many. The score covers the tokens after the cap; full KV
is scored on the same tokens. `kept`: the positions that each layer and head retains at the end.

Source: the table "Eviction Policy Comparison" of "KV Cache: The Hidden Memory Giant" (4,096 tokens,
a budget of 1,024). The source does not describe how to reproduce its numbers; here they are
measured.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from benchmarks.common.result import Cell, HeatMap, Numbers, PartResult, Table
from benchmarks.common.tables import table_of
from benchmarks.eviction.config import PerplexityConfig, RetainedConfig
from benchmarks.quality.rules import Rule
from benchmarks.quality.texts import RunningText, cut_texts
from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import InvariantError
from quire.layout.eviction import PREFILL_AND_DECODE
from quire.models.loader import LoadedModel
from quire.policies.registry import FULL
from quire.sampling.outputs import RequestOutput
from quire.scheduler.schedule_config import ScheduleConfig

Retained = NDArray[np.bool_]  # [texts, lanes, positions]
SINKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTexts:
    """Scores of all texts with one rule.

    Attributes:
        rule: text of the rule, or FULL.
        nats: mean negative log-likelihood of each text's scored tokens.
        request_bytes: most KV bytes of a text.
    """

    rule: str
    nats: tuple[float, ...]
    request_bytes: int

    @property
    def perplexity(self) -> float:
        """Perplexity over all scored tokens; all texts have equally many."""
        return math.exp(statistics.mean(self.nats))

    def nats_over(self, other: "RuleTexts") -> tuple[float, float]:
        """Mean increase of the nats per token over another rule, and its standard error.

        Returns:
            Increase in nats, and its standard error; 0 for one text.
        """
        increase = [a - b for a, b in zip(self.nats, other.nats, strict=True)]
        error = float(stats.sem(increase)) if len(increase) > 1 else 0.0
        return statistics.mean(increase), error


def run_perplexity(
    model: LoadedModel, config: PerplexityConfig, running: RunningText
) -> PartResult:
    """Run the part."""
    texts = cut_texts(model, running, config.tokens, config.texts)
    found = [score_texts(model, config, texts, rule) for rule in (None, *config.rules)]
    return PartResult(
        claims=claims(found),
        tables=(_table(config, running.name, found),),
        raw={"rules": [asdict(one) for one in found]},
    )


def score_texts(
    model: LoadedModel, config: PerplexityConfig, texts: Sequence[list[int]], rule: Rule | None
) -> RuleTexts:
    """Score all texts with a rule; None: no eviction."""
    number_bytes = model.decoder.dtype.itemsize
    memory = 2 * config.rows * model.spec.kv_bytes(config.tokens, number_bytes) + (8 << 20)
    evict = FULL if rule is None else rule.evict(config.cap, config.every, PREFILL_AND_DECODE)
    kv = KVConfig(memory=memory, evict=evict, prefix_cache=PrefixCacheConfig(enabled=False))
    llm = LLM(model, kv=kv, schedule=ScheduleConfig(max_num_seqs=config.rows))
    options = SamplingParams(max_tokens=0, prompt_logprobs=0)
    answers = llm.generate(list(texts), options)
    return RuleTexts(
        rule=FULL if rule is None else rule.text,
        nats=tuple(mean_nats(answer, config.cap) for answer in answers),
        request_bytes=max(answer.usage.kv_peak_bytes for answer in answers),
    )


def mean_nats(answer: RequestOutput, first: int) -> float:
    """Mean negative log-likelihood of the tokens from position `first` on.

    Raises:
        InvariantError: the request failed.
    """
    if answer.error is not None or answer.prompt_logprobs is None:
        raise InvariantError(f"expected scores of a whole text, got the error {answer.error}")
    scored = [token for token in answer.prompt_logprobs[first:] if token is not None]
    return -statistics.mean(token.logprob for token in scored)


def claims(found: Sequence[RuleTexts]) -> Numbers:
    """Perplexity of every rule, its ratio to full KV's, and the ratio of bytes."""
    full = found[0]
    made: Numbers = {"perplexity_full": full.perplexity}
    for one in found[1:]:
        name = Rule(one.rule).name
        made[f"perplexity_{name}"] = one.perplexity
        made[f"perplexity_{name}_over_full"] = one.perplexity / full.perplexity
        made[f"perplexity_{name}_bytes_over_full"] = one.request_bytes / full.request_bytes
    return made


def _table(config: PerplexityConfig, name: str, found: Sequence[RuleTexts]) -> Table:
    full = found[0]
    columns: dict[str, Callable[[RuleTexts], Cell]] = {
        "rule": lambda one: one.rule,
        "retained tokens": lambda one: config.tokens if one.rule == FULL else config.cap,
        "KV KiB": lambda one: one.request_bytes / 1024,
        "perplexity": lambda one: one.perplexity,
        "over full": lambda one: one.perplexity / full.perplexity,
        "nats more": lambda one: "{:+.4f} +- {:.4f}".format(*one.nats_over(full)),
    }
    return table_of(
        "eviction-perplexity",
        f"{config.texts} texts of {config.tokens:,} tokens from {name}, processed in blocks of "
        f"{config.every} with a cap of {config.cap} ({100 * config.budget:g} %); tokens after "
        "the cap are scored. KV: most bytes of a text, with statistics. Nats: mean increase "
        "per token over full KV, and its standard error.",
        found,
        columns,
    )


def run_retained(model: LoadedModel, config: RetainedConfig, running: RunningText) -> PartResult:
    """Run the part."""
    texts = cut_texts(model, running, config.tokens, config.texts)
    found = {rule: retained_positions(model, config, texts, rule) for rule in config.rules}
    maps = {rule.text: binned(retained, config.bins) for rule, retained in found.items()}
    return PartResult(
        claims=kept_claims(found, model.spec.num_kv_heads),
        tables=(_kept_table(config, running.name, found, model.spec.num_kv_heads),),
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


def kept_claims(found: dict[Rule, Retained], heads: int) -> Numbers:
    """Per policy: retained fraction of the oldest half, and agreement of a layer's heads."""
    made: Numbers = {}
    for rule, retained in found.items():
        _, old, _, head_agreement = _summary(retained, heads)
        made[f"kept_{rule.name}_old_half"] = old
        made[f"kept_{rule.name}_head_agreement"] = head_agreement
    return made


def _kept_table(
    config: RetainedConfig, name: str, found: dict[Rule, Retained], heads: int
) -> Table:
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
