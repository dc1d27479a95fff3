"""What a row's tables need before more tokens can be written: new pages, and copies of shared ones.

These functions only look; `KVMemory.grow` acts.
"""

import numpy as np
from numpy.typing import NDArray

from quire.kv.pages import CountedPages
from quire.kv.stores.base import Demand
from quire.kv.tables import LaneTable, Rows


def grow_demand(
    table: LaneTable, pool: CountedPages, rows: Rows, tokens: NDArray[np.int32]
) -> Demand:
    """Both of the below."""
    return Demand(
        table, rows, new_pages(table, rows, tokens), shared_ends(table, pool, rows, tokens)
    )


def new_pages(table: LaneTable, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Pages [rows, lanes] to append before row `rows[i]` can take `tokens[i]` more tokens."""
    per_page = table.group.page_class.tokens
    slots = table.num_slots[rows] + tokens[:, None]
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
    if not pool.num_shared:
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
