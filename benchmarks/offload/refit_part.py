"""Part `refit`: steps until the split is adapted after the link loses half its rate."""

from dataclasses import replace

from benchmarks.common.result import Chart, PartResult, Table
from benchmarks.offload.arms import BY_NAME, step_work
from benchmarks.offload.config import OffloadBenchConfig
from benchmarks.offload.simulated_machine import SimulatedMachine
from quire.offload.control import SplitController
from quire.offload.profiler import OffloadProfiler, Speeds
from quire.offload.schedule.executor import VirtualClock
from quire.offload.schedule.planner import plan_step
from quire.offload.schedule.work import BatchTokens
from quire.offload.timeline import Timeline
from quire.plan.offload.split import OffloadRates
from quire.plan.rates import CopyRate

_FACTOR = 0.5
_WITHIN = 1.05


def run_refit(config: OffloadBenchConfig) -> PartResult:
    """Run the part: equally many steps before and after the change."""
    machine = SimulatedMachine(config.shape, config.ratios)
    profiler, control, splits = OffloadProfiler(machine.speeds), SplitController(), []
    slower = CopyRate(bytes_per_s=machine.nominal.inward.bytes_per_s * _FACTOR)
    seconds = []
    for step in range(2 * config.refit_steps):
        if step == config.refit_steps:
            machine.link.rate = slower
        split = control.split(_rates(machine, profiler.speeds), machine.shape.tokens)
        timeline = _run(machine, profiler.speeds, split)
        profiler.observe(timeline)
        control.observe(timeline, _rates(machine, profiler.speeds), machine.shape.tokens)
        splits.append(split)
        seconds.append(timeline.wall_s or timeline.seconds)
    needed = _needed(machine, splits[config.refit_steps :], slower)
    return PartResult(
        claims={
            "refit_steps": needed,
            "refit_noticed_changes": profiler.num_changes,
            "refit_last_over_best": _over_best(machine, splits[-1], slower),
        },
        tables=(
            Table(
                name="offload-refit",
                caption=(
                    f"The link drops to half its rate after step {config.refit_steps}: recomputed "
                    f"tokens of {machine.shape.tokens:,}, and the time of each step."
                ),
                columns=("step", "recomputed", "ms"),
                rows=tuple(
                    (step + 1, split, 1e3 * step_s)
                    for step, (split, step_s) in enumerate(zip(splits, seconds, strict=True))
                ),
            ),
        ),
        charts=(
            Chart(
                name="offload-refit",
                title="A link that loses half its rate",
                x_label="step",
                y_label="recomputed tokens",
                lines={"": tuple((step + 1, split) for step, split in enumerate(splits))},
            ),
        ),
        raw={"seconds": seconds},
    )


def _rates(machine: SimulatedMachine, speeds: Speeds) -> OffloadRates:
    return machine.layout(BY_NAME["lB"], speeds).rates


def _run(machine: SimulatedMachine, speeds: Speeds, split: int) -> Timeline:
    batch, rules = _divided(machine, split), machine.layout(BY_NAME["lB"], speeds).rules
    work = step_work(batch, machine.shape.num_layers, machine.shape.sizes(), speeds)
    return machine.executor.run(plan_step(work, rules), machine.begin(batch, rules).work)


def _divided(machine: SimulatedMachine, split: int) -> BatchTokens:
    return BatchTokens(rows=machine.shape.rows, x=split, kv=machine.shape.tokens - split)


def _step_s(machine: SimulatedMachine, split: int, link: CopyRate) -> float:
    """Duration of a step at the actual rates, on the virtual clock."""
    speeds = replace(machine.nominal, inward=link)
    work = step_work(
        _divided(machine, split), machine.shape.num_layers, machine.shape.sizes(), speeds
    )
    rules = machine.layout(BY_NAME["lB"], speeds).rules
    return float(VirtualClock().run(plan_step(work, rules)).seconds)


def _over_best(machine: SimulatedMachine, split: int, link: CopyRate) -> float:
    tokens = machine.shape.tokens
    best_s = min(_step_s(machine, x, link) for x in range(0, tokens + 1, max(1, tokens // 64)))
    return _step_s(machine, split, link) / best_s


def _needed(machine: SimulatedMachine, splits: list[int], link: CopyRate) -> int:
    """Number of steps until all further splits are within 5 % of the best."""
    good = [_over_best(machine, split, link) <= _WITHIN for split in splits]
    bad = [step for step, fine in enumerate(good) if not fine]
    return bad[-1] + 1 if bad else 0
