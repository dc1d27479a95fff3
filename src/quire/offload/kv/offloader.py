"""Offloads the first pages of running requests to free memory, and evicts from such requests.

The scheduler offloads pages before it preempts a request, if evictions of cached prefixes do not
free enough pages. The request keeps running: its first pages are prefetched layer by layer (see
`quire.offload.kv.offloaded_prefixes`). The request whose offload frees most memory is chosen first.
Each call offloads a quarter of its remaining pages, so copies are large and few pages are offloaded
without need.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np

from quire.errors import HostMemoryFull, OutOfPages
from quire.kv.memory import KVMemory
from quire.layout.layout import can_be_offloaded, offloaded_token_bytes
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.scheduler.events import EventLog
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lanes import Evicted, Evictor, Slots
from quire.scheduler.offload_port import KVOffloader
from quire.scheduler.peaks import can_offload_request
from quire.scheduler.request import Request
from quire.scheduler.sequence_memory import SequenceMemory

T = TypeVar("T")

_PART = 4  # each call offloads 1 / _PART of a request's remaining pages
_MIN_PAGES = 4  # minimum pages of a lane per call, if the lane has them


class PrefixOffloader:
    """Offloads prefixes of running requests.

    Args:
        memory: the arena.
        prefixes: offloaded prefixes of its sequences.
        events: receives `offloaded` events.
        sequence_memory: its cached prefixes may reference the same pages.
        running: requests that hold KV; the scheduler's own list.
        offload_bytes: size of offload memory, including activations.

    Attributes:
        offload_bytes: see above.
        num_loaded_back: number of times all pages of a request were loaded back for an eviction.
    """

    def __init__(
        self,
        memory: KVMemory,
        prefixes: OffloadedPrefixes,
        events: EventLog,
        *,
        sequence_memory: SequenceMemory,
        running: Sequence[Request],
        offload_bytes: int,
    ) -> None:
        self._memory, self._prefixes, self._events = memory, prefixes, events
        self._sequence_memory, self._running = sequence_memory, running
        self._holders = 0 if sequence_memory.prefix is None else 1
        groups = [group for group in memory.layout.groups if can_be_offloaded(group)]
        self._page_tokens = max((group.page_class.tokens for group in groups), default=1)
        self._token_bytes = offloaded_token_bytes(memory.layout)
        self.offload_bytes = offload_bytes
        self.num_loaded_back = 0

    @property
    def offloaded_tokens(self) -> int:
        """Maximum tokens of one sequence that fit in offload memory."""
        return self._prefixes.pool.total_bytes // max(1, self._token_bytes)

    def is_staged(self, request: Request) -> bool:
        """Whether the first pages of a running request are offloaded."""
        return request.memory.row in self._prefixes.rows

    def stops_evicting(self, request: Request) -> bool:
        """Whether a running request could evict tokens if its first pages were loaded back."""
        return request.eviction.spec.cap is not None and self.is_staged(request)

    def offload_some(self, exclude: Request | None = None) -> bool:
        """Offload pages of one request; return False if no offload frees memory.

        Args:
            exclude: request whose pages are not offloaded.
        """
        movable = [request for request in self._movable() if request is not exclude]
        found = [(self._gain_bytes(request), request) for request in movable]
        for gain_bytes, request in sorted(found, key=lambda pair: -pair[0]):
            if gain_bytes <= 0:
                return False
            if self._move(request):
                return True
        return False

    def offload_more(self, request: Request) -> bool:
        """Offload pages of a request, or further ones; False if that frees no memory."""
        if self.is_staged(request):
            return can_offload_request(request) and self._move(request)
        may_move = any(other is request for other in self._movable())
        return may_move and self._gain_bytes(request) > 0 and self._move(request)

    def load_back(self, request: Request) -> None:
        """Load all pages of a request back, offloading pages of other requests if needed.

        Pages of window lanes that no later query reads are freed before: a chunk of a prompt holds
        more of them than a decoding row.

        Raises:
            OutOfPages: no other request has pages to offload; the request was not changed.
        """
        if not self.is_staged(request):
            return
        self._sequence_memory.drop_cached()
        self._memory.drop_behind_windows(np.array([request.memory.row]))
        while self.is_staged(request):
            try:
                self._prefixes.load_back(request.memory.row)
            except OutOfPages:
                if not self.offload_some(exclude=request):
                    raise
        self.num_loaded_back += 1

    def halve_staging(self, request: Request) -> None:
        """Reduce a request to one staging slot and offload as many of its pages as possible.

        Its pages, staging included, are then packed so that pages of all classes fill slabs.
        """
        self._prefixes.halve_staging(request.memory.row)
        while can_offload_request(request) and self._move(request):
            self._prefixes.halve_staging(request.memory.row)
        self._prefixes.repack(request.memory.row)

    def _movable(self) -> list[Request]:
        return [
            request
            for request in self._running
            if request.is_running
            and request.memory.row >= 0
            and can_offload_request(request)
            and not self._sequence_memory.shares_unwritten(request)
        ]

    def _gain_bytes(self, request: Request) -> int:
        return self._prefixes.gain_bytes(request.memory.row, self._slots(request), self._holders)

    def _slots(self, request: Request) -> int:
        """Slots of every lane that can be offloaded, without those that the next step writes."""
        tables = self._memory.tables.values()
        held = min(
            int(t.num_slots[request.memory.row].min()) for t in tables if can_be_offloaded(t.group)
        )
        return held - (
            int(self._memory.lengths[request.memory.row]) - request.progress.num_computed
        )

    def _move(self, request: Request) -> bool:
        """Offload the next pages of a request; False if not one page of each lane fits.

        If offload memory or staging is too small for the pages, fewer are offloaded.
        """
        tokens, slots = self._page_tokens, self._slots(request)
        held = max(int(t.staged[request.memory.row]) for t in self._memory.tables.values())
        left = slots // tokens - held
        pages = min(left, max(_MIN_PAGES, -(-left // _PART)))
        self._withdraw_from_cache(request, slots)
        before = self._prefixes.pool.used_bytes
        while pages > 0 and self._prefixes.pool.used_bytes == before:
            with suppress(
                HostMemoryFull, OutOfPages
            ):  # groups moved before the error stay offloaded
                self._prefixes.offload(request.memory.row, (held + pages) * tokens)
            pages //= 2
        moved = self._prefixes.pool.used_bytes - before
        if moved:
            self._events.emit("offloaded", request, kv_bytes=moved)
        return moved > 0

    def _withdraw_from_cache(self, request: Request, slots: int) -> None:
        """Evict the blocks from the cache whose pages are offloaded, of all requests that share."""
        rows = self._prefixes.sharers(request.memory.row, slots)
        for other in [request, *self._running]:
            if other.memory.row in rows:
                self._sequence_memory.withdraw_from_cache(other)


# Evicts from requests with offloaded pages, which are loaded back first.
#
# Eviction rules read and move slots, so the pages must be in the KV memory. If they do not fit, the
# evictor loads them layer by layer, and cuts each layer before it loads the next one.


class OffloadEvictor:
    """Implements `Evictor`: loads offloaded pages back, then calls another evictor.

    Args:
        evictor: selects and moves slots.
        prefix_offloader: loads the offloaded pages.
    """

    def __init__(self, evictor: Evictor, prefix_offloader: KVOffloader) -> None:
        self._evictor, self._prefix_offloader = evictor, prefix_offloader

    def evict(
        self, request: Request, keep: Slots, *, min_gain: int | None = None
    ) -> Evicted | None:
        with suppress(OutOfPages):
            self._prefix_offloader.load_back(request)
        return self._with_pages(
            request, lambda: self._evictor.evict(request, keep, min_gain=min_gain)
        )

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        with suppress(OutOfPages):
            self._prefix_offloader.load_back(request)
        self._with_pages(request, lambda: self._evictor.repeat(request, entry))

    def _with_pages(self, request: Request, evict: Callable[[], T]) -> T:
        """Evict; if pages are missing, offload more of the request itself and try again."""
        while True:
            try:
                return evict()
            except OutOfPages:
                if not self._prefix_offloader.offload_more(request):
                    raise

    def finalize(self, request: Request) -> None:
        """See `Evictor.finalize`; raises OutOfPages too."""
        self._prefix_offloader.load_back(request)
        self._evictor.finalize(request)
