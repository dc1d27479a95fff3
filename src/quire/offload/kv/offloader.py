"""Offloads the first pages of running requests to free memory.

The scheduler offloads pages before it preempts a request, if evictions of cached prefixes do not
free enough pages. The request keeps running: its first pages are prefetched layer by layer (see
`quire.offload.kv.offloaded_prefixes`). The request whose offload frees most memory is chosen first.
Each call offloads a quarter of its remaining pages, so copies are large and few pages are offloaded
without need.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from quire.errors import HostMemoryFull, OutOfPages
from quire.kv.memory import KVMemory
from quire.layout.layout import can_be_offloaded, offloaded_token_bytes
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.scheduler.events import EventLog
from quire.scheduler.peaks import can_offload_request, evicts_offloaded
from quire.scheduler.request import Request, may_evict
from quire.scheduler.sequence_memory import SequenceMemory

_PART = 4  # each call offloads 1 / _PART of a request's remaining pages
_MIN_PAGES = 4  # minimum pages of a lane per call, if the lane has them


class PrefixOffloader:
    """Offloads prefixes of running requests.

    Args:
        memory: the arena.
        prefixes: offloaded prefixes of its sequences.
        events: receives `offloaded` events.
        sequence_memory: knows the requests whose pages the next step writes.
        running: requests that hold KV; the scheduler's own list.
        offload_bytes: size of offload memory, including activations.

    Attributes:
        offload_bytes: see above.
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
        groups = [group for group in memory.layout.groups if can_be_offloaded(group)]
        self._page_tokens = max((group.page_class.tokens for group in groups), default=1)
        self._token_bytes = offloaded_token_bytes(memory.layout)
        self.offload_bytes = offload_bytes

    @property
    def offloaded_tokens(self) -> int:
        """Maximum tokens of one sequence that fit in offload memory."""
        return self._prefixes.pool.total_bytes // max(1, self._token_bytes)

    def offload_some(self) -> bool:
        """Offload pages of one request; return False if no offload frees memory."""
        movable = self._movable()
        rows = [request.memory.row for request in movable]
        found = [(self._gain_bytes(request, rows), request) for request in movable]
        for gain_bytes, request in sorted(found, key=lambda pair: -pair[0]):
            if gain_bytes <= 0:
                return False
            if self._move(request, rows):
                return True
        return False

    def halve_staging(self, request: Request) -> None:
        """Reduce a request to one staging slot and offload as many of its pages as possible.

        Its pages, staging included, are then packed so that pages of all classes fill slabs.
        """
        self._prefixes.restage(request.memory.row, 1)
        rows = [other.memory.row for other in self._movable()]
        while request.memory.row in rows and self._move(request, rows):
            self._prefixes.restage(request.memory.row, 1)
        self._prefixes.restage(request.memory.row, 1, pack=True)

    def holds_unused(self, request: Request) -> bool:
        """Whether pages that were offloaded with those of a request occupy memory without use.

        Pages that were offloaded together are freed together. A request that started from a
        prefix of them keeps all in offload memory.
        """
        held = self._prefixes.page_groups(request.memory.row)
        return sum(h.columns for h in held) < sum(h.columns for h in {h.host for h in held})

    def _movable(self) -> list[Request]:
        return [
            request
            for request in self._running
            if request.is_running
            and request.memory.row >= 0
            and can_offload_request(request, self._memory.layout)
            and not self._sequence_memory.shares_unwritten(request)
        ]

    def _gain_bytes(self, request: Request, rows: Collection[int]) -> int:
        return self._prefixes.gain_bytes(request.memory.row, self._slots(request), rows)

    def _slots(self, request: Request) -> int:
        """Slots of every lane that can be offloaded, without those that the next step writes.

        The last page of a lane with a cap remains: an eviction that frees it can then use it.
        """
        tables = self._memory.tables.values()
        held = min(
            int(t.num_slots[request.memory.row].min()) for t in tables if can_be_offloaded(t.group)
        )
        unwritten = int(self._memory.lengths[request.memory.row]) - request.progress.num_computed
        return held - max(unwritten, int(may_evict(request)))

    def _move(self, request: Request, rows: Collection[int]) -> bool:
        """Offload the next pages of a request; False if not one page of each lane fits.

        If offload memory or staging is too small for the pages, fewer are offloaded.
        """
        tokens, slots = self._page_tokens, self._slots(request)
        held = max(int(t.staged[request.memory.row]) for t in self._memory.tables.values())
        left = slots // tokens - held
        pages = min(left, max(_MIN_PAGES, -(-left // _PART)))
        before = self._prefixes.pool.used_bytes
        while pages > 0 and self._prefixes.pool.used_bytes == before:
            with suppress(
                HostMemoryFull, OutOfPages
            ):  # groups moved before the error stay offloaded
                self._prefixes.offload(request.memory.row, (held + pages) * tokens, rows)
            pages //= 2
        moved = self._prefixes.pool.used_bytes - before
        if moved:
            self._events.emit("offloaded", request, kv_bytes=moved)
        return moved > 0


class RowRequests:
    """Properties of sequences, by row of the KV memory.

    Args:
        fraction: fraction (0 to 1) of a sequence's tokens that may be recomputed, from the first.
        running: requests that hold KV; the scheduler's own list.
        memory: their KV memory.
    """

    def __init__(self, fraction: int | float, running: Sequence[Request], memory: KVMemory) -> None:
        self._fraction, self._running, self._memory = fraction, running, memory

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
        # also before its caps are set: it may be offloaded later, from the first token on
        if may_evict(request) and not evicts_offloaded(self._memory.layout):
            return 0
        return int(-(-request.final_tokens * self._fraction // 1))

    def _of(self, row: int) -> Request:
        return next(request for request in self._running if request.memory.row == row)
