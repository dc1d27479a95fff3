"""Data classes of routing, and the interface of routers.

    caller (proxy, Ray Serve, simulator)            router
      ReplicaLoad of each replica  -- choose --->    replica_id
      request sent                 -- note_sent ->   counts it, expects its blocks there
      output finished or aborted   -- note_finished
      replica died or drained      -- note_lost ->   forgets the replica
      KV events of a replica       -- note_block_events -> knows which blocks are cached there

A router has no clock, no thread and no random numbers: equal calls give equal choices. It is not
thread-safe; the caller serializes the calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.errors import ConfigError

BlockHash = bytes | int
"""Identity of a block and of everything before it; equal to the hash in KV events, if these are
used."""

KvEvent = Mapping[str, object]
"""BlockStored, BlockRemoved or AllBlocksCleared, in the format of `quire.engine.block_events`."""

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """What a router may know of a request."""

    # hashes of the whole blocks, each with everything before it
    prompt_blocks: tuple[BlockHash, ...]
    prompt_tokens: int
    session: str | None = None  # conversation or user that sent the request; None: unknown
    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """Load of one replica, as far as the caller knows it."""

    replica_id: str
    active_kv_bytes: int = 0  # of running requests, without unused blocks of the prefix cache
    kv_capacity_bytes: int = 0  # 0: unknown
    # not computed yet, of waiting and running requests, without known cache hits
    queued_prompt_tokens: int = 0
    running_requests: int = 0
    queued_requests: int = 0

    @property
    def num_requests(self) -> int:
        return self.running_requests + self.queued_requests


class Router:
    """Chooses the replica of each request; by default without knowledge of caches and prompts."""

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> str:
        """The `replica_id`; changes nothing: a caller that sends the request calls `note_sent`."""
        raise NotImplementedError

    def uncached_tokens(self, request: RoutedRequest, replica_id: str) -> int:
        """Prompt tokens that a replica is expected to compute; all, if the router cannot know."""
        return request.prompt_tokens

    def note_sent(self, request: RoutedRequest, replica_id: str) -> None:
        """Note that a request was sent to a replica."""

    def note_finished(self, request: RoutedRequest, replica_id: str) -> None:
        """Finished, failed or aborted; ignored after `note_lost`."""

    def note_lost(self, replica_id: str) -> None:
        """Note that a replica died, was drained or restarted: forget everything about it."""

    def note_block_events(self, replica_id: str, events: Sequence[KvEvent]) -> None:
        """Note KV events of a replica, in the order in which it sent them.

        From the first call on, the router's view of this replica's cache follows its events. It
        no longer approximates the cache by the blocks of sent requests.
        """


def require_replicas(replicas: Sequence[ReplicaLoad]) -> None:
    """Reject a choice among no replicas."""
    if not replicas:
        raise ConfigError("expected at least one replica that accepts requests, got none")
