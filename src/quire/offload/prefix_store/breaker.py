"""Stops the calls to a tier that fails, for a time that doubles with every failed trial.

    closed --failure--> open for 1 s --trial fails--> open for 2 s ... 60 s
       ^------------------trial succeeds------------------'

An outage is logged once when it begins and once when it ends.
"""

import logging
import time
from collections.abc import Callable

FIRST_S, MOST_S = 1.0, 60.0

logger = logging.getLogger(__name__)


class CircuitBreaker:
    """Whether a tier may be called now.

    Args:
        name: name of the tier, for the log.
        clock: seconds.

    Attributes:
        num_outages: how often the tier began to fail.
        reason: why the last call failed.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_outages, self.reason = 0, ""
        self._name, self._clock = name, clock
        self._wait_s, self._until_s = 0.0, 0.0

    @property
    def is_open(self) -> bool:
        """Whether the tier is not to be called yet."""
        return self._wait_s > 0 and self._clock() < self._until_s

    def failed(self, reason: object) -> None:
        """Open, or stay open for longer after a failed trial; no effect while it is open."""
        if self.is_open:
            return
        self.reason = str(reason)
        if not self._wait_s:
            self.num_outages += 1
            logger.warning(
                "the %s tier of cached prefixes is not used for now: %s; its prefixes are "
                "recomputed, and it is tried again after %g s, later after up to %g s",
                self._name,
                reason,
                FIRST_S,
                MOST_S,
            )
        self._wait_s = min(2 * self._wait_s, MOST_S) if self._wait_s else FIRST_S
        self._until_s = self._clock() + self._wait_s

    def succeeded(self) -> None:
        """Close after a successful call."""
        if self._wait_s:
            self._wait_s = 0.0
            logger.warning("the %s tier of cached prefixes is used again", self._name)
