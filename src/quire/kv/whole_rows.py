"""Rows whose pages come all at once: a copy of another row, or one brought back from elsewhere."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from quire.errors import OutOfPages
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.stores.base import Demand
from quire.kv.tables import Rows


def add_pages(
    memory: KVMemory, rows: Rows, counts: Mapping[str, NDArray[np.int32]]
) -> dict[str, PageNumbers]:
    """Append pages to lanes, all or nothing; their caller fills them and counts their slots.

    Args:
        memory: holds the rows.
        rows: [rows] distinct row numbers.
        counts: group name -> [rows, lanes] pages.

    Returns:
        Pages of each group, row by row, lane by lane.

    Raises:
        OutOfPages: nothing was changed.
    """
    demands = [
        Demand(table, rows, counts[name], np.zeros(counts[name].shape, dtype=bool))
        for name, table in memory.tables.items()
    ]
    memory.placement.reserve(demands, memory.store)
    added = {}
    for name, table in memory.tables.items():
        added[name] = memory.placement.give(table, rows, counts[name])
        table.append(rows, counts[name], added[name])
    return added


def copy_row(memory: KVMemory, row: int) -> int:
    """Start a sequence equal to `row` in pages of its own.

    Raises:
        OutOfPages: no row, or no pages for the copy; nothing was changed.
    """
    copy = memory.start()
    rows = np.array([copy])
    try:
        counts = {name: table.num_pages[[row]] for name, table in memory.tables.items()}
        pages = add_pages(memory, rows, counts)
    except OutOfPages:
        memory.release(rows)
        raise
    for name, table in memory.tables.items():
        memory.store.copy_pages(table.group.page_class, table.row_pages(row), pages[name])
        table.page_positions[copy] = table.page_positions[row]
        table.num_slots[copy] = table.num_slots[row]
    memory.lengths[copy] = memory.lengths[row]
    memory.note_peaks(rows)
    return copy
