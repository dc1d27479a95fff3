"""When each operation of a schedule ran: how busy each lane was, and what it waited for."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import InvariantError
from quire.offload.schedule.operations import DEVICE, IN, Kind, Operation, Schedule

FIRST = "the first"
"""What a lane waits for before anything could be there."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation as it ran.

    Attributes:
        operation: what.
        start_s, end_s: since the step began.
    """

    operation: Operation
    start_s: int | float
    end_s: int | float

    @property
    def seconds(self) -> int | float:
        """It took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule as it ran.

    Attributes:
        schedule: what was to run.
        spans: by index of the operation.
        wall_s: that the run took by the wall clock; None where no wall clock was asked.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    wall_s: float | None = None

    @property
    def seconds(self) -> int | float:
        """Of the step, from its beginning to the last end."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, lane: str) -> int | float:
        """Time in which a lane worked."""
        return sum(span.seconds for span in self.of(lane))

    def busy_fraction(self, lane: str = DEVICE) -> float:
        """Part of the step in which a lane worked."""
        return self.busy_s(lane) / self.seconds if self.seconds else 0.0

    def by_kind(self) -> dict[Kind, float]:
        """Seconds of all operations of a kind."""
        found: dict[Kind, float] = {}
        for span in self.spans:
            kind = span.operation.kind
            found[kind] = found.get(kind, 0.0) + span.seconds
        return found

    def overlap(self, one: str = IN, other: str = DEVICE) -> float:
        """Of the less busy lane's time, the part that ran while the other worked too.

        (t_one + t_other - t_step) / min(t_one, t_other): 1 where all is hidden, at most.
        """
        times = (self.busy_s(one), self.busy_s(other))
        return (sum(times) - self.seconds) / min(times) if min(times) else 0.0

    def stalls(self, lane: str = DEVICE, from_layer: int = 0) -> dict[str, float]:
        """Seconds in which a lane stood still, by the kind of operation that it waited for.

        Args:
            lane: whose.
            from_layer: waits of earlier layers are left out: the first has nothing to hide behind.
        """
        found: dict[str, float] = {}
        free_s: int | float = 0.0
        for span in self.of(lane):
            if span.start_s > free_s and span.operation.layer >= from_layer:
                cause = self._last_needed(span.operation)
                found[cause] = found.get(cause, 0.0) + span.start_s - free_s
            free_s = span.end_s
        return found

    def check(self) -> None:
        """Prove that lanes did one thing at a time, and nothing before what it needs.

        Raises:
            InvariantError: one did.
        """
        for lane in self.schedule.lanes:
            free_s: int | float = 0.0
            for span in self.of(lane):
                ready_s = max((self.spans[n].end_s for n in span.operation.needs), default=0.0)
                if span.start_s < max(free_s, ready_s) or span.end_s < span.start_s:
                    raise InvariantError(
                        f"{span.operation.label} ran from {span.start_s} to {span.end_s} s; its "
                        f"lane was free at {free_s}, what it needs there at {ready_s}"
                    )
                free_s = span.end_s

    def of(self, lane: str) -> list[Span]:
        """What a lane did, in order."""
        return [span for span in self.spans if span.operation.lane == lane]

    def _last_needed(self, operation: Operation) -> str:
        needs = [self.spans[need] for need in operation.needs]
        return max(needs, key=lambda span: span.end_s).operation.kind if needs else FIRST


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, object]:
    """Events for chrome://tracing or Perfetto: a process for each timeline, a thread for each lane.

    Args:
        timelines: by name.
    """
    events: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append(_named("process_name", process, 0, name))
        for thread, lane in enumerate(timeline.schedule.lanes):
            events.append(_named("thread_name", process, thread, lane))
            events += [_event(span, process, thread) for span in timeline.of(lane)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _event(span: Span, process: int, thread: int) -> dict[str, object]:
    operation = span.operation
    return {
        "name": operation.label,
        "cat": str(operation.kind),
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": span.start_s * 1e6,
        "dur": span.seconds * 1e6,
        "args": {"bytes": operation.num_bytes, "tokens": operation.tokens, "slot": operation.slot},
    }
