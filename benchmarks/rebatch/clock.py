"""A clock that skips time in which nobody asks anything."""

import time
from collections.abc import Callable


class SkippingClock:
    """Seconds since the start; what is skipped counts as passed.

    Args:
        seconds: the clock below it.
    """

    def __init__(self, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._start_s = seconds()
        self._skipped_s = 0.0

    def __call__(self) -> float:
        """Seconds since the start."""
        return self._seconds() - self._start_s + self._skipped_s

    def skip_to(self, when_s: float) -> None:
        """Let it be that late, if it is not."""
        self._skipped_s += max(0.0, when_s - self())
