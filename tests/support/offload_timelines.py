"""Analysis of schedules and timelines: speeds and totals."""

from collections.abc import Iterable, Sequence

from quire.offload.profiler import COST_CLASSES, Speeds, call_and_units, speeds_of
from quire.offload.schedule.executor import Executor, Work
from quire.offload.timeline import DEVICE, IN, Schedule, Span, TaskKind, Timeline
from quire.plan.fitting import fit_seconds


def measure_speeds(executor: Executor, probes: Sequence[tuple[Schedule, Work]]) -> Speeds:
    """Measure speeds with probes; each probe runs once as a warm-up and once measured.

    Args:
        executor: executor of the steps.
        probes: schedules of different sizes, and their work.
    """
    spans: list[Span] = []
    for schedule, work in probes:
        executor.run(schedule, work)
        spans += executor.run(schedule, work).spans
    return fit_speeds(spans)


def fit_speeds(spans: Iterable[Span]) -> Speeds:
    """Fit speeds to operations; an operation kind without measurements has no cost."""
    samples: dict[str, tuple[list[tuple[float, float]], list[float]]] = {}
    for span in spans:
        amounts, seconds = samples.setdefault(COST_CLASSES[span.operation.kind], ([], []))
        if span.seconds > 0 and call_and_units(span.operation)[1]:
            amounts.append(call_and_units(span.operation))
            seconds.append(float(span.seconds))
    fitted = {name: fit_seconds(*found) for name, found in samples.items() if found[1]}
    return speeds_of({name: (call_s, unit_s) for name, (call_s, unit_s) in fitted.items()})


def copied_bytes(schedule: Schedule, *kinds: TaskKind) -> int:
    """Bytes of the given kinds of copies."""
    return sum(op.num_bytes for op in schedule.operations if op.kind in kinds)


def busy_s(timeline: Timeline, lane: str) -> int | float:
    """Time in which a lane was busy."""
    return sum(span.seconds for span in timeline.of(lane))


def busy_fraction(timeline: Timeline, lane: str = DEVICE) -> float:
    """Fraction of the step in which a lane was busy."""
    return busy_s(timeline, lane) / timeline.seconds if timeline.seconds else 0.0


def seconds_by_kind(timeline: Timeline) -> dict[TaskKind, float]:
    """Time of all operations of each kind."""
    found: dict[TaskKind, float] = {}
    for span in timeline.spans:
        kind = span.operation.kind
        found[kind] = found.get(kind, 0.0) + span.seconds
    return found


def overlap(timeline: Timeline, one: str = IN, other: str = DEVICE) -> float:
    """Overlapped fraction of the less busy lane's time.

    (t_one + t_other - t_step) / min(t_one, t_other): at most 1, for complete overlap.
    """
    times = (busy_s(timeline, one), busy_s(timeline, other))
    return (sum(times) - timeline.seconds) / min(times) if min(times) else 0.0
