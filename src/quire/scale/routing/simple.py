"""Routers that do not know the prefix caches: in turn, and by load."""

from collections.abc import Sequence

from quire.scale.routing.base import KvEvent, ReplicaLoad, RoutedRequest, require_replicas


class WithoutPrefixes:
    """Ignores all notes, and expects no cached tokens."""

    def uncached_tokens(self, request: RoutedRequest, replica_id: str) -> int:
        """See `Router.uncached_tokens`."""
        return request.prompt_tokens

    def note_sent(self, request: RoutedRequest, replica_id: str) -> None:
        """See `Router.note_sent`."""

    def note_finished(self, request: RoutedRequest, replica_id: str) -> None:
        """See `Router.note_finished`."""

    def note_lost(self, replica_id: str) -> None:
        """See `Router.note_lost`."""

    def note_block_events(self, replica_id: str, events: Sequence[KvEvent]) -> None:
        """See `Router.note_block_events`."""


class RoundRobin(WithoutPrefixes):
    """Sends requests to the replicas in turn."""

    def __init__(self) -> None:
        self._num_sent = 0

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> str:
        """See `Router.choose`."""
        require_replicas(replicas)
        return replicas[self._num_sent % len(replicas)].replica_id

    def note_sent(self, request: RoutedRequest, replica_id: str) -> None:
        """Advance to the next replica."""
        self._num_sent += 1


class LeastLoaded(WithoutPrefixes):
    """Chooses the replica with the fewest requests.

    Among equals it chooses the one with the fewest prompt tokens to compute, then the one with the
    least KV, then the first.
    """

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> str:
        """See `Router.choose`."""
        require_replicas(replicas)
        return min(replicas, key=_load).replica_id


def _load(replica: ReplicaLoad) -> tuple[int, int, int]:
    return replica.num_requests, replica.queued_prompt_tokens, replica.active_kv_bytes
