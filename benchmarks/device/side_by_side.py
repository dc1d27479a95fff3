"""Calls of several lanes beside each other, on streams or threads, timed one by one."""

import statistics
from collections.abc import Callable, Mapping

from benchmarks.offload_schedule.executor import Executor
from quire.offload.timeline import LANES, Kind, Operation, Schedule, Timeline

Calls = Mapping[Kind, tuple[Callable[[], object], int]]
"""What each kind does, and how often; of each lane one kind."""
_MOST_CALLS = 500
_LEAST_S = 1e-9


def run_calls(executor: Executor, calls: Calls) -> Timeline:
    """Run every lane's calls in a row; lanes need nothing of each other.

    Args:
        executor: of the device.
        calls: by kind.
    """
    operations: list[Operation] = []
    for kind, (_, times) in calls.items():
        for part in range(times):
            index = len(operations)
            operations.append(
                Operation(index=index, kind=kind, lane=LANES[kind], layer=0, part=part)
            )

    def work(operation: Operation) -> None:
        calls[operation.kind][0]()

    return executor.run(Schedule(tuple(operations)), work)


def call_seconds(timeline: Timeline, kind: Kind, beside: Kind | None = None) -> float:
    """Median seconds of one kind's calls; only calls fully overlapped by another kind, if any.

    Args:
        timeline: result of `run_calls`.
        kind: kind of the measured calls.
        beside: kind of the overlapping calls.
    """
    spans = timeline.of(LANES[kind])
    if beside is not None:
        others = timeline.of(LANES[beside])
        begin_s, end_s = others[0].start_s, others[-1].end_s
        spans = [s for s in spans if begin_s <= s.start_s and s.end_s <= end_s] or spans
    return max(statistics.median(float(span.seconds) for span in spans), _LEAST_S)


def matching_times(seconds: tuple[float, float], least: int) -> tuple[int, int]:
    """How often to call each of two, so that both work for about as long.

    Args:
        seconds: of a call of each, above 0.
        least: calls of the longer one, and of either.
    """
    one, other = (max(least, min(_MOST_CALLS, round(least * max(seconds) / s))) for s in seconds)
    return one, other
