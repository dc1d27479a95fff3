"""Loads of replicas between two reports.

A report is old when the next request arrives. Without a correction every router sends all requests
of the meantime to the same replica, the one with the least load in the last report.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quire.scale.routing.base import ReplicaLoad


@dataclass(slots=True)
class _Sent:
    """Tokens of requests that were sent to a replica after its last report."""

    load: ReplicaLoad
    num_received: int = 0
    since: deque[int] = field(default_factory=deque)
    tokens: int = 0


class LoadView:
    """The last report of each replica, plus the requests sent after it.

    Draining and lost replicas are removed with `remove`; the rest is offered to the router.
    """

    def __init__(self) -> None:
        self._found: dict[str, _Sent] = {}

    def report(self, load: ReplicaLoad, num_received: int | None = None) -> None:
        """Store a load; requests sent after `num_received` are still added; None: it has all."""
        found = self._found.setdefault(load.replica_id, _Sent(load))
        found.load = load
        while found.since and (num_received is None or found.num_received < num_received):
            found.tokens -= found.since.popleft()
            found.num_received += 1

    def sent(self, replica_id: str, uncached_tokens: int) -> None:
        found = self._found.get(replica_id)
        if found is not None:  # otherwise it was removed meanwhile
            found.since.append(uncached_tokens)
            found.tokens += uncached_tokens

    def remove(self, replica_id: str) -> None:
        self._found.pop(replica_id, None)

    def loads(self) -> Mapping[str, ReplicaLoad]:
        return {name: _current(found) for name, found in self._found.items()}


def _current(found: _Sent) -> ReplicaLoad:
    if not found.since:
        return found.load
    return replace(
        found.load,
        queued_prompt_tokens=found.load.queued_prompt_tokens + found.tokens,
        queued_requests=found.load.queued_requests + len(found.since),
    )
