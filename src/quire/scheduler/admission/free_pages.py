"""Checks whether a waiting request fits: rows, promised pages, pages for its swapped KV."""

from collections.abc import Iterator, Sequence

import numpy as np

from quire.scheduler.admission.peaks import Counts
from quire.scheduler.admission.rules import AdmissionRule, Optimistic
from quire.scheduler.components import SchedulerComponents
from quire.scheduler.group import bytes_of, copies_to_come, num_rows, reserved_rows
from quire.scheduler.request import Request

AHEAD_TOKENS = 16  # further tokens for which pages must be free with `scale_down_at`


class FreePages:
    """Free rows and pages of the KV memory.

    Args:
        components: the scheduler's components.
    """

    def __init__(self, components: SchedulerComponents) -> None:
        self._config, self._rule = components.config, components.admission_rule
        self._peaks = components.admission_rule.peaks
        self._known = Optimistic(self._peaks)
        self._preempter, self._running = components.preempter, components.state.running
        self._memory = components.sequence_memory.memory
        self._sharing = components.sequence_memory.sharing
        self._num_rows = components.config.num_rows

    @property
    def reserved_bytes(self) -> float:
        """Bytes above the low watermark; an admission leaves them free while other requests run."""
        return (1 - self._config.full_at) * self._memory.total_bytes

    @property
    def _reserved_at_peak_bytes(self) -> float:
        """Bytes above the levels at which running requests are preempted."""
        most = min(self._config.high_watermark, self._config.scale_down_at or 1.0)
        return (1 - most) * self._memory.total_bytes

    def has_rows(self, request: Request, staying: Sequence[Request]) -> bool:
        """Whether there are rows for a request and its group if only `staying` keep running."""
        num_leaving = len(self._running) - len(staying)
        free = self._memory.num_free_rows + num_leaving
        free = min(self._num_rows - len(staying), free)
        return num_rows(request) + reserved_rows(staying) <= free

    def fits(self, request: Request, cached_tokens: int) -> bool:
        """Whether there are rows and pages for a request, and pages for its swapped KV.

        Pages of known tokens must fit below the low watermark, pages promised for tokens to come
        below the high one. A request that would run alone may use all of the KV memory.
        """
        if not self.has_rows(request, self._running):
            return False
        if self._running:
            promised = self._promised(self._rule, request, cached_tokens, self._running)
            by_class = self._rule.peaks.by_class(promised)
            if not self._leaves_enough(request, cached_tokens, self._running, promised):
                return False
            if not self._sharing.free_pages(by_class):
                return False
        return self._preempter.can_swap_in(request)

    def would_fit(self, request: Request, cached_tokens: int, staying: Sequence[Request]) -> bool:
        """Whether a request would fit if only `staying` keep running."""
        if not self.has_rows(request, staying):
            return False
        promised = self._promised(self._rule, request, cached_tokens, staying)
        return not staying or self._leaves_enough(request, cached_tokens, staying, promised)

    def shortages(self, request: Request) -> Iterator[tuple[int, float]]:
        """Yield bytes that a request needs and bytes that are free: below the watermarks, in slabs.

        Evicts nothing: prefixes that can be evicted count as free, but not as free slabs.
        """
        promised = self._promised(self._rule, request, 0, self._running)
        yield min(self._needs(request, 0, self._running, promised), key=lambda n: n[1] - n[0])
        pages, swapped = self._rule.peaks.by_class(promised), request.memory.swapped
        if swapped is not None and not swapped.keep_from:
            pages = swapped.needed_pages
        yield self._memory.slab_bytes_for(pages)

    def _promised(
        self,
        rule: AdmissionRule,
        request: Request,
        cached_tokens: int,
        staying: Sequence[Request],
    ) -> Counts:
        peaks = rule.peaks
        promised = rule.promised(request, staying, cached_tokens)
        if self._config.scale_down_at is not None:
            promised = np.maximum(promised, self._ahead(request, staying, cached_tokens))
        for copy in copies_to_come([request, *staying]):
            promised = promised + rule.promised(copy, [], peaks.shared_tokens(copy))
        return promised

    def _ahead(self, request: Request, staying: Sequence[Request], cached_tokens: int) -> Counts:
        """Pages for `AHEAD_TOKENS` of all requests, so that none is preempted at once again."""
        tokens = min(request.num_tokens + AHEAD_TOKENS, request.final_tokens)
        new_request = self._rule.new_request(request, tokens, cached_tokens)
        then = [min(r.num_tokens + AHEAD_TOKENS, r.final_tokens) for r in staying]
        ahead: Counts = new_request + self._rule.peaks.further_pages(staying, then).sum(axis=0)
        return ahead

    def _leaves_enough(
        self, request: Request, cached_tokens: int, staying: Sequence[Request], promised: Counts
    ) -> bool:
        """Whether promised pages fit below the watermarks if only `staying` keep running."""
        needs = self._needs(request, cached_tokens, staying, promised)
        return all(needed <= free for needed, free in needs)

    def _needs(
        self, request: Request, cached_tokens: int, staying: Sequence[Request], promised: Counts
    ) -> Iterator[tuple[int, float]]:
        """Yield promised bytes and the bytes that are free for them below each watermark."""
        left_bytes = self._sharing.available_bytes
        if len(staying) < len(self._running):
            left_bytes += bytes_of(self._running, self._memory) - bytes_of(staying, self._memory)
        if self._rule.promises_growth:
            yield self._peaks.num_bytes(promised), left_bytes - self._reserved_at_peak_bytes
            promised = self._promised(self._known, request, cached_tokens, staying)
        yield self._peaks.num_bytes(promised), left_bytes - self.reserved_bytes
