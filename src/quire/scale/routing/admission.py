"""Requests that wait at the router, fairly among tenants.

    tenant a  r1 r4 r5 ...  --.
                               >-- least served tenant first --> a replica with a short queue
    tenant b  r2 r3         --'

Engines serve the tenants of their own queues fairly. That is not enough if one tenant fills all the
queues that engines bound: requests of other tenants are then refused. Here a request is sent only
when a replica has fewer than `max_queued_requests` waiting requests, and tenants take turns by the
tokens they were served on all replicas.
"""

import itertools
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.scale.routing.base import ReplicaLoad, RoutedRequest, Router
from quire.tenancy.fair_queue import FairQueue, Order


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRequest:
    """A request that waits at the router; see `quire.tenancy.fair_queue.Queued`."""

    request_id: str  # as `Queued`
    request: RoutedRequest
    order: Order  # among the requests of its tenant

    @property
    def tenant(self) -> str:
        return self.request.tenant


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A request to send now."""

    request_id: str
    request: RoutedRequest
    replica_id: str
    uncached_tokens: int  # that the replica is expected to compute


def _dispatch(
    router: Router, request_id: str, request: RoutedRequest, replicas: Sequence[ReplicaLoad]
) -> Dispatch:
    replica_id = router.choose(request, replicas)
    uncached_tokens = router.uncached_tokens(request, replica_id)
    router.note_sent(request, replica_id)
    return Dispatch(request_id, request, replica_id, uncached_tokens)


def make_admission(
    router: Router, max_queued_requests: int | None
) -> "ImmediateAdmission | FairAdmission":
    """Requests are sent at once without a limit, otherwise fairly; see `FairAdmission`."""
    if max_queued_requests is None:
        return ImmediateAdmission(router)
    return FairAdmission(router, max_queued_requests)


class ImmediateAdmission:
    """Sends requests in the order of arrival, without a limit."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._waiting: dict[str, RoutedRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request_id: str, request: RoutedRequest, priority: int = 0) -> None:
        _refuse_known(request_id, self._waiting)
        self._waiting[request_id] = request

    def cancel(self, request_id: str) -> bool:
        return self._waiting.pop(request_id, None) is not None

    def next(self, replicas: Sequence[ReplicaLoad]) -> Dispatch | None:
        if not self._waiting or not replicas:
            return None
        request_id = next(iter(self._waiting))
        return _dispatch(self._router, request_id, self._waiting.pop(request_id), replicas)

    def finished(self, dispatch: Dispatch, output_tokens: int = 0) -> None:
        self._router.note_finished(dispatch.request, dispatch.replica_id)


def _refuse_known(request_id: str, waiting: Container[str]) -> None:
    if request_id in waiting:
        raise ConfigError(f"request {request_id} is waiting already; use distinct names")


class FairAdmission:
    """Holds requests back while each replica has `max_queued_requests` waiting requests."""

    def __init__(
        self,
        router: Router,
        max_queued_requests: int,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if max_queued_requests < 1:
            raise ConfigError(f"expected max_queued_requests from 1, got {max_queued_requests}")
        self._router, self._max_queued = router, max_queued_requests
        self._queue: FairQueue[WaitingRequest] = FairQueue(weights)
        self._waiting: dict[str, WaitingRequest] = {}
        self._running: Counter[str] = Counter()  # sent and unfinished requests, by tenant
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, request_id: str, request: RoutedRequest, priority: int = 0) -> None:
        """Queue a request; lower priorities are sent first within a tenant."""
        _refuse_known(request_id, self._waiting)
        order = priority, 0.0, next(self._numbers)
        waiting = self._waiting[request_id] = WaitingRequest(request_id, request, order)
        self._queue.push(waiting)

    def cancel(self, request_id: str) -> bool:
        """Remove a waiting request; return whether it was waiting."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._queue.pop(waiting)
        return waiting is not None

    def next(self, replicas: Sequence[ReplicaLoad]) -> Dispatch | None:
        """The request to send now, until None; the router is notified of it."""
        free = [load for load in replicas if load.queued_requests < self._max_queued]
        head = next(self._queue.heads(), None)
        if not free or head is None:
            return None
        dispatch = _dispatch(self._router, head.request_id, head.request, free)
        del self._waiting[head.request_id]
        self._queue.pop(head)
        self._running[head.tenant] += 1
        self._queue.charge(head.tenant, prompt_tokens=dispatch.uncached_tokens)
        return dispatch

    def finished(self, dispatch: Dispatch, output_tokens: int = 0) -> None:
        """Finished, failed or aborted; the output tokens are charged to the tenant."""
        tenant = dispatch.request.tenant
        self._router.note_finished(dispatch.request, dispatch.replica_id)
        self._queue.charge(tenant, output_tokens=output_tokens)
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
            self._queue.forget_idle(self._running.keys())
