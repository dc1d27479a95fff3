"""Sequences in pages: start, grow, fork, truncate, evict, lend, swap, release, and the proof.

Bookkeeping only: NumPy arrays, no tensors. Whatever must happen to the bytes (copy a page before
it is written, move a slot, read pages out) is asked of a `PageBytes` at the moment it is decided,
so the order of calls is the order of the bytes' changes, on a CPU as on a CUDA stream.

Two lengths are never mixed up: `lengths[row]` is logical (the position the next token gets),
`tables[g].num_slots[row]` is physical (slots that live in a lane).
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.listeners import MemoryListeners
from quire.kv.page_bytes import NoBytes, PageBytes
from quire.kv.pages import PageNumbers
from quire.kv.proof import prove_lanes, prove_references, prove_slabs
from quire.kv.resizing import (
    cut_slots,
    drop_behind_window,
    grow_demand,
    grown_slots,
    require_room_for_one_token,
    slots_below,
)
from quire.kv.stores.base import Demand, PlacementMaker, pages_by_class
from quire.kv.stores.paged import Paged
from quire.kv.tables import LaneTable, Rows
from quire.layout.pages import CacheLayout, LaneGroup, PageClass

Counts = NDArray[np.int32]
MakeStore = Callable[[int], PageBytes]  # of an arena of so many bytes


class KVMemory:
    """All sequences of a device in one arena.

    Args:
        layout: lane groups of every sequence.
        total_bytes: the arena.
        max_rows: sequences that can exist at once.
        store: where the bytes are, or what makes it for an arena of so many bytes.
        track_changes: keep the table entries each step touches, for a device's copy.
        placement: which store gives lanes their pages, made from the three first arguments.

    Raises:
        ConfigError: the arena does not hold one sequence of one token.
    """

    def __init__(
        self,
        layout: CacheLayout,
        total_bytes: int,
        max_rows: int,
        *,
        store: PageBytes | MakeStore | None = None,
        track_changes: bool = False,
        placement: PlacementMaker = Paged,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"expected room for at least 1 sequence, got max_rows={max_rows}")
        self.layout = layout
        self.placement = placement(layout, total_bytes, max_rows)
        self.arena, self.pools = self.placement.arena, self.placement.pools
        require_room_for_one_token(layout, self.placement, total_bytes)
        self.tables = {
            group.name: LaneTable(group, max_rows, track_changes=track_changes)
            for group in layout.groups
        }
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        self.peak_bytes = np.zeros(max_rows, dtype=np.int64)
        self.arena_peak_bytes = self.copied_bytes = 0
        self.listeners = MemoryListeners()
        self.cached_references: dict[
            int, Mapping[str, PageNumbers]
        ] = {}  # pages lent to nobody in particular
        self.cached_reference_keys = itertools.count()
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._live = np.zeros(max_rows, dtype=bool)
        self.store: PageBytes = _made(store, self.arena.total_bytes)

    # ---- bytes ---------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of pages in use plus what slab borders waste; used + free == total, always."""
        return sum(pool.used_bytes + pool.tail_bytes for pool in self.pools.values())

    @property
    def free_bytes(self) -> int:
        """Bytes of free pages and of free slabs."""
        held = sum(pool.free_bytes for pool in self.pools.values())
        return held + self.arena.num_free_slabs * self.arena.slab_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.total_bytes

    @property
    def live_rows(self) -> Rows:
        """Rows in use, ascending."""
        return np.flatnonzero(self._live)

    @property
    def num_free_rows(self) -> int:
        """Sequences that can still be started."""
        return len(self._free_rows)

    def row_bytes(self, row: int) -> int:
        """Bytes of all pages a sequence refers to, and of those kept aside for it."""
        return int(self._rows_bytes(np.array([row]))[0])

    def _rows_bytes(self, rows: Rows) -> NDArray[np.int64]:
        held = np.zeros(len(rows), dtype=np.int64)
        for table in self.tables.values():
            pages = table.pages_held(rows)
            if self.placement.reserves:
                pages += self.placement.reserved_pages(table, rows).sum(axis=1)
            held += pages * table.group.page_class.page_bytes
        return held

    def fits(self, pages: Mapping[PageClass, int]) -> bool:
        """Whether so many more pages of each class can be given at once, wherever they lie."""
        return self.placement.fits(pages)

    # ---- life of a row -------------------------------------------------------------------------

    def start(self, statistics: Collection[str] | None = None) -> int:
        """Open an empty sequence; return its row.

        Args:
            statistics: names of the private groups it uses; None: all. It has nothing in others.

        Raises:
            OutOfPages: all rows are taken.
            ConfigError: a name is not that of a private group.
        """
        private = {name for name, table in self.tables.items() if table.group.private}
        used = private if statistics is None else frozenset(statistics)
        if not used <= private:
            raise ConfigError(f"no statistics {sorted(used - private)}; has {sorted(private)}")
        if not self._free_rows:
            raise OutOfPages(f"all {len(self.lengths)} rows are taken")
        row = self._free_rows.pop()
        for name in private:
            self.tables[name].active[row] = name in used
        self._live[row] = True
        self.lengths[row] = 0
        self.peak_bytes[row] = 0
        return row

    def statistics_of(self, row: int) -> frozenset[str]:
        """Names of the private groups a row uses."""
        return frozenset(n for n, t in self.tables.items() if t.group.private and t.active[row])

    def release(self, rows: Rows | Sequence[int]) -> None:
        """Close sequences and give their pages back.

        Raises:
            InvariantError: one is not open, or named twice.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if not self._live[rows].all() or len(np.unique(rows)) != len(rows):
            raise InvariantError(f"rows {rows.tolist()} are not all open, or one is named twice")
        self.listeners.released(rows)
        for table in self.tables.values():
            self.placement.close(table, rows, table.clear(rows))
        self._live[rows] = False
        self._free_rows.extend(int(row) for row in rows)

    # ---- growth --------------------------------------------------------------------------------

    def pages_to_grow(self, rows: Rows, tokens: Counts) -> dict[PageClass, int]:
        """Pages each class must give before `rows` can take `tokens` more tokens each."""
        return pages_by_class(self._demands(rows, tokens))

    def _demands(self, rows: Rows, tokens: Counts) -> list[Demand]:
        return [
            grow_demand(table, self.pools[table.group.page_class], rows, tokens)
            for table in self.tables.values()
        ]

    def can_grow(self, rows: Rows, tokens: Counts) -> bool:
        """Whether `grow` would succeed. Returns pages behind windows first, as `grow` does."""
        self.drop_behind_windows(rows)
        return self.placement.can_give(self._demands(rows, tokens))

    def grow(self, rows: Rows, tokens: Counts) -> None:
        """Make room for `tokens[i]` more tokens in row `rows[i]`, in every lane, all or nothing.

        A last page that is shared is copied first: pages are written only by their one owner.

        Raises:
            OutOfPages: the arena is full; nothing was changed (but pages behind windows returned).
        """
        self.drop_behind_windows(rows)
        demands = self._demands(rows, tokens)
        self.placement.reserve(demands, self.store)
        for demand in demands:
            self._grow_table(demand, tokens)
        self.lengths[rows] += tokens
        self.note_peaks(rows)

    def _grow_table(self, demand: Demand, tokens: Counts) -> None:
        table, rows = demand.table, demand.rows
        page_class, slots = table.group.page_class, grown_slots(table, rows, tokens)
        if demand.shared.any():
            index, lane = np.nonzero(demand.shared)
            row = rows[index]
            column = table.num_slots[row, lane].astype(np.int64) // page_class.tokens
            self.privatise(table, row, lane, column)
        if demand.new.any():
            added = self.placement.give(table, rows, demand.new)
            row, lane, column = table.append(rows, demand.new, added)
            if table.group.ordered:  # new pages continue the row's logical positions
                first = self.lengths[row] - table.num_slots[row, lane]
                table.page_positions[row, lane, column] = first + column * page_class.tokens
            if table.group.private:
                self.store.clear_pages(page_class, added)
        table.num_slots[rows] = slots

    def note_peaks(self, rows: Rows) -> None:
        """Remember the most bytes that `rows` and the arena have held; call after taking pages."""
        held = self._rows_bytes(rows)
        self.peak_bytes[rows] = np.maximum(self.peak_bytes[rows], held)
        used = sum(pool.used_bytes for pool in self.pools.values())
        in_use = used - self.listeners.idle_bytes()
        copying = self.placement.copying_peak_bytes
        self.arena_peak_bytes = max(self.arena_peak_bytes, in_use, copying)

    def privatise(self, table: LaneTable, row: Rows, lane: Rows, column: NDArray[np.int64]) -> None:
        """Copy shared pages and let these table entries name the copies."""
        pool = self.pools[table.group.page_class]
        old = table.pages[row, lane, column]
        new = pool.allocate(len(old))
        self.store.copy_pages(pool.page_class, old, new)
        table.replace(row, lane, column, new)
        pool.release(old)
        self.copied_bytes += len(old) * pool.page_class.page_bytes

    # ---- shrinking -----------------------------------------------------------------------------

    def drop_behind_windows(self, rows: Rows) -> None:
        """Return pages of window lanes that no query from the next position on can see.

        A store whose lanes have no holes keeps them.
        """
        for table in self.tables.values() if self.placement.drops_pages else ():
            if table.group.window is not None:
                for row, lane, pages in drop_behind_window(
                    table, rows, self.lengths[rows], table.group.window
                ):
                    self.placement.pass_window(table, row, lane, pages)

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens from logical position `length` on; lanes must be in position order.

        Raises:
            ConfigError: the row is shorter, some lane has lost its order, a window lane has
                already dropped pages that the shorter sequence would look back to, or tokens that
                it would attend to as they were made have made room for later ones.
        """
        held = int(self.lengths[row])
        if not 0 <= length <= held:
            raise ConfigError(f"cannot truncate a row of {held} tokens to {length}")
        kept = {name: slots_below(t, row, held, length) for name, t in self.tables.items()}
        for name, table in self.tables.items():
            if table.group.mirrors is not None and table.active[row]:
                kept[name] = kept[table.group.mirrors]
            self.placement.take_back(table, cut_slots(table, row, kept[name]))
        self.lengths[row] = length

    # ---- proof ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Prove that every byte is accounted for and every reference has a holder.

        Raises:
            InvariantError: something does not add up.
        """
        self.arena.check()
        if sorted(self._free_rows) != np.flatnonzero(~self._live).tolist():
            raise InvariantError("a row is free and live at once, or free twice")
        for pool in self.pools.values():
            pool.check()
            prove_references(pool, self.tables, self.cached_references.values(), self.placement)
        prove_slabs(self.arena, self.pools.values())
        for table in self.tables.values():
            table.check()
            self.placement.check(table)
        prove_lanes(self.tables, self.lengths, self._live)
        if self.used_bytes + self.free_bytes != self.total_bytes:
            raise InvariantError(
                f"used {self.used_bytes:,} + free {self.free_bytes:,} != {self.total_bytes:,} B"
            )


def shared_groups(memory: KVMemory) -> list[LaneGroup]:
    """The groups whose pages sequences can share, in the order of their records."""
    return [group for group in memory.layout.groups if not group.private]


def _made(store: PageBytes | MakeStore | None, total_bytes: int) -> PageBytes:
    if store is None:
        return NoBytes()
    return store(total_bytes) if callable(store) else store
