"""The seam of executors, and a virtual clock as the simplest of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

from quire.offload.timeline import Operation, Schedule, Span, Timeline

# The seam of executors.

Work = Callable[[Operation], object]
"""Does what an operation says: copies, multiplies. It begins it and may return before it is done
where a device does it in order."""


@runtime_checkable
class Executor(Protocol):
    """Runs schedules."""

    def run(self, schedule: Schedule, work: Work | None = None) -> Timeline:
        """Run all operations, each after what it needs; return when all have ended.

        Args:
            schedule: what to run.
            work: does an operation; None: nothing but time passes.

        Raises:
            OffloadError: an operation did not end, or failed.
        """


def nothing(_operation: Operation) -> None:
    """Work that does nothing."""


def dispatch(kinds: Mapping[str, Work]) -> Work:
    """Work that differs by kind; kinds that are not named do nothing."""

    def do(operation: Operation) -> object:
        return kinds.get(operation.kind, nothing)(operation)

    return do


# ---- virtual -------------------------------------------------------------------------------------

# A virtual clock: operations take exactly their given durations, and no thread waits.
#
# Deterministic, so that schedules are tested against formulas, and so is what the work computes: it
# is called in the order in which operations begin.


class VirtualClock:
    """`Executor` without any waiting.

    Args:
        seconds: what an operation really takes; what the schedule expects where this is None.
    """

    def __init__(self, seconds: Callable[[Operation], int | float] | None = None) -> None:
        self._seconds = seconds or _expected

    def run(self, schedule: Schedule, work: Work | None = None) -> Timeline:
        """See `Executor.run`."""
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
    """When the first operation of each lane could begin, as far as that is known.

    What waits for an operation that has no end yet cannot begin before one that could begin now.
    """
    for operation in waiting.values():
        if all(need in spans for need in operation.needs):
            ready_s = max((spans[need].end_s for need in operation.needs), default=0.0)
            lane_s = free_s.get(schedule.resource(operation.lane), 0.0)
            yield max(ready_s, lane_s), operation.index, operation


def _expected(operation: Operation) -> int | float:
    return operation.seconds
