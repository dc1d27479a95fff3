"""Makes a lane as slow as something else: a link of so many bytes a second, a host of such a speed.

What a lane really does is short; then it waits until an absolute deadline, so that late wake-ups do
not add up, neither along a lane nor from lane to lane:

    deadline = max(deadline before, when what it needs was due) + seconds of the operation

What was done in time is due at its deadline, however late its thread woke; what was late when it
was done.
"""

import random
import threading
import time
from collections.abc import Callable

from quire.errors import ConfigError
from quire.offload.schedule.operations import Operation
from quire.plan.rates import CopyRate


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
