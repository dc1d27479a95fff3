"""Ray Serve's request router, which asks `ReplicaChoice`.

Ray sends this module to its processes by value, so it contains nothing but the adapter.
"""

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.scale.replica_choice import ReplicaChoice
from quire.scale.routing.base import RoutedRequest
from quire.scale.routing.policies import RouterConfig, make_router

_UNKNOWN = RoutedRequest(prompt_blocks=(), prompt_tokens=0)


class QuireRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Routes requests by `RoutedRequest` and the reports of the replicas."""

    def initialize_state(self, *, block_words: int, **options: Any) -> None:
        router = make_router(RouterConfig(**options), block_tokens=block_words)
        self._choice = ReplicaChoice(router)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Rank the replicas of a request; Ray tries the ranks in their order."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None or not by_name:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray tries without a pause
        call = pending_request.args[0]
        if call.replica_id in by_name:
            return [[by_name[call.replica_id]]]
        request_id = pending_request.metadata.internal_request_id
        reports = {name: replica.routing_stats or {} for name, replica in by_name.items()}
        ranked = self._choice.rank(request_id, call.routed or _UNKNOWN, reports)
        pending_request.future.add_done_callback(lambda done: self._cancelled(request_id, done))
        return [[by_name[name]] for name in ranked]

    def _cancelled(self, request_id: str, done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            self._choice.ended(request_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._choice.accepted(pending_request.metadata.internal_request_id, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._choice.ended(internal_request_id, replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._choice.lost([replica_id.unique_id])

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = {found.unique_id for found in self.curr_replicas}
        super().update_replicas(replicas)
        self._choice.lost(before - {found.unique_id for found in self.curr_replicas})
