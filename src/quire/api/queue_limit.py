"""Limit of the waiting requests of an engine: back-pressure for clients."""

from collections import deque
from dataclasses import dataclass

from quire.engine.core import Engine
from quire.errors import QueueFull

_MOST_RETRY_S = 60.0
_UNKNOWN_RETRY_S = 2.0
"""Time to wait before the first request has ended."""
_RATE_OVER = 64
"""Steps with ended requests from which the rate is computed."""


class ServedRate:
    """Rate of ended requests over the last steps that ended requests; idle time does not count."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._ended = deque([(0.0, 0)], maxlen=_RATE_OVER)  # busy time after a step, and number

    def add(self, step_s: float, num_ended: int) -> None:
        """Add a step.

        Args:
            step_s: duration of the step.
            num_ended: requests that it ended.
        """
        self._busy_s += step_s
        if num_ended:
            self._ended.append((self._busy_s, num_ended))

    @property
    def per_s(self) -> float:
        """Requests that end per second; 0 before the first one."""
        (start_s, _), *later = self._ended
        elapsed_s = self._busy_s - start_s
        return sum(number for _, number in later) / elapsed_s if elapsed_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimit:
    """Most requests that may wait.

    Attributes:
        requests: number of waiting requests; None: no limit.
        tokens: prompt tokens of waiting requests; None: no limit.
    """

    requests: int | None = None
    tokens: int | None = None

    def check(self, engine: Engine, served_per_s: float) -> None:
        """Refuse new requests while the limit is reached.

        Args:
            engine: the engine, between two steps.
            served_per_s: requests that end per second; 0: unknown.

        Raises:
            QueueFull: states the number of waiting requests and when to try again.
        """
        scheduler = engine.scheduler
        waiting = scheduler.num_waiting
        if self.requests is not None and waiting >= self.requests:
            raise QueueFull(
                f"{waiting:,} requests are waiting, the limit is {self.requests:,}: try again "
                "later",
                retry_after_s=_wait_s(waiting, served_per_s),
            )
        if self.tokens is None or not waiting:
            return
        tokens = sum(len(request.prompt_token_ids) for request in scheduler.waiting.ordered())
        if tokens >= self.tokens:
            raise QueueFull(
                f"the prompts of waiting requests have {tokens:,} tokens, the limit is "
                f"{self.tokens:,}: try again later",
                retry_after_s=_wait_s(waiting, served_per_s),
            )


def _wait_s(waiting: int, served_per_s: float) -> float:
    """Time in which the waiting requests are served at the present rate, from 1 to 60 s."""
    expected_s = waiting / served_per_s if served_per_s > 0 else _UNKNOWN_RETRY_S
    return min(max(1.0, expected_s), _MOST_RETRY_S)
