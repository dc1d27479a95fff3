"""Offloads the first pages of running requests to free memory, and evicts from such requests.

The scheduler offloads pages before it preempts a request, if evictions of cached prefixes do not
free enough pages. The request keeps running: its first pages are prefetched layer by layer (see
`quire.offload.kv.offloaded_prefixes`). The request whose offload frees most memory is chosen first.
Each call offloads a quarter of its remaining pages, so copies are large and few pages are offloaded
without need.

For an eviction, the offloaded pages of a request are loaded layer by layer:

    layer    0        1        2        3
    before   offloaded in all layers; staging for two of them
    then     settled  settled  offloaded ...      loaded to the staging; kept pages are copied to
                                                  pages of their own, then slots move
    after    all layers are settled: staging and offloaded bytes are freed

It thus needs pages for the retained tokens only, besides the staging. Of sequences that share the
offloaded pages, each evicts on its own; the last one frees the staging and the bytes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.errors import HostMemoryFull, OutOfPages
from quire.kv.memory import KVMemory
from quire.layout.layout import can_be_offloaded, offloaded_token_bytes
from quire.offload.kv.offloaded_prefixes import OffloadedPageGroup, OffloadedPrefixes
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
        # evict the blocks from the cache whose pages are offloaded, of all requests that share
        rows = self._prefixes.sharers(request.memory.row, slots)
        for other in [request, *self._running]:
            if other.memory.row in rows:
                self._sequence_memory.withdraw_from_cache(other)
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


class OffloadedLayers:
    """Implements `quire.eviction.eviction.LayerLoads`.

    Args:
        memory: KV memory of the sequences.
        prefixes: their offloaded prefixes.
    """

    def __init__(self, memory: KVMemory, prefixes: OffloadedPrefixes) -> None:
        self._memory, self._prefixes = memory, prefixes

    def is_offloaded(self, row: int, group: str) -> bool:
        return bool(self._page_groups(row, group))

    def read(self, row: int, group: str, layers: range) -> None:
        page_groups = self._page_groups(row, group)
        if not page_groups:
            return
        assert len(layers) == 1, "layers share staging pages"
        self._prefixes.use.finalize()
        self._prefixes.use.ahead.clear()
        for page_group in page_groups:
            pages = page_group.staging[layers.start % page_group.slots].reshape(-1)
            self._load(page_group, layers.start, pages)
        self._prefixes.pool.copies.wait()

    def require_pages(self, row: int, group: str, kept: NDArray[np.bool_], copies: int = 0) -> None:
        table = self._memory.tables[group]
        staged, per_layer = int(table.staged[row]), table.group.lanes_per_layer
        resident = (table.num_pages[row] - staged).reshape(-1, per_layer).sum(axis=1)
        by_layer = kept.reshape(len(resident), per_layer, -1)
        loaded = by_layer[:, :, :staged].sum(axis=(1, 2))
        grown = by_layer.sum(axis=(1, 2)) - resident
        if self._prefixes.is_shared(row):  # no page is freed that another sequence may share
            grown = loaded
        before = np.cumsum(grown) - grown  # of the layers that were cut before each layer
        needed = int((before + loaded).max(initial=0))
        needed = max(0, needed) + copies
        if not self._memory.fits({table.group.page_class: needed}):
            raise OutOfPages(f"{needed} pages needed to evict from an offloaded prefix")

    def settle(self, row: int, group: str, layer: int, kept: NDArray[np.bool_]) -> None:
        self.read(row, group, range(layer, layer + 1))
        table = self._memory.tables[group]
        per_layer = table.group.lanes_per_layer
        lanes = slice(layer * per_layer, (layer + 1) * per_layer)
        lane, column = np.nonzero(kept[lanes, : int(table.staged[row])])
        rows = np.full(len(lane), row)
        self._memory.privatise(table, rows, lane + lanes.start, column)

    def forget(self, row: int, group: str) -> None:
        self._prefixes.forget(row, group)

    def _load(self, page_group: OffloadedPageGroup, layer: int, pages: NDArray[np.int32]) -> None:
        page_class = self._memory.tables[page_group.group].group.page_class
        self._prefixes.pool.load(page_group.layers[layer], page_class, pages)

    def _page_groups(self, row: int, group: str) -> Sequence[OffloadedPageGroup]:
        return [held for held in self._prefixes.page_groups(row) if held.group == group]


class RowRequests:
    """Implements `quire.offload.recompute.kv_recompute.Tokens` over the running requests.

    Args:
        fraction: fraction (0 to 1) of a sequence's tokens that may be recomputed, from the first.
        running: requests that hold KV; the scheduler's own list.
    """

    def __init__(self, fraction: int | float, running: Sequence[Request]) -> None:
        self._fraction, self._running = fraction, running

    def token_ids(self, row: int, positions: NDArray[np.int64]) -> list[int]:
        """Token ids at these positions."""
        ids = self._of(row).token_ids(0, int(positions.max()) + 1)
        return [ids[position] for position in positions.tolist()]

    def rope_variant(self, row: int) -> int:
        """RoPE scaling variant of the sequence."""
        return self._of(row).spec.rope_variant

    def inputs_until(self, row: int) -> int:
        """First slot that is never recomputed; 0 if no slot is."""
        request = self._of(row)
        return (
            int(-(-request.final_tokens * self._fraction // 1))
            if can_offload_request(request)
            else 0
        )

    def _of(self, row: int) -> Request:
        return next(request for request in self._running if request.memory.row == row)
