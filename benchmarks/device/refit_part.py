"""M9: number of steps until the split is refit, after background traffic takes half the link.

The correct split is measured, not computed: a sweep of splits runs on the busy link.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.busy_link import BusyLink, SecondStream, ThrottledHalf
from benchmarks.device.step_harness import StepHarness
from benchmarks.device.sweep_part import splits
from benchmarks.offload.arms import BY_NAME
from quire.offload.control import SplitController
from quire.offload.profiler import OffloadProfiler
from quire.plan.rates import CopyRate

_WITHIN = 1.05
_SETTLED_SHARE = 0.2  # fraction of the steps after the change that counts as settled
_TRANSFER_S = 4e-3  # simulated transfer time of a layer's KV on a CPU


@dataclass(slots=True)
class _Followed:
    """Recomputed tokens and duration of every step."""

    splits: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run_refit(bench: DeviceBench) -> PartResult:
    """Run the part: equally many steps before and after the change."""
    harness = bench.harness(bench.config.refit_case)
    link = _link(bench, harness)
    harness.executor = link.executor
    harness.speeds = harness.measured()
    before = harness.speeds.inward.bytes_per_s
    try:
        found, changes = _follow(harness, link, bench.config.refit_steps)
        curve = _curve(harness, bench)
        remaining = harness.measured().inward.bytes_per_s / before
    finally:
        link.end()
    claims = _claims(found, curve, bench.config.refit_steps)
    return PartResult(
        claims=claims | {"refit_link_left": remaining, "refit_noticed_changes": changes},
        tables=(_table(bench, harness, found),),
        charts=(_chart(found),),
        raw={"seconds": found.seconds, "splits": found.splits, "best": curve},
    )


def _link(bench: DeviceBench, harness: StepHarness) -> BusyLink:
    if bench.target.on_gpu:
        return SecondStream(bench.target, harness.executor)
    layer_bytes = harness.case.tokens * harness.sizes.kv_bytes
    return ThrottledHalf(CopyRate(bytes_per_s=layer_bytes / _TRANSFER_S))


def _follow(harness: StepHarness, link: BusyLink, steps: int) -> tuple[_Followed, int]:
    """Run steps with the controller's split; return them and the number of detected changes."""
    profiler, control, found = OffloadProfiler(harness.speeds), SplitController(), _Followed()
    tokens = harness.case.tokens
    for number in range(2 * steps):
        if number == steps:
            link.begin()
        rates = harness.layout(BY_NAME["lB"], profiler.speeds).rates
        split = control.split(rates, tokens)
        step = harness.run(harness.split_layout(split, profiler.speeds))
        profiler.observe(step.timeline)
        now = harness.layout(BY_NAME["lB"], profiler.speeds).rates
        control.observe(step.timeline, now, tokens)
        found.splits.append(split)
        found.seconds.append(step.seconds)
    return found, profiler.num_changes


def _curve(harness: StepHarness, bench: DeviceBench) -> list[tuple[int, float]]:
    """Splits and their step times at the current link rate."""
    layouts = {str(x): harness.split_layout(x) for x in splits(harness, bench.config.sweep_points)}
    steps = harness.rounds(layouts, bench.config.repeats)
    return [(int(x), statistics.median(s.seconds for s in steps[x])) for x in layouts]


def _claims(
    found: _Followed, curve: Sequence[tuple[int, float]], steps: int
) -> dict[str, int | float]:
    """Claims relative to the best split measured after the change.

    refit_steps: steps until all later splits are within 5 % of the best.
    refit_loss: settled step time over the best, minus 1.

    """
    best_s = min(step_s for _, step_s in curve)
    over = [at(curve, x) / best_s for x in found.splits[steps:]]
    settled = found.seconds[-max(1, round(_SETTLED_SHARE * steps)) :]
    return {
        "refit_steps": settling_steps(over),
        "refit_loss": statistics.median(settled) / best_s - 1,
    }


def at(curve: Sequence[tuple[int, float]], split: int) -> float:
    """Step time of a split, interpolated linearly between measured splits."""
    measured_splits, step_s = zip(*sorted(curve), strict=True)
    return float(np.interp(split, measured_splits, step_s))


def settling_steps(over: Sequence[float]) -> int:
    """Steps until all later ones are within 5 % of the best; all steps if the last is not."""
    bad = [step for step, ratio in enumerate(over) if ratio > _WITHIN]
    return bad[-1] + 1 if bad else 0


def _table(bench: DeviceBench, harness: StepHarness, found: _Followed) -> Table:
    pairs = zip(found.splits, found.seconds, strict=True)
    return Table(
        name="device-refit",
        caption=(
            f"{bench.where} {harness.case.label}: background traffic takes about half the link "
            f"after step {bench.config.refit_steps}; recomputed tokens and time of each step. "
            "Expected: the split adapts within 10 steps, and loses less than 5 % against the best "
            "measured split."
        ),
        columns=("step", "recomputed", "fraction", "ms"),
        rows=tuple(
            (n + 1, split, split / harness.case.tokens, 1e3 * step_s)
            for n, (split, step_s) in enumerate(pairs)
        ),
    )


def _chart(found: _Followed) -> Chart:
    return Chart(
        name="device-refit",
        title="A link with half of its rate in use",
        x_label="step",
        y_label="recomputed tokens",
        lines={"": tuple((n + 1, split) for n, split in enumerate(found.splits))},
    )
