"""M4: a decode step with KV in host memory: all arms, with the times that a data sheet predicts."""

from benchmarks.common.result import Cell, Numbers, PartResult, Table
from benchmarks.device.bench import DeviceBench
from benchmarks.device.shapes import DecodeCase
from benchmarks.device.step_harness import RESIDENT, StepHarness, expected_seconds, median_ms
from benchmarks.offload.arms import BY_NAME, Layout
from benchmarks.offload.arms_part import error_p95, ratio
from benchmarks.offload.simulated_machine import MeasuredStep
from quire.models.device_memory import free_device_bytes

ARMS = ("no_overlap", "prefetch", "lA", "lB")


def run_step(bench: DeviceBench) -> PartResult:
    """Run the part."""
    claims: Numbers = {}
    rows: list[tuple[Cell, ...]] = []
    raw: dict[str, object] = {}
    for case in bench.config.cases:
        steps, found = _measured(bench, case)
        claims |= _claims(case.model, steps)
        rows += found
        raw[case.model] = {name: [s.seconds for s in run] for name, run in steps.items()}
    return PartResult(claims=claims, tables=(_table(bench, rows),), raw={"seconds": raw})


def _measured(
    bench: DeviceBench, case: DecodeCase
) -> tuple[dict[str, list[MeasuredStep]], list[tuple[Cell, ...]]]:
    """Steps of all arms, and a table row of each; the model's memory is freed on return."""
    harness = bench.harness(case)
    layouts = layouts_of(harness)
    steps = harness.rounds(layouts, bench.config.repeats)
    return steps, [_row(bench, harness, name, layouts[name], steps) for name in layouts]


def layouts_of(harness: StepHarness) -> dict[str, Layout]:
    """Layouts of all arms, and of all KV on the device if its memory suffices."""
    found = {name: harness.layout(BY_NAME[name]) for name in ARMS}
    case = harness.case
    resident_bytes = case.tokens * case.kv_width * case.value_bytes * (harness.model.distinct + 2)
    if resident_bytes < free_device_bytes(harness.target.device):
        found[RESIDENT] = harness.resident_layout()
    return found


def _claims(model: str, steps: dict[str, list[MeasuredStep]]) -> Numbers:
    """Claims of each model.

    *_ms: step time. gain_lB_over_*: latency over the pipelined split's, within rounds.
    model_error_p95: prediction by the rates measured at the start against measurement, all arms.
    output_error: largest relative error of hidden states against all KV on the device.

    """
    found: Numbers = {f"{model}_{name}_ms": median_ms(run) for name, run in steps.items()}
    for name in ("prefetch", "lA"):
        found[f"{model}_gain_lB_over_{name}"] = ratio(steps, name, "lB")
    offloaded = [step for name, run in steps.items() if name != RESIDENT for step in run]
    found[f"{model}_model_error_p95"] = error_p95([step.model_error for step in offloaded])
    found[f"{model}_output_error"] = max(step.error for step in offloaded)
    return found


def _row(
    bench: DeviceBench,
    harness: StepHarness,
    name: str,
    layout: Layout,
    steps: dict[str, list[MeasuredStep]],
) -> tuple[Cell, ...]:
    case, found = harness.case, steps[name]
    expected_s = None
    if name != RESIDENT:
        expected_s = 1e3 * expected_seconds(case, BY_NAME[name], bench.config.machine)
    label = "all on the device" if name == RESIDENT else BY_NAME[name].label
    measured_ms = median_ms(found)
    return (
        case.label,
        round(case.kv_bytes / 1e9, 2),
        harness.model.distinct,
        label,
        layout.batch.x / case.tokens,
        measured_ms,
        1e3 * case.rows / measured_ms,
        1e3 * found[0].predicted_s if name != RESIDENT else None,
        expected_s,
        max(step.error for step in found),
    )


def _table(bench: DeviceBench, rows: list[tuple[Cell, ...]]) -> Table:
    return Table(
        name="device-step",
        caption=(
            f"{bench.where} A decode step with random weights on the device and KV in host memory; "
            f"medians of {bench.config.repeats} rounds, arms in turn. Predicted: by rates measured "
            f"before. Expected: by the data sheet of {bench.config.machine}. Layers beyond the "
            "distinct ones share data with earlier ones."
        ),
        columns=(
            *("batch", "KV, GB", "distinct layers", "arm", "recomputed", "ms", "tokens/s"),
            *("predicted, ms", "expected, ms", "error"),
        ),
        rows=tuple(rows),
    )
