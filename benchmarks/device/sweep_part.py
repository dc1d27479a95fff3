"""M5: step times of all splits, compared with the formula's best split."""

import statistics

from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.step_harness import StepHarness, expected_seconds, median_ms
from benchmarks.offload.arms import BY_NAME, Layout
from benchmarks.offload.simulated_machine import MeasuredStep

_NOISE = 0.02  # relative changes up to this are ignored


def run_sweep(bench: DeviceBench) -> PartResult:
    """Run the part."""
    harness = bench.harness(bench.config.cases[0])
    layouts = {str(x): harness.split_layout(x) for x in splits(harness, bench.config.sweep_points)}
    selected = harness.layout(BY_NAME["lB"])
    layouts.setdefault(str(selected.batch.x), selected)
    steps = harness.rounds(layouts, bench.config.repeats)
    order = sorted(layouts, key=int)
    rows = tuple(_row(bench, harness, layouts[x], steps[x]) for x in order)
    return PartResult(
        claims=_claims(harness, selected, {int(x): steps[x] for x in order}),
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


def _claims(
    harness: StepHarness, selected: Layout, steps: dict[int, list[MeasuredStep]]
) -> Numbers:
    """Compare measured steps with the split that the measured rates select.

    sweep_least_share, sweep_lB_share: recomputed fraction of the fastest and of the selected split.
    sweep_lB_over_least: step time of the selected split over the fastest.
    sweep_turns: number of changes from falling to rising step times; at most 1 for a V.
    sweep_model_error: model error of the selected split.

    """
    times = {x: statistics.median(s.seconds for s in found) for x, found in steps.items()}
    least = min(times, key=lambda x: times[x])
    split, tokens = selected.batch.x, harness.case.tokens
    return {
        "sweep_least_share": least / tokens,
        "sweep_lB_share": split / tokens,
        "sweep_lB_over_least": times[split] / times[least],
        "sweep_turns": turns([times[x] for x in sorted(times)]),
        "sweep_model_error": statistics.median(s.model_error for s in steps[split]),
    }


def turns(values: list[float]) -> int:
    """Number of times that values start to rise after a fall; changes within noise are ignored."""
    found, falling, last = 0, False, values[0]
    for value in values[1:]:
        if abs(value / last - 1) <= _NOISE:
            continue
        found += falling and value > last
        falling, last = value < last, value
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
            f"{bench.where} {harness.case.label}: step time in ms by recomputed tokens of a layer. "
            "Expected: a V with its minimum within 5 % of l_B, and within 10 % of the "
            "prediction."
        ),
        columns=("recomputed", "fraction", "measured", "predicted", "expected"),
        rows=rows,
    )


def _chart(rows: tuple[tuple[Cell, ...], ...]) -> Chart:
    names = {"measured": 2, "predicted": 3}
    return Chart(
        name="device-sweep",
        title="Step time by recomputed fraction",
        x_label="recomputed fraction",
        y_label="ms",
        lines={
            name: tuple((float(row[1] or 0), float(row[column] or 0)) for row in rows)
            for name, column in names.items()
        },
    )
