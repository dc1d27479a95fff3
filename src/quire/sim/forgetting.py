"""Eviction without tensors: which slots leave changes no page count, so the oldest ones do."""

import numpy as np

from quire.errors import InvariantError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.lane_capacities import Evicted
from quire.scheduler.lane_slots import Slots, evicting_table
from quire.scheduler.request import Request


class OldestLeave:
    """Brings the lanes of a request down to what the schedule lets them keep.

    Args:
        memory: of the simulation.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def evict(
        self, request: Request, keep: Slots, *, least_gain: int | None = None
    ) -> Evicted | None:
        """Keep the last `keep` [lanes] slots of every lane that may lose some."""
        memory, table = self._memory, evicting_table(self._memory)
        assert table is not None, "requests evict where lanes lose tokens"
        held = table.num_slots[request.memory.row]
        slot = np.arange(int(held.max(initial=0)))
        mask = (slot >= (held - keep)[:, None]) & (slot < held[:, None])
        plan = plan_compaction(memory, table.group.name, request.memory.row, mask)
        if least_gain is not None and plan.gain_bytes < least_gain:
            return None
        commit_compaction(memory, plan)
        return Evicted(int((held - keep).clip(min=0).sum()), len(held))

    def repeat(self, request: Request, entry: EvictionEntry) -> None:
        """Nothing is noted, so that nothing is repeated: it is evicted anew."""
        raise InvariantError(f"request {request.request_id} repeats what was not noted")

    def finalize(self, request: Request) -> None:
        """Caps stay as they are: how a prompt would divide them only a model can tell."""
