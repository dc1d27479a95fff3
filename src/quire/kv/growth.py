"""What a row's tables need before more tokens can be written: new pages, and copies of shared ones.

These functions only look; `KVMemory.grow` acts.
"""

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.kv.pages import CountedPages
from quire.kv.stores.base import Demand, Placement
from quire.kv.tables import LaneTable, Rows
from quire.layout.pages import CacheLayout


def grow_demand(
    table: LaneTable, pool: CountedPages, rows: Rows, tokens: NDArray[np.int32]
) -> Demand:
    """Both of the below."""
    return Demand(
        table, rows, new_pages(table, rows, tokens), shared_ends(table, pool, rows, tokens)
    )


def grown_slots(table: LaneTable, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Slots [rows, lanes] once row `rows[i]` has taken `tokens[i]` more tokens."""
    held: NDArray[np.int32] = table.num_slots[rows]
    if not table.group.private:
        return held + tokens[:, None]
    grows = table.active[rows] & (tokens > 0)
    if table.group.fixed_slots is not None:
        return np.where(grows[:, None], np.int32(table.group.fixed_slots), held)
    return held + np.where(grows, tokens, np.int32(0))[:, None]


def new_pages(table: LaneTable, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pages [rows, lanes] to append before row `rows[i]` can take `tokens[i]` more tokens."""
    per_page = table.group.page_class.tokens
    slots = grown_slots(table, rows, tokens)
    new: NDArray[np.int32] = (slots + (per_page - 1)) // per_page - table.num_pages[rows]
    return new


def shared_ends(
    table: LaneTable, pool: CountedPages, rows: Rows, tokens: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Lanes [rows, lanes] whose next token would be written into a page somebody else reads.

    Where all who hold a page are about to write into it, the first of them keeps it.
    """
    slots = table.num_slots[rows]
    shared = np.zeros(slots.shape, dtype=bool)
    if table.group.private or not pool.num_shared:
        return shared
    per_page = table.group.page_class.tokens
    index, lane = np.nonzero((slots % per_page != 0) & (tokens[:, None] > 0))
    last = table.pages[rows[index], lane, slots[index, lane] // per_page]
    read = pool.ref_counts[last] > 1
    if not read.any():
        return shared
    index, lane, last = index[read], lane[read], last[read]
    shared[index, lane] = True
    pages, first, times = np.unique(last, return_index=True, return_counts=True)
    keep = first[times == pool.ref_counts[pages]]
    shared[index[keep], lane[keep]] = False
    return shared


def require_room_for_one_token(layout: CacheLayout, placement: Placement, total_bytes: int) -> None:
    """Refuse an arena that does not hold one sequence of one token, all statistics among it.

    Raises:
        ConfigError: with the bytes asked for and those needed.
    """
    pages = dict.fromkeys(layout.page_classes, 0)
    for group in layout.groups:
        lane_pages = group.page_class.pages_for(group.slots_of(1))
        pages[group.page_class] += lane_pages * group.num_lanes
    slabs = sum(placement.pools[c].slabs_needed(n) for c, n in pages.items())
    if slabs > placement.arena.num_slabs:
        raise ConfigError(
            f"a KV memory of {total_bytes:,} B holds not one token of one sequence: "
            f"{slabs * placement.arena.slab_bytes:,} B are needed (pages of "
            f"{layout.smallest_sequence_bytes:,} B in {slabs} slabs); "
            "raise --kv-memory or lower --block-size"
        )
