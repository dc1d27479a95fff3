"""Totals of schedules and timelines."""

from benchmarks.offload.schedule import DEVICE, IN, Schedule, TaskKind, Timeline


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
