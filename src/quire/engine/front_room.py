"""Makes room in the KV memory by moving the first pages of running requests to the host.

Asked when cached prefixes are gone and pages are still short, before anybody gives way. A request
that has moved runs on: its first pages are brought layer by layer (see `quire.kv.hosted`). Which
request: the one that frees most; of its pages a quarter at a time, so that little more is moved
than is needed and copies stay large.
"""

from collections.abc import Callable, Sequence

from quire.engine.admission.need import may_stream
from quire.engine.events import EventLog
from quire.engine.request import Request, RequestState
from quire.errors import HostPoolFull, OutOfPages
from quire.kv.hosted import HostedFronts, can_have_front
from quire.kv.memory import KVMemory

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
        running: those who run; the scheduler's own list.
        let_go: takes a request's pages out of cached prefixes, from which nobody else reads them.
    """

    def __init__(
        self, memory: KVMemory, fronts: HostedFronts, events: EventLog, *, cached: bool
    ) -> None:
        self._memory, self._fronts, self._events = memory, fronts, events
        self._holders = 2 if cached else 1
        groups = [group for group in memory.layout.groups if can_have_front(group)]
        self._page_tokens = max((group.page_class.tokens for group in groups), default=1)
        self._token_bytes = sum(g.num_lanes * g.page_class.slot_bytes for g in groups)
        self.running: Sequence[Request] = ()
        self.let_go: Callable[[Request], None] = lambda request: None

    @property
    def front_tokens(self) -> int:
        """Of one sequence that the host holds when nobody else has anything there."""
        return self._fronts.pool.total_bytes // max(1, self._token_bytes)

    def is_staged(self, request: Request) -> bool:
        """Whether a running request has its first pages on the host."""
        return request.row in self._fronts.rows

    def move_some(self) -> bool:
        """Move pages of somebody; False where nobody has any that would free memory."""
        found = [(self._gain_bytes(request), request) for request in self._movable()]
        for gain_bytes, request in sorted(found, key=lambda pair: -pair[0]):
            if gain_bytes <= 0:
                return False
            if self._move(request):
                return True
        return False

    def _movable(self) -> list[Request]:
        return [
            request
            for request in self.running
            if request.state is RequestState.RUNNING and request.row >= 0 and may_stream(request)
        ]

    def _gain_bytes(self, request: Request) -> int:
        return self._fronts.gain_bytes(request.row, request.num_computed, self._holders)

    def _move(self, request: Request) -> bool:
        """Move the next part of a request's pages; False where neither side has room for it."""
        tokens = self._page_tokens
        held = max(int(t.staged[request.row]) for t in self._memory.tables.values())
        left = request.num_computed // tokens - held
        more = max(_LEAST_PAGES, -(-left // _PART))
        self.let_go(request)
        try:
            moved = self._fronts.host(
                request.row, min(request.num_computed, (held + more) * tokens)
            )
        except (HostPoolFull, OutOfPages):
            return False
        self._events.emit("hosted", request, kv_bytes=moved)
        return moved > 0
