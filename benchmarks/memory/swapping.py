"""Part `swap`: resuming a preempted sequence by swapping or by recompute, by length.

Both are measured for each length in one engine and in turn, so that changes of the machine's load
affect both. A prompt is prefilled, which is the cost of recompute; its KV is then swapped out and
in.
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
from quire.profile.ceilings import kv_memory_for, random_prompt, seconds
from quire.scheduler.schedule_config import ScheduleConfig

_SPARE_TOKENS = 256  # new tokens, and unused slots of last pages
LENGTHS = (64, 128, 256, 512, 1_024, 2_048, 4_096)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapConfig:
    """Configuration of the measurement.

    Attributes:
        lengths: tokens of the prompts.
        repeats: measured rounds of all lengths, after one warm-up round.
        max_num_batched_tokens: token budget of a step.
        attention: attention backend.
    """

    lengths: tuple[int, ...] = LENGTHS
    repeats: int = 5
    max_num_batched_tokens: int = 512
    attention: AttentionName = "auto"


QUICK_SWAP = SwapConfig(lengths=(32, 96), repeats=2, max_num_batched_tokens=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTime:
    """Measurements of one sequence.

    Attributes:
        tokens: tokens of its prompt.
        kv_bytes: KV bytes it held.
        recompute_s: time to prefill it.
        out_s, back_s: time to swap it out and in.
    """

    tokens: int
    kv_bytes: int
    recompute_s: float
    out_s: float
    back_s: float

    @property
    def swap_s(self) -> float:
        """Time to swap out and in."""
        return self.out_s + self.back_s


def measure_swap(model: LoadedModel, config: SwapConfig) -> Iterator[SwapTime]:
    """Yield the times of every length, round by round.

    Args:
        model: model with a context at least two tokens longer than every length.
        config: lengths and repeats.

    Raises:
        ConfigError: a prompt exceeds the context.
    """
    longest = max(config.lengths)
    if longest + 2 > model.spec.max_positions:
        raise ConfigError(
            f"expected prompts of at most {model.spec.max_positions - 2} tokens for a context of "
            f"{model.spec.max_positions}, got {longest}: use shorter prompts"
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
    """Swap space that holds a request and the unused slots of its pages."""
    return spec.kv_bytes(tokens + _SPARE_TOKENS, value_bytes)


def _measure_one(engine: Engine, prompt: list[int]) -> SwapTime:
    pool, memory = engine.pool.host, engine.pool.kv.memory
    if pool is None:
        raise InvariantError("expected an engine with swap space, got one without")
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
    """Median seconds by length, and the break-even length of swapping."""
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
    """Length above which swapping is faster.

    Between the longest length at which recompute was faster and the next one, the ratio is
    interpolated, both on logarithmic scales.

    Args:
        ratios: recompute time over swap time, by length.

    Returns:
        Tokens; 0 if swapping was faster at every length, infinity if recompute was faster at the
        longest length.
    """
    lengths = sorted(ratios)
    slower = [tokens for tokens in lengths if ratios[tokens] <= 1]
    if not slower:
        return 0.0
    low = slower[-1]
    if low == lengths[-1]:
        return math.inf
    high = lengths[lengths.index(low) + 1]
    fraction = -math.log(ratios[low]) / (math.log(ratios[high]) - math.log(ratios[low]))
    return low * math.exp(fraction * math.log(high / low))


BREAKEVEN = "swap_recompute_breakeven_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappingConfig:
    """Configuration of the part.

    Attributes:
        model: a name in SHAPES.
        swap: lengths and repeats.
    """

    model: str = "125m"
    swap: SwapConfig = field(default_factory=SwapConfig)


def run_swap(config: SwappingConfig) -> PartResult:
    """Run the part; an infinite break-even length is omitted from the claims."""
    model = random_model(SHAPES[config.model](), dtype=torch.bfloat16)
    times = list(measure_swap(model, config.swap))
    claims = summarise(times)
    points = {length: _median(times, length) for length in config.swap.lengths}
    table = Table(
        name="swap",
        caption=(
            f"A preempted sequence, swapped out and in, or recomputed: random-weight Llama "
            f"({config.model}), bfloat16, medians of {config.swap.repeats}. "
            f"{_breakeven_words(claims[BREAKEVEN])}"
        ),
        columns=("tokens", "KV MB", "recompute ms", "swap ms", "recompute / swap"),
        rows=tuple(
            (length, kv_bytes / 1e6, 1e3 * recompute_s, 1e3 * swap_s, recompute_s / swap_s)
            for length, (kv_bytes, recompute_s, swap_s) in points.items()
        ),
    )
    chart = Chart(
        name="swap",
        title="Cost of a preempted sequence",
        x_label="tokens of the sequence",
        y_label="ms",
        lines={
            "recompute": tuple((length, 1e3 * s) for length, (_, s, _) in points.items()),
            "swap": tuple((length, 1e3 * s) for length, (_, _, s) in points.items()),
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
    recompute_s = statistics.median(time.recompute_s for time in found)
    return found[0].kv_bytes, recompute_s, statistics.median(time.swap_s for time in found)


def _breakeven_words(tokens: int | float) -> str:
    if math.isinf(tokens):
        return "Recompute was faster at every length."
    if not tokens:
        return "Swapping was faster at every length."
    return f"Swapping is faster from {tokens:,.0f} tokens on."
