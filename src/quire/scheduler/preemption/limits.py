"""Limits that running requests may not exceed: watermarks of the memory, and tenants' limits.

All are enforced before a step is planned, so that no preempted request is part of it.
"""

from quire.scheduler.components import SchedulerComponents
from quire.scheduler.group import same_group
from quire.scheduler.request import Request

SCALED_DOWN = "memory use above scale_down_at"


class Limits:
    """Preempts requests that would exceed a limit in the next step.

    Args:
        components: the scheduler's components.
    """

    def __init__(self, components: SchedulerComponents) -> None:
        self._config, self._memory = components.config, components.sequence_memory.memory
        self._sharing = components.sequence_memory.sharing
        self._fairness, self._preempter = components.fairness, components.preempter
        self._lifecycle, self._running = components.lifecycle, components.state.running
        self._peaks = components.admission_rule.peaks

    def enforce(self) -> None:
        """Enforce all limits."""
        if self._config.high_watermark < 1:
            self._enforce_watermark(self._config.high_watermark * self._memory.total_bytes)
        if self._config.scale_down_at is not None:
            self._scale_down(self._config.scale_down_at * self._memory.total_bytes)
        for spec in self._fairness.accounts.specs:
            if spec.limit_bytes is not None:
                self._enforce_tenant(spec.name, spec.limit_bytes)

    @property
    def _used_bytes(self) -> int:
        return self._memory.total_bytes - self._sharing.available_bytes

    def _enforce_watermark(self, max_bytes: float) -> None:
        """Preempt requests while memory use is above the high watermark."""
        while len(self._running) > 1 and self._used_bytes > max_bytes:
            first = min(self._running, key=self._preempter.order)
            victim = self._preempter.victim(self._running, first)
            if victim is None:
                return
            self._lifecycle.preempt(victim, "memory use above the high watermark")

    def _scale_down(self, max_bytes: float) -> None:
        """Swap out requests, just resumed ones too, while memory use is above `scale_down_at`.

        The first request in scheduling order keeps running. A single request may use all memory.
        """
        while self._used_bytes > max_bytes:
            first = min(self._running, key=self._preempter.order, default=None)
            if first is None:
                return
            victim = self._preempter.victim(self._running, first)
            victim = victim or self._preempter.victim(self._running, first, even_resumed=True)
            if victim is None:
                return
            self._lifecycle.preempt(victim, SCALED_DOWN, swap_all=True)

    def _enforce_tenant(self, tenant: str, limit_bytes: int) -> None:
        """Preempt the last requests of a tenant that would exceed its limit.

        Its first request fits alone: requests that do not are refused at submission.
        """
        while True:
            theirs = [request for request in self._running if request.tenant == tenant]
            if not theirs or self._bytes_then(tenant, theirs) <= limit_bytes:
                return
            victim = self._last_of(theirs)
            if victim is None:
                return
            self._lifecycle.preempt(victim, "its tenant would exceed its limit")

    def _last_of(self, theirs: list[Request]) -> Request | None:
        first = min(theirs, key=self._preempter.order)
        others = [r for r in theirs if r is not first and not same_group(r, first)]
        victim = self._preempter.victim_among(others)
        return victim or self._preempter.victim_among(others, even_resumed=True)

    def _bytes_then(self, tenant: str, requests: list[Request]) -> int:
        """Bytes of a tenant once the KV of all known tokens of its requests is computed."""
        further = self._peaks.further_pages(requests, [request.num_tokens for request in requests])
        return self._fairness.accounts.held_bytes(tenant) + self._peaks.num_bytes(
            further.sum(axis=0)
        )
