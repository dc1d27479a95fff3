"""Pages appended to a running row: those of a prefix that was loaded, or that another row computed.

row      [0 ............ length)            whole pages of its own tokens
append                  [length .. end)     pages that the row takes over or shares
"""

from collections.abc import Mapping, Sequence

import numpy as np

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.sharing import (
    CachedReference,
    begin_lanes,
    copy_private_pages,
    require_chain,
    zeroed_pages,
)
from quire.kv.tables import LaneTable
from quire.layout.pages import PageClass


def can_append(memory: KVMemory, row: int) -> bool:
    """Whether whole pages can be appended to a row: its lanes hold all tokens, in full pages."""
    length = int(memory.lengths[row])
    return all(
        not table.staged[row] and _is_dense(table, row, length)
        for table in memory.tables.values()
        if not table.group.private
    )


def _is_dense(table: LaneTable, row: int, length: int) -> bool:
    """Whether every lane ends with the last token and all its pages are full."""
    num_slots, group = table.num_slots[row], table.group
    least, held = 0 if group.window is not None else length, int(num_slots[0])
    equal = bool((num_slots == held).all())
    return equal and held >= least and held % group.page_class.tokens == 0


def append_pages(memory: KVMemory, row: int, pages: Mapping[str, PageNumbers], end: int) -> None:
    """Append whole pages to a row for which `can_append` holds; the row takes the references."""
    length = int(memory.lengths[row])
    for name, numbers in pages.items():
        table = memory.tables[name]
        (lanes, columns), held = numbers.shape, int(table.num_pages[row, 0])
        counts = np.full((1, lanes), columns, dtype=np.int32)
        table.append(np.array([row]), counts, numbers.reshape(-1))
        positions = length + np.arange(columns) * table.group.page_class.tokens
        table.page_positions[row, :, held : held + columns] = positions
        table.num_slots[row] += end - length
    memory.lengths[row] = end
    memory.note_peaks(np.array([row]))


def replace_statistics(
    memory: KVMemory, row: int, pages: Mapping[str, PageNumbers], end: int
) -> None:
    """Replace the pages of private groups of a row; the row takes the references."""
    for name, numbers in pages.items():
        table = memory.tables[name]
        old = table.cut(row, np.zeros(table.group.num_lanes, dtype=np.int32))
        memory.pools[table.group.page_class].release(old)
        begin_lanes(table, row, end, numbers)
    memory.note_peaks(np.array([row]))


def extend_from_references(
    memory: KVMemory,
    row: int,
    cached_references: Sequence[CachedReference],
    statistics: CachedReference | None = None,
) -> bool:
    """Append references; False, without a change, if it cannot share them or copies do not fit."""
    length = int(memory.lengths[row])
    require_chain(memory, cached_references, statistics, start=length)
    if not can_append(memory, row):
        return False
    copied = _private_copies(memory, row, statistics, cached_references[-1].end)
    if copied is None:
        return False
    pages = {
        name: np.concatenate([found.pages[name] for found in cached_references], axis=1)
        for name in cached_references[0].pages
    }
    for name, numbers in pages.items():
        memory.pools[memory.tables[name].group.page_class].retain(numbers.reshape(-1))
    append_pages(memory, row, pages, cached_references[-1].end)
    replace_statistics(memory, row, copied, cached_references[-1].end)
    return True


def _private_copies(
    memory: KVMemory, row: int, statistics: CachedReference | None, end: int
) -> dict[str, PageNumbers] | None:
    """Private copies of a snapshot, zeroed records of promoted tokens; None if they do not fit."""
    pages = {} if statistics is None else statistics.pages
    empty = [t for t in memory.tables.values() if t.active[row] and not t.group.checkpointed]
    counts = {name: numbers.size for name, numbers in pages.items()}
    for group in (table.group for table in empty):
        counts[group.name] = group.page_class.pages_for(group.slots_of(end)) * group.num_lanes
    needed: dict[PageClass, int] = {}
    for name, count in counts.items():
        page_class = memory.tables[name].group.page_class
        needed[page_class] = needed.get(page_class, 0) + count
    if not memory.fits(needed):
        return None
    return {
        n: copy_private_pages(memory, memory.tables[n], numbers.reshape(-1))
        for n, numbers in pages.items()
    } | {t.group.name: zeroed_pages(memory, t, counts[t.group.name]) for t in empty}
