"""Page sharing: fork a sequence, cache references to its pages, start or extend one from them.

A shared page has more than one reference and is never written; `KVMemory.grow` copies the page it
must write (copy on write). Pages of private groups (statistics) are copied by the fork, because
the two sequences diverge.

Pages are also appended to a running row: those of a prefix that was loaded, or that another row
computed.

    row      [0 ............ length)            whole pages of its own tokens
    append                  [length .. end)     pages that the row takes over or shares
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.tables import NO_PAGE, LaneTable
from quire.layout.pages import PageClass


@dataclass(frozen=True, slots=True)
class CachedReference:
    """A reference to pages that keeps them allocated without a sequence."""

    key: int  # in `KVMemory.cached_references`
    start: int  # logical position of the first token
    end: int  # logical position after the last token
    # group name -> page numbers [lanes, pages of a lane]; offloaded groups are missing
    pages: dict[str, PageNumbers]


def fork(memory: KVMemory, row: int) -> int:
    """Start a sequence equal to `row` that shares all its pages except private ones.

    Offloaded pages are shared too.
    """
    if not memory.fits(statistics_pages(memory, row)):
        raise OutOfPages("too few free pages for the statistics of a fork")
    child = memory.start(memory.statistics_of(row))
    for table in memory.tables.values():
        table.copy_row(row, child)
        _retain_row(memory, table, row)
        if table.group.private:
            lane, column = np.nonzero(table.pages[child] >= 0)
            memory.privatise(table, np.full(len(lane), child), lane, column)
    memory.lengths[child] = memory.lengths[row]
    memory.listeners.forked(row, child)
    memory.note_peaks(np.array([child]))
    return child


def _retain_row(memory: KVMemory, table: LaneTable, row: int) -> None:
    """Add a reference for every entry of a row; layers share the staging pages of offloaded KV."""
    pool, pages = memory.pools[table.group.page_class], table.row_pages(row)
    if not table.repeated[row]:
        pool.retain(pages)
        return
    distinct, times = np.unique(pages, return_counts=True)
    for further in range(int(times.max(initial=0))):
        pool.retain(distinct[times > further])


def reference_pages(memory: KVMemory, row: int, start: int, end: int) -> CachedReference:
    """Reference the pages of the tokens from `start` to `end`, so they outlive the sequence."""
    return reference_blocks(memory, row, start, end, end - start)[0]


def reference_blocks(
    memory: KVMemory, row: int, start: int, end: int, block_tokens: int
) -> list[CachedReference]:
    """Reference tokens in blocks of `block_tokens`, all or none; see `reference_pages`."""
    shared = {name: t for name, t in memory.tables.items() if not t.group.private}
    pages = {name: _span_pages(memory, table, row, start, end) for name, table in shared.items()}
    return _in_blocks(memory, pages, start, end, block_tokens)


def _in_blocks(
    memory: KVMemory, pages: Mapping[str, PageNumbers], start: int, end: int, block_tokens: int
) -> list[CachedReference]:
    """Add a reference to pages [lanes, columns] of tokens from `start` on, block by block.

    A model without attention has blocks without pages.
    """
    width = {}
    for name, numbers in pages.items():
        page_class = memory.tables[name].group.page_class
        memory.pools[page_class].retain(numbers.reshape(-1))
        width[name] = block_tokens // max(1, page_class.tokens)
    count = min(
        (numbers.shape[1] // width[name] for name, numbers in pages.items()),
        default=(end - start) // block_tokens,
    )
    return [
        _registered(
            memory,
            start + i * block_tokens,
            start + (i + 1) * block_tokens,
            {name: of[:, i * width[name] : (i + 1) * width[name]] for name, of in pages.items()},
        )
        for i in range(count)
    ]


class LayerReferences:
    """References to the tokens of a row that are computed, and then cut, layer by layer.

    Args:
        memory: the KV memory.
        row: a row that has no slots for the tokens yet.
        start, end: the tokens, in whole blocks.
    """

    def __init__(self, memory: KVMemory, row: int, start: int, end: int) -> None:
        self._memory, self._row, self._start, self._end = memory, row, start, end
        tables = [table for table in memory.tables.values() if not table.group.private]
        self._pages = {t.group.name: self._empty(t, end - start) for t in tables}
        self._statistics: dict[int, dict[str, PageNumbers]] = {}

    def _empty(self, table: LaneTable, slots: int) -> PageNumbers:
        columns = table.group.page_class.pages_for(slots)
        return np.full((table.group.num_lanes, columns), NO_PAGE, dtype=np.int32)

    def add(self, layer: int) -> None:
        """Reference the pages of a layer, which holds all tokens of the row."""
        for name, pages in self._pages.items():
            table = self._memory.tables[name]
            lanes = table.is_lane_of(layer)
            if lanes.any() and pages.size:
                found = _span_pages(self._memory, table, self._row, self._start, self._end, lanes)
                self._memory.pools[table.group.page_class].retain(found.reshape(-1))
                pages[lanes] = found

    def add_statistics(self, layer: int, end: int) -> None:
        """Copy the statistics of a layer after the token at `end` - 1."""
        for table in _referenced_tables(self._memory):
            lanes, group = table.is_lane_of(layer), table.group
            if table.active[self._row] and lanes.any():
                copies = self._statistics.setdefault(end, {})
                if group.name not in copies:
                    copies[group.name] = self._empty(table, group.slots_of(end))
                pages = table.pages[self._row, lanes, : copies[group.name].shape[1]]
                copied = self._memory.pools[group.page_class].allocate(pages.size)
                self._memory.store.copy_pages(group.page_class, pages.reshape(-1), copied)
                copies[group.name][lanes] = copied.reshape(pages.shape)

    def blocks(self, start: int, end: int, block_tokens: int) -> list[CachedReference]:
        """Reference the pages of some of the tokens; see `reference_blocks`."""
        chosen = {}
        for name, pages in self._pages.items():
            tokens = self._memory.tables[name].group.page_class.tokens
            chosen[name] = pages[:, (start - self._start) // tokens : (end - self._start) // tokens]
        return _in_blocks(self._memory, chosen, start, end, block_tokens)

    def statistics(self) -> list[CachedReference]:
        """Hand over the copied statistics."""
        found, self._statistics = self._statistics, {}
        return [_registered(self._memory, 0, end, pages) for end, pages in found.items()]

    def release(self) -> None:
        """Release the references of this object."""
        for pages in (self._pages, *self._statistics.values()):
            for name, numbers in pages.items():
                pool = self._memory.pools[self._memory.tables[name].group.page_class]
                pool.release(numbers[numbers != NO_PAGE])
        self._pages, self._statistics = {}, {}

    @property
    def idle_bytes(self) -> int:
        """Bytes of pages that only these references use."""
        total = 0
        for name, numbers in self._pages.items():
            pool = self._memory.pools[self._memory.tables[name].group.page_class]
            alone = pool.ref_counts[numbers[numbers != NO_PAGE]] == 1
            total += int(np.count_nonzero(alone)) * pool.page_class.page_bytes
        return total


def _registered(
    memory: KVMemory, start: int, end: int, pages: dict[str, PageNumbers]
) -> CachedReference:
    key = next(memory.cached_reference_keys)
    memory.cached_references[key] = pages
    return CachedReference(key, start, end, pages)


def _span_pages(
    memory: KVMemory,
    table: LaneTable,
    row: int,
    start: int,
    end: int,
    lanes: NDArray[np.bool_] | slice = slice(None),
) -> PageNumbers:
    per_page, length = table.group.page_class.tokens, int(memory.lengths[row])
    if not 0 <= start < end <= length or start % per_page or end % per_page:
        raise ConfigError(
            f"expected whole pages of {per_page} tokens up to {length}, got {start} to {end}"
        )
    slots = table.num_slots[row, lanes]
    first = length - int(slots[0]) if table.group.bounded else 0
    if (slots != length - first).any() or start < first:
        raise ConfigError(
            f"group {table.group.name!r} no longer holds every token from {start} to {end}"
        )
    columns = slice((start - first) // per_page, (end - first) // per_page)
    table.require_in_place(row, columns.start)
    pages: PageNumbers = table.pages[row][lanes, columns].copy()
    return pages


def reference_statistics(memory: KVMemory, row: int) -> CachedReference | None:
    """Copy the current private pages of a row; None if it has none or the copies do not fit.

    A sequence that starts from the cached prefix starts with copies of these statistics. The
    reference holds the private groups that the row uses, except promoted (mixed-precision) tokens:
    there are none before the first eviction.
    """
    private = [table for table in _referenced_tables(memory) if table.active[row]]
    if not private or not memory.fits(referenced_statistics_pages(memory, row)):
        return None
    length = int(memory.lengths[row])
    if any((t.num_slots[row] != t.group.slots_of(length)).any() for t in private):
        raise ConfigError(f"row {row} has evicted some of its {length} tokens and their statistics")
    pages = {
        table.group.name: copy_private_pages(memory, table, table.row_pages(row))
        for table in private
    }
    return _registered(memory, 0, length, pages)


def statistics_pages(memory: KVMemory, row: int) -> dict[PageClass, int]:
    """Return the pages of each class that a copy of a row's private pages needs."""
    return _pages_of(_private_tables(memory), row)


def referenced_statistics_pages(memory: KVMemory, row: int) -> dict[PageClass, int]:
    """Return the pages of each class that `reference_statistics` needs."""
    return _pages_of(_referenced_tables(memory), row)


def _pages_of(tables: Sequence[LaneTable], row: int) -> dict[PageClass, int]:
    needed: dict[PageClass, int] = {}
    for table in tables:
        page_class = table.group.page_class
        needed[page_class] = needed.get(page_class, 0) + int(table.num_pages[row].sum())
    return needed


def _private_tables(memory: KVMemory) -> list[LaneTable]:
    return [table for table in memory.tables.values() if table.group.private]


def _referenced_tables(memory: KVMemory) -> list[LaneTable]:
    return [table for table in _private_tables(memory) if table.group.checkpointed]


def copy_private_pages(memory: KVMemory, table: LaneTable, pages: PageNumbers) -> PageNumbers:
    """Copy pages of a private group; return the copies [lanes, pages of a lane]."""
    page_class = table.group.page_class
    copies = memory.pools[page_class].allocate(len(pages))
    memory.store.copy_pages(page_class, pages, copies)
    return copies.reshape(table.group.num_lanes, -1)


def start_from_references(
    memory: KVMemory,
    cached_references: Sequence[CachedReference],
    statistics: CachedReference | None = None,
    *,
    used: Collection[str] | None = None,
) -> int:
    """Start a sequence from consecutive cached references that begin at position 0."""
    require_chain(memory, cached_references, statistics)
    length = cached_references[-1].end
    keys, offloaded = [found.key for found in cached_references], memory.offloaded
    needed = {} if offloaded is None else dict(offloaded.pages_to_start(keys))
    for group in (table.group for table in _private_tables(memory)):
        if used is None or group.name in used:
            pages = group.page_class.pages_for(group.slots_of(length)) * group.num_lanes
            needed[group.page_class] = needed.get(group.page_class, 0) + pages
    if not memory.fits(needed):
        raise OutOfPages("too few free pages for the statistics or staging of a cached prefix")
    row = memory.start(used)
    if offloaded is not None:
        offloaded.start(row, keys)
    for table in memory.tables.values():
        if not table.active[row]:
            continue
        if table.group.private:
            lanes = _private_pages(memory, table, length, statistics)
        else:
            name = table.group.name
            none = np.empty((table.group.num_lanes, 0), dtype=np.int32)
            lanes = np.concatenate([f.pages.get(name, none) for f in cached_references], axis=1)
            memory.pools[table.group.page_class].retain(lanes.reshape(-1))
        begin_lanes(table, row, length, lanes)
    memory.lengths[row] = length
    memory.note_peaks(np.array([row]))
    return row


def require_chain(
    memory: KVMemory,
    cached_references: Sequence[CachedReference],
    statistics: CachedReference | None,
    start: int = 0,
) -> None:
    """Raise InvariantError unless references are held and consecutive from `start` on."""
    for cached_reference in (*cached_references, *filter(None, [statistics])):
        _require_referenced(memory, cached_reference)
    starts = [start, *(cached_reference.end for cached_reference in cached_references[:-1])]
    if not cached_references or starts != [
        cached_reference.start for cached_reference in cached_references
    ]:
        spans = [(found.start, found.end) for found in cached_references]
        raise InvariantError(f"cached references {spans} do not follow token {start}")
    if statistics is not None and statistics.end != cached_references[-1].end:
        raise InvariantError(
            f"statistics at {statistics.end} for a prefix of {cached_references[-1].end} tokens"
        )


def _private_pages(
    memory: KVMemory, table: LaneTable, length: int, statistics: CachedReference | None
) -> PageNumbers:
    group = table.group
    if statistics is not None and group.name in statistics.pages:
        return copy_private_pages(memory, table, statistics.pages[group.name].reshape(-1))
    count = group.page_class.pages_for(group.slots_of(length)) * group.num_lanes
    return zeroed_pages(memory, table, count)


def zeroed_pages(memory: KVMemory, table: LaneTable, count: int) -> PageNumbers:
    """Allocate zeroed pages of a private group; return them as [lanes, pages of a lane]."""
    pages = memory.pools[table.group.page_class].allocate(count)
    memory.store.clear_pages(table.group.page_class, pages)
    return pages.reshape(table.group.num_lanes, -1)


def begin_lanes(table: LaneTable, row: int, length: int, pages: PageNumbers) -> None:
    """Enter pages [lanes, pages of a lane] in the table of a row with at most offloaded pages."""
    (lanes, columns), first = pages.shape, int(table.staged[row])
    counts = np.full((1, lanes), columns, dtype=np.int32)
    table.append(np.array([row]), counts, pages.reshape(-1))
    table.num_slots[row] = table.group.slots_of(length)
    positions = (first + np.arange(columns)) * table.group.page_class.tokens
    table.page_positions[row, :, first : first + columns] = positions


def release_reference(memory: KVMemory, cached_reference: CachedReference) -> None:
    """Release a cached reference; pages that sequences still reference stay allocated."""
    release_references(memory, [cached_reference])


def release_references(memory: KVMemory, cached_references: Sequence[CachedReference]) -> None:
    """Release several cached references in one pass over the pool; see `release_reference`."""
    pages: dict[str, list[PageNumbers]] = {}
    for cached_reference in cached_references:
        _require_referenced(memory, cached_reference)
        for name, numbers in memory.cached_references.pop(cached_reference.key).items():
            pages.setdefault(name, []).append(numbers.reshape(-1))
    if memory.offloaded is not None:
        memory.offloaded.release_references([found.key for found in cached_references])
    for name, parts in pages.items():
        memory.pools[memory.tables[name].group.page_class].release(np.concatenate(parts))


def _require_referenced(memory: KVMemory, cached_reference: CachedReference) -> None:
    if cached_reference.key not in memory.cached_references:
        raise InvariantError(
            f"cached reference {cached_reference.key} of tokens {cached_reference.start} to "
            f"{cached_reference.end} was released before"
        )


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
    least, held = 0 if group.bounded else length, int(num_slots[0])
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
        old = table.cut(np.array([row]), np.zeros((1, table.group.num_lanes), dtype=np.int32))
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
