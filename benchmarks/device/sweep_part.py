"""M5: every split from nothing to everything: is the least where the formula says?"""

import statistics

from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.step_harness import StepHarness, expected_seconds, median_ms
from benchmarks.offload.arms import BY_NAME, Layout
from benchmarks.offload.simulated_machine import MeasuredStep

_NOISE = 0.02  # of a step: rises smaller than this are none


def run_sweep(bench: DeviceBench) -> PartResult:
    """The part."""
    harness = bench.harness(bench.config.cases[0])
    layouts = {str(x): harness.split_layout(x) for x in splits(harness, bench.config.sweep_points)}
    chosen = harness.layout(BY_NAME["lB"])
    layouts.setdefault(str(chosen.batch.x), chosen)
    steps = harness.rounds(layouts, bench.config.repeats)
    order = sorted(layouts, key=int)
    rows = tuple(_row(bench, harness, layouts[x], steps[x]) for x in order)
    return PartResult(
        claims=_claims(harness, chosen, {int(x): steps[x] for x in order}),
        tables=(_table(bench, harness, rows),),
        charts=(_chart(rows),),
        raw={"seconds": {x: [s.seconds for s in steps[x]] for x in order}},
    )


def splits(harness: StepHarness, points: int) -> list[int]:
    """The splits of the sweep; only the first if recompute from activations does not pay."""
    if not harness.model.with_x:
        return [0]
    last = max(1, points - 1)
    return [harness.case.tokens * point // last for point in range(last + 1)]


def _claims(harness: StepHarness, chosen: Layout, steps: dict[int, list[MeasuredStep]]) -> Numbers:
    """What was measured, against the split that the rates choose.

    sweep_least_share, sweep_lB_share: of all tokens, at the least step and as chosen.
    sweep_lB_over_least: step at the chosen split over the least one.
    sweep_turns: times at which steps turn from falling to rising; of a V at most 1.
    sweep_model_error: of the chosen split.
    """
    times = {x: statistics.median(s.seconds for s in found) for x, found in steps.items()}
    least = min(times, key=lambda x: times[x])
    split, tokens = chosen.batch.x, harness.case.tokens
    return {
        "sweep_least_share": least / tokens,
        "sweep_lB_share": split / tokens,
        "sweep_lB_over_least": times[split] / times[least],
        "sweep_turns": turns([times[x] for x in sorted(times)]),
        "sweep_model_error": statistics.median(s.model_error for s in steps[split]),
    }


def turns(values: list[float]) -> int:
    """How often values begin to rise behind a fall; changes within the noise are none."""
    found, falling, held = 0, False, values[0]
    for value in values[1:]:
        if abs(value / held - 1) <= _NOISE:
            continue
        found += falling and value > held
        falling, held = value < held, value
    return found


def _row(
    bench: DeviceBench, harness: StepHarness, layout: Layout, steps: list[MeasuredStep]
) -> tuple[Cell, ...]:
    case, x = harness.case, layout.batch.x
    expected_s = expected_seconds(case, BY_NAME["lB"], bench.config.machine, x_tokens=x)
    predicted_s = steps[0].predicted_s
    return x, x / case.tokens, median_ms(steps), 1e3 * predicted_s, 1e3 * expected_s


def _table(bench: DeviceBench, harness: StepHarness, rows: tuple[tuple[Cell, ...], ...]) -> Table:
    return Table(
        name="device-sweep",
        caption=(
            f"{bench.where} {harness.case.label}: a step by the tokens of a layer that are "
            "recomputed, ms. Expected: a V whose least is within 5 % of l_B, and 10 % of what "
            "is predicted."
        ),
        columns=("recomputed", "share", "measured", "predicted", "expected"),
        rows=rows,
    )


def _chart(rows: tuple[tuple[Cell, ...], ...]) -> Chart:
    names = {"measured": 2, "predicted": 3}
    return Chart(
        name="device-sweep",
        title="A step by what is recomputed",
        x_label="share recomputed",
        y_label="ms",
        lines={
            name: tuple((float(row[1] or 0), float(row[place] or 0)) for row in rows)
            for name, place in names.items()
        },
    )
