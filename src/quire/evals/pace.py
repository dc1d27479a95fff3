"""Time of a long measurement: an estimate of what is left, and a limit."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from quire.errors import ConfigError

Report = Callable[[str], None]
"""Takes a line about the progress."""


class Pace:
    """Estimates the time that is left from the units that were measured, not those of a file.

    `report` takes lines about the progress.
    """

    def __init__(
        self,
        limit_s: float | None = None,
        report: Report = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.report = report
        if limit_s is not None and not limit_s > 0:
            raise ConfigError(f"expected --time-limit above 0, in seconds, got {limit_s:g}")
        self._clock, self._end_s = clock, clock() + (math.inf if limit_s is None else limit_s)
        self._units, self._seconds = 0, 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time limit is reached."""
        return self._clock() >= self._end_s

    @contextmanager
    def measuring(self, units: int = 1) -> Iterator[None]:
        """Count the time of a measurement."""
        started_s = self._clock()
        yield
        self._units += units
        self._seconds += self._clock() - started_s

    def left(self, units: int) -> str:
        """The time of further units as text; empty before the first measurement and at the end."""
        if not (units and self._units):
            return ""
        return f", about {timedelta(seconds=round(units * self._seconds / self._units))} left"
