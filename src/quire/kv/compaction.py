"""Compaction: free evicted slots of lanes without order, by filling the holes with survivors.

    slots      0 1 2 3 | 4 5 6 7 | 8 9 . .        keep 6 of 10: x marks the evicted
    keep       o x o o | x o x o | o x
    moves      8 -> 1, 7 -> 4                     survivors behind slot 6 fill holes before it
    after      o 8 o o | 7 o . . |                the third page returns

Attention does not care about the order of slots: RoPE is in the key and the position is in the
slot. So at most min(kept, evicted) slots move, lanes stay dense, no mask is kept.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.memory import KVMemory
from quire.kv.shrinking import cut_slots
from quire.kv.tables import LaneTable


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """What a kept set means for one row in one group. Nothing has happened yet.

    Attributes:
        group: name of the lane group.
        row: the sequence.
        held_slots: [lanes] slots of each lane when the plan was made.
        keep_slots: [lanes] survivors of each lane.
        move_lane, move_source, move_target: [moves] slot indices, one to one.
        needed_pages: private copies to make before anything moves.
        freed_pages: pages that return; those that others still read do not.
    """

    group: str
    row: int
    held_slots: NDArray[np.int32]
    keep_slots: NDArray[np.int32]
    move_lane: NDArray[np.int64]
    move_source: NDArray[np.int64]
    move_target: NDArray[np.int64]
    needed_pages: int
    freed_pages: int

    @property
    def gain_pages(self) -> int:
        """Pages won, all of one class; where it is not positive the plan makes no room."""
        return self.freed_pages - self.needed_pages


def plan_compaction(
    memory: KVMemory, group: str, row: int, keep: NDArray[np.bool_]
) -> CompactionPlan:
    """Turn a keep mask into moves.

    Args:
        memory: holds the row.
        group: a group whose lanes have no order.
        row: the sequence.
        keep: [lanes, slots] True where a slot stays; columns past a lane's slots are ignored.

    Raises:
        ConfigError: the group is ordered, or the mask does not cover the lanes' slots.
    """
    table = memory.tables[group]
    slots = table.num_slots[row]
    if table.group.ordered:
        raise ConfigError(f"group {group!r} keeps slots in order: drop whole pages instead")
    if keep.shape[0] != len(slots) or keep.shape[1] < slots.max(initial=0):
        raise ConfigError(f"expected keep [{len(slots)}, {slots.max()}], got {list(keep.shape)}")
    column = np.arange(keep.shape[1])
    keep = keep & (column < slots[:, None])
    keep_slots = keep.sum(axis=1, dtype=np.int32)
    hole_lane, hole = np.nonzero(~keep & (column < keep_slots[:, None]))
    _, mover = np.nonzero(keep & (column >= keep_slots[:, None]))
    shared_lane, _ = _shared_targets(memory, table, row, hole_lane, hole)
    return CompactionPlan(
        group=group,
        row=row,
        held_slots=slots.copy(),
        keep_slots=keep_slots,
        move_lane=hole_lane,
        move_source=mover,
        move_target=hole,
        needed_pages=len(shared_lane),
        freed_pages=_freed_pages(memory, table, row, keep_slots),
    )


def _freed_pages(
    memory: KVMemory, table: LaneTable, row: int, keep_slots: NDArray[np.int32]
) -> int:
    if not memory.placement.drops_pages:
        return 0  # they stay reserved for the lane
    kept = -(-keep_slots // table.group.page_class.tokens)
    column = np.arange(table.capacity)
    cut = (column >= kept[:, None]) & (column < table.num_pages[row][:, None])
    ref_counts = memory.pools[table.group.page_class].ref_counts[table.pages[row][cut]]
    return int(np.count_nonzero(ref_counts == 1))


def _shared_targets(
    memory: KVMemory,
    table: LaneTable,
    row: int,
    lane: NDArray[np.int64],
    slot: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Table entries of shared pages that moves into these slots would write."""
    column = slot // table.group.page_class.tokens
    written = np.unique(np.stack([lane, column]), axis=1)
    pages = table.pages[row, written[0], written[1]]
    shared = memory.pools[table.group.page_class].ref_counts[pages] > 1
    return written[0][shared], written[1][shared]


def commit_compaction(memory: KVMemory, plan: CompactionPlan) -> None:
    """Carry a plan out: private copies first, then the moves, then the freed pages.

    Raises:
        OutOfPages: no room for the private copies; nothing was changed.
        InvariantError: the row has other slots than when the plan was made.
    """
    table = memory.tables[plan.group]
    page_class = table.group.page_class
    if (table.num_slots[plan.row] != plan.held_slots).any():
        raise InvariantError(f"row {plan.row} has changed since its compaction was planned")
    # looked up again: a fork or a loan may have come between
    lane, column = _shared_targets(memory, table, plan.row, plan.move_lane, plan.move_target)
    if not memory.fits({page_class: len(lane)}):
        raise OutOfPages(f"{len(lane)} private pages needed before compaction")
    if len(lane):
        row = np.full(len(lane), plan.row)
        memory.privatise(table, row, lane, column)
        memory.note_peaks(row[:1])
    if len(plan.move_lane):
        places = [
            (
                table.pages[plan.row, plan.move_lane, slot // page_class.tokens],
                slot % page_class.tokens,
            )
            for slot in (plan.move_source, plan.move_target)
        ]
        memory.store.move_slots(page_class, places[0], places[1])
    memory.placement.take_back(table, cut_slots(table, plan.row, plan.keep_slots))
