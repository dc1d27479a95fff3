"""Makes room in the KV memory by moving the first pages of running requests to the host.

Asked when cached prefixes are gone and pages are still short, before anybody gives way. A request
that has moved runs on: its first pages are brought layer by layer (see `quire.offload.kv.hosted`). Which
request: the one that frees most; of its pages a quarter at a time, so that little more is moved
than is needed and copies stay large.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from quire.errors import HostPoolFull, OutOfPages
from quire.kv.memory import KVMemory
from quire.offload.kv.front_rows import FrontRows
from quire.offload.kv.hosted import HostedFronts
from quire.offload.kv.staging import can_have_front, offloaded_token_bytes
from quire.scheduler.admission.need import may_stream
from quire.scheduler.events import EventLog
from quire.scheduler.request import Request, RequestState

_PART = 4  # of what a request could still move, one in so many at a time
_LEAST_PAGES = 4  # of a lane, where there are as many


class FrontRoom:
    """Fronts of those who run.

    Args:
        memory: the arena.
        fronts: of its sequences.
        events: told of what moves.
        cached: whether pages may be named by cached prefixes too, which are dropped when nobody
            else needs them.

    Attributes:
        rows: told who runs, too; None where nobody asks.
        offload_bytes: of offload memory; larger than what KV has where activations share it.
        num_returned: times all pages of a request came back, for it to evict.
        let_go: takes a request's pages out of cached prefixes, from which nobody else reads them.
        drop_cached: drops prefixes that nobody uses.
    """

    def __init__(
        self, memory: KVMemory, fronts: HostedFronts, events: EventLog, *, cached: bool
    ) -> None:
        self._memory, self._fronts, self._events = memory, fronts, events
        self._holders = 2 if cached else 1
        groups = [group for group in memory.layout.groups if can_have_front(group)]
        self._page_tokens = max((group.page_class.tokens for group in groups), default=1)
        self._token_bytes = offloaded_token_bytes(memory.layout)
        self.offload_bytes = fronts.pool.total_bytes
        self._running: Sequence[Request] = ()
        self.rows: FrontRows | None = None
        self.num_returned = 0
        self.let_go: Callable[[Request], None] = lambda request: None
        self.drop_cached: Callable[[], None] = lambda: None

    @property
    def running(self) -> Sequence[Request]:
        """Those who run; the scheduler's own list."""
        return self._running

    @running.setter
    def running(self, requests: Sequence[Request]) -> None:
        self._running = requests
        if self.rows is not None:
            self.rows.running = requests

    @property
    def front_tokens(self) -> int:
        """Of one sequence that the host holds when nobody else has anything there."""
        return self._fronts.pool.total_bytes // max(1, self._token_bytes)

    def is_staged(self, request: Request) -> bool:
        """Whether a running request has its first pages on the host."""
        return request.row in self._fronts.rows

    def stops_evicting(self, request: Request) -> bool:
        """Whether a running request could lose tokens if its first pages were back."""
        return request.eviction.cap is not None and self.is_staged(request)

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

    def bring_back(self, request: Request) -> None:
        """Let a request have all its pages in the memory again, in the room of others' if need be.

        Raises:
            OutOfPages: nobody else has pages that could move; nothing was changed.
        """
        if not self.is_staged(request):
            return
        self.drop_cached()
        while self.is_staged(request):
            try:
                self._fronts.bring_back(request.row)
            except OutOfPages:
                if not self.move_some(but=request):
                    raise
        self.num_returned += 1

    def halve_staging(self, request: Request) -> None:
        """Leave a request one staging slot for its offloaded pages; offload all that can be.

        Its pages are packed then, staging included, for pages of all classes to fill slabs.
        """
        self._fronts.halve_staging(request.row)
        while may_stream(request) and self._move(request):
            self._fronts.halve_staging(request.row)
        self._fronts.repack(request.row)

    def _movable(self) -> list[Request]:
        return [
            request
            for request in self.running
            if request.state is RequestState.RUNNING and request.row >= 0 and may_stream(request)
        ]

    def _gain_bytes(self, request: Request) -> int:
        return self._fronts.gain_bytes(request.row, self._slots(request), self._holders)

    def _slots(self, request: Request) -> int:
        """In every lane that could have a front; without those that the next step will write."""
        tables = self._memory.tables.values()
        held = min(int(t.num_slots[request.row].min()) for t in tables if can_have_front(t.group))
        return held - (int(self._memory.lengths[request.row]) - request.num_computed)

    def _move(self, request: Request) -> bool:
        """Offload the next pages of a request; False where neither side has room for one of each.

        Where offload memory or staging has no room for so many, fewer are offloaded.
        """
        tokens, slots = self._page_tokens, self._slots(request)
        held = max(int(t.staged[request.row]) for t in self._memory.tables.values())
        left = slots // tokens - held
        pages = min(left, max(_LEAST_PAGES, -(-left // _PART)))
        self.let_go(request)
        before = self._fronts.pool.used_bytes
        while pages > 0 and self._fronts.pool.used_bytes == before:
            with suppress(HostPoolFull, OutOfPages):  # what was offloaded before it stays so
                self._fronts.host(request.row, (held + pages) * tokens)
            pages //= 2
        moved = self._fronts.pool.used_bytes - before
        if moved:
            self._events.emit("hosted", request, kv_bytes=moved)
        return moved > 0
