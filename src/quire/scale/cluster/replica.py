"""One replica of a simulated cluster: the engine, its load and its KV events."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire.scale.routing.base import KvEvent, ReplicaLoad
from quire.scale.routing.block_index import REMOVED, STORED
from quire.sim.engine import SimulatedEngine


class BlockEventList:
    """A `PrefixListener` that collects KV events.

    Attributes:
        events: events since the last call of `take`.
    """

    def __init__(self) -> None:
        self.events: list[KvEvent] = []

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None,
        token_ids: Sequence[int],
        page_tokens: int,
    ) -> None:
        """See `PrefixListener.stored`."""
        self.events.append({"type": STORED, "block_hashes": list(block_hashes)})

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """See `PrefixListener.removed`."""
        self.events.append({"type": REMOVED, "block_hashes": list(block_hashes)})

    def take(self) -> list[KvEvent]:
        """Return and forget the collected events."""
        taken, self.events = self.events, []
        return taken


@dataclass(slots=True)
class Replica:
    """One replica of the cluster.

    Attributes:
        name: its `replica_id`.
        engine: the simulated engine.
        events: its KV events; None if the router does not follow them.
        num_received: requests that it received.
        steps: whether a step is running.
        reported_s: time of its last load report.
    """

    name: str
    engine: SimulatedEngine
    events: BlockEventList | None
    num_received: int = 0
    steps: bool = False
    reported_s: float = -math.inf

    def load(self) -> ReplicaLoad:
        """Its current load."""
        engine = self.engine
        return ReplicaLoad(
            replica_id=self.name,
            active_kv_bytes=engine.active_bytes,
            kv_capacity_bytes=engine.memory.total_bytes,
            queued_prompt_tokens=engine.pending_tokens,
            running_requests=engine.num_running,
            queued_requests=engine.num_waiting,
        )
