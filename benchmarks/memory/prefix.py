"""Part `prefix`: many requests with one system prompt, with and without the prefix cache.

The engine runs the same requests both ways, in interleaved rounds. All requests arrive at once, so
the shared prefix must be matched while it is being prefilled. Weights are float32, so that the
outputs of both ways must be equal, token by token.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Numbers, PartResult, Table
from benchmarks.common.workload import SHAPES
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.loader import LoadedModel
from quire.profile.ceilings import seconds
from quire.sampling.outputs import Usage
from quire.scheduler.schedule_config import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """Configuration of the requests.

    Attributes:
        model: a name in SHAPES.
        sharers: number of requests.
        system_tokens: tokens of the shared system prompt.
        own_tokens: further prompt tokens of each request.
        new_tokens: tokens generated for each request.
        repeats: rounds of both arms, after one warm-up round.
    """

    model: str = "small"
    sharers: int = 64
    system_tokens: int = 2_000
    own_tokens: int = 32
    new_tokens: int = 16
    repeats: int = 2

    @property
    def shareable_tokens(self) -> int:
        """Prompt tokens that the cache can save: the system prompt of all requests but one."""
        return (self.sharers - 1) * self.system_tokens

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Prompts, equal in every process; no two questions start with the same token."""
        rng = random.Random(0)

        def drawn(tokens: int) -> list[int]:
            return [rng.randrange(vocab_size) for _ in range(tokens)]

        system = drawn(self.system_tokens)
        firsts = rng.sample(range(vocab_size), self.sharers)
        return [[*system, first, *drawn(self.own_tokens - 1)] for first in firsts]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRun:
    """Measurements of one run of all requests.

    Attributes:
        shares: whether the prefix cache is enabled.
        cached_tokens: cached tokens over all requests, from `usage`.
        computed_tokens: tokens processed by the engine's steps.
        peak_bytes: peak KV bytes.
        total_s: time until the last token.
        tokens: output tokens of each request.
    """

    shares: bool
    cached_tokens: int
    computed_tokens: int
    peak_bytes: int
    total_s: float
    tokens: tuple[tuple[int, ...], ...]


def measure_prefix(config: PrefixConfig) -> list[PrefixRun]:
    """Run both arms in turn, after one warm-up round."""
    model = random_model(SHAPES[config.model](), dtype=torch.float32)
    runs = []
    for i in range(config.repeats + 1):
        pair = [run_once(model, config, shares=shares) for shares in (True, False)]
        runs += pair if i else []
    return runs


def run_once(model: LoadedModel, config: PrefixConfig, *, shares: bool) -> PrefixRun:
    """Run all requests on a new engine with an empty cache."""
    length = config.system_tokens + config.own_tokens + config.new_tokens + 16
    memory = model.spec.kv_bytes_per_token(4) * length * config.sharers + (32 << 20)
    engine = Engine(
        model,
        KVConfig(memory=memory, prefix_cache=PrefixCacheConfig(enabled=shares)),
        ScheduleConfig(max_num_seqs=config.sharers),
    )
    options = SamplingParams(max_tokens=config.new_tokens, temperature=0.0, ignore_eos=True)
    prompts = config.prompts(model.spec.vocab_size)
    ids = [engine.submit(GenerationRequest(prompt, options)) for prompt in prompts]
    answers: dict[str, list[int]] = {key: [] for key in ids}
    usages: list[Usage] = []

    def run_all() -> None:
        while engine.has_work:
            for delta in engine.step():
                answers[delta.request_id] += delta.token_ids
                usages.extend([] if delta.usage is None else [delta.usage])

    total_s = seconds(run_all)
    engine.check()
    stats = engine.stats()
    return PrefixRun(
        shares=shares,
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        computed_tokens=stats.num_processed_tokens,
        peak_bytes=stats.kv_peak_bytes,
        total_s=total_s,
        tokens=tuple(tuple(answers[key]) for key in ids),
    )


def run_prefix(config: PrefixConfig) -> PartResult:
    """Run the part."""
    runs = measure_prefix(config)
    rows = tuple(
        (
            "enabled" if run.shares else "disabled",
            run.cached_tokens,
            run.computed_tokens,
            run.peak_bytes / 1e6,
            statistics.median(r.total_s for r in runs if r.shares == run.shares),
        )
        for run in runs[:2]
    )
    table = Table(
        name="prefix",
        caption=(
            f"{config.sharers} requests with a system prompt of {config.system_tokens:,} tokens, "
            f"{config.own_tokens} tokens of their own and {config.new_tokens} new ones, all at "
            f"once; random-weight Llama ({config.model}), float32; median of {config.repeats}."
        ),
        columns=(
            "prefix cache",
            "cached prompt tokens",
            "tokens computed",
            "peak KV MB",
            "total s",
        ),
        rows=rows,
    )
    raw = {"runs": [asdict(run) | {"tokens": None} for run in runs]}
    return PartResult(claims=claims(config, runs), tables=(table,), raw=raw)


def claims(config: PrefixConfig, runs: Sequence[PrefixRun]) -> Numbers:
    """Saved fraction of shareable tokens; ratios of bytes, time and work to those without cache.

    Args:
        config: configuration of the requests.
        runs: runs of both arms in turn, with the cache first.
    """
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    shared, alone = pairs[0]
    return {
        "prefix_prefill_saved_fraction": shared.cached_tokens / config.shareable_tokens,
        "prefix_computed_ratio": shared.computed_tokens / alone.computed_tokens,
        "prefix_kv_bytes_ratio": shared.peak_bytes / alone.peak_bytes,
        "prefix_total_ratio": statistics.median(s.total_s / a.total_s for s, a in pairs),
        "prefix_equal_answers": sum(
            s == a for pair in pairs for s, a in zip(pair[0].tokens, pair[1].tokens, strict=True)
        )
        / (len(pairs) * config.sharers),
    }
