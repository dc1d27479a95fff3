"""The routing policies, by name: in turn, by load, and by sessions and cached prefixes."""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, no_type_check

from quire.errors import ConfigError
from quire.layout.options import check_options, option
from quire.scale.routing.base import (
    KvEvent,
    ReplicaLoad,
    RoutedRequest,
    Router,
    require_replicas,
)
from quire.scale.routing.block_index import BlockIndex

RouterName = Literal["kv_aware", "least_loaded", "round_robin"]


@no_type_check  # run-time type checks in tests must not replace Quire's own errors
@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of request routing."""

    name: RouterName = option(
        "kv_aware",
        help="how a replica is chosen: kv_aware: least expected work, which counts uncached prompt "
        "tokens, the queue and active KV; least_loaded: fewest requests; round_robin: in turn",
        flag="router",
    )
    prefix_weight: float = option(
        4.0,
        help="cost of an uncached prompt token for kv_aware, relative to a queued one",
        flag="router-prefix-weight",
    )
    kv_weight: float = option(
        4096.0,
        help="cost of a full KV memory for kv_aware",
        unit="prompt tokens",
        flag="router-kv-weight",
    )
    max_imbalance_tokens: int = option(
        512,
        help="additional cost up to which kv_aware keeps a session on its replica",
        unit="prompt tokens",
        flag="router-max-imbalance",
    )
    max_blocks: int = option(
        65536,
        help="blocks of each replica's prefix cache that kv_aware remembers",
        flag="router-max-blocks",
    )
    max_sessions: int = option(
        65536, help="sessions that kv_aware remembers", flag="router-max-sessions"
    )

    def __post_init__(self) -> None:
        check_options(self)
        for one in fields(self):
            value = getattr(self, one.name)
            least = 1 if one.name in ("max_blocks", "max_sessions") else 0
            if one.name != "name" and not least <= value < math.inf:
                flag = one.metadata["option"].flag
                raise ConfigError(f"expected --{flag} from {least}, got {value}")


class RoundRobin(Router):
    """Sends requests to the replicas in turn."""

    def __init__(self) -> None:
        self._num_sent = 0

    def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaLoad]) -> str:
        require_replicas(replicas)
        return replicas[self._num_sent % len(replicas)].replica_id

    def note_sent(self, request: RoutedRequest, replica_id: str) -> None:
        self._num_sent += 1


class LeastLoaded(Router):
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


class KvAware(Router):
    """Chooses the replica with the least expected work."""

    def __init__(self, config: RouterConfig, block_tokens: int) -> None:
        self._config, self._block_tokens = config, block_tokens
        self.index = BlockIndex(config.max_blocks)
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._sent: dict[str, _Sent] = {}
        self._num_sent = 0

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
            most = ranked[best][0] + self._config.max_imbalance_tokens
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
        cost = self._config.prefix_weight * uncached + self._backlog(
            request.tenant, replica, uncached
        )
        if replica.kv_capacity_bytes:
            cost += self._config.kv_weight * replica.active_kv_bytes / replica.kv_capacity_bytes
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
            if len(self._sessions) > self._config.max_sessions:
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


def make_router(config: RouterConfig, *, block_tokens: int) -> Router:
    """Create a router."""
    if block_tokens < 1:
        raise ConfigError(f"expected block_tokens of 1 or more, got {block_tokens}")
    return _MAKERS[config.name](config, block_tokens)


_MAKERS: Mapping[RouterName, Callable[[RouterConfig, int], Router]] = {
    "kv_aware": KvAware,
    "least_loaded": lambda config, block_tokens: LeastLoaded(),
    "round_robin": lambda config, block_tokens: RoundRobin(),
}
ROUTERS = tuple(_MAKERS)
