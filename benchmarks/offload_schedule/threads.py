"""Executor with a thread per lane: real copies and products, on a link throttled to a given rate.

Gains depend on ratios only (xi, rho, c / kS, layers, slots), so two cores and a throttled link
show the gains of an accelerator, if the copies are short compared with their waits.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping

from quire.errors import ConfigError, LinkStalled
from quire.offload.schedule.executor import Work, no_work
from quire.offload.timeline import Operation, Schedule, Span, Timeline
from quire.plan.rates import CopyRate

# ---- pace ----------------------------------------------------------------------------------------

# Throttles a lane to a given speed: a link to a rate in bytes per second, a host to its speed.
#
# The real work of an operation is short; then the lane waits until an absolute deadline, so that
# late wake-ups accumulate neither along a lane nor across lanes:
#
#     deadline = max(previous deadline, due times of its dependencies) + seconds of the operation
#
# An operation that ends in time is due at its deadline, however late its thread wakes up; a late
# operation is due when it ends.


class Pace:
    """Deadlines of one resource. Lanes on one resource share its pace and run in turn.

    Args:
        seconds: returns the duration of an operation.
        delay: returns an additional delay of an operation, such as a stall in tests.
    """

    def __init__(
        self,
        seconds: Callable[[Operation], int | float],
        delay: Callable[[Operation], int | float] | None = None,
    ) -> None:
        self._seconds, self._delay = seconds, delay
        self._deadline_s = 0.0
        self.turn = threading.Lock()

    def wait(
        self, operation: Operation, ready_s: float, stopped: threading.Event
    ) -> tuple[float, float]:
        """Wait until the operation's deadline, or until `stopped` is set.

        Args:
            operation: operation whose work has ended.
            ready_s: due time of its dependencies, on `time.perf_counter`.
            stopped: event that ends all waits.

        Returns:
            Start and due time of the operation.
        """
        done_s = time.perf_counter()
        delay_s = self._delay(operation) if self._delay else 0.0
        begun_s = max(self._deadline_s, ready_s)
        self._deadline_s = begun_s + self._seconds(operation) + delay_s
        if self._deadline_s > done_s:
            stopped.wait(self._deadline_s - done_s)
        self._deadline_s = max(self._deadline_s, done_s)
        return begun_s, self._deadline_s


class ThrottledLink:
    """A link whose rate can be changed during use.

    Args:
        rate: rate that gives a copy's duration from its bytes.
        jitter: standard deviation of the logarithm of a copy's duration.
        seed: random seed of the jitter.

    Attributes:
        rate: current rate.

    Raises:
        ConfigError: negative jitter.
    """

    def __init__(self, rate: CopyRate, *, jitter: int | float = 0.0, seed: int = 0) -> None:
        if jitter < 0:
            raise ConfigError(f"expected jitter of 0 or more, got {jitter}")
        self.rate = rate
        self._jitter, self._random = jitter, random.Random(seed)

    def seconds(self, operation: Operation) -> float:
        """Duration of a copy."""
        factor = self._random.lognormvariate(0, self._jitter) if self._jitter else 1.0
        return self.rate.seconds(operation.num_bytes) * factor


def expected(operation: Operation) -> int | float:
    """The schedule's expected duration."""
    return operation.seconds


# ---- threads -------------------------------------------------------------------------------------


class ThreadExecutor:
    """`Executor` on threads.

    Args:
        paces: pace of each resource; other lanes run without simulated durations.
        stall_s: a step counts as stalled if no operation ends for this long, in addition to the
            expected duration of the longest operation.
    """

    def __init__(
        self, paces: Mapping[str, Pace] | None = None, *, stall_s: int | float = 30.0
    ) -> None:
        self._paces = dict(paces or {})
        self._stall_s = stall_s

    def run(self, schedule: Schedule, work: Work | None = None) -> Timeline:
        """See `Executor.run`.

        Raises:
            LinkStalled: no operation ended in time; the message names the running operations.
        """
        return _Run(schedule, work or no_work, self._paces).result(self._stall_s)


class _Run:
    def __init__(self, schedule: Schedule, work: Work, paces: Mapping[str, Pace]) -> None:
        self._schedule, self._work, self._paces = schedule, work, paces
        self._ended = [threading.Event() for _ in schedule.operations]
        self._spans: list[Span | None] = [None] * len(schedule.operations)
        self._running: dict[str, Operation] = {}
        self._stopped, self._progress = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._begun_s = 0.0
        self._due_s = [0.0] * len(schedule.operations)
        self._lane_s: dict[str, float] = {}

    def result(self, stall_s: int | float) -> Timeline:
        longest_s = max((op.seconds for op in self._schedule.operations), default=0.0)
        threads = [
            threading.Thread(target=self._follow, args=(operations,), name=lane, daemon=True)
            for lane, operations in self._schedule.lanes.items()
        ]
        self._begun_s = time.perf_counter()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and self._failure is None:
            self._progress.clear()
            if all(event.is_set() for event in self._ended):
                break
            if not self._progress.wait(longest_s + stall_s) and self._failure is None:
                self._fail(LinkStalled(self._stalled(longest_s + stall_s)))
        wall_s = time.perf_counter() - self._begun_s
        if self._failure is not None:
            raise self._failure
        spans = tuple(span for span in self._spans if span is not None)
        return Timeline(self._schedule, spans, wall_s)

    def _follow(self, operations: tuple[Operation, ...]) -> None:
        try:
            for operation in operations:
                for need in operation.needs:
                    self._ended[need].wait()
                if self._stopped.is_set():
                    return
                self._do(operation)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that called run
            self._fail(error)

    def _do(self, operation: Operation) -> None:
        pace = self._paces.get(self._schedule.resource(operation.lane))
        if pace is None:
            self._running[operation.lane] = operation
            started_s = time.perf_counter()
            self._work(operation)
            self._record(operation, started_s, time.perf_counter())
            return
        with pace.turn:
            self._running[operation.lane] = operation
            self._work(operation)
            ready_s = max((self._due_s[n] for n in operation.needs), default=self._begun_s)
            self._record(operation, *pace.wait(operation, ready_s, self._stopped))

    def _record(self, operation: Operation, started_s: float, due_s: float) -> None:
        """Record the end of an operation and release its dependents."""
        if self._stopped.is_set():
            return
        started_s = max(started_s, self._lane_s.get(operation.lane, 0.0))
        self._lane_s[operation.lane] = self._due_s[operation.index] = due_s = max(started_s, due_s)
        span = Span(operation, started_s - self._begun_s, due_s - self._begun_s)
        self._spans[operation.index] = span
        del self._running[operation.lane]
        self._ended[operation.index].set()
        self._progress.set()

    def _fail(self, error: BaseException) -> None:
        """Release all lanes; the first failure is raised."""
        self._failure = self._failure or error
        self._stopped.set()
        for event in self._ended:
            event.set()
        self._progress.set()

    def _stalled(self, seconds: int | float) -> str:
        running = ", ".join(op.label for op in tuple(self._running.values())) or "none"
        missing = sum(span is None for span in self._spans)
        return (
            f"no operation ended for {seconds:.3g} s; running: {running}; {missing} of "
            f"{len(self._spans)} operations are missing. The step's requests are recomputed"
        )
