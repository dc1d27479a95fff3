"""A machine of chosen ratios on two cores: a throttled link, and a device of a fixed speed.

    r    a real product takes less; its lane then waits until an absolute deadline
    k    r / rho, the link's bytes a second set to it; copies are real, and short beside their waits
    c    a share of k S: attention and the rest of the layer, padded likewise
    u    of the host that attends, padded likewise

So the ratios stay what they are while other programs come and go, as long as real work is done
before its deadline; `late_fraction` says how much was not.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.offload.arms import Arm, Layout, lay_out, step_work
from benchmarks.offload.layer_harness import LayerHarness, LayerShape
from benchmarks.offload_schedule.executor import VirtualClock, Work
from benchmarks.offload_schedule.planner import plan_step
from benchmarks.offload_schedule.threads import Pace, ThreadExecutor, ThrottledLink
from benchmarks.offload_schedule.timelines import measure_speeds
from benchmarks.offload_schedule.work import BatchTokens, Rules
from quire.offload.profiler import Speeds
from quire.offload.timeline import DEVICE, HOST, IN, OUT, Kind, Operation, Schedule, Timeline
from quire.plan.rates import CopyRate

_PRODUCTS = 15
_PROBE_SHARES = (0.3, 0.5, 0.7)
_PROBE_LAYERS = 4
_PROBE_RULES = Rules(x_chunks=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """What gains depend on.

    Attributes:
        recompute: rho = r / k.
        host: u / k; 0: the host does not attend.
        other: c / (k S).
        headroom: a device that takes so many times what a product takes here.
    """

    recompute: float = 0.58
    host: float = 1.0
    other: float = 0.04
    headroom: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step of one arm.

    Attributes:
        timeline: as it ran.
        predicted_s: by the virtual clock with speeds measured at the start.
        error: of what it computed.
    """

    timeline: Timeline
    predicted_s: float
    error: float

    @property
    def seconds(self) -> float:
        """By the wall clock."""
        wall_s = self.timeline.wall_s
        return float(self.timeline.seconds if wall_s is None else wall_s)

    @property
    def model_error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s - self.seconds) / self.seconds


class SimulatedMachine:
    """One shape at one set of ratios.

    Args:
        shape: what is computed.
        ratios: of the machine.

    Attributes:
        nominal: the speeds it was given.
        speeds: measured in steps, at the start.
        link: whose rate may be changed.
    """

    def __init__(self, shape: LayerShape, ratios: Ratios) -> None:
        self.shape, self.ratios, self.harness = shape, ratios, LayerHarness(shape)
        self.nominal = self._nominal()
        self.link = ThrottledLink(self.nominal.inward)
        out = ThrottledLink(self.nominal.outward)
        self.executor = ThreadExecutor(
            {
                IN: Pace(self.link.seconds),
                OUT: Pace(out.seconds),
                DEVICE: Pace(self._on_device),
                HOST: Pace(lambda op: op.tokens * self.nominal.host_token_s),
            }
        )
        self.speeds = self._measured()

    def _nominal(self) -> Speeds:
        taken_s = min(self.harness.product_seconds() for _ in range(_PRODUCTS))
        shape, ratios = self.shape, self.ratios
        token_s = ratios.headroom * taken_s / shape.tokens
        kv_s = token_s / ratios.recompute
        other_s = ratios.other * kv_s * shape.tokens
        rate = CopyRate(bytes_per_s=shape.sizes().kv_bytes / kv_s)
        return Speeds(
            inward=rate,
            outward=rate,
            project_token_s=token_s,
            attend_call_s=other_s / 2,
            layer_s=other_s / 2,
            host_token_s=ratios.host * kv_s,
        )

    def _on_device(self, op: Operation) -> int | float:
        if op.kind == Kind.PROJECT:
            return op.tokens * self.nominal.project_token_s
        return self.nominal.attend_call_s if op.kind == Kind.ATTEND else self.nominal.layer_s

    def _measured(self) -> Speeds:
        """Speeds from steps of several sizes; the host's is the one it was given."""
        probes = []
        for tokens in (self.shape.tokens // 2, self.shape.tokens):
            for share in _PROBE_SHARES:
                x = int(share * tokens)
                batch = BatchTokens(rows=self.shape.rows, x=x, kv=tokens - x)
                probes.append(
                    (self._plan(batch, _PROBE_RULES, layers=_PROBE_LAYERS), self._work(batch))
                )
        found = measure_speeds(self.executor, probes)
        return replace(found, outward=self.nominal.outward, host_token_s=self.nominal.host_token_s)

    def _plan(
        self, batch: BatchTokens, rules: Rules, *, layers: int = 0, coded: bool = False
    ) -> Schedule:
        speeds = getattr(self, "speeds", self.nominal)
        sizes = self.shape.sizes(coded=coded)
        return plan_step(step_work(batch, layers or self.shape.num_layers, sizes, speeds), rules)

    def _work(self, batch: BatchTokens) -> Work:
        return self.harness.work(batch, _PROBE_RULES)

    def layout(self, arm: Arm, speeds: Speeds | None = None) -> Layout:
        """An arm's division of the tokens, by measured speeds or by these."""
        shape = self.shape
        sizes = shape.sizes(coded=arm.coded)
        return lay_out(arm, speeds or self.speeds, sizes, rows=shape.rows, tokens=shape.tokens)

    def step(self, arm: Arm, layout: Layout | None = None) -> MeasuredStep:
        """Run one step of an arm.

        Args:
            arm: which.
            layout: other than the arm's own.
        """
        layout = layout or self.layout(arm)
        batch, rules = layout.batch, layout.rules
        schedule = self._plan(batch, rules, coded=arm.coded)
        timeline = self.executor.run(schedule, self.harness.work(batch, rules, coded=arm.coded))
        return MeasuredStep(
            timeline=timeline,
            predicted_s=VirtualClock().run(schedule).seconds,
            error=self.harness.error(),
        )


def medians(steps: Mapping[str, list[MeasuredStep]]) -> dict[str, float]:
    """Median seconds of each arm."""
    return {
        name: statistics.median(step.seconds for step in found) for name, found in steps.items()
    }
