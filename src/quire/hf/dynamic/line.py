"""Who waits: prompts to be read, and queries with KV but no row, each in line."""

from bisect import insort

from quire.hf.dynamic.query import Query, QueryState


class Line:
    """Two queues, by rank.

    Attributes:
        waiting: to be read.
        ready: read, or taken out of a row.
    """

    def __init__(self) -> None:
        self.waiting: list[Query] = []
        self.ready: list[Query] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.ready)

    def wait(self, query: Query) -> None:
        """To be read."""
        query.state = QueryState.WAITING
        insort(self.waiting, query, key=lambda found: found.rank)

    def stand_ready(self, query: Query) -> None:
        """Has its KV."""
        query.state = QueryState.READY
        insort(self.ready, query, key=lambda found: found.rank)

    def leave(self, query: Query) -> None:
        """Go, to a row or for good."""
        (self.waiting if query.state is QueryState.WAITING else self.ready).remove(query)

    def first(self) -> Query | None:
        """Whoever is first of both."""
        heads = [queue[0] for queue in (self.waiting, self.ready) if queue]
        return min(heads, key=lambda found: found.rank, default=None)
