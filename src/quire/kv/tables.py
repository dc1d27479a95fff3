"""Page tables of one lane group: the pages of each lane in order, and the number of slots in use.

A row is a sequence; each row has several lanes. A lane is dense: slot i is in its page i // tokens
at offset i % tokens, so page table and length suffice and no slot mapping is built. The arrays are
NumPy. On a CPU the kernels read the same memory; for a device `drain_changes` returns the entries
that changed.

The functions compute what rows need to grow (`Demand`; `KVMemory.grow` allocates it), and remove
pages outside a window or at the tail; the caller frees the pages they return.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError
from quire.kv.pages import PageNumbers, PagePool
from quire.layout.pages import LaneGroup, PageClass
from quire.layout.sizes import format_size
from quire.plan.machine import free_host_bytes

Rows = NDArray[np.int64]
INITIAL_PAGES_PER_LANE = 16
NO_PAGE = -1


class LaneTable:
    """The tables of all sequences in one lane group.

    Attributes:
        pages: int32 [rows, lanes, capacity] page numbers; NO_PAGE for empty entries.
        page_positions: int32, same shape: logical position of a page's first slot. Valid for
            ordered lanes; unordered lanes store positions in their pages.
        num_pages: int32 [rows, lanes] pages of each lane.
        num_slots: int32 [rows, lanes] live slots, the physical length.
        active: bool [rows] whether a row uses this group; if not, it has no slots in it. Every row
            uses the groups that are not private.
        staged: int32 [rows] number of first pages of each lane that are staging pages of an
            offloaded prefix; they hold their bytes only while their layer runs and are never
            moved, swapped or cut.
        repeated: int32 [rows] entries of a row whose page is also in another entry of the row.
        version: incremented when the arrays are reallocated; views must then be renewed.
    """

    def __init__(self, group: LaneGroup, max_rows: int, *, track_changes: bool = False) -> None:
        self.group = group
        shape = (max_rows, group.num_lanes, INITIAL_PAGES_PER_LANE)
        self.pages = np.full(shape, NO_PAGE, dtype=np.int32)
        self.page_positions = np.zeros(shape, dtype=np.int32)
        self.num_pages = np.zeros(shape[:2], dtype=np.int32)
        self.num_slots = np.zeros(shape[:2], dtype=np.int32)
        self.active = np.ones(max_rows, dtype=bool)
        self.staged = np.zeros(max_rows, dtype=np.int32)
        self.repeated = np.zeros(max_rows, dtype=np.int32)
        self.version = 0
        self._track_changes = track_changes
        self._changed: list[NDArray[np.int64]] = []

    @property
    def capacity(self) -> int:
        """Pages per lane before the arrays must be reallocated."""
        return int(self.pages.shape[2])

    def is_lane_of(self, layer: int) -> NDArray[np.bool_]:
        """Mask [lanes] of the lanes of a layer of the model."""
        return np.repeat(np.equal(self.group.layers, layer), self.group.lanes_per_layer)

    def append(
        self, rows: Rows, counts: NDArray[np.int32], pages: PageNumbers
    ) -> tuple[Rows, Rows, Rows]:
        """Append pages, row-major by counts [n, lanes]; row, lane and column of each new entry."""
        held = self.num_pages[rows]
        needed = int((held + counts).max(initial=0))
        if needed > self.capacity:
            self._widen(needed)
        row, lane, column = self._new_entries(rows, counts, held)
        self.pages[row, lane, column] = pages
        self.num_pages[rows] = held + counts
        self._note(row, lane, column)
        return row, lane, column

    def _new_entries(
        self, rows: Rows, counts: NDArray[np.int32], held: NDArray[np.int32]
    ) -> tuple[Rows, Rows, Rows]:
        index, lane = np.nonzero(counts)
        times = counts[index, lane]
        if times.max(initial=1) == 1:
            return rows[index], lane, held[index, lane].astype(np.int64)
        start = np.repeat(np.cumsum(times) - times, times)
        offset = np.arange(int(times.sum())) - start
        index, lane = np.repeat(index, times), np.repeat(lane, times)
        return rows[index], lane, held[index, lane] + offset

    def replace(self, row: Rows, lane: Rows, column: Rows, pages: PageNumbers) -> None:
        self.pages[row, lane, column] = pages
        self._note(row, lane, column)

    def cut(self, rows: Rows, keep_pages: NDArray[np.int32]) -> PageNumbers:
        """Remove the pages after the first `keep_pages` [rows, lanes] of rows; return them."""
        held = self.num_pages[rows]
        column = np.arange(int(held.max(initial=0)))
        removed = (column >= keep_pages[:, :, None]) & (column < held[:, :, None])
        index, lane, column = np.nonzero(removed)
        row = rows[index]
        pages: PageNumbers = self.pages[row, lane, column]
        self.pages[row, lane, column] = NO_PAGE
        self.num_pages[rows] = np.minimum(held, keep_pages)
        self._note(row, lane, column)
        return pages

    def drop(self, row: int, lane: int, columns: NDArray[np.int64]) -> PageNumbers:
        """Remove full pages of an ordered lane, not its partly filled last page; return them.

        Later entries move up to close the gap. Only the table changes; no bytes move.
        """
        held = int(self.num_pages[row, lane])
        dropped: PageNumbers = self.pages[row, lane, columns].copy()
        retained = np.delete(np.arange(held), columns)
        for array in (self.pages, self.page_positions):
            array[row, lane, : len(retained)] = array[row, lane, retained]
        self.pages[row, lane, len(retained) : held] = NO_PAGE
        self.num_pages[row, lane] = len(retained)
        self.num_slots[row, lane] -= len(columns) * self.group.page_class.tokens
        touched = np.arange(columns.min(initial=held), held)
        self._note(np.full(len(touched), row), np.full(len(touched), lane), touched)
        return dropped

    def keep_columns(self, row: int, retained: NDArray[np.bool_]) -> PageNumbers:
        """Remove whole pages by a mask [lanes, columns] and close the gaps; return the pages."""
        width = retained.shape[1]
        block = self.pages[row, :, :width]
        named = block != NO_PAGE
        dropped: PageNumbers = block[named & ~retained]
        touched = named & np.logical_or.accumulate(~retained, axis=1)
        order = np.argsort(~retained, axis=1, kind="stable")
        for array in (self.pages, self.page_positions):
            part = array[row, :, :width]
            part[...] = np.take_along_axis(part, order, axis=1)
        self.num_pages[row] = retained.sum(axis=1)
        block[np.arange(width) >= self.num_pages[row][:, None]] = NO_PAGE
        self._note_mask(row, touched)
        return dropped

    def copy_row(self, source: int, target: int) -> None:
        """Copy the entries of `source` to the empty row `target`, which uses the same groups."""
        arrays = (self.pages, self.page_positions, self.num_pages, self.num_slots)
        for array in (*arrays, self.staged, self.repeated):
            array[target] = array[source]
        self._note_mask(target, self.pages[target] != NO_PAGE)

    def clear(self, rows: Rows) -> PageNumbers:
        """Empty rows; return all their pages."""
        block = self.pages[rows]
        index, lane, column = np.nonzero(block != NO_PAGE)
        pages: PageNumbers = block[index, lane, column]
        self._note(rows[index], lane, column)
        self.pages[rows] = NO_PAGE
        self.num_pages[rows] = 0
        self.num_slots[rows] = 0
        self.staged[rows] = self.repeated[rows] = 0
        return pages

    def row_pages(self, row: int) -> PageNumbers:
        block = self.pages[row]
        pages: PageNumbers = block[block != NO_PAGE]
        return pages

    def slot_positions(self, row: int, lane: int) -> NDArray[np.int32]:
        """Return the logical positions [num_slots] of an ordered lane's slots."""
        tokens = self.group.page_class.tokens
        first = self.page_positions[row, lane, : self.num_pages[row, lane]]
        grid = np.add(first[:, None], np.arange(tokens), dtype=np.int32)
        return grid.reshape(-1)[: self.num_slots[row, lane]]

    def pages_held(self, rows: Rows) -> NDArray[np.int64]:
        """Count the distinct pages of each row, [rows]; layers share staging pages."""
        held: NDArray[np.int64] = self.num_pages[rows].sum(axis=1, dtype=np.int64)
        return held - self.repeated[rows]

    def require_in_place(self, row: int, columns: int | None = None) -> None:
        """Refuse to read or move offloaded pages; the first `columns` are not used."""
        staged = int(self.staged[row])
        if staged and (columns is None or columns < staged):
            raise ConfigError(
                f"the first {staged} pages of each lane of row {row} are in CPU memory; load them "
                "into the arena before they are shared, moved or cut"
            )

    def check(self) -> None:
        """Every lane has exactly the pages that its slots need."""
        needed = -(-self.num_slots // self.group.page_class.tokens)
        held = np.count_nonzero(self.pages != NO_PAGE, axis=2)
        dense = (self.pages != NO_PAGE) == (np.arange(self.capacity) < self.num_pages[:, :, None])
        if (needed != self.num_pages).any() or (held != self.num_pages).any() or not dense.all():
            raise InvariantError(f"group {self.group.name!r}: pages do not match slots")

    def drain_changes(self) -> NDArray[np.int64]:
        """Return and clear the flat indices into `pages` that changed since the last call."""
        changed = np.concatenate(self._changed) if self._changed else np.empty(0, dtype=np.int64)
        self._changed.clear()
        return np.unique(changed)

    def _widen(self, needed: int) -> None:
        grown = max(needed, 2 * self.capacity)
        rows, lanes, old = self.pages.shape
        pages = np.full((rows, lanes, grown), NO_PAGE, dtype=np.int32)
        positions = np.zeros((rows, lanes, grown), dtype=np.int32)
        pages[:, :, :old], positions[:, :, :old] = self.pages, self.page_positions
        self.pages, self.page_positions = pages, positions
        self.version += 1
        self._changed.clear()

    def _note(self, row: Rows, lane: Rows, column: Rows) -> None:
        if self._track_changes:
            lanes = self.pages.shape[1]
            self._changed.append((row * lanes + lane) * self.capacity + column)

    def _note_mask(self, row: int, mask: NDArray[np.bool_]) -> None:
        if self._track_changes:
            lane, column = np.nonzero(mask)
            self._note(np.full(len(lane), row), lane, column)


def table_bytes(group: LaneGroup, max_rows: int) -> int:
    """Return the bytes that a new `LaneTable` of `max_rows` sequences allocates."""
    of_one = vars(LaneTable(group, 1)).values()
    return max_rows * sum(array.nbytes for array in of_one if isinstance(array, np.ndarray))


def refuse_too_many_rows(groups: Iterable[LaneGroup], max_rows: int) -> None:
    """Refuse more rows than CPU memory has space for, before page tables are allocated."""
    needed_bytes = sum(table_bytes(group, max_rows) for group in groups)
    free_bytes = free_host_bytes()
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"page tables of {max_rows:,} sequences need {format_size(needed_bytes)} of CPU "
            f"memory, of which {format_size(free_bytes)} are free; lower --max-num-seqs"
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """Pages that one lane group needs before some rows can grow."""

    table: LaneTable
    rows: Rows  # [rows] row numbers
    slots: NDArray[np.int32]  # [rows, lanes] slots after the growth
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
    """Compute the new pages and the copies before lanes grow by tokens [rows, lanes or 1]."""
    per_page, slots = table.group.page_class.tokens, grown_slots(table, rows, tokens)
    new: NDArray[np.int32] = (slots + (per_page - 1)) // per_page - table.num_pages[rows]
    return Demand(table, rows, slots, new, _shared_ends(table, pool, rows, tokens))


def grown_slots(table: LaneTable, rows: Rows, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the slots [rows, lanes] after lanes have grown by tokens [rows, lanes or 1]."""
    held: NDArray[np.int32] = table.num_slots[rows]
    if not table.group.private:
        return held + tokens
    grows = table.active[rows][:, None] & (tokens > 0)
    if table.group.records is not None:
        return np.where(grows, np.int32(table.group.records), held)
    return held + np.where(grows, tokens, np.int32(0))


def _shared_ends(
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
    index, lane = np.nonzero((slots % per_page != 0) & (tokens > 0))
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


def drop_behind_window(
    table: LaneTable,
    rows: Rows,
    lengths: NDArray[np.int64],
    layer: int | None = None,
) -> Iterator[PageNumbers]:
    """Drop the pages that no query from positions `lengths` [n] on can attend to, lane by lane.

    With a layer, only the lanes of this layer.
    """
    per_page = table.group.page_class.tokens
    full_pages = table.num_slots[rows] // per_page
    # largest first slot of a page that the next query does not attend to
    last_hidden = table.group.first_needed(lengths) - per_page
    outside = (full_pages > 0) & (table.page_positions[rows, :, 0] <= last_hidden[:, None])
    if layer is not None:
        outside &= table.is_lane_of(layer)
    for i, lane in zip(*np.nonzero(outside), strict=True):
        first_slots = table.page_positions[rows[i], lane, : full_pages[i, lane]]
        num_outside = np.searchsorted(first_slots, last_hidden[i], side="right")
        yield table.drop(int(rows[i]), int(lane), np.arange(num_outside))


def cut_slots(table: LaneTable, rows: Rows, keep_slots: NDArray[np.int32]) -> PageNumbers:
    """Drop the slots after the first `keep_slots` [rows, lanes] of rows; return removed pages."""
    table.num_slots[rows] = keep_slots
    return table.cut(rows, -(-keep_slots // table.group.page_class.tokens))


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
        if table.group.bounded:
            first_needed = int(table.group.first_needed(np.array([length]))[0])
            first_held = int(positions[0]) if len(positions) else row_length
            if first_held > first_needed and first_needed < length:
                raise ConfigError(
                    f"group {table.group.name!r} has dropped positions below {first_held} that a "
                    f"row of {length} needs"
                )
    return kept
