"""Keeps lanes at or below their capacity: evicts before the next tokens are computed."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from quire.errors import InvariantError, OutOfPages, PolicyError
from quire.layout.eviction import PRESSURE
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lane_slots import (
    Slots,
    division_is_due,
    evicting_lanes,
    held_slots,
    lookahead,
    needs_page,
    note_division,
    over_cap,
    slots_to_keep,
)
from quire.scheduler.lifecycle import Lifecycle
from quire.scheduler.request import Request
from quire.scheduler.sequence_memory import SequenceMemory

CAP, REPLAY = "cap", "replay"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Evicted:
    """Result of an eviction.

    Attributes:
        slots: number of evicted slots, over all lanes.
        lanes: number of lanes that can evict.
        entry: the evicted tokens; None in a simulation, which does not track tokens.
    """

    slots: int
    lanes: int
    entry: EvictionEntry | None = None


@runtime_checkable
class Evictor(Protocol):
    """Selects and evicts slots, and compacts the retained ones; the selection needs tensors."""

    def evict(
        self, request: Request, keep: Slots, *, min_gain: int | None = None
    ) -> Evicted | None:
        """Evict slots until each lane of a request has `keep` slots.

        Args:
            request: a running request.
            keep: [lanes] number of slots to retain.
            min_gain: evict only if at least this many bytes are freed; None: no minimum.

        Returns:
            None if no slot was evicted.

        Raises:
            PolicyError: the policy broke its contract.
            OutOfPages: no pages for private copies of shared pages; the request is unchanged.
        """
        ...

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """Evict the tokens of an entry again.

        Raises:
            OutOfPages: see `evict`.
        """
        ...

    def finalize(self, request: Request) -> None:
        """Distribute the cap of a request over its lanes by its cache.

        Called once its prompt has been computed, or with `EvictionSpec.divided` at each eviction
        until then.

        Raises:
            PolicyError: the policy broke its contract.
        """
        ...


class _NoEvictor:
    """Evictor of an engine without eviction rules: every call is an error."""

    def evict(
        self, request: Request, keep: Slots, *, min_gain: int | None = None
    ) -> Evicted | None:
        raise InvariantError(f"request {request.request_id} evicts, but its engine has no rules")

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        raise InvariantError(f"request {request.request_id} evicts, but its engine has no rules")

    def finalize(self, request: Request) -> None:
        raise InvariantError(f"request {request.request_id} evicts, but its engine has no rules")


class LaneCapacities:
    """Evicts from lanes that are full.

    Args:
        sequence_memory: the requests' pages.
        evictor: selects and evicts slots; None if no request evicts.
        lifecycle: ends requests whose policy broke its contract.

    Attributes:
        num_evictions, evicted_tokens: totals since the start, without replayed evictions.
    """

    def __init__(
        self,
        sequence_memory: SequenceMemory,
        evictor: Evictor | None,
        lifecycle: Lifecycle,
    ) -> None:
        self._sequence_memory, self._lifecycle = sequence_memory, lifecycle
        self._evictor = _NoEvictor() if evictor is None else evictor
        self._lanes = evicting_lanes(sequence_memory.memory)
        self.num_evictions = 0
        self.evicted_tokens = 0.0

    def evict_to_capacity(self, requests: list[Request]) -> list[Request]:
        """Evict from requests with full lanes; return the requests that can be scheduled."""
        if self._lanes is None:
            return requests
        stuck = [r for r in requests if r.eviction.spec.cap is not None and not self._try(r)]
        if not stuck:
            return requests
        # when a failed member had planned forks, its whole group was queued again
        return [r for r in requests if r not in stuck and r.is_running]

    def may_evict(self, requests: Iterable[Request]) -> bool:
        """Whether planning a step may evict from one of these running requests."""
        if self._lanes is None:
            return False
        capped = (r for r in requests if r.eviction.spec.cap is not None)
        return any(r.eviction.spec.when == PRESSURE or self._is_due(r) for r in capped)

    def evict_while(
        self, lacks_free_pages: Callable[[], bool], requests: Collection[Request]
    ) -> None:
        """Evict under pressure until enough pages are free; called before any preemption.

        Args:
            lacks_free_pages: whether memory is still short; called only if a request may evict.
            requests: see `evict_under_pressure`; failed requests are removed from it.
        """
        evictable = self._lanes is not None and any(
            r.eviction.spec.when == PRESSURE for r in requests
        )
        while evictable and lacks_free_pages() and self.evict_under_pressure(requests):
            pass

    def evict_under_pressure(self, requests: Iterable[Request]) -> bool:
        """Evict the longest request above its cap (`when=pressure`) down to its cap.

        Args:
            requests: running requests; none may be part of the step that is being planned.

        Returns:
            Whether pages were freed.
        """
        return any(map(self._evict_pages, self._evictable(requests)))

    def free_for(self, requests: Iterable[Request], running: Iterable[Request]) -> bool:
        """Evict under pressure; if no page can be freed, free slots in the requests' own pages.

        Args:
            requests: requests that lack pages for their next tokens.
            running: requests that may evict; none may be part of the step that is being planned.

        Returns:
            Whether pages or slots were freed.
        """
        return self.evict_under_pressure(running) or self.reuse_slots(requests)

    def reuse_slots(self, requests: Iterable[Request]) -> bool:
        """Evict from the longest request whose pages are full, to free slots in its pages.

        Its lanes are at their cap and end at a page boundary, so evictions may free no page.

        Args:
            requests: requests that lack a page for their next token; none may be part of the step
                that is being planned.

        Returns:
            Whether one of the requests has free slots now.
        """
        return any(map(self._reuse_slots, self._evictable(requests)))

    def _evictable(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests that evict only under pressure, the longest first."""
        if self._lanes is None:
            return
        evictable = [
            r
            for r in requests
            if r.eviction.spec.when == PRESSURE and r.eviction.next_replay is None
        ]
        for request in sorted(evictable, key=lambda r: (-self._held(r), r.order)):
            if request.is_running:
                yield request

    def _held(self, request: Request) -> int:
        assert self._lanes is not None
        return int(held_slots(self._lanes, request).sum())

    def _evict_pages(self, request: Request) -> bool:
        return self._evict_private(request, tokens=0, min_gain=1)

    def _reuse_slots(self, request: Request) -> bool:
        assert self._lanes is not None
        if not needs_page(request, self._lanes):
            return False
        return self._evict_private(request, tokens=1, min_gain=None)

    def _evict_private(self, request: Request, *, tokens: int, min_gain: int | None) -> bool:
        """Evict lanes above their cap if no group member shares the pages.

        Args:
            request: a running request.
            tokens: number of next tokens; with 1, lanes at their cap count as above it.
            min_gain: see `Evictor.evict`.

        Returns:
            Whether slots were evicted, or the request failed and was freed.
        """
        assert self._lanes is not None
        # while every lane is within its cap, their sum is bounded: no division is needed
        if over_cap(request, self._lanes, tokens) is None:
            return False
        if self._sequence_memory.sharing.shares_unwritten(request):
            return False
        if self._shares_with_group(request):
            return False
        # evict its cached prefixes first: pages that a cached prefix refers to are not freed
        self._sequence_memory.sharing.stop_sharing(request)
        self._sequence_memory.sharing.drop_cached()
        try:
            with _undone_without_eviction(request):
                if request.eviction.pending:
                    self._divide(request)
                keep = over_cap(request, self._lanes, tokens)
                return keep is not None and self._evict(request, keep, PRESSURE, min_gain=min_gain)
        except OutOfPages:
            return False
        except PolicyError as error:
            self._lifecycle.fail(request, error)
            return True

    def _divide(self, request: Request) -> None:
        """Set the caps of a request's lanes by its cache."""
        self._evictor.finalize(request)
        note_division(request)

    def _shares_with_group(self, request: Request) -> bool:
        """Whether other members of its group share pages of a request.

        Admission counted these pages as shared until the end. With private copies, the group could
        need more pages than the memory has.
        """
        if self._lanes is None or request.group is None:
            return False
        others = [
            m.memory.row for m in request.group.members if m.memory.row >= 0 and m is not request
        ]
        rows, row = np.array(others, dtype=np.int64), request.memory.row
        return any(
            bool(np.isin(table.row_pages(row), table.pages[rows]).any())
            for table in self._lanes.tables
        )

    def _try(self, request: Request) -> bool:
        """Evict; False if the policy failed or there are no pages for private copies."""
        try:
            return self._evict_due(request)
        except OutOfPages:
            return False
        except PolicyError as error:
            self._lifecycle.fail(request, error)
            return False

    def _evict_due(self, request: Request) -> bool:
        """Evict what the next tokens require; False while the request shares unwritten blocks."""
        assert self._lanes is not None
        if self._sequence_memory.sharing.shares_unwritten(request):
            return not self._is_due(request)
        while (entry := request.eviction.next_replay) is not None:
            if entry.num_computed != request.progress.num_computed:
                return True
            self._repeat(request, entry)
        if request.progress.num_computed < request.eviction.divided_tokens:
            return True  # recomputed: no eviction was due between the last one and the division
        try:
            division = request.eviction.division
            if division_is_due(request, self._lanes, lookahead(request)):
                self._divide(request)
            keep = slots_to_keep(request, self._lanes, lookahead(request))
            if keep is not None and np.any(keep < held_slots(self._lanes, request)):
                self._evict(request, keep, CAP)
        except OutOfPages:
            request.eviction.division = division
            raise
        return True

    def _is_due(self, request: Request) -> bool:
        entry = request.eviction.next_replay
        if entry is not None:
            return entry.num_computed == request.progress.num_computed
        assert self._lanes is not None
        tokens = lookahead(request)
        return (
            division_is_due(request, self._lanes, tokens)
            or slots_to_keep(request, self._lanes, tokens) is not None
        )

    def _evict(
        self, request: Request, keep: Slots, reason: str, *, min_gain: int | None = None
    ) -> bool:
        memory = self._sequence_memory.memory
        free_bytes = memory.free_bytes
        evicted = self._changing(
            request, lambda: self._evictor.evict(request, keep, min_gain=min_gain)
        )
        if evicted is None:
            return False
        if evicted.entry is not None:
            request.eviction.trace.append(evicted.entry)
            request.eviction.replayed = len(request.eviction.trace)
        tokens = evicted.slots / evicted.lanes
        request.eviction.exact = False
        request.eviction.num_evictions += 1
        request.eviction.evicted_tokens += tokens
        self.num_evictions += 1
        self.evicted_tokens += tokens
        self._log_eviction(request, tokens, memory.free_bytes - free_bytes, reason)
        return True

    def _repeat(self, request: Request, entry: EvictionEntry) -> None:
        memory = self._sequence_memory.memory
        free_bytes = memory.free_bytes
        self._changing(request, lambda: self._evictor.repeat(request, entry))
        request.eviction.exact = False
        request.eviction.replayed += 1
        tokens = entry.num_slots / len(entry.counts)
        self._log_eviction(request, tokens, memory.free_bytes - free_bytes, REPLAY)

    def _changing(self, request: Request, change: Callable[[], T]) -> T:
        """Change lanes; if private copies lack pages, evict cached prefixes and retry."""
        self._sequence_memory.sharing.stop_sharing(request)
        copied_bytes = self._sequence_memory.memory.copied_bytes
        try:
            changed = change()
        except OutOfPages:
            self._sequence_memory.sharing.drop_cached()
            changed = change()
        copied_bytes = self._sequence_memory.memory.copied_bytes - copied_bytes
        if copied_bytes:
            self._sequence_memory.events.emit("copied", request, kv_bytes=copied_bytes)
        return changed

    def _log_eviction(self, request: Request, tokens: float, freed_bytes: int, reason: str) -> None:
        last = (
            request.eviction.trace[request.eviction.replayed - 1]
            if request.eviction.replayed
            else None
        )
        recorded = request.spec.records_evictions
        extra = {"digest": last.digest} if recorded and last is not None else {}
        self._sequence_memory.events.emit(
            "evicted",
            request,
            tokens=round(tokens, 3),
            freed_bytes=freed_bytes,
            reason=reason,
            length=request.progress.num_computed,
            **extra,
        )


@contextmanager
def _undone_without_eviction(request: Request) -> Iterator[None]:
    """Restore the caps of a request's lanes if no token is evicted in the block."""
    division, entries = request.eviction.division, request.eviction.num_evictions
    try:
        yield
    finally:
        if request.eviction.num_evictions == entries:
            request.eviction.division = division
