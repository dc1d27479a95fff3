"""Eviction without tensors: which slots leave changes no page count, so the oldest ones do."""

import numpy as np

from quire.engine.request import Request
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory


class OldestLeave:
    """Brings the lanes of a request down to what the schedule lets them keep.

    Args:
        memory: of the simulation.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    def __call__(self, request: Request, keep: int) -> None:
        """Keep the last `keep` slots of every lane that may lose some."""
        for name, table in self._memory.tables.items():
            slots = int(table.num_slots[request.row].max())
            if table.group.ordered or table.group.private or slots <= keep:
                continue
            mask = np.zeros((table.group.num_lanes, slots), dtype=bool)
            mask[:, slots - keep :] = True
            commit_compaction(self._memory, plan_compaction(self._memory, name, request.row, mask))
