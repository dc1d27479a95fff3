"""A machine of given ratios, simulated on two cores: a throttled link and a slowed device.

    r    time to recompute; the real product is faster, then its lane waits for an absolute deadline
    k    r / rho, which sets the link's rate; copies are real, and short compared with their waits
    c    a fraction of k S: attention and the rest of the layer, slowed in the same way
    u    time of CPU attention, slowed in the same way

Steps are those of `offloaded_step`, in float32 on a CPU. The ratios hold under load from other
programs while real work ends before its deadline; `late_fraction` is the fraction of the work that
did not.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.common.host_bytes import HostBytes
from benchmarks.common.link_codecs import LinkCodecs
from benchmarks.common.offloaded_model import OffloadedModel, layer_host_bytes, new_host_bytes
from benchmarks.common.offloaded_step import OffloadedStep, Staging
from benchmarks.common.target import Target
from benchmarks.offload.arms import Arm, Layout, lay_out, step_work
from benchmarks.offload.layer_shape import LayerBatch, LayerShape
from benchmarks.offload_schedule.threads import Pace, ThreadExecutor, ThrottledLink
from benchmarks.offload_schedule.timelines import measure_speeds
from quire.offload.profiler import Speeds
from quire.offload.schedule.executor import VirtualClock
from quire.offload.schedule.planner import plan_step
from quire.offload.schedule.work import BatchTokens, Rules
from quire.offload.timeline import DEVICE, HOST, IN, OUT, Kind, Operation, Schedule, Timeline
from quire.plan.rates import CopyRate
from quire.profile.ceilings import seconds

_CPU = Target(torch.device("cpu"))
_DISTINCT_LAYERS = 4
_CODED = LinkCodecs("float16", "float16")
"""Codecs of half the bytes; coding is a cast."""
_PRODUCTS = 15
_PROBE_SHARES = (0.3, 0.5, 0.7)
_PROBE_LAYERS = 4
_PROBE_RULES = Rules(x_chunks=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """Ratios that determine the gains.

    Attributes:
        recompute: rho = r / k.
        host: u / k; 0: no CPU attention.
        other: c / (k S).
        headroom: simulated time of a product over its real time.
    """

    recompute: float = 0.58
    host: float = 1.0
    other: float = 0.04
    headroom: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step of one arm.

    Attributes:
        timeline: measured timeline.
        predicted_s: duration on the virtual clock, with speeds measured at the start.
        error: relative error of the hidden states.
    """

    timeline: Timeline
    predicted_s: float
    error: float

    @property
    def seconds(self) -> float:
        """Wall-clock duration."""
        wall_s = self.timeline.wall_s
        return float(self.timeline.seconds if wall_s is None else wall_s)

    @property
    def model_error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted_s - self.seconds) / self.seconds


class SimulatedMachine:
    """A simulated machine for one shape and one set of ratios.

    Args:
        shape: shape of the layers.
        ratios: ratios of the machine.
        poison: fill staging with NaN after use.

    Attributes:
        nominal: speeds computed from the ratios.
        speeds: speeds measured in steps at the start.
        link: throttled link; its rate can be changed.
    """

    def __init__(self, shape: LayerShape, ratios: Ratios, *, poison: bool = False) -> None:
        self.shape, self.ratios, self._poison = shape, ratios, poison
        self._staging = Staging(_CPU)
        self._models = {False: simulated_model(shape)}
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
        product_s = min(self._product_s() for _ in range(_PRODUCTS))
        shape, ratios = self.shape, self.ratios
        token_s = ratios.headroom * product_s / shape.tokens
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

    def _product_s(self) -> float:
        """Measured time to recompute all tokens of a layer."""
        model = self._models[False]
        x, out = model.activations(0), torch.empty(self.shape.tokens, self.shape.kv_width)
        return seconds(lambda: model.layer(0).project(x, out))

    def _on_device(self, op: Operation) -> int | float:
        if op.kind == Kind.PROJECT:
            return op.tokens * self.nominal.project_token_s
        return self.nominal.attend_call_s if op.kind == Kind.ATTEND else self.nominal.layer_s

    def _measured(self) -> Speeds:
        """Speeds measured in steps of several sizes; CPU attention has its nominal speed."""
        layers, probes = min(_PROBE_LAYERS, self.shape.num_layers), []
        for tokens in (self.shape.tokens // 2, self.shape.tokens):
            for share in _PROBE_SHARES:
                x = int(share * tokens)
                batch = BatchTokens(rows=self.shape.rows, x=x, kv=tokens - x)
                work = self.begin(batch, _PROBE_RULES).work
                probes.append((self._plan(batch, _PROBE_RULES, layers=layers), work))
        found = measure_speeds(self.executor, probes)
        return replace(found, outward=self.nominal.outward, host_token_s=self.nominal.host_token_s)

    def _plan(
        self, batch: BatchTokens, rules: Rules, *, layers: int = 0, coded: bool = False
    ) -> Schedule:
        speeds = getattr(self, "speeds", self.nominal)
        sizes = self.shape.sizes(coded=coded)
        return plan_step(step_work(batch, layers or self.shape.num_layers, sizes, speeds), rules)

    def begin(self, batch: BatchTokens, rules: Rules, *, coded: bool = False) -> OffloadedStep:
        """Create a step of a layout, before its first operation.

        Args:
            batch: division of the tokens.
            rules: rules of the layout.
            coded: whether KV and X cross the link as codes.
        """
        if coded not in self._models:
            self._models[coded] = simulated_model(self.shape, _CODED)
        return OffloadedStep(self._models[coded], self._staging, batch, rules, poison=self._poison)

    def layout(self, arm: Arm, speeds: Speeds | None = None) -> Layout:
        """Layout of an arm, by the given or the measured speeds."""
        shape = self.shape
        sizes = shape.sizes(coded=arm.coded)
        return lay_out(arm, speeds or self.speeds, sizes, rows=shape.rows, tokens=shape.tokens)

    def step(self, arm: Arm, layout: Layout | None = None) -> MeasuredStep:
        """Run one step of an arm.

        Args:
            arm: the arm.
            layout: layout to use; None: the arm's own.
        """
        layout = layout or self.layout(arm)
        batch, rules = layout.batch, layout.rules
        schedule = self._plan(batch, rules, coded=arm.coded)
        step = self.begin(batch, rules, coded=arm.coded)
        timeline = self.executor.run(schedule, step.work)
        return MeasuredStep(
            timeline=timeline,
            predicted_s=VirtualClock().run(schedule).seconds,
            error=self._models[arm.coded].off(step.hidden),
        )


def simulated_model(shape: LayerShape, link_codecs: LinkCodecs | None = None) -> OffloadedModel:
    """A model with a few distinct layers in host memory, each with its X."""
    batch, codecs = LayerBatch.of(shape), link_codecs or LinkCodecs()
    layers = min(_DISTINCT_LAYERS, shape.num_layers)
    num_bytes = layers * layer_host_bytes(batch, codecs, with_x=True) + new_host_bytes(batch)
    return OffloadedModel(batch, _CPU, HostBytes(num_bytes, _CPU), codecs, with_x=True)


def medians(steps: Mapping[str, list[MeasuredStep]]) -> dict[str, float]:
    """Median step time of each arm in seconds."""
    return {
        name: statistics.median(step.seconds for step in found) for name, found in steps.items()
    }
