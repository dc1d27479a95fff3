"""Moves the first pages of running requests to the host for room, and evicts from such requests.

Asked when cached prefixes are gone and pages are still short, before anybody gives way. A request
that has moved runs on: its first pages are brought layer by layer (see
`quire.offload.kv.offloaded_prefixes`). Which request: the one that frees most; of its pages a
quarter at a time, so that little more is moved than is needed and copies stay large.
"""

from collections.abc import Sequence
from contextlib import suppress

from quire.errors import HostPoolFull, OutOfPages
from quire.kv.memory import KVMemory
from quire.layout.layout import can_be_offloaded, offloaded_token_bytes
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.scheduler.admission.need import can_offload_request
from quire.scheduler.events import EventLog
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lane_capacities import Evicted, Evictor
from quire.scheduler.lane_slots import Slots
from quire.scheduler.offload_port import KVOffloader
from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import Request

# Makes room in the KV memory by moving the first pages of running requests to the host.

_PART = 4  # of what a request could still move, one in so many at a time
_LEAST_PAGES = 4  # of a lane, where there are as many


class PrefixOffloader:
    """Fronts of those who run.

    Args:
        memory: the arena.
        prefixes: of its sequences.
        events: told of what moves.
        sharing: cached prefixes, which may name the same pages.
        running: requests that hold KV; the scheduler's own list.
        offload_bytes: of offload memory; larger than what KV has where activations share it.

    Attributes:
        offload_bytes: see above.
        num_returned: times all pages of a request came back, for it to evict.
    """

    def __init__(
        self,
        memory: KVMemory,
        prefixes: OffloadedPrefixes,
        events: EventLog,
        *,
        sharing: PrefixSharing,
        running: Sequence[Request],
        offload_bytes: int,
    ) -> None:
        self._memory, self._prefixes, self._events = memory, prefixes, events
        self._sharing, self._running = sharing, running
        self._holders = 1 if sharing.prefix is None else 2
        groups = [group for group in memory.layout.groups if can_be_offloaded(group)]
        self._page_tokens = max((group.page_class.tokens for group in groups), default=1)
        self._token_bytes = offloaded_token_bytes(memory.layout)
        self.offload_bytes = offload_bytes
        self.num_returned = 0

    @property
    def offloaded_tokens(self) -> int:
        """Of one sequence that the host holds when nobody else has anything there."""
        return self._prefixes.pool.total_bytes // max(1, self._token_bytes)

    def is_staged(self, request: Request) -> bool:
        """Whether a running request has its first pages on the host."""
        return request.memory.row in self._prefixes.rows

    def stops_evicting(self, request: Request) -> bool:
        """Whether a running request could lose tokens if its first pages were back."""
        return request.eviction.spec.cap is not None and self.is_staged(request)

    def move_some(self, but: Request | None = None) -> bool:
        """Move pages of somebody; False where nobody has any that would free memory.

        Args:
            but: not of this one.
        """
        movable = [request for request in self._movable() if request is not but]
        found = [(self._gain_bytes(request), request) for request in movable]
        for gain_bytes, request in sorted(found, key=lambda pair: -pair[0]):
            if gain_bytes <= 0:
                return False
            if self._move(request):
                return True
        return False

    def load_back(self, request: Request) -> None:
        """Let a request have all its pages in the memory again, in the room of others' if need be.

        Raises:
            OutOfPages: nobody else has pages that could move; nothing was changed.
        """
        if not self.is_staged(request):
            return
        self._sharing.drop_cached()
        while self.is_staged(request):
            try:
                self._prefixes.load_back(request.memory.row)
            except OutOfPages:
                if not self.move_some(but=request):
                    raise
        self.num_returned += 1

    def halve_staging(self, request: Request) -> None:
        """Leave a request one staging slot for its offloaded pages; offload all that can be.

        Its pages are packed then, staging included, for pages of all classes to fill slabs.
        """
        self._prefixes.halve_staging(request.memory.row)
        while can_offload_request(request) and self._move(request):
            self._prefixes.halve_staging(request.memory.row)
        self._prefixes.repack(request.memory.row)

    def _movable(self) -> list[Request]:
        return [
            request
            for request in self._running
            if request.is_running and request.memory.row >= 0 and can_offload_request(request)
        ]

    def _gain_bytes(self, request: Request) -> int:
        return self._prefixes.gain_bytes(request.memory.row, self._slots(request), self._holders)

    def _slots(self, request: Request) -> int:
        """In every lane that could have a front; without those that the next step will write."""
        tables = self._memory.tables.values()
        held = min(
            int(t.num_slots[request.memory.row].min()) for t in tables if can_be_offloaded(t.group)
        )
        return held - (
            int(self._memory.lengths[request.memory.row]) - request.progress.num_computed
        )

    def _move(self, request: Request) -> bool:
        """Offload the next pages of a request; False where neither side has room for one of each.

        Where offload memory or staging has no room for so many, fewer are offloaded.
        """
        tokens, slots = self._page_tokens, self._slots(request)
        held = max(int(t.staged[request.memory.row]) for t in self._memory.tables.values())
        left = slots // tokens - held
        pages = min(left, max(_LEAST_PAGES, -(-left // _PART)))
        self._sharing.withdraw_from_cache(request)
        before = self._prefixes.pool.used_bytes
        while pages > 0 and self._prefixes.pool.used_bytes == before:
            with suppress(HostPoolFull, OutOfPages):  # what was offloaded before it stays so
                self._prefixes.host(request.memory.row, (held + pages) * tokens)
            pages //= 2
        moved = self._prefixes.pool.used_bytes - before
        if moved:
            self._events.emit("offloaded", request, kv_bytes=moved)
        return moved > 0


# ---- evictor -------------------------------------------------------------------------------------

# Evicts from requests whose first pages may be on the host: for that they come back.
#
# Rules look at slots and slots move, so all of a request's pages must be in the memory. That is
# once in as many tokens as an eviction lets be processed, where its front crosses the link at each.


class OffloadEvictor:
    """Implements `Evictor` in front of another.

    Args:
        evictor: chooses and moves.
        prefix_offloader: has the fronts.
    """

    def __init__(self, evictor: Evictor, prefix_offloader: KVOffloader) -> None:
        self._evictor, self._prefix_offloader = evictor, prefix_offloader

    def evict(
        self, request: Request, keep: Slots, *, least_gain: int | None = None
    ) -> Evicted | None:
        """See `Evictor.evict`."""
        self._prefix_offloader.load_back(request)
        return self._evictor.evict(request, keep, least_gain=least_gain)

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """See `Evictor.repeat`."""
        self._prefix_offloader.load_back(request)
        self._evictor.repeat(request, entry)

    def finalize(self, request: Request) -> None:
        """See `Evictor.finalize`; raises OutOfPages too."""
        self._prefix_offloader.load_back(request)
        self._evictor.finalize(request)
