"""Concurrent calls on several lanes, on streams or threads, each call timed."""

import statistics
from collections.abc import Callable, Mapping

from quire.offload.schedule.executor import Executor
from quire.offload.timeline import LANES, Kind, Operation, Schedule, Timeline

Calls = Mapping[Kind, tuple[Callable[[], object], int]]
"""Maps a kind to (call, number of calls), with one kind per lane."""
_MOST_CALLS = 500
_LEAST_S = 1e-9


def run_calls(executor: Executor, calls: Calls) -> Timeline:
    """Run each lane's calls one after the other; lanes do not depend on each other.

    Args:
        executor: executor of the device.
        calls: calls by kind.
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


def call_seconds(timeline: Timeline, kind: Kind, overlapping: Kind | None = None) -> float:
    """Median seconds of one kind's calls; with `overlapping`, of fully overlapped calls only.

    Args:
        timeline: result of `run_calls`.
        kind: kind of the measured calls.
        overlapping: kind of the overlapping calls; None: count all calls.
    """
    spans = timeline.of(LANES[kind])
    if overlapping is not None:
        others = timeline.of(LANES[overlapping])
        begin_s, end_s = others[0].start_s, others[-1].end_s
        spans = [s for s in spans if begin_s <= s.start_s and s.end_s <= end_s] or spans
    return max(statistics.median(float(span.seconds) for span in spans), _LEAST_S)


def matching_times(seconds: tuple[float, float], least: int) -> tuple[int, int]:
    """Numbers of calls with which two functions run for about the same total time.

    Args:
        seconds: duration of one call of each function, above 0.
        least: least number of calls of each function.
    """
    one, other = (max(least, min(_MOST_CALLS, round(least * max(seconds) / s))) for s in seconds)
    return one, other
