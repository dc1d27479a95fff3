"""Repacking: move the pages of sequences together so that they occupy as few slabs as possible.

Pages scattered between freed pages occupy more slabs than they fill, which other page classes then
cannot use.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.tables import LaneTable, Rows
from quire.layout.pages import PageClass


@dataclass(frozen=True, slots=True)
class _Named:
    """Entries of a page table: row, lane, column and page number of each."""

    table: LaneTable
    row: Rows
    lane: Rows
    column: Rows
    pages: PageNumbers


@dataclass(frozen=True, slots=True)
class _Moving:
    """Pages of one class that only the repacked rows reference, with reference counts and bytes."""

    pages: PageNumbers
    times: NDArray[np.int64]
    payload: object


def repack(memory: KVMemory, *rows: int) -> None:
    """Move together the pages that only these sequences reference; sharing is preserved.

    Pages that other sequences or the prefix cache reference are not moved. No page is moved if the
    packed pages might not fit: slabs that begin between two pages hold one page less than others.
    """
    named = [_entries(table, np.array(rows)) for table in memory.tables.values()]
    moving = {page_class: _exclusive(memory, page_class, named) for page_class in memory.pools}
    if not _fit_packed(memory, moving):
        return
    for page_class, found in moving.items():
        memory.pools[page_class].release(np.repeat(found.pages, found.times))
    for page_class, found in moving.items():
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


def _fit_packed(memory: KVMemory, moving: Mapping[PageClass, _Moving]) -> bool:
    """Whether these pages can be allocated again after all of them have been released."""
    slab_bytes, free, needed = memory.arena.slab_bytes, memory.arena.num_free_slabs, 0
    for page_class, found in moving.items():
        pool, page_bytes = memory.pools[page_class], page_class.page_bytes
        staying = np.setdiff1d(np.flatnonzero(pool.ref_counts), found.pages)
        slabs = np.unique(staying * page_bytes // slab_bytes)
        ends, starts = (slabs + 1) * slab_bytes // page_bytes, -(-slabs * slab_bytes // page_bytes)
        free += len(pool.held_slabs) - len(slabs)
        missing = len(found.pages) - (int((ends - starts).sum()) - len(staying))
        needed += max(0, -(-missing // pool.pages_per_slab))
    return needed <= free


def _entries(table: LaneTable, rows: Rows) -> _Named:
    """Return the entries of rows without staging pages of an offloaded prefix, which stay."""
    past_staging = np.arange(table.capacity) >= table.staged[rows][:, None, None]
    index, lane, column = np.nonzero((table.pages[rows] >= 0) & past_staging)
    row = rows[index]
    return _Named(table, row, lane, column, table.pages[row, lane, column])


def _exclusive(memory: KVMemory, page_class: PageClass, named: list[_Named]) -> _Moving:
    of_class = [found.pages for found in named if found.table.group.page_class == page_class]
    pages, times = np.unique(np.concatenate(of_class), return_counts=True)
    own = memory.pools[page_class].ref_counts[pages] == times
    payload = memory.store.read_pages(page_class, pages[own])
    return _Moving(pages[own], times[own], payload)
