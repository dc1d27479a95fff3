"""Fork and swap in for stores without page sharing: every row gets its own copy of all pages."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from quire.errors import OutOfPages
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.stored_sequences import Swapped
from quire.kv.stores.base import Demand
from quire.kv.tables import Rows


def add_pages(
    memory: KVMemory, rows: Rows, counts: Mapping[str, NDArray[np.int32]]
) -> dict[str, PageNumbers]:
    """Append pages to lanes, all or none; the caller writes them and sets the slot counts.

    Args:
        memory: the KV memory that holds the rows.
        rows: [rows] distinct row numbers.
        counts: group name -> [rows, lanes] number of pages.

    Returns:
        Pages of each group, row by row, lane by lane.

    Raises:
        OutOfPages: too few free pages; nothing changed.
    """
    memory.placement.reserve(_demands(memory, rows, counts), memory.store)
    added = {}
    for name, table in memory.tables.items():
        added[name] = memory.placement.allocate(table, rows, counts[name])
        table.append(rows, counts[name], added[name])
    return added


def _demands(memory: KVMemory, rows: Rows, counts: Mapping[str, NDArray[np.int32]]) -> list[Demand]:
    return [
        Demand(table, rows, counts[name], np.zeros(counts[name].shape, dtype=bool))
        for name, table in memory.tables.items()
    ]


def copy_row(memory: KVMemory, row: int) -> int:
    """Start a sequence equal to `row` with copies of all its pages.

    Raises:
        OutOfPages: no free row, or too few free pages for the copy; nothing changed.
    """
    copy = memory.start(memory.statistics_of(row))
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


def restore_rows(memory: KVMemory, swapped: Swapped) -> list[int]:
    """Start sequences from their stored pages; return their rows, in order.

    Raises:
        OutOfPages: too few free rows or pages; nothing changed.
    """
    rows = np.array([memory.start(sequence.statistics) for sequence in swapped.sequences])
    try:
        add_stored(memory, rows, swapped)
    except BaseException:
        memory.release(rows)
        raise
    memory.note_peaks(rows)
    swapped.stored.free()
    return [int(row) for row in rows]


def can_place(memory: KVMemory, swapped: Swapped) -> bool:
    """Return whether enough pages are free for `restore_rows`; enough rows must be free."""
    free_rows = np.setdiff1d(np.arange(len(memory.lengths)), memory.live_rows)
    return can_append(memory, free_rows[: len(swapped.sequences)], swapped)


def can_append(memory: KVMemory, rows: Rows, swapped: Swapped) -> bool:
    """Return whether enough pages are free for `add_stored`, or reserved for the rows' lanes."""
    return memory.placement.can_allocate(_demands(memory, rows, _stored_counts(memory, swapped)))


def _stored_counts(memory: KVMemory, swapped: Swapped) -> dict[str, NDArray[np.int32]]:
    return {
        name: np.stack([sequence.lanes[name].num_pages for sequence in swapped.sequences])
        for name in memory.tables
    }


def add_stored(memory: KVMemory, rows: Rows, swapped: Swapped) -> None:
    """Append the stored pages of sequences to `rows`, in newly allocated pages.

    Raises:
        OutOfPages: too few free pages; nothing changed.
    """
    held = {name: table.num_pages[rows] for name, table in memory.tables.items()}
    shapes = swapped.sequences
    added = add_pages(memory, rows, _stored_counts(memory, swapped))
    pages = {c: np.empty(count, dtype=np.int32) for c, count in swapped.pages.items()}
    for name, table in memory.tables.items():
        stored = np.concatenate([s.lanes[name].stored for s in shapes])
        pages[table.group.page_class][stored] = added[name]
    try:
        swapped.stored.load(memory, pages)
    except BaseException:
        for name, table in memory.tables.items():
            for row, num_pages in zip(rows, held[name], strict=True):
                memory.placement.free(table, table.cut(int(row), num_pages))
        raise
    for row, sequence in zip(rows, shapes, strict=True):
        for name, lanes in sequence.lanes.items():
            table = memory.tables[name]
            new = np.arange(table.capacity) >= (table.num_pages[row] - lanes.num_pages)[:, None]
            new &= np.arange(table.capacity) < table.num_pages[row][:, None]
            table.page_positions[row][new] = lanes.page_positions
            table.num_slots[row] += lanes.num_slots
        memory.lengths[row] = sequence.length
        memory.peak_bytes[row] = max(sequence.peak_bytes, int(memory.peak_bytes[row]))


def repack_runs(memory: KVMemory, row: int) -> None:
    """Move the runs of the only live sequence together; do nothing if there are other sequences."""
    if len(memory.live_rows) > 1:
        return
    rows = np.array([row])
    slots = {name: table.num_slots[row].copy() for name, table in memory.tables.items()}
    counts = {name: table.num_pages[rows] for name, table in memory.tables.items()}
    payloads = {
        name: memory.store.read_pages(table.group.page_class, table.row_pages(row))
        for name, table in memory.tables.items()
    }
    for table in memory.tables.values():
        memory.placement.free_rows(table, rows, table.clear(rows))
    pages = add_pages(memory, rows, counts)  # always fits: the arena holds no other sequence
    for name, table in memory.tables.items():
        memory.store.write_pages(table.group.page_class, pages[name], payloads[name])
        table.num_slots[row] = slots[name]
