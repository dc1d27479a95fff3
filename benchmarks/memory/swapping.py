"""Part `swap`: bringing a preempted sequence's KV back from the host, or reading it again."""

import math
import statistics
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.common.models import random_model
from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.common.workload import SHAPES
from benchmarks.memory.swap_bench import SwapConfig, SwapTime, measure_swap, summarise

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
