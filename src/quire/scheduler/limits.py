"""Limits that those who run may not pass: a mark of the whole memory, and what a tenant may hold.

Both are kept before a step is planned, so that nobody who gives way is part of it.
"""

from collections.abc import Callable

from quire.scheduler.group import same_group
from quire.scheduler.request import Request
from quire.scheduler.scheduler_parts import SchedulerParts

SCALED_DOWN = "above the mark for scaling down"
Preempt = Callable[[Request, str], None]  # (request, why)


class Limits:
    """Takes requests out that would pass a limit in the next step.

    Args:
        parts: the rules and books that are asked.
        running: those that are in; the scheduler's own list.
        preempt: takes a request out.
        scale_out: takes a request out to the host, whole where it has room.
    """

    def __init__(
        self,
        parts: SchedulerParts,
        running: list[Request],
        preempt: Preempt,
        scale_out: Preempt,
    ) -> None:
        self._memory, self._sequence_memory = parts.sequence_memory.memory, parts.sequence_memory
        self._high_watermark = parts.config.high_watermark
        self._scale_down_at, self._scale_out = parts.config.scale_down_at, scale_out
        self._fairness, self._preempter = parts.fairness, parts.preempter
        self._peaks = parts.admission.peaks
        self._running, self._preempt = running, preempt

    def respect(self) -> None:
        """Keep all limits."""
        if self._high_watermark < 1:
            self._respect_watermark()
        if self._scale_down_at is not None:
            self._scale_down(self._scale_down_at * self._memory.total_bytes)
        for spec in self._fairness.book.specs:
            if spec.limit_bytes is not None:
                self._respect_tenant(spec.name, spec.limit_bytes)

    def _respect_watermark(self) -> None:
        """Above the high watermark somebody gives way before memory runs out."""
        most_bytes = self._high_watermark * self._memory.total_bytes
        while len(self._running) > 1:
            if (
                self._memory.total_bytes - self._sequence_memory.sharing.available_bytes
                <= most_bytes
            ):
                return
            first = min(self._running, key=self._preempter.order)
            victim = self._preempter.victim(self._running, first)
            if victim is None:
                return
            self._preempt(victim, "above the high watermark")

    def _scale_down(self, most_bytes: float) -> None:
        """Over the mark the batch shrinks, also by those that have just come back.

        Whoever is first stays: alone it may have all of the memory.
        """
        while self._memory.total_bytes - self._sequence_memory.sharing.available_bytes > most_bytes:
            first = min(self._running, key=self._preempter.order, default=None)
            if first is None:
                return
            victim = self._preempter.victim(self._running, first)
            victim = victim or self._preempter.victim(self._running, first, even_returned=True)
            if victim is None:
                return
            self._scale_out(victim, SCALED_DOWN)

    def _respect_tenant(self, tenant: str, limit_bytes: int) -> None:
        """A tenant whose requests would grow over its limit gives way to itself, the last first.

        The first of them fits by itself: one that does not is refused when it is submitted.
        """
        while True:
            theirs = [request for request in self._running if request.tenant == tenant]
            if not theirs or self._bytes_then(tenant, theirs) <= limit_bytes:
                return
            first = min(theirs, key=self._preempter.order)
            others = [request for request in theirs if not same_group(request, first)]
            others = [request for request in others if request is not first]
            victim = self._preempter.victim_among(others)
            if victim is None:  # those who have just come back: a limit is a limit
                victim = self._preempter.victim_among(others, even_returned=True)
            if victim is None:
                return
            self._preempt(victim, "its tenant would pass its limit")

    def _bytes_then(self, tenant: str, requests: list[Request]) -> int:
        """Bytes of a tenant once its requests hold every token they know."""
        owed = self._peaks.owed(requests, [request.num_tokens for request in requests])
        return self._fairness.book.held_bytes(tenant) + self._peaks.num_bytes(owed.sum(axis=0))
