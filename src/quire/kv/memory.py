"""Sequences in pages: start, grow, fork, truncate, evict, lend, swap, release, and the proof.

Bookkeeping only: NumPy arrays, no tensors. Whatever must happen to the bytes (copy a page before
it is written, move a slot, read pages out) is asked of a `PageBytes` at the moment it is decided,
so the order of calls is the order of the bytes' changes, on a CPU as on a CUDA stream.

Two lengths are never mixed up: `lengths[row]` is logical (the position the next token gets),
`tables[g].num_slots[row]` is physical (slots that live in a lane).
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.arena import Arena
from quire.kv.growth import new_pages, shared_ends
from quire.kv.page_bytes import NoBytes, PageBytes
from quire.kv.pages import PageNumbers, PagePool
from quire.kv.proof import prove_references, prove_slabs
from quire.kv.shrinking import cut_slots, drop_behind_window, drop_full_pages, slots_below
from quire.kv.tables import LaneTable, Rows
from quire.spec.pages import CacheLayout, LaneGroup, PageClass

Counts = NDArray[np.int32]


class KVMemory:
    """All sequences of a device in one arena.

    Args:
        layout: lane groups of every sequence.
        total_bytes: the arena.
        max_rows: sequences that can exist at once.
        store: where the bytes are.
        track_changes: keep the table entries each step touches, for a device's copy.

    Raises:
        ConfigError: the arena does not hold one sequence of one token.
    """

    def __init__(
        self,
        layout: CacheLayout,
        total_bytes: int,
        max_rows: int,
        *,
        store: PageBytes | None = None,
        track_changes: bool = False,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"expected room for at least 1 sequence, got max_rows={max_rows}")
        self.layout = layout
        self.store: PageBytes = store or NoBytes()
        self.arena = Arena(total_bytes, [c.page_bytes for c in layout.page_classes])
        self.pools = {c: PagePool(self.arena, c) for c in layout.page_classes}
        self._require_room_for_one_token(total_bytes)
        self.tables = {
            group.name: LaneTable(group, max_rows, track_changes=track_changes)
            for group in layout.groups
        }
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        self.peak_bytes = np.zeros(max_rows, dtype=np.int64)
        self.arena_peak_bytes = 0
        self.loans: dict[int, Mapping[str, PageNumbers]] = {}  # pages lent to nobody in particular
        self.loan_keys = itertools.count()
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._live = np.zeros(max_rows, dtype=bool)

    def _require_room_for_one_token(self, total_bytes: int) -> None:
        pages = dict.fromkeys(self.layout.page_classes, 0)
        for group in self.layout.groups:
            pages[group.page_class] += group.num_lanes
        if not self.fits(pages):
            slabs = sum(self.pools[c].slabs_needed(n) for c, n in pages.items())
            raise ConfigError(
                f"a KV memory of {total_bytes:,} B holds not one token of one sequence: "
                f"{slabs * self.arena.slab_bytes:,} B are needed (pages of "
                f"{self.layout.smallest_sequence_bytes:,} B in {slabs} slabs); "
                "raise --kv-memory or lower --page-tokens"
            )

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
        """Bytes of all pages a sequence refers to."""
        return sum(
            int(table.num_pages[row].sum()) * table.group.page_class.page_bytes
            for table in self.tables.values()
        )

    def fits(self, pages: Mapping[PageClass, int]) -> bool:
        """Whether so many more pages of each class can be given at once."""
        slabs = sum(self.pools[c].slabs_needed(n) for c, n in pages.items())
        return slabs <= self.arena.num_free_slabs

    # ---- life of a row -------------------------------------------------------------------------

    def start(self) -> int:
        """Open an empty sequence; return its row.

        Raises:
            OutOfPages: all rows are taken.
        """
        if not self._free_rows:
            raise OutOfPages(f"all {len(self.lengths)} rows are taken")
        row = self._free_rows.pop()
        self._live[row] = True
        self.lengths[row] = 0
        self.peak_bytes[row] = 0
        return row

    def release(self, rows: Rows | Sequence[int]) -> None:
        """Close sequences and give their pages back.

        Raises:
            InvariantError: one is not open, or named twice.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if not self._live[rows].all() or len(np.unique(rows)) != len(rows):
            raise InvariantError(f"rows {rows.tolist()} are not all open, or one is named twice")
        for table in self.tables.values():
            self.pools[table.group.page_class].release(table.clear(rows))
        self._live[rows] = False
        self._free_rows.extend(int(row) for row in rows)

    # ---- growth --------------------------------------------------------------------------------

    def pages_to_grow(self, rows: Rows, tokens: Counts) -> dict[PageClass, int]:
        """Pages each class must give before `rows` can take `tokens` more tokens each."""
        pages: dict[PageClass, int] = {}
        for table in self.tables.values():
            page_class = table.group.page_class
            needed = int(new_pages(table, rows, tokens).sum())
            needed += int(shared_ends(table, self.pools[page_class], rows, tokens).sum())
            pages[page_class] = pages.get(page_class, 0) + needed
        return pages

    def can_grow(self, rows: Rows, tokens: Counts) -> bool:
        """Whether `grow` would succeed. Returns pages behind windows first, as `grow` does."""
        self.drop_behind_windows(rows)
        return self.fits(self.pages_to_grow(rows, tokens))

    def grow(self, rows: Rows, tokens: Counts) -> None:
        """Make room for `tokens[i]` more tokens in row `rows[i]`, in every lane, all or nothing.

        A last page that is shared is copied first: pages are written only by their one owner.

        Raises:
            OutOfPages: the arena is full; nothing was changed (but pages behind windows returned).
        """
        self.drop_behind_windows(rows)
        pages = self.pages_to_grow(rows, tokens)
        if not self.fits(pages):
            raise OutOfPages(f"{sum(pages.values())} pages asked for, {self.free_bytes:,} B free")
        for table in self.tables.values():
            self._grow_table(table, rows, tokens)
        self.lengths[rows] += tokens
        self.note_peaks(rows)

    def _grow_table(self, table: LaneTable, rows: Rows, tokens: Counts) -> None:
        pool = self.pools[table.group.page_class]
        shared = shared_ends(table, pool, rows, tokens)
        if shared.any():
            index, lane = np.nonzero(shared)
            row = rows[index]
            column = table.num_slots[row, lane].astype(np.int64) // pool.page_class.tokens
            self.privatise(table, row, lane, column)
        new = new_pages(table, rows, tokens)
        if new.any():
            added = pool.allocate(int(new.sum()))
            row, lane, column = table.append(rows, new, added)
            if table.group.ordered:  # new pages continue the row's logical positions
                first = self.lengths[row] - table.num_slots[row, lane]
                table.page_positions[row, lane, column] = first + column * pool.page_class.tokens
            if table.group.private:
                self.store.clear_pages(pool.page_class, added)
        table.num_slots[rows] += tokens[:, None]

    def note_peaks(self, rows: Rows) -> None:
        """Remember the most bytes that `rows` and the arena have held; call after taking pages."""
        held = np.zeros(len(rows), dtype=np.int64)
        for table in self.tables.values():
            held += table.num_pages[rows].sum(axis=1) * table.group.page_class.page_bytes
        self.peak_bytes[rows] = np.maximum(self.peak_bytes[rows], held)
        used = sum(pool.used_bytes for pool in self.pools.values())
        self.arena_peak_bytes = max(self.arena_peak_bytes, used)

    def privatise(self, table: LaneTable, row: Rows, lane: Rows, column: NDArray[np.int64]) -> None:
        """Copy shared pages and let these table entries name the copies."""
        pool = self.pools[table.group.page_class]
        old = table.pages[row, lane, column]
        new = pool.allocate(len(old))
        self.store.copy_pages(pool.page_class, old, new)
        table.replace(row, lane, column, new)
        pool.release(old)

    # ---- shrinking -----------------------------------------------------------------------------

    def drop_behind_windows(self, rows: Rows) -> None:
        """Return pages of window lanes that no query from the next position on can see."""
        for table in self.tables.values():
            if table.group.window is not None:
                pool = self.pools[table.group.page_class]
                for pages in drop_behind_window(
                    table, rows, self.lengths[rows], table.group.window
                ):
                    pool.release(pages)

    def drop_pages(self, group: LaneGroup, row: int, lane: int, columns: Rows) -> None:
        """Drop full pages of an ordered lane: they are edited out of the table, nothing moves.

        Raises:
            ConfigError: the lane is not ordered, or a page named is not full or named twice.
        """
        table = self.tables[group.name]
        self.pools[group.page_class].release(drop_full_pages(table, row, lane, columns))

    def truncate(self, row: int, length: int) -> None:
        """Forget the tokens from logical position `length` on; lanes must be in position order.

        Raises:
            ConfigError: the row is shorter, some lane has lost its order, or a window lane has
                already dropped pages that the shorter sequence would look back to.
        """
        held = int(self.lengths[row])
        if not 0 <= length <= held:
            raise ConfigError(f"cannot truncate a row of {held} tokens to {length}")
        kept = {name: slots_below(t, row, held, length) for name, t in self.tables.items()}
        for name, table in self.tables.items():
            self.pools[table.group.page_class].release(cut_slots(table, row, kept[name]))
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
            prove_references(pool, self.tables, self.loans.values())
        prove_slabs(self.arena, self.pools.values())
        for table in self.tables.values():
            table.check()
            if table.num_slots[~self._live].any():
                raise InvariantError(f"group {table.group.name!r}: a closed row still has slots")
            if (table.num_slots > self.lengths[:, None]).any():
                raise InvariantError(f"group {table.group.name!r}: more slots than tokens")
        if self.used_bytes + self.free_bytes != self.total_bytes:
            raise InvariantError(
                f"used {self.used_bytes:,} + free {self.free_bytes:,} != {self.total_bytes:,} B"
            )
