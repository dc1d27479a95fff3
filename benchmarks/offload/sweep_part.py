"""Part `sweep`: whether the selected split is ever slower than transferring all KV."""

from dataclasses import replace

from benchmarks.common.kvpr import pipelined_gain
from benchmarks.common.result import Cell, PartResult, Table
from benchmarks.offload.arms import BY_NAME, step_work
from benchmarks.offload.arms_part import error_p95, model_errors, ratio, run_rounds
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.simulated_machine import SimulatedMachine
from quire.offload.schedule.executor import VirtualClock
from quire.offload.schedule.planner import fastest, plan_step
from quire.offload.schedule.work import BatchTokens, Rules

_TOLERANCE = 0.05


def run_sweep(config: OffloadBenchConfig) -> PartResult:
    """Run the part."""
    rows, slower, virtual, errors = [], [], [], []
    for xi in config.xis:
        for rho in config.rhos:
            shape = replace(config.sweep_shape, x_ratio=xi)
            machine = SimulatedMachine(shape, replace(config.ratios, recompute=rho))
            steps = run_rounds(machine, [BY_NAME["prefetch"], BY_NAME["lB"]], config.repeats)
            rows.append(_row(machine, xi, rho, ratio(steps, "prefetch", "lB")))
            slower.append(ratio(steps, "lB", "prefetch"))
            virtual.append(_virtual_ratio(machine))
            errors += model_errors(steps)
    never = max(virtual) <= 1 and max(slower) <= 1 + _TOLERANCE
    return PartResult(
        claims={
            "never_slower": int(never),
            "slowest_over_prefetch": max(slower),
            "slowest_over_prefetch_virtual": max(virtual),
            "sweep_model_error_p95": error_p95(errors),
        },
        tables=(_table(config, rows),),
        raw={"threads": slower, "virtual": virtual},
    )


def _virtual_ratio(machine: SimulatedMachine) -> float:
    """Selected split over transferring all KV, both on the virtual clock at nominal speeds."""
    shape = machine.shape
    sizes, tokens = shape.sizes(), shape.tokens
    arm = BY_NAME["lB"]
    divided = machine.layout(arm, machine.nominal)
    whole = BatchTokens(rows=shape.rows, kv=tokens)
    variants = [
        (step_work(batch, shape.num_layers, sizes, machine.nominal), rules)
        for batch, rules in ((whole, Rules()), (divided.batch, divided.rules))
    ]
    _, selected = fastest(variants)
    plain_s = VirtualClock().run(plan_step(*variants[0])).seconds
    return VirtualClock().run(selected).seconds / plain_s


def _row(machine: SimulatedMachine, xi: float, rho: float, gain: float) -> tuple[Cell, ...]:
    share = machine.layout(BY_NAME["lB"]).batch.x / machine.shape.tokens
    plain = machine.layout(BY_NAME["prefetch"]).rates
    return xi, rho, share, gain, pipelined_gain(plain)


def _table(config: OffloadBenchConfig, rows: list[tuple[Cell, ...]]) -> Table:
    shape = config.sweep_shape
    return Table(
        name="offload-sweep",
        caption=(
            f"The pipelined split over transferring all KV, {shape.num_layers} layers of "
            f"{shape.tokens:,} tokens on threads, medians of {config.repeats}. The formula's gain "
            "assumes infinitely many layers and no other device work."
        ),
        columns=("xi", "rho", "recomputed fraction", "gain", "formula"),
        rows=tuple(rows),
    )
