"""Simulated decode steps of a model with KV in host memory, at this machine's real speeds.

Speeds      fitted to all operations of steps that ran at the start
splits      computed from these speeds, as in `python -m benchmarks offload`
predicted   the same schedule on the virtual clock, with these speeds
expected    the same schedule on the virtual clock, with a data sheet's speeds
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.common.decode_batch import DecodeBatch
from benchmarks.common.host_bytes import HostBytes
from benchmarks.common.link_codecs import LinkCodecs, link_sizes
from benchmarks.common.offloaded_model import OffloadedModel
from benchmarks.common.offloaded_step import OffloadedStep, Staging
from benchmarks.common.target import Target
from benchmarks.offload.arms import BY_NAME, Arm, Layout, lay_out, step_work
from benchmarks.offload.machines import MACHINES, sizes_of, speeds_of
from benchmarks.offload.simulated_machine import MeasuredStep
from benchmarks.offload_schedule.timelines import measure_speeds
from quire.offload.profiler import Sizes, Speeds
from quire.offload.schedule.executor import Executor, VirtualClock, Work
from quire.offload.schedule.planner import plan_step
from quire.offload.schedule.work import BatchTokens, Rules
from quire.offload.timeline import Schedule

_PROBE_SHARES = (0.3, 0.5, 0.7)
_PROBE_LAYERS = 4
_PROBE_RULES = Rules(x_chunks=8)
RESIDENT = "resident"
"""Name of the layout with all KV on the device; it is not an arm."""


class StepHarness:
    """Harness that runs decode steps of one batch on one device.

    Args:
        case: the batch.
        target: the device.
        pool: host memory.
        link_codecs: codecs of X and KV on the link.
        host: whether CPU attention is allowed; if so, its speed is measured too.
        executor: replaces the device's own executor.
        poison: fill staging with NaN after use, for tests.

    Attributes:
        speeds: speeds measured at the start.
        model: the model that the steps run.
        executor: executor of the steps.
        hidden: hidden states of the rows after the last step.
    """

    def __init__(
        self,
        case: DecodeBatch,
        target: Target,
        pool: HostBytes,
        link_codecs: LinkCodecs | None = None,
        *,
        host: bool = False,
        executor: Executor | None = None,
        poison: bool = False,
    ) -> None:
        self.case, self.target, self._poison = case, target, poison
        self.model = OffloadedModel(case, target, pool, link_codecs)
        self.sizes = link_sizes(case, self.model.link_codecs)
        self.executor = executor or target.executor()
        self._staging = Staging(target)
        self.hidden = self.model.begin
        self.speeds = self.measured(host=host)

    def measured(self, *, host: bool = False) -> Speeds:
        """Current speeds, measured with steps of several sizes."""
        found = measure_speeds(
            self.executor, [self._probe(batch) for batch in self._probes(host=host)]
        )
        if host and not found.host_token_s:  # too few tokens to separate the time per token
            offloaded = max(1, self.case.rows // 2) * self.case.context
            found = replace(found, host_token_s=found.host_call_s / offloaded, host_call_s=0.0)
        return replace(found, outward=found.inward)

    def _probes(self, *, host: bool) -> list[BatchTokens]:
        case, found = self.case, []
        for context in (case.context // 2 or 1, case.context):
            for share in _PROBE_SHARES if self.model.with_x else (0.0,):
                tokens = case.rows * context
                x = int(share * tokens)
                found.append(BatchTokens(rows=case.rows, x=x, kv=tokens - x))
        for rows in sorted({max(1, case.rows // 4), max(1, case.rows // 2)}) if host else ():
            offloaded = rows * case.context
            found.append(BatchTokens(rows=case.rows, kv=case.tokens - offloaded, host=offloaded))
        # the largest batch first, so that staging is allocated once
        return sorted(found, key=lambda batch: (batch.x, batch.kv), reverse=True)

    def _probe(self, batch: BatchTokens) -> tuple[Schedule, Work]:
        nominal = speeds_of(MACHINES["h200"], self.case.spec, sizes_of(self.case.spec))
        layers = min(_PROBE_LAYERS, self.case.spec.num_layers)
        schedule = plan_step(step_work(batch, layers, self.sizes, nominal), _PROBE_RULES)
        return schedule, self._step(batch, _PROBE_RULES).work

    def _step(self, batch: BatchTokens, rules: Rules) -> OffloadedStep:
        return OffloadedStep(self.model, self._staging, batch, rules, poison=self._poison)

    # ---- layouts -------------------------------------------------------------------------------

    def layout(self, arm: Arm, speeds: Speeds | None = None) -> Layout:
        """Layout of an arm, by the given or the measured speeds."""
        found = lay_out(
            arm, speeds or self.speeds, self.sizes, rows=self.case.rows, tokens=self.case.tokens
        )
        return replace(found, batch=whole_rows(self.case, found.batch))

    def split_layout(self, x_tokens: int, speeds: Speeds | None = None) -> Layout:
        """Layout that recomputes the given number of tokens, with the pipelined split's ring."""
        arm = replace(BY_NAME["lB"], divide=lambda _rates, _tokens: (x_tokens, 0))
        return self.layout(arm, speeds)

    def resident_layout(self) -> Layout:
        """Layout with all KV on the device."""
        batch = BatchTokens(rows=self.case.rows, resident=self.case.tokens)
        return replace(self.layout(BY_NAME["prefetch"]), batch=batch)

    # ---- steps ---------------------------------------------------------------------------------

    def plan(self, layout: Layout, speeds: Speeds | None = None) -> Schedule:
        """Plan the schedule of a layout."""
        layers = self.case.spec.num_layers
        work = step_work(layout.batch, layers, self.sizes, speeds or self.speeds)
        return plan_step(work, layout.rules)

    def run(self, layout: Layout) -> MeasuredStep:
        """Run one step; its error is relative, over all hidden states."""
        schedule = self.plan(layout)
        step = self._step(layout.batch, layout.rules)
        timeline = self.executor.run(schedule, step.work)
        self.hidden = step.hidden
        return MeasuredStep(
            timeline=timeline,
            predicted_s=VirtualClock().run(schedule).seconds,
            error=self.model.off(step.hidden),
        )

    def rounds(self, layouts: dict[str, Layout], repeats: int) -> dict[str, list[MeasuredStep]]:
        """Run steps of all layouts in turn, after one warm-up step of each."""
        found: dict[str, list[MeasuredStep]] = {name: [] for name in layouts}
        for turn in range(repeats + 1):
            for name, layout in layouts.items():
                step = self.run(layout)
                if turn:
                    found[name].append(step)
        return found


def whole_rows(case: DecodeBatch, batch: BatchTokens) -> BatchTokens:
    """The same batch with CPU attention rounded to whole rows."""
    host = min(case.rows, round(batch.host / case.context)) * case.context
    x = min(batch.x, case.tokens - host)
    return replace(batch, x=x, kv=case.tokens - host - x, host=host, x_on_device=0)


def median_ms(steps: Sequence[MeasuredStep]) -> float:
    """Median step time in milliseconds."""
    return 1e3 * statistics.median(step.seconds for step in steps)


def expected_seconds(
    case: DecodeBatch, arm: Arm, machine: str, *, x_tokens: int = -1, sizes: Sizes | None = None
) -> float:
    """Duration of an arm's step by the data sheet of a machine.

    Args:
        case: the batch, in half precision.
        arm: the arm.
        machine: name in `MACHINES`.
        x_tokens: recomputed tokens; -1: the arm's own split.
        sizes: bytes on the link; None: sizes without codecs.
    """
    sizes = sizes or sizes_of(case.spec)
    speeds = speeds_of(MACHINES[machine], case.spec, sizes)
    if x_tokens >= 0:
        arm = replace(arm, divide=lambda _rates, _tokens: (x_tokens, 0))
    layout = lay_out(arm, speeds, sizes, rows=case.rows, tokens=case.tokens)
    work = step_work(layout.batch, case.spec.num_layers, sizes, speeds)
    return float(VirtualClock().run(plan_step(work, layout.rules)).seconds)
