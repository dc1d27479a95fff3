"""How fast operations are: measured once at the start, then followed on every real one.

    copies in, out        seconds = call_s + bytes / bytes_per_s
    project, attend       seconds = call_s + tokens * token_s
    layer                 seconds = layer_s + rows * row_s

What primitives take alone is a prior only: what they take in a step, beside each other, is what
counts. Where times change for good (another program takes half the link) a detector says so, and
the next samples are believed at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.offload.executors.base import Executor, Work
from quire.offload.schedule.operations import Kind, Operation, Schedule
from quire.offload.schedule.work import Speeds
from quire.offload.timeline import Span, Timeline
from quire.plan.fitting import ChangeDetector, RateEstimator, fit_seconds
from quire.plan.rates import CopyRate

# a coefficient of 0 would stay so; what was taken for nothing is learned from about there
_LEAST_CALL_S, _LEAST_UNIT_S = 1e-6, 1e-12
_CLASSES = {
    Kind.WEIGHTS_IN: "in",
    Kind.KV_IN: "in",
    Kind.HIDDEN_IN: "in",
    Kind.X_IN: "in",
    Kind.KV_OUT: "out",
    Kind.HIDDEN_OUT: "out",
    Kind.PROJECT: "project",
    Kind.ATTEND: "attend",
    Kind.HOST_ATTEND: "host",
    Kind.LAYER: "layer",
}
"""Operations that one law holds for."""


@dataclass(slots=True)
class _Followed:
    estimator: RateEstimator
    detector: ChangeDetector


class OffloadProfiler:
    """Speeds of this engine on this machine, as known now.

    Args:
        prior: measured at the start, or assumed.
        forgetting: see `RateEstimator`.

    Attributes:
        num_changes: times at which an operation's time changed for good.
    """

    def __init__(self, prior: Speeds, *, forgetting: float = 0.97) -> None:
        self.num_changes = 0
        self._prior = prior
        self._followed = {
            name: _Followed(
                RateEstimator((max(call_s, _LEAST_CALL_S), max(unit_s, _LEAST_UNIT_S)), forgetting),
                ChangeDetector(),
            )
            for name, (call_s, unit_s) in _coefficients(prior).items()
        }

    @property
    def speeds(self) -> Speeds:
        """As known now; what never ran stays as it was given."""
        before = _coefficients(self._prior)
        return _speeds(
            {
                name: followed.estimator.coefficients
                if followed.estimator.num_samples
                else before[name]
                for name, followed in self._followed.items()
            }
        )

    def observe(self, timeline: Timeline) -> None:
        """Learn from every operation of a step."""
        for span in timeline.spans:
            self._learn(span)

    def _learn(self, span: Span) -> None:
        followed, amounts = self._followed[_CLASSES[span.operation.kind]], _amounts(span.operation)
        if not amounts[1]:
            return
        predicted_s = followed.estimator.predict(amounts)
        if followed.detector.add(predicted_s, span.seconds):
            followed.estimator.doubt()
            self.num_changes += 1
        followed.estimator.add(amounts, span.seconds)


def measure_speeds(executor: Executor, probes: Sequence[tuple[Schedule, Work]]) -> Speeds:
    """Speeds from probes that are run once unmeasured and once measured.

    Args:
        executor: that will run the steps.
        probes: schedules of different sizes, and their work.
    """
    spans: list[Span] = []
    for schedule, work in probes:
        executor.run(schedule, work)
        spans += executor.run(schedule, work).spans
    return fit_speeds(spans)


def fit_speeds(spans: Iterable[Span]) -> Speeds:
    """Speeds that fit operations best; what did not run is free."""
    samples: dict[str, tuple[list[tuple[float, float]], list[float]]] = {}
    for span in spans:
        amounts, seconds = samples.setdefault(_CLASSES[span.operation.kind], ([], []))
        if span.seconds > 0 and _amounts(span.operation)[1]:
            amounts.append(_amounts(span.operation))
            seconds.append(float(span.seconds))
    fitted = {name: fit_seconds(*found) for name, found in samples.items() if found[1]}
    return _speeds({name: (call_s, unit_s) for name, (call_s, unit_s) in fitted.items()})


def _amounts(operation: Operation) -> tuple[float, float]:
    """One call, and bytes of a copy or tokens of a product."""
    units = operation.num_bytes if _CLASSES[operation.kind] in ("in", "out") else operation.tokens
    return 1.0, float(units)


def _coefficients(speeds: Speeds) -> dict[str, tuple[float, float]]:
    return {
        "in": (float(speeds.inward.call_s), 1 / speeds.inward.bytes_per_s),
        "out": (float(speeds.outward.call_s), 1 / speeds.outward.bytes_per_s),
        "project": (float(speeds.project_call_s), float(speeds.project_token_s)),
        "attend": (float(speeds.attend_call_s), float(speeds.attend_token_s)),
        "host": (float(speeds.host_call_s), float(speeds.host_token_s)),
        "layer": (float(speeds.layer_s), float(speeds.row_s)),
    }


def _speeds(found: dict[str, tuple[float, ...]]) -> Speeds:
    def of(name: str) -> tuple[float, float]:
        call_s, unit_s = found.get(name, (0.0, 0.0))
        return call_s, unit_s

    project, attend, host, layer = (of(name) for name in ("project", "attend", "host", "layer"))
    return Speeds(
        inward=_rate(*of("in")),
        outward=_rate(*of("out")),
        project_call_s=project[0],
        project_token_s=project[1],
        attend_call_s=attend[0],
        attend_token_s=attend[1],
        host_call_s=host[0],
        host_token_s=host[1],
        layer_s=layer[0],
        row_s=layer[1],
    )


def _rate(call_s: float, byte_s: float) -> CopyRate:
    return CopyRate(bytes_per_s=1 / max(byte_s, 1e-15), call_s=call_s)
