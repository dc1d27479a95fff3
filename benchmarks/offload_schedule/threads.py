"""A thread for each lane: real copies and products, on a link throttled to a given rate.

Gains depend on ratios alone (xi, rho, c / kS, layers, slots), so two cores and a throttled link
show what an accelerator would: the link's copies must be short beside its waits.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping

from benchmarks.offload_schedule.executor import Work, nothing
from quire.errors import ConfigError, LinkStalled
from quire.offload.timeline import Operation, Schedule, Span, Timeline
from quire.plan.rates import CopyRate

# ---- pace ----------------------------------------------------------------------------------------

# Throttles a lane to a given speed: a link to a rate in bytes a second, a host to its speed.
#
# What a lane really does is short; then it waits until an absolute deadline, so that late wake-ups
# do not add up, neither along a lane nor from lane to lane:
#
#     deadline = max(deadline before, when what it needs was due) + seconds of the operation
#
# What was done in time is due at its deadline, however late its thread woke; what was late when it
# was done.


class Pace:
    """Deadlines of one resource. Lanes that share one share its pace, and so take turns.

    Args:
        seconds: an operation takes.
        delay: that is added to an operation, for tests; a link that stalls adds much.
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
        """Return at the operation's deadline, or as soon as `stopped` is set.

        Args:
            operation: that has been done.
            ready_s: on `time.perf_counter`, when what it needs was due.
            stopped: ends all waiting.

        Returns:
            When it began, and when it is due.
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
    """Rates of a link that may change while it is used.

    Args:
        rate: seconds of a copy by its bytes.
        jitter: standard deviation of the logarithm of a copy's time.
        seed: of the jitter.

    Attributes:
        rate: as of now.

    Raises:
        ConfigError: negative jitter.
    """

    def __init__(self, rate: CopyRate, *, jitter: int | float = 0.0, seed: int = 0) -> None:
        if jitter < 0:
            raise ConfigError(f"expected jitter of 0 or more, got {jitter}")
        self.rate = rate
        self._jitter, self._random = jitter, random.Random(seed)

    def seconds(self, operation: Operation) -> float:
        """Of a copy."""
        factor = self._random.lognormvariate(0, self._jitter) if self._jitter else 1.0
        return self.rate.seconds(operation.num_bytes) * factor


def expected(operation: Operation) -> int | float:
    """What the schedule says."""
    return operation.seconds


# ---- threads -------------------------------------------------------------------------------------


class ThreadExecutor:
    """`Executor` on threads.

    Args:
        paces: resource of a schedule to its pace; lanes without one take what their work takes.
        stall_s: after so long without any operation ending, beyond what the longest one is
            expected to take, a step has stalled.
    """

    def __init__(
        self, paces: Mapping[str, Pace] | None = None, *, stall_s: int | float = 30.0
    ) -> None:
        self._paces = dict(paces or {})
        self._stall_s = stall_s

    def run(self, schedule: Schedule, work: Work | None = None) -> Timeline:
        """See `Executor.run`.

        Raises:
            LinkStalled: nothing ended for too long; the message names what was running.
        """
        return _Run(schedule, work or nothing, self._paces).result(self._stall_s)


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
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that called run
            self._fail(error)

    def _do(self, operation: Operation) -> None:
        pace = self._paces.get(self._schedule.resource(operation.lane))
        if pace is None:
            self._running[operation.lane] = operation
            started_s = time.perf_counter()
            self._work(operation)
            self._note(operation, started_s, time.perf_counter())
            return
        with pace.turn:
            self._running[operation.lane] = operation
            self._work(operation)
            ready_s = max((self._due_s[n] for n in operation.needs), default=self._begun_s)
            self._note(operation, *pace.wait(operation, ready_s, self._stopped))

    def _note(self, operation: Operation, started_s: float, due_s: float) -> None:
        """What needs the operation may begin."""
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
        """Let every lane go; the first failure counts."""
        self._failure = self._failure or error
        self._stopped.set()
        for event in self._ended:
            event.set()
        self._progress.set()

    def _stalled(self, seconds: int | float) -> str:
        running = ", ".join(op.label for op in tuple(self._running.values())) or "nothing"
        missing = sum(span is None for span in self._spans)
        return (
            f"no operation ended for {seconds:.3g} s; running: {running}; {missing} of "
            f"{len(self._spans)} are missing. The requests of this step are computed again"
        )
