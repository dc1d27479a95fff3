"""The KV memory: sequences in pages, with their page tables, page pools and invariant checks.

Bookkeeping only: NumPy arrays, no tensors. A `PageBytes` changes the bytes: it copies pages on
write, moves slots and reads pages. The memory calls it as soon as a change is decided. The bytes
therefore change in call order, on a CPU and on a CUDA stream.

There are two lengths: `lengths[row]` is logical (the position of the next token);
`tables[g].num_slots[row]` is physical (the slots in use in each lane).
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.pages import NO_PAGES, Arena, PageNumbers, PagePool
from quire.kv.slot_moves import Mask, SlotMoves
from quire.kv.tables import (
    Demand,
    LaneTable,
    Rows,
    cut_slots,
    drop_behind_window,
    grow_demand,
    pages_by_class,
    slots_below,
)
from quire.layout.pages import CacheLayout, LaneGroup, PageClass, pages_per_slab
from quire.layout.sizes import option_size


@runtime_checkable
class PageBytes(Protocol):
    """Operations on whole pages and on slots; a slot is (page, offset in the page)."""

    def copy_pages(self, page_class: PageClass, source: PageNumbers, target: PageNumbers) -> None:
        """Copy whole pages, `source[i]` onto `target[i]`."""

    def clear_pages(self, page_class: PageClass, pages: PageNumbers) -> None:
        """Zero whole pages."""

    def move_slots(
        self,
        page_class: PageClass,
        source: tuple[PageNumbers, NDArray[np.int64]],
        target: tuple[PageNumbers, NDArray[np.int64]],
    ) -> None:
        """A slot is (page, offset); all sources are read before any target is written."""

    def set_bounds(
        self, page_class: PageClass, pages: PageNumbers, held: NDArray[np.int64]
    ) -> None:
        """Compute the bounds of the keys in the first `held` slots (at least one) of pages."""

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        """Read the bytes of whole pages, in a form that `write_pages` accepts."""

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None:
        """Write bytes from `read_pages` into the same or other pages."""


class NoBytes:
    """A `PageBytes` without bytes, for simulations and schedules; every method does nothing."""

    def copy_pages(
        self, page_class: PageClass, source: PageNumbers, target: PageNumbers
    ) -> None: ...

    def clear_pages(self, page_class: PageClass, pages: PageNumbers) -> None: ...

    def move_slots(
        self,
        page_class: PageClass,
        source: tuple[PageNumbers, NDArray[np.int64]],
        target: tuple[PageNumbers, NDArray[np.int64]],
    ) -> None: ...

    def set_bounds(
        self, page_class: PageClass, pages: PageNumbers, held: NDArray[np.int64]
    ) -> None: ...

    def read_pages(self, page_class: PageClass, pages: PageNumbers) -> object:
        return None

    def write_pages(self, page_class: PageClass, pages: PageNumbers, payload: object) -> None: ...


Counts = NDArray[np.int32]
MakeStore = Callable[[int], PageBytes]  # argument: bytes of the arena


@runtime_checkable  # for the type checks in tests
class OffloadedPages(Protocol):
    """Offloaded first pages of swapped sequences; their bytes stay where they are."""

    staging: Mapping[PageClass, int]

    def attach(self, rows: Sequence[int]) -> None:
        """Append the pages to the empty rows of the resumed sequences."""

    def discard(self) -> None:
        """Free the bytes that no sequence uses."""


@runtime_checkable  # for the type checks in tests
class OffloadedRows(Protocol):
    """The offloaded first pages of a KV memory's sequences and of its cached prefixes."""

    def read(self, row: int, group: str, layers: range) -> None:
        """Load the offloaded pages of layers (at most one) into staging, until the next read."""

    def compact(
        self, row: int, group: str, moves: SlotMoves, retained: Mask, offloaded: int
    ) -> None:
        """Move the slots of a row, and drop its pages that are not in `retained` [lanes, columns].

        The first `offloaded` pages of each lane stay offloaded.
        """

    def detach(self, rows: Sequence[int]) -> OffloadedPages | None:
        """Take over the offloaded pages of sequences that leave the arena; None if there are none.

        The caller releases the rows next.
        """
        ...

    def pages_to_start(self, keys: Sequence[int]) -> Mapping[PageClass, int]:
        """Pages of each class that `start` allocates."""
        ...

    def start(self, row: int, keys: Sequence[int]) -> None:
        """Append the offloaded pages of consecutive cached references to an empty row."""

    def release_references(self, keys: Sequence[int]) -> None:
        """Free the offloaded pages of cached references."""


class MemoryListener:
    """Base class of listeners to a KV memory; every method does nothing unless overridden."""

    @property
    def idle_bytes(self) -> int:
        return 0

    def released(self, rows: Rows) -> None:
        """Handle the release of sequences; their page tables still hold their pages."""

    def forked(self, parent: int, child: int) -> None:
        """Handle the fork of a sequence; the page table of the child holds its pages already."""

    @property
    def reads_moves(self) -> bool:
        """Whether `compacted` must know how slots moved, so that the CPU waits for them."""
        return False

    def compacted(self, row: int, group: str, moves: SlotMoves | None, slots: int) -> None:
        """`moves` is None if whole pages were dropped, or if only the device knows the moves.

        `slots` is the fewest of any lane.
        """

    def unpublish(self, page_class: PageClass, pages: PageNumbers) -> NDArray[np.bool_]:
        """Release pages that are about to be written; return the mask of released pages."""
        del page_class
        return np.zeros(len(pages), dtype=bool)

    def offloading(self, group: str, keys: Sequence[int]) -> None:
        """Handle cached references whose pages of a group move to offload memory next."""

    def free_offloaded(self) -> bool:
        """Free some unused cached references with offloaded pages; False if there are none."""
        return False


class MemoryListeners:
    """The listeners of one KV memory, called in the order in which they subscribed."""

    def __init__(self) -> None:
        self._listeners: list[MemoryListener] = []

    def __iter__(self) -> Iterator[MemoryListener]:
        return iter(self._listeners)

    def subscribe(self, listener: MemoryListener) -> None:
        self._listeners.append(listener)

    def idle_bytes(self) -> int:
        """Bytes of pages in use that no running request uses."""
        return sum(listener.idle_bytes for listener in self._listeners)

    @property
    def reads_moves(self) -> bool:
        return any(listener.reads_moves for listener in self._listeners)

    def released(self, rows: Rows) -> None:
        for listener in self._listeners:
            listener.released(rows)

    def forked(self, parent: int, child: int) -> None:
        for listener in self._listeners:
            listener.forked(parent, child)

    def compacted(self, row: int, group: str, moves: SlotMoves | None, slots: int) -> None:
        for listener in self._listeners:
            listener.compacted(row, group, moves, slots)

    def unpublish(self, page_class: PageClass, pages: PageNumbers) -> NDArray[np.bool_]:
        done = np.zeros(len(pages), dtype=bool)
        for listener in self._listeners:
            done |= listener.unpublish(page_class, pages)
        return done

    def offloading(self, group: str, keys: Sequence[int]) -> None:
        for listener in self._listeners:
            listener.offloading(group, keys)

    def free_offloaded(self) -> bool:
        return any(listener.free_offloaded() for listener in self._listeners)


class KVMemory:
    """The page tables and pages of all sequences of a device, in one arena.

    Args:
        layout: lane groups of every sequence.
        total_bytes: size of the arena.
        max_rows: maximum number of concurrent sequences.
        store: the page bytes, or a function that creates them for the arena's size in bytes.
        track_changes: record changed table entries, for the device's copy of the tables.
        arena: arena that provides the slabs; None to create one of `total_bytes`.
        unite: returns where the mask of any rank of the model is True; None: the model has one.
    """

    def __init__(
        self,
        layout: CacheLayout,
        total_bytes: int,
        max_rows: int,
        *,
        store: PageBytes | MakeStore | None = None,
        track_changes: bool = False,
        arena: Arena | None = None,
        unite: Callable[[NDArray[np.bool_]], NDArray[np.bool_]] | None = None,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"expected max_rows of at least 1, got {max_rows}")
        self.layout, self._track_changes = layout, track_changes
        self._unite = unite
        self.arena = arena or Arena(total_bytes, [c.page_bytes for c in layout.page_classes])
        self.pools = {c: PagePool(self.arena, c) for c in layout.page_classes}
        self._require_one_token(total_bytes)
        self.tables = {
            group.name: LaneTable(group, max_rows, track_changes=track_changes)
            for group in layout.groups
        }
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        self.peak_bytes = np.zeros(max_rows, dtype=np.int64)
        self.arena_peak_bytes = self.copied_bytes = 0
        self.listeners = MemoryListeners()
        self.offloaded: OffloadedRows | None = None
        # pages that the prefix cache references
        self.cached_references: dict[int, dict[str, PageNumbers]] = {}
        self.cached_reference_keys = itertools.count()
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._live = np.zeros(max_rows, dtype=bool)
        store = NoBytes() if store is None else store
        self.store: PageBytes = store(self.arena.total_bytes) if callable(store) else store

    def _require_one_token(self, total_bytes: int) -> None:
        """Refuse an arena that cannot hold one sequence of one token with all its statistics."""
        pages = dict.fromkeys(self.layout.page_classes, 0)
        for group in self.layout.groups:
            lane_pages = group.page_class.pages_for(group.slots_of(1))
            pages[group.page_class] += lane_pages * group.num_lanes
        slabs = self._slabs_needed(pages)
        if slabs > self.arena.num_slabs:
            needed_bytes = self.arena.fitting_bytes([(c.page_bytes, n) for c, n in pages.items()])
            raise ConfigError(
                f"a KV memory of {total_bytes:,} B cannot hold one token of one sequence: "
                f"{slabs * self.arena.slab_bytes:,} B are needed; raise {self.arena.size_option} "
                f"to {option_size(needed_bytes)} or lower --block-size"
            )

    def add_groups(self, groups: Sequence[LaneGroup]) -> None:
        """Private lane groups, which only sequences that start later can use."""
        layout = replace(self.layout, groups=(*self.layout.groups, *groups))
        for group in groups:
            if pages_per_slab(self.arena.slab_bytes, group.page_class.page_bytes) < 1:
                raise ConfigError(
                    f"a page of {group.page_class.page_bytes:,} B is larger than a slab of "
                    f"{self.arena.slab_bytes:,} B; raise --kv-memory, or name the rule in --evict "
                    "or --evict-allow when the engine starts"
                )
        for group in groups:
            if group.page_class not in self.pools:
                self.pools[group.page_class] = PagePool(self.arena, group.page_class)
        for group in groups:
            table = LaneTable(group, len(self.lengths), track_changes=self._track_changes)
            table.active[:] = False
            self.tables[group.name] = table
        self.layout = layout

    # ---- bytes ---------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of pages in use plus waste at slab boundaries; used + free == total, always."""
        return sum(pool.used_bytes + pool.tail_bytes for pool in self.pools.values())

    @property
    def free_bytes(self) -> int:
        held = sum(pool.free_bytes for pool in self.pools.values())
        return held + self.arena.num_free_slabs * self.arena.slab_bytes

    @property
    def total_bytes(self) -> int:
        return self.arena.total_bytes

    @property
    def live_rows(self) -> Rows:
        return np.flatnonzero(self._live)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def row_bytes(self, row: int) -> int:
        return int(self._rows_bytes(np.array([row]))[0])

    def _rows_bytes(self, rows: Rows) -> NDArray[np.int64]:
        held = np.zeros(len(rows), dtype=np.int64)
        for table in self.tables.values():
            held += table.pages_held(rows) * table.group.page_class.page_bytes
        return held

    def fits(self, pages: Mapping[PageClass, int]) -> bool:
        return self._slabs_needed(pages) <= self.arena.num_free_slabs

    def _slabs_needed(self, pages: Mapping[PageClass, int]) -> int:
        return sum(self.pools[c].slabs_needed(n) for c, n in pages.items())

    def slab_bytes_for(self, pages: Mapping[PageClass, int]) -> tuple[int, int]:
        """Bytes of the further slabs that pages need, and of the free slabs."""
        slab_bytes = self.arena.slab_bytes
        return self._slabs_needed(pages) * slab_bytes, self.arena.num_free_slabs * slab_bytes

    def shortage(self, pages: Mapping[PageClass, int]) -> str:
        """Return an error text for pages that do not fit: needed and free bytes in whole slabs."""
        needed_bytes, free_bytes = self.slab_bytes_for(pages)
        return (
            f"{needed_bytes:,} B more of KV memory are needed, {free_bytes:,} of "
            f"{self.arena.total_bytes:,} B are free"
        )

    # ---- start and release ---------------------------------------------------------------------

    def start(self, statistics: Collection[str] | None = None) -> int:
        """Start an empty sequence with private groups of these names; None: all."""
        private = {name for name, table in self.tables.items() if table.group.private}
        used = private if statistics is None else frozenset(statistics)
        if not used <= private:
            raise ConfigError(
                f"expected private groups of {sorted(private)}, got {sorted(used - private)}"
            )
        if not self._free_rows:
            raise OutOfPages(f"all {len(self.lengths)} rows are in use")
        row = self._free_rows.pop()
        for name in private:
            self.tables[name].active[row] = name in used
        self._live[row] = True
        self.lengths[row] = 0
        self.peak_bytes[row] = 0
        return row

    def statistics_of(self, row: int) -> frozenset[str]:
        return frozenset(n for n, t in self.tables.items() if t.group.private and t.active[row])

    def kept_with_prefix(self, names: Iterable[str], tokens_after: int = 0) -> frozenset[str]:
        """Return those of these private groups whose records are kept with a cached prefix.

        Args:
            names: of private groups.
            tokens_after: tokens that a sequence computes after the prefix before records are read.
                It needs no records that only depend on the newest queries, if these are later ones.
        """
        groups = (self.tables[name].group for name in names)
        return frozenset(
            g.name
            for g in groups
            if g.checkpointed
            and not (g.statistic and g.statistic.newest and g.statistic.newest <= tokens_after)
        )

    def release(self, rows: Rows | Sequence[int]) -> None:
        rows = np.asarray(rows, dtype=np.int64)
        if not self._live[rows].all() or len(np.unique(rows)) != len(rows):
            raise InvariantError(f"expected distinct rows in use, got {rows.tolist()}")
        self.listeners.released(rows)
        for table in self.tables.values():
            self.pools[table.group.page_class].release(table.clear(rows))
        self._live[rows] = False
        self._free_rows.extend(int(row) for row in rows)

    # ---- growth --------------------------------------------------------------------------------

    def pages_to_grow(self, rows: Rows, tokens: Counts) -> dict[PageClass, int]:
        return pages_by_class(self._demands(rows, tokens))

    def _demands(self, rows: Rows, tokens: Counts, layer: int | None = None) -> list[Demand]:
        demands = []
        for table in self.tables.values():
            by_lane = tokens[:, None]
            if layer is not None:
                by_lane = by_lane * table.is_lane_of(layer)
            demands.append(grow_demand(table, self.pools[table.group.page_class], rows, by_lane))
        return demands

    def can_grow(self, rows: Rows, tokens: Counts) -> bool:
        """Return whether `grow` would succeed; free pages outside windows first, as `grow` does."""
        self.drop_behind_windows(rows)
        return self.fits(self.pages_to_grow(rows, tokens))

    def grow(self, rows: Rows, tokens: Counts) -> None:
        """Allocate slots for `tokens[i]` more tokens of row `rows[i]` in every lane, all or none.

        A shared last page is copied first (copy on write): only pages with one owner are written.

        Raises:
            OutOfPages: the arena is full; nothing changed except that pages outside windows are
                freed.
        """
        self.drop_behind_windows(rows)
        self._require_one_chunk(rows, tokens)
        self._grow(rows, self._demands(rows, tokens), self.lengths)
        self.lengths[rows] += tokens

    def _require_one_chunk(self, rows: Rows, tokens: Counts) -> None:
        for group in self.layout.groups:
            if group.chunk and (self.lengths[rows] % group.chunk + tokens > group.chunk).any():
                raise InvariantError(
                    f"a step of {tokens.max()} tokens goes beyond the end of a chunk of "
                    f"{group.chunk} tokens: queries of one row would begin at different tokens"
                )

    def _grow(self, rows: Rows, demands: list[Demand], lengths: NDArray[np.int64]) -> None:
        needed = any(demand.num_pages for demand in demands)
        if needed:  # most decode steps write to pages that their rows have
            pages = pages_by_class(demands)
            if not self.fits(pages):
                raise OutOfPages(self.shortage(pages))
        for demand in demands:
            self._grow_table(demand, lengths)
        if needed:
            self.note_peaks(rows)

    def grow_layer(self, rows: Rows, tokens: Counts, layer: int) -> None:
        """Allocate the slots of one layer for tokens that `lengths` already counts.

        Raises:
            OutOfPages: see `grow`.
        """
        lengths = self.lengths.copy()
        lengths[rows] -= tokens
        self._grow(rows, self._demands(rows, tokens, layer), lengths)

    def try_grow(self, rows: Rows, tokens: Counts) -> bool:
        try:
            self.grow(rows, tokens)
        except OutOfPages:
            return False
        return True

    def _grow_table(self, demand: Demand, lengths: NDArray[np.int64]) -> None:
        table, rows, page_class = demand.table, demand.rows, demand.table.group.page_class
        if demand.shared.any():
            index, lane = np.nonzero(demand.shared)
            row = rows[index]
            column = table.num_slots[row, lane].astype(np.int64) // page_class.tokens
            self.privatise(table, row, lane, column)
            self.set_bounds(table, row, lane, column)
        if demand.new.any():
            added = self.pools[page_class].allocate(int(demand.new.sum()))
            row, lane, column = table.append(rows, demand.new, added)
            if table.group.ordered:  # new pages continue the row's logical positions
                first = lengths[row] - table.num_slots[row, lane]
                table.page_positions[row, lane, column] = first + column * page_class.tokens
            if table.group.private:
                self.store.clear_pages(page_class, added)
        table.num_slots[rows] = demand.slots

    def united(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return where the mask of any rank of the model is True.

        The ranks hold different heads and move different slots. A page that one rank copies is
        copied on all ranks, so that their page tables stay equal.
        """
        return mask if self._unite is None else self._unite(mask)

    def note_peaks(self, rows: Rows) -> None:
        """Update the peak bytes of `rows` and of the arena; call after allocating pages."""
        held = self._rows_bytes(rows)
        self.peak_bytes[rows] = np.maximum(self.peak_bytes[rows], held)
        used = sum(pool.used_bytes for pool in self.pools.values())
        in_use = used - self.listeners.idle_bytes()
        self.arena_peak_bytes = max(self.arena_peak_bytes, in_use)

    def privatise(self, table: LaneTable, row: Rows, lane: Rows, column: NDArray[np.int64]) -> None:
        """Copy shared pages and point these table entries at the copies (copy on write)."""
        pool = self.pools[table.group.page_class]
        old = table.pages[row, lane, column]
        new = pool.allocate(len(old))
        self.store.copy_pages(pool.page_class, old, new)
        table.replace(row, lane, column, new)
        pool.release(old)
        self.copied_bytes += len(old) * pool.page_class.page_bytes

    def set_bounds(
        self, table: LaneTable, row: Rows, lane: Rows, column: NDArray[np.int64]
    ) -> None:
        """Compute the bounds of these pages again, after a row lost or moved slots of them.

        Pages that others read keep bounds of all their slots.
        """
        page_class = table.group.page_class
        if not page_class.has_bounds:
            return
        held = table.num_slots[row, lane] - column * page_class.tokens
        held = np.minimum(held, page_class.tokens)
        pages = table.pages[row, lane, column]
        own = (held > 0) & (self.pools[page_class].ref_counts[pages] == 1)
        if own.any():
            self.store.set_bounds(page_class, pages[own], held[own].astype(np.int64))

    def set_last_bounds(self, table: LaneTable, rows: Rows) -> None:
        """Compute the bounds of the last pages of rows again, if these are not full."""
        if table.group.page_class.has_bounds:
            slots, tokens = table.num_slots[rows].astype(np.int64), table.group.page_class.tokens
            index, lane = np.nonzero(slots % tokens)
            self.set_bounds(table, rows[index], lane, slots[index, lane] // tokens)

    # ---- shrinking -----------------------------------------------------------------------------

    def drop_behind_windows(self, rows: Rows, layer: int | None = None) -> None:
        """Free pages whose tokens are outside the window or chunk of the next query.

        With a layer, only those of this layer.
        """
        for table in self.tables.values():
            if table.group.bounded:
                for pages in drop_behind_window(table, rows, self.lengths[rows], layer):
                    self.pools[table.group.page_class].release(pages)

    def truncate(self, row: int, length: int) -> None:
        """Drop the tokens from logical position `length` on; lanes must be in position order."""
        held = int(self.lengths[row])
        if not 0 <= length <= held:
            raise ConfigError(f"cannot truncate a row of {held} tokens to {length}")
        kept = {name: slots_below(t, row, held, length) for name, t in self.tables.items()}
        for name, table in self.tables.items():
            if table.group.follows is not None and table.active[row]:
                kept[name] = kept[table.group.follows]
            freed = cut_slots(table, np.array([row]), kept[name][None])
            self.pools[table.group.page_class].release(freed)
            self.set_last_bounds(table, np.array([row]))
        self.lengths[row] = length

    def drop_newest(self, row: int, tokens: int) -> None:
        """Drop the newest tokens of a row, which are the last slots of its lanes.

        Only for tokens after the last eviction, and without groups that keep the newest tokens in
        full precision. Fixed records stay as they are.
        """
        for table in self.tables.values():
            if table.active[row] and table.group.records is None:
                freed = cut_slots(table, np.array([row]), table.num_slots[[row]] - np.int32(tokens))
                self.pools[table.group.page_class].release(freed)
                self.set_last_bounds(table, np.array([row]))
        self.lengths[row] -= tokens

    def truncate_layer(self, row: int, tokens: int, layer: int) -> None:
        """Drop the newest tokens of a layer that has evicted none; `lengths` does not change."""
        for table in self.tables.values():
            dropped = np.where(table.is_lane_of(layer), np.int32(tokens), np.int32(0))
            if table.group.records is None and table.active[row] and dropped.any():
                freed = cut_slots(table, np.array([row]), table.num_slots[[row]] - dropped)
                self.pools[table.group.page_class].release(freed)
                self.set_last_bounds(table, np.array([row]))

    # ---- checks --------------------------------------------------------------------------------

    def check(self) -> None:
        """Every byte is accounted for and all reference counts are correct."""
        self.arena.check()
        if sorted(self._free_rows) != np.flatnonzero(~self._live).tolist():
            raise InvariantError("a row is both free and in use, or is twice in the free list")
        for pool in self.pools.values():
            pool.check()
            self._check_references(pool)
        slabs = [slab for pool in self.pools.values() for slab in pool.held_slabs]
        if len(slabs) != len(set(slabs)) or self.arena.free_slabs & set(slabs):
            raise InvariantError("a slab serves two page classes, or is held and free at once")
        for table in self.tables.values():
            table.check()
            self._check_slots(table)
        if self.used_bytes + self.free_bytes != self.total_bytes:
            raise InvariantError(
                f"used {self.used_bytes:,} + free {self.free_bytes:,} != {self.total_bytes:,} B"
            )

    def _check_references(self, pool: PagePool) -> None:
        """Compare reference counts with page tables and cached references."""
        expected = np.zeros_like(pool.ref_counts)
        own = {n: t for n, t in self.tables.items() if t.group.page_class == pool.page_class}
        for table in own.values():
            np.add.at(expected, table.pages[table.pages >= 0], 1)
        for cached_reference in self.cached_references.values():
            for name in own:
                np.add.at(expected, cached_reference.get(name, NO_PAGES).reshape(-1), 1)
        if (expected != pool.ref_counts).any():
            wrong = np.flatnonzero(expected != pool.ref_counts)[:5]
            raise InvariantError(
                f"reference counts of pages {wrong} differ from the references in tables and caches"
            )

    def _check_slots(self, table: LaneTable) -> None:
        group, slots = table.group, table.num_slots
        used = self._live & table.active
        if slots[~self._live].any():
            raise InvariantError(f"group {group.name!r}: a closed row still has slots")
        if slots[~used].any():
            raise InvariantError(f"group {group.name!r}: slots of a row that does not use it")
        if group.follows is not None:
            if (slots != self.tables[group.follows].num_slots)[used].any():
                raise InvariantError(
                    f"group {group.name!r}: slot counts differ from group {group.follows!r}"
                )
        elif group.records is not None:
            records = np.where(used & (self.lengths > 0), group.records, 0)
            if (slots != records[:, None]).any():
                raise InvariantError(
                    f"group {group.name!r}: expected {group.records} records in every lane"
                )
        elif (slots > self.lengths[:, None]).any():
            raise InvariantError(f"group {group.name!r}: more slots than tokens")


def shared_groups(memory: KVMemory) -> list[LaneGroup]:
    """Return the groups whose pages sequences can share, in the order of the layout."""
    return [group for group in memory.layout.groups if not group.private]
