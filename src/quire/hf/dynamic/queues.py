"""Who waits: prompts to be read, and queries with KV but no row, each in line."""

from bisect import insort
from heapq import heappop, heappush

from quire.hf.dynamic.query import Query, QueryState

_IN_LINE = (QueryState.WAITING, QueryState.READY)


class QueryQueues:
    """Two queues, by rank.

    Attributes:
        waiting: to be read.
        ready: read, or taken out of a row.
    """

    def __init__(self) -> None:
        self.waiting: list[Query] = []
        self.ready: list[Query] = []
        self._longest: list[tuple[int, int, Query]] = []  # heap; those who left stay for a while

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready)

    def wait(self, query: Query) -> None:
        """To be read."""
        self._enter(query, self.waiting, QueryState.WAITING)

    def stand_ready(self, query: Query) -> None:
        """Has its KV."""
        self._enter(query, self.ready, QueryState.READY)

    def _enter(self, query: Query, queue: list[Query], state: QueryState) -> None:
        query.state = state
        insort(queue, query, key=lambda found: found.rank)
        heappush(self._longest, (-query.certain_tokens, query.number, query))

    @property
    def certain_tokens(self) -> int:
        """Most that anybody in line will have for certain."""
        while self._longest and self._longest[0][-1].state not in _IN_LINE:
            heappop(self._longest)
        return -self._longest[0][0] if self._longest else 0

    def leave(self, query: Query) -> None:
        """Go, to a row or for good."""
        (self.waiting if query.state is QueryState.WAITING else self.ready).remove(query)

    def first(self) -> Query | None:
        """Whoever is first of both."""
        heads = [queue[0] for queue in (self.waiting, self.ready) if queue]
        return min(heads, key=lambda found: found.rank, default=None)
