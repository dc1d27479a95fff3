"""Repacking: moves the pages of sequences together, so that they fill as few slabs as can be.

Pages may lie between places of pages that have been freed, and so keep more slabs than they fill
from the other page classes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.tables import LaneTable, Rows
from quire.kv.whole_rows import repack_runs
from quire.layout.pages import PageClass


@dataclass(frozen=True, slots=True)
class _Named:
    """Entries of a table that name pages: row, lane and column of each, and the page."""

    table: LaneTable
    row: Rows
    lane: Rows
    column: Rows
    pages: PageNumbers


@dataclass(frozen=True, slots=True)
class _Moving:
    """Pages of one class that only some rows name: the page, how often, and its bytes."""

    pages: PageNumbers
    times: NDArray[np.int64]
    payload: object


def repack(memory: KVMemory, *rows: int) -> None:
    """Move the pages that only these sequences name together; they go on sharing them.

    Pages that others name too stay where they are.

    Raises:
        InvariantError: the arena does not hold them packed; one whose slabs suffice for these
            sequences alone always does while nobody else is in it.
    """
    if not memory.placement.shares:
        for row in rows:
            repack_runs(memory, row)
        return
    named = [_entries(table, np.array(rows)) for table in memory.tables.values()]
    moving = {page_class: _only_theirs(memory, page_class, named) for page_class in memory.pools}
    for page_class, found in moving.items():
        memory.pools[page_class].release(np.repeat(found.pages, found.times))
    needed = {page_class: len(found.pages) for page_class, found in moving.items()}
    if not memory.fits(needed):
        raise InvariantError(f"rows {rows} held {sum(needed.values())} pages that no longer fit")
    for page_class, found in moving.items():
        _place(memory, page_class, found, named)


def _entries(table: LaneTable, rows: Rows) -> _Named:
    """Entries of rows; a front's staging stays where it is."""
    behind = np.arange(table.capacity) >= table.staged[rows][:, None, None]
    index, lane, column = np.nonzero((table.pages[rows] >= 0) & behind)
    row = rows[index]
    return _Named(table, row, lane, column, table.pages[row, lane, column])


def _only_theirs(memory: KVMemory, page_class: PageClass, named: list[_Named]) -> _Moving:
    """Pages of a class that nothing but these entries names."""
    of_class = [found.pages for found in named if found.table.group.page_class == page_class]
    pages, times = np.unique(np.concatenate(of_class), return_counts=True)
    own = memory.pools[page_class].ref_counts[pages] == times
    payload = memory.store.read_pages(page_class, pages[own])
    return _Moving(pages[own], times[own], payload)


def _place(memory: KVMemory, page_class: PageClass, found: _Moving, named: list[_Named]) -> None:
    """Write pages to fresh ones, and let the entries name these."""
    pool = memory.pools[page_class]
    fresh = pool.allocate(len(found.pages))
    memory.store.write_pages(page_class, fresh, found.payload)
    for further in range(1, int(found.times.max(initial=1))):
        pool.retain(fresh[found.times > further])
    for entries in named:
        if entries.table.group.page_class == page_class:
            moved = np.isin(entries.pages, found.pages)
            place = np.searchsorted(found.pages, entries.pages[moved])
            row, lane, column = entries.row[moved], entries.lane[moved], entries.column[moved]
            entries.table.replace(row, lane, column, fresh[place])
