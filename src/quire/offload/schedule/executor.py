"""The executor interface, and an executor with a virtual clock."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from quire.offload.timeline import Operation, Schedule, Span, Timeline

Work = Callable[[Operation], object]
"""Executes an operation, such as a copy or a product. On a device it may return after it has
submitted the operation."""


@runtime_checkable
class Executor(Protocol):
    """Runs schedules."""

    def run(self, schedule: Schedule, work: Work | None = None) -> Timeline:
        """Run all operations, each after its dependencies; return when all have ended.

        Args:
            schedule: the schedule.
            work: function that executes an operation; None: only time passes.

        Raises:
            OffloadError: an operation failed or did not end.
        """


def no_work(_operation: Operation) -> None:
    """Do nothing."""


def dispatch(kinds: Mapping[str, Work]) -> Work:
    """Combine work functions by kind of operation; other kinds do nothing."""

    def do(operation: Operation) -> object:
        return kinds.get(operation.kind, no_work)(operation)

    return do


# An executor with a virtual clock: operations have exactly the given durations, no thread waits.
#
# Results are deterministic, so tests can compare schedules with formulas. Work is called in the
# order in which operations start.


class ScheduleClock:
    """`Executor` with a virtual clock.

    Args:
        seconds: duration of an operation; None: the schedule's expected duration.
    """

    def __init__(self, seconds: Callable[[Operation], int | float] | None = None) -> None:
        self._seconds = seconds or _expected

    def run(self, schedule: Schedule, work: Work | None = None) -> Timeline:
        spans: dict[int, Span] = {}
        free_s: dict[str, int | float] = {}
        heads = {lane: iter(operations) for lane, operations in schedule.lanes.items()}
        waiting = {lane: next(operations) for lane, operations in heads.items()}
        while waiting:
            start_s, _, operation = min(_startable(schedule, waiting, spans, free_s))
            if work is not None:
                work(operation)
            end_s = start_s + self._seconds(operation)
            spans[operation.index] = Span(operation, start_s, end_s)
            free_s[schedule.resource(operation.lane)] = end_s
            following = next(heads[operation.lane], None)
            if following is None:
                del waiting[operation.lane]
            else:
                waiting[operation.lane] = following
        return Timeline(schedule, tuple(spans[i] for i in range(len(spans))))


def _startable(
    schedule: Schedule,
    waiting: dict[str, Operation],
    spans: dict[int, Span],
    free_s: dict[str, int | float],
) -> Iterator["tuple[int | float, int, Operation]"]:
    """Earliest start of each lane's next operation whose dependencies have ended.

    An operation with a dependency that has not ended cannot start before these.

    """
    for operation in waiting.values():
        if all(need in spans for need in operation.needs):
            ready_s = max((spans[need].end_s for need in operation.needs), default=0.0)
            lane_s = free_s.get(schedule.resource(operation.lane), 0.0)
            yield max(ready_s, lane_s), operation.index, operation


def _expected(operation: Operation) -> int | float:
    return operation.seconds
