"""Part `arms`: measured latency, breakdown and prediction of each arm on threads, in turn."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common.kvpr import paper_gain, pipelined_gain
from benchmarks.common.result import Cell, Chart, Numbers, PartResult, Spans, Table
from benchmarks.offload.arms import ARMS, BY_NAME, Arm, step_work
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.simulated_machine import MeasuredStep, SimulatedMachine
from benchmarks.offload_schedule.timelines import busy_fraction, chrome_trace, seconds_by_kind
from quire.offload.schedule.work import staging_bytes
from quire.offload.timeline import DEVICE, IN, Kind, Timeline

Steps = Mapping[str, Sequence[MeasuredStep]]
COMPARED = ("prefetch", "lA", "lB")
_BREAKDOWN = (
    ("KV load", Kind.KV_IN),
    ("X load", Kind.X_IN),
    ("recompute", Kind.PROJECT),
    ("attention", Kind.ATTEND),
    ("CPU attention", Kind.HOST_ATTEND),
    ("rest of the layer", Kind.LAYER),
    ("store", Kind.KV_OUT),
)


def run_arms(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
    machine = SimulatedMachine(config.shape, config.ratios)
    steps = run_rounds(machine, ARMS, config.repeats)
    others = {name: _other(config, rho) for name, rho in config.others}
    traced = {name: found[-1].timeline for name, found in steps.items()}
    return PartResult(
        claims=claims(machine, steps) | _other_claims(others),
        tables=(_table(machine, steps), _breakdown(steps), _other_table(config, others)),
        charts=(_chart(steps),),
        spans=(_spans({name: traced[name] for name in COMPARED}),),
        raw={
            "seconds": {name: [s.seconds for s in found] for name, found in steps.items()},
            "predicted_s": {name: found[0].predicted_s for name, found in steps.items()},
            "trace": chrome_trace(traced),
        },
    )


def run_rounds(
    machine: SimulatedMachine, arms: Sequence[Arm], repeats: int
) -> dict[str, list[MeasuredStep]]:
    """Run steps of all arms in turn, after one warm-up step of each."""
    layouts = {arm.name: machine.layout(arm) for arm in arms}
    found: dict[str, list[MeasuredStep]] = {arm.name: [] for arm in arms}
    for turn in range(repeats + 1):
        for arm in arms:
            step = machine.step(arm, layouts[arm.name])
            if turn:
                found[arm.name].append(step)
    return found


def ratio(steps: Steps, over: str, under: str) -> float:
    """Ratio of two arms' step times within rounds, median over rounds."""
    pairs = zip(steps[over], steps[under], strict=True)
    return statistics.median(a.seconds / b.seconds for a, b in pairs)


def model_errors(steps: Steps) -> list[float]:
    """|predicted - measured| / measured of every step."""
    return [step.model_error for found in steps.values() for step in found]


def error_p95(errors: Sequence[float]) -> float:
    """The smallest measured error that at least 95 % of the errors do not exceed."""
    return float(np.quantile(errors, 0.95, method="higher"))


def claims(machine: SimulatedMachine, steps: Steps) -> Numbers:
    """Ratios within rounds, medians over rounds.

    gain_lB_over_prefetch, gain_lB_over_lA: latency over the latency of the pipelined split.
    latency_cut_lA: 1 - latency of the paper's split over that of prefetching.
    device_busy_fraction: at the pipelined split, with the first layer.
    model_error_p95: over all steps of all arms.
    staging_bytes_over_prefetch: staging bytes of the pipelined split over those of prefetching.
    output_error: largest error of a step's hidden states, without the arm with codes.

    """
    rates = machine.layout(BY_NAME["prefetch"]).rates
    exact = [s.error for arm in ARMS if not arm.coded for s in steps[arm.name]]
    busy = [busy_fraction(step.timeline) for step in steps["lB"]]
    return {
        "gain_lB_over_prefetch": ratio(steps, "prefetch", "lB"),
        "gain_lB_over_prefetch_formula": pipelined_gain(rates),
        "latency_cut_lA": 1 - ratio(steps, "lA", "prefetch"),
        "latency_cut_lA_formula": 1 - 1 / paper_gain(rates),
        "gain_lB_over_lA": ratio(steps, "lA", "lB"),
        "gain_lB_codec_over_lB": ratio(steps, "lB", "lB_codec"),
        "gain_host_share_over_lB": ratio(steps, "lB", "host_share"),
        "gain_prefetch_over_no_overlap": ratio(steps, "no_overlap", "prefetch"),
        "gain_lA_over_serial": ratio(steps, "serial", "lA"),
        "device_busy_fraction": statistics.median(busy),
        "model_error_p95": error_p95(model_errors(steps)),
        "staging_bytes_over_prefetch": _staging(machine, "lB") / _staging(machine, "prefetch"),
        "output_error": max(exact),
        "rho": rates.recompute_ratio,
        "xi": rates.x_ratio,
        "other_over_carrying": rates.other_s / (rates.kv_s * machine.shape.tokens),
    }


def _staging(machine: SimulatedMachine, name: str) -> int | float:
    arm = BY_NAME[name]
    layout = machine.layout(arm)
    sizes = machine.shape.sizes(coded=arm.coded)
    work = step_work(layout.batch, machine.shape.num_layers, sizes, machine.speeds)
    return staging_bytes(work, layout.rules)


def _table(machine: SimulatedMachine, steps: Steps) -> Table:
    shape, ratios = machine.shape, machine.ratios
    return Table(
        name="offload-arms",
        caption=(
            f"A decode step on threads: {shape.num_layers} layers, {shape.tokens:,} tokens of "
            f"{shape.rows} rows with KV in host memory, rho = {ratios.recompute}, xi = "
            f"{shape.x_ratio}, u / k = {ratios.host}. Products and copies are real; link and "
            "device are slowed to these ratios. Medians of "
            f"{len(steps['lB'])} rounds, arms in turn."
        ),
        columns=(
            "arm",
            "recomputed",
            "transferred",
            "CPU attention",
            "ms",
            "over prefetch",
            "predicted ms",
            "device busy",
            "link busy",
            "staging over prefetch",
        ),
        rows=tuple(_row(machine, arm, steps) for arm in ARMS),
    )


def _row(machine: SimulatedMachine, arm: Arm, steps: Steps) -> tuple[Cell, ...]:
    batch, found = machine.layout(arm).batch, steps[arm.name]

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    return (
        arm.label,
        batch.x,
        batch.kv,
        batch.host,
        1e3 * median([step.seconds for step in found]),
        ratio(steps, "prefetch", arm.name),
        1e3 * median([step.predicted_s for step in found]),
        median([busy_fraction(step.timeline, DEVICE) for step in found]),
        median([busy_fraction(step.timeline, IN) for step in found]),
        _staging(machine, arm.name) / _staging(machine, "prefetch"),
    )


def _breakdown(steps: Steps) -> Table:
    """Fraction of each kind in the sum of all times, as in the paper's Figure 10."""
    rows: list[tuple[Cell, ...]] = []
    for arm in ARMS:
        kinds = seconds_by_kind(steps[arm.name][-1].timeline)
        whole = sum(kinds.values())
        rows.append((arm.label, *(kinds.get(kind, 0.0) / whole for _, kind in _BREAKDOWN)))
    return Table(
        name="offload-breakdown",
        caption="Breakdown of a step: time of each kind over the sum of all times, with overlap.",
        columns=("arm", *(label for label, _ in _BREAKDOWN)),
        rows=tuple(rows),
    )


def _chart(steps: Steps) -> Chart:
    bars = tuple(
        (arm.name, 1e3 * statistics.median(s.seconds for s in steps[arm.name])) for arm in ARMS
    )
    return Chart(
        name="offload-arms",
        title="A decode step with KV in host memory",
        x_label="arm",
        y_label="ms",
        lines={"": bars},
    )


def _spans(timelines: Mapping[str, Timeline]) -> Spans:
    """Operations in the first half of some arms' steps, by lane."""
    end_s = min(timeline.seconds for timeline in timelines.values()) / 2
    panels = {
        BY_NAME[name].label: {
            lane: tuple(
                (span.start_s * 1e3, min(span.end_s, end_s) * 1e3, str(span.operation.kind))
                for span in timeline.of(lane)
                if span.start_s < end_s
            )
            for lane in (IN, DEVICE)
        }
        for name, timeline in timelines.items()
    }
    return Spans(name="offload-timeline", title="Link and device", x_label="ms", panels=panels)


# ---- other machines ----------------------------------------------------------------------------


def _other(config: OffloadBenchConfig, rho: float) -> dict[str, Any]:
    machine = SimulatedMachine(config.shape, replace(config.ratios, recompute=rho))
    steps = run_rounds(machine, [BY_NAME[name] for name in COMPARED], config.repeats)
    return {"machine": machine, "steps": steps}


def _other_claims(others: Mapping[str, Any]) -> Numbers:
    found: Numbers = {}
    for name, run in others.items():
        found[f"{name}_gain_lB_over_prefetch"] = ratio(run["steps"], "prefetch", "lB")
        found[f"{name}_gain_lA_over_prefetch"] = ratio(run["steps"], "prefetch", "lA")
    return found


def _other_table(config: OffloadBenchConfig, others: Mapping[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, rho in config.others:
        run = others[name]
        rates = run["machine"].layout(BY_NAME["prefetch"]).rates
        rows.append(
            (
                name,
                rho,
                ratio(run["steps"], "prefetch", "lA"),
                paper_gain(rates),
                ratio(run["steps"], "prefetch", "lB"),
                pipelined_gain(rates),
            )
        )
    return Table(
        name="offload-machines",
        caption="The same at the ratios of other machines with OPT-6.7B: gains over prefetching.",
        columns=("machine", "rho", "paper's split", "formula", "pipelined", "formula"),
        rows=tuple(rows),
    )
