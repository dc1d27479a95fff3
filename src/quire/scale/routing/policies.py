"""The routing policies: by load, by session, at random, and by cached prefixes."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.scale.routing.base import KvEvent, ReplicaLoad, RoutedRequest, require_replicas
from quire.scale.routing.block_index import BlockIndex


class WithoutPrefixes:
    """Ignores all notes, and expects no cached tokens."""

    def uncached_tokens(self, request: RoutedRequest, replica_id: str) -> int:
        return request.prompt_tokens

    def note_sent(self, request: RoutedRequest, replica_id: str) -> None:
        pass

    def note_finished(self, request: RoutedRequest, replica_id: str) -> None:
        pass

    def note_lost(self, replica_id: str) -> None:
        pass

    def note_block_events(self, replica_id: str, events: Sequence[KvEvent]) -> None:
        pass


class RoundRobin(WithoutPrefixes):
    """Sends requests to the replicas in turn."""

    def __init__(self) -> None:
        self._num_sent = 0

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> str:
        require_replicas(replicas)
        return replicas[self._num_sent % len(replicas)].replica_id

    def note_sent(self, request: RoutedRequest, replica_id: str) -> None:
        self._num_sent += 1


class LeastLoaded(WithoutPrefixes):
    """Chooses the replica with the fewest requests.

    Among equals it chooses the one with the fewest prompt tokens to compute, then the one with the
    least KV, then the first.
    """

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> str:
        require_replicas(replicas)
        return min(replicas, key=_load).replica_id


def _load(replica: ReplicaLoad) -> tuple[int, int, int]:
    return replica.num_requests, replica.queued_prompt_tokens, replica.active_kv_bytes


@dataclass(slots=True)
class _Sent:
    """Requests that were sent to one replica."""

    tokens: Counter[str] = field(default_factory=Counter)  # of unfinished prompts, by tenant
    last: int = 0  # number of the last request in the order of sending; 0: none


class KvAware:
    """Chooses the replica with the least expected work; see the module.

    Args:
        prefix_weight: cost of an uncached prompt token. Above 1 it counts that a second copy of a
            prefix evicts another one.
        kv_weight: cost of a full KV memory, in prompt tokens.
        max_imbalance_tokens: additional cost up to which a session stays on its replica.
        max_blocks: blocks of a replica that the router remembers.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        prefix_weight: int | float,
        kv_weight: int | float,
        max_imbalance_tokens: int,
        max_blocks: int,
        max_sessions: int,
    ) -> None:
        self.index = BlockIndex(max_blocks)
        self._block_tokens = block_tokens
        self._prefix_weight, self._kv_weight = prefix_weight, kv_weight
        self._max_imbalance_tokens = max_imbalance_tokens
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._sent: dict[str, _Sent] = {}
        self._num_sent = 0

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    # ---- choice --------------------------------------------------------------------------------

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> str:
        require_replicas(replicas)
        cached = self.index.cached_blocks(request.prompt_blocks)
        ranked = [
            (self._cost(request, replica, cached.get(replica.replica_id, 0)), *self._order(replica))
            for replica in replicas
        ]
        best = min(range(len(ranked)), key=ranked.__getitem__)
        own = None if request.session is None else self._sessions.get(request.session)
        if own is not None and own != replicas[best].replica_id:
            most = ranked[best][0] + self._max_imbalance_tokens
            for rank, replica in zip(ranked, replicas, strict=True):
                if replica.replica_id == own and rank[0] <= most:
                    return own
        return replicas[best].replica_id

    def uncached_tokens(self, request: RoutedRequest, replica_id: str) -> int:
        cached = self.index.cached_blocks(request.prompt_blocks).get(replica_id, 0)
        return self._uncached(request, cached)

    def _uncached(self, request: RoutedRequest, cached_blocks: int) -> int:
        return max(1, request.prompt_tokens - cached_blocks * self._block_tokens)

    def _cost(
        self, request: RoutedRequest, replica: ReplicaLoad, cached_blocks: int
    ) -> int | float:
        uncached = self._uncached(request, cached_blocks)
        cost = self._prefix_weight * uncached + self._backlog(request.tenant, replica, uncached)
        if replica.kv_capacity_bytes:
            cost += self._kv_weight * replica.active_kv_bytes / replica.kv_capacity_bytes
        return cost

    def _backlog(self, tenant: str, replica: ReplicaLoad, uncached: int) -> int | float:
        """Prompt tokens that a replica computes before a request of a tenant."""
        queued, sent = replica.queued_prompt_tokens, self._sent.get(replica.replica_id)
        if sent is None or not sent.tokens or sent.tokens.keys() == {tenant}:
            return queued
        scale = queued / max(1, sent.tokens.total())
        own = scale * sent.tokens[tenant]
        others = (n for other, n in sent.tokens.items() if other != tenant)
        return own + sum(min(scale * tokens, own + uncached) for tokens in others)

    def _order(self, replica: ReplicaLoad) -> tuple[int, int]:
        sent = self._sent.get(replica.replica_id)
        return replica.num_requests, 0 if sent is None else sent.last

    # ---- notes ---------------------------------------------------------------------------------

    def note_sent(self, request: RoutedRequest, replica_id: str) -> None:
        self.index.expect(replica_id, request.prompt_blocks)
        sent = self._sent.setdefault(replica_id, _Sent())
        self._num_sent += 1
        sent.last = self._num_sent
        sent.tokens[request.tenant] += request.prompt_tokens
        if request.session is not None:
            self._sessions[request.session] = replica_id
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > self._max_sessions:
                self._sessions.popitem(last=False)

    def note_finished(self, request: RoutedRequest, replica_id: str) -> None:
        self.index.finish(replica_id, request.prompt_blocks)
        sent = self._sent.get(replica_id)
        if sent is not None:
            sent.tokens[request.tenant] -= request.prompt_tokens
            if sent.tokens[request.tenant] <= 0:
                del sent.tokens[request.tenant]

    def note_lost(self, replica_id: str) -> None:
        self.index.forget(replica_id)
        self._sent.pop(replica_id, None)

    def note_block_events(self, replica_id: str, events: Sequence[KvEvent]) -> None:
        self.index.apply_events(replica_id, events)
