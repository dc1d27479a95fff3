"""Part `swap`: bringing a preempted sequence's KV back from the host, or reading it again.

Both are measured by length, in one engine and in turns, so that neither has the quieter minutes: a
prompt is read, which is what recomputing it takes; then its KV goes to the host and comes back.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.common.workload import SHAPES
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import AttentionName, KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, InvariantError
from quire.kv.stored_sequences import Swapped
from quire.kv.swap import swap_in, swap_out
from quire.layout.model import ModelSpec
from quire.models.loader import LoadedModel
from quire.profile.prefill_rates import kv_memory_for, random_prompt
from quire.profile.timing import seconds
from quire.scheduler.schedule_config import ScheduleConfig

_SPARE_TOKENS = 256  # new ones, and slots of last pages
LENGTHS = (64, 128, 256, 512, 1_024, 2_048, 4_096)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapConfig:
    """What is measured.

    Attributes:
        lengths: tokens of the prompts.
        repeats: measured rounds of all lengths, after one that is not.
        max_num_batched_tokens: of the engine.
        attention: its backend.
    """

    lengths: tuple[int, ...] = LENGTHS
    repeats: int = 5
    max_num_batched_tokens: int = 512
    attention: AttentionName = "auto"


QUICK_SWAP = SwapConfig(lengths=(32, 96), repeats=2, max_num_batched_tokens=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTime:
    """One sequence, once.

    Attributes:
        tokens: of its prompt.
        kv_bytes: it held.
        recompute_s: reading it.
        out_s, back_s: swapping it out and in.
    """

    tokens: int
    kv_bytes: int
    recompute_s: float
    out_s: float
    back_s: float

    @property
    def swap_s(self) -> float:
        """Out and back."""
        return self.out_s + self.back_s


def measure_swap(model: LoadedModel, config: SwapConfig) -> Iterator[SwapTime]:
    """Yield the times of every length, round by round.

    Args:
        model: loaded, with a context longer than every length by two.
        config: what.

    Raises:
        ConfigError: a prompt over the context.
    """
    longest = max(config.lengths)
    if longest + 2 > model.spec.max_positions:
        raise ConfigError(
            f"a prompt of {longest} tokens leaves no room in a context of "
            f"{model.spec.max_positions}: measure shorter ones"
        )
    kv = KVConfig(
        memory=kv_memory_for(model.spec, longest + 2),
        swap_space=swap_space_for(model.spec, longest, model.decoder.dtype.itemsize),
        attention=config.attention,
        prefix_cache=PrefixCacheConfig(enabled=False),
    )
    engine = Engine(model, kv, ScheduleConfig(max_num_batched_tokens=config.max_num_batched_tokens))
    seeds = itertools.count()
    for round_number in range(config.repeats + 1):
        for tokens in config.lengths:
            time = _measure_one(engine, random_prompt(model, tokens, next(seeds)))
            if round_number:
                yield time


def swap_space_for(spec: ModelSpec, tokens: int, value_bytes: int) -> int:
    """Swap space that holds a request and what its pages leave empty."""
    return spec.kv_bytes(tokens + _SPARE_TOKENS, value_bytes)


def _measure_one(engine: Engine, prompt: list[int]) -> SwapTime:
    pool, memory = engine.pool.host, engine.pool.kv.memory
    if pool is None:
        raise InvariantError("the engine of this bench has a host pool")
    request_id = engine.submit(
        GenerationRequest(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    )
    recompute_s = 0.0
    while not recompute_s or engine.scheduler.running[0].progress.num_computed < len(prompt):
        recompute_s += seconds(engine.step)
    request = engine.scheduler.running[0]
    kv_bytes = memory.row_bytes(request.memory.row)
    swapped: list[Swapped] = []
    out_s = seconds(lambda: swapped.append(swap_out(memory, [request.memory.row], pool)))
    rows: list[int] = []
    back_s = seconds(lambda: rows.extend(swap_in(memory, swapped[0])))
    [request.memory.row] = rows
    engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    return SwapTime(
        tokens=len(prompt),
        kv_bytes=kv_bytes,
        recompute_s=recompute_s,
        out_s=out_s,
        back_s=back_s,
    )


def summarise(times: Sequence[SwapTime]) -> dict[str, int | float]:
    """Median seconds by length, and the length from which on swapping is cheaper."""
    by_length: dict[int, list[SwapTime]] = {}
    for time in times:
        by_length.setdefault(time.tokens, []).append(time)
    claims: dict[str, int | float] = {}
    ratios = {}
    for tokens, found in sorted(by_length.items()):
        claims[f"recompute_s_{tokens}"] = statistics.median(t.recompute_s for t in found)
        claims[f"swap_s_{tokens}"] = statistics.median(t.swap_s for t in found)
        ratios[tokens] = statistics.median(t.recompute_s / t.swap_s for t in found)
    claims["swap_recompute_breakeven_tokens"] = measured_breakeven(ratios)
    return claims


def measured_breakeven(ratios: Mapping[int, float]) -> float:
    """The length from which on swapping is cheaper.

    Between the longest length at which recomputing was cheaper and the next one the ratio is
    interpolated, both on logarithmic scales.

    Args:
        ratios: recompute over swap, by length.

    Returns:
        Tokens; 0 where swapping was cheaper at every length, infinity where it was not at the
        longest.
    """
    lengths = sorted(ratios)
    dearer = [tokens for tokens in lengths if ratios[tokens] <= 1]
    if not dearer:
        return 0.0
    low = dearer[-1]
    if low == lengths[-1]:
        return math.inf
    high = lengths[lengths.index(low) + 1]
    share = -math.log(ratios[low]) / (math.log(ratios[high]) - math.log(ratios[low]))
    return low * math.exp(share * math.log(high / low))


BREAKEVEN = "swap_recompute_breakeven_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappingConfig:
    """What is measured.

    Attributes:
        model: a name in SHAPES.
        swap: lengths and repeats.
    """

    model: str = "125m"
    swap: SwapConfig = field(default_factory=SwapConfig)


def run_swap(config: SwappingConfig) -> PartResult:
    """The part; the break-even is left out of the claims where swapping never wins."""
    model = random_model(SHAPES[config.model](), dtype=torch.bfloat16)
    times = list(measure_swap(model, config.swap))
    claims = summarise(times)
    points = {length: _median(times, length) for length in config.swap.lengths}
    table = Table(
        name="swap",
        caption=(
            f"A preempted sequence, swapped out and in, or read again: random-weight Llama "
            f"({config.model}), bfloat16, medians of {config.swap.repeats}. "
            f"{_breakeven_words(claims[BREAKEVEN])}"
        ),
        columns=("tokens", "KV MB", "read again ms", "swap ms", "read again / swap"),
        rows=tuple(
            (length, kv_bytes / 1e6, 1e3 * again_s, 1e3 * swap_s, again_s / swap_s)
            for length, (kv_bytes, again_s, swap_s) in points.items()
        ),
    )
    chart = Chart(
        name="swap",
        title="What a preempted sequence costs",
        x_label="its tokens",
        y_label="ms",
        lines={
            "read again": tuple((length, 1e3 * s) for length, (_, s, _) in points.items()),
            "swapped": tuple((length, 1e3 * s) for length, (_, _, s) in points.items()),
        },
        log_x=True,
        log_y=True,
    )
    return PartResult(
        claims={name: value for name, value in claims.items() if math.isfinite(value)},
        tables=(table,),
        charts=(chart,),
        raw={"times": [asdict(time) for time in times]},
    )


def _median(times: list[SwapTime], tokens: int) -> tuple[int, float, float]:
    found = [time for time in times if time.tokens == tokens]
    again_s = statistics.median(time.recompute_s for time in found)
    return found[0].kv_bytes, again_s, statistics.median(time.swap_s for time in found)


def _breakeven_words(tokens: int | float) -> str:
    if math.isinf(tokens):
        return "Reading again was cheaper at every length."
    if not tokens:
        return "Swapping was cheaper at every length."
    return f"Swapping is cheaper from {tokens:,.0f} tokens on."
