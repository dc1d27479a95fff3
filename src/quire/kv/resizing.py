"""Growing and shrinking the page tables of a row.

The growth functions only compute demands; `KVMemory.grow` allocates.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.kv.arena import Arena
from quire.kv.pages import PageNumbers, PagePool
from quire.kv.tables import LaneTable, Rows
from quire.layout.pages import CacheLayout, PageClass
from quire.layout.sizes import option_size

# Demands of a row's tables before more tokens can be written: new pages and copies of shared pages.


@dataclass(frozen=True, slots=True)
class Demand:
    """Pages that one lane group needs before some rows can grow."""

    table: LaneTable
    rows: Rows  # [rows] row numbers
    new: NDArray[np.int32]  # [rows, lanes] pages to append
    # [rows, lanes] whether the lane's last page must be copied before it is written
    shared: NDArray[np.bool_]

    @property
    def num_pages(self) -> int:
        return int(self.new.sum()) + int(self.shared.sum())


def pages_by_class(demands: Sequence[Demand]) -> dict[PageClass, int]:
    """Sum the demanded pages of each class, copies included."""
    pages: dict[PageClass, int] = {}
    for demand in demands:
        page_class = demand.table.group.page_class
        pages[page_class] = pages.get(page_class, 0) + demand.num_pages
    return pages


def grow_demand(table: LaneTable, pool: PagePool, rows: Rows, tokens: NDArray[np.int32]) -> Demand:
    """Compute the new pages and the copies that rows need to grow."""
    return Demand(
        table, rows, new_pages(table, rows, tokens), shared_ends(table, pool, rows, tokens)
    )


def grown_slots(table: LaneTable, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the slots [rows, lanes] after row `rows[i]` has grown by `tokens[i]` tokens."""
    held: NDArray[np.int32] = table.num_slots[rows]
    if not table.group.private:
        return held + tokens[:, None]
    grows = table.active[rows] & (tokens > 0)
    if table.group.records is not None:
        return np.where(grows[:, None], np.int32(table.group.records), held)
    return held + np.where(grows, tokens, np.int32(0))[:, None]


def new_pages(table: LaneTable, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the pages [rows, lanes] to append before row `rows[i]` grows by `tokens[i]` tokens."""
    per_page = table.group.page_class.tokens
    slots = grown_slots(table, rows, tokens)
    new: NDArray[np.int32] = (slots + (per_page - 1)) // per_page - table.num_pages[rows]
    return new


def shared_ends(
    table: LaneTable, pool: PagePool, rows: Rows, tokens: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Return a mask [rows, lanes] of lanes whose next token would be written to a shared page.

    If all rows that reference a page are about to write it, the first row keeps the page.
    """
    shared = np.zeros((len(rows), table.group.num_lanes), dtype=bool)
    if table.group.private or not pool.num_shared:
        return shared
    slots = table.num_slots[rows]
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


def require_room_for_one_token(
    layout: CacheLayout,
    arena: Arena,
    pools: Mapping[PageClass, PagePool],
    total_bytes: int,
) -> None:
    """Refuse an arena that cannot hold one sequence of one token with all its statistics."""
    pages = dict.fromkeys(layout.page_classes, 0)
    for group in layout.groups:
        lane_pages = group.page_class.pages_for(group.slots_of(1))
        pages[group.page_class] += lane_pages * group.num_lanes
    slabs = sum(pools[c].slabs_needed(n) for c, n in pages.items())
    if slabs > arena.num_slabs:
        needed_bytes = arena.fitting_bytes([(c.page_bytes, n) for c, n in pages.items()])
        raise ConfigError(
            f"a KV memory of {total_bytes:,} B cannot hold one token of one sequence: "
            f"{slabs * arena.slab_bytes:,} B are needed; raise {arena.size_option} to "
            f"{option_size(needed_bytes)} or lower --block-size"
        )


# Removing pages from a row's tables: pages outside a window, and the tail.
#
# Each function changes one table and returns the removed pages; `KVMemory` frees them.


def drop_behind_window(
    table: LaneTable, rows: Rows, lengths: NDArray[np.int64], window: int
) -> Iterator[PageNumbers]:
    """Drop the pages that no query from positions `lengths` [n] on can attend to, lane by lane."""
    per_page = table.group.page_class.tokens
    full_pages = table.num_slots[rows] // per_page
    last_hidden = lengths + 1 - window - per_page  # largest first slot of a page outside the window
    outside = (full_pages > 0) & (table.page_positions[rows, :, 0] <= last_hidden[:, None])
    for i, lane in zip(*np.nonzero(outside), strict=True):
        first_slots = table.page_positions[rows[i], lane, : full_pages[i, lane]]
        num_outside = np.searchsorted(first_slots, last_hidden[i], side="right")
        yield table.drop(int(rows[i]), int(lane), np.arange(num_outside))


def cut_slots(table: LaneTable, row: int, keep_slots: NDArray[np.int32]) -> PageNumbers:
    """Drop the slots after the first `keep_slots` [lanes] of a row; return the removed pages."""
    table.num_slots[row] = keep_slots
    return table.cut(row, -(-keep_slots // table.group.page_class.tokens))


def slots_below(table: LaneTable, row: int, row_length: int, length: int) -> NDArray[np.int32]:
    """Return the number of slots [lanes] at positions below `length`, the first of their lanes.

    Lanes that mirror others retain as many slots as their source; for them the result is not used.
    Groups with fixed records retain all of them while the row has a token.
    """
    slots: NDArray[np.int32] = table.num_slots[row]
    if not table.active[row] or table.group.follows is not None:
        return slots.copy()
    if length < row_length:
        table.require_in_place(row, length // table.group.page_class.tokens)
    recent = 0 if table.group.full_precision is None else table.group.full_precision.recent
    if recent and 0 < length < row_length:
        raise ConfigError(
            f"a row that keeps its newest {recent} tokens in full precision cannot be truncated "
            f"from {row_length} to {length}: older tokens are no longer in full precision"
        )
    if table.group.records is not None:
        return np.full_like(slots, table.group.slots_of(length))
    if not table.group.ordered:
        if (slots != row_length).any():
            raise ConfigError("a lane that has evicted tokens cannot be truncated by position")
        return np.full_like(slots, length)
    kept = np.empty_like(slots)
    for lane in range(table.group.num_lanes):
        positions = table.slot_positions(row, lane)
        kept[lane] = np.searchsorted(positions, length)
        if table.group.window is not None:
            first_needed = max(0, length + 1 - table.group.window)
            first_held = int(positions[0]) if len(positions) else row_length
            if first_held > first_needed and first_needed < length:
                raise ConfigError(
                    f"group {table.group.name!r} has dropped positions below {first_held} that a "
                    f"row of {length} needs"
                )
    return kept
