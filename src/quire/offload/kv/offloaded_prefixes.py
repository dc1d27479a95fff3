"""Sequences with offloaded first pages; the arena holds staging pages for two layers of them.

    layer     0       1       2       3            pages of a lane: offloaded | resident
    table   a b|p q  c d|r s  a b|t u  c d|v w     a b c d: staging, two slots used in turn
    CPU     A0 B0    A1 B1    A2 B2    A3 B3       offloaded bytes, one segment for each layer

With one staging slot, which takes less memory, the copy of a layer starts after the attention of
the previous layer.

Every layer has a complete page table. The entries of the offloaded prefix point to staging pages,
which all layers of a slot share. The bytes of a layer are prefetched into them before its attention
(see `prefetch`). So codecs, backends and statistics read them as any other pages. Of the n layers
of a prefix the arena stores two. The pages after the prefix are resident; new tokens are written
there.

Pages that several sequences share (outputs of one prompt, beams, a common prefix) are offloaded
once, and the sequences share their staging. Such sequences must run in one batch. Cached prefixes
refer to offloaded pages too: a sequence that starts from them gets staging of its own.

An eviction cuts one layer after the other, inside the staging pages of the layer. The first
retained pages stay offloaded.

Offloaded pages and activations of swapped sequences stay in offload memory:

    preempted   resident pages -> swap space     offloaded pages, activations: unchanged
    resumed     swap space -> new pages          staging is allocated again

This module does the bookkeeping; a `PageBytes` does the copies.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.errors import HostMemoryFull, OutOfPages
from quire.kv.compaction import after_first, move_slots
from quire.kv.memory import KVMemory, MemoryListener
from quire.kv.pages import PageNumbers
from quire.kv.repacking import repack
from quire.kv.slot_moves import Mask, SlotMoves
from quire.kv.tables import LaneTable, Rows
from quire.layout.layout import SLOTS, can_be_offloaded
from quire.layout.pages import LaneGroup, PageClass
from quire.offload.kv.staging import (
    StagingUse,
    allocate_staging,
    entries_of,
    retain_layers,
    stage,
    staged_pages,
)
from quire.offload.recompute.activation_allocator import ActivationAllocator, Stored
from quire.offload.swap.host_pool import HostPool, HostSpace, page_starts


@dataclass(slots=True, eq=False)
class HostPages:
    """Pages of one group in offload memory.

    Attributes:
        layers: bytes of each layer of the group, lane by lane.
        columns: pages of a lane.
        positions: [lanes, slots] logical positions of the slots; None if lanes are in order.
        page_positions: [lanes, columns] logical position of the first slot of each page.
        users: sequences and cached prefixes that refer to them.
    """

    layers: list[HostSpace]
    columns: int
    positions: NDArray[np.int32] | None
    page_positions: PageNumbers
    users: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class OffloadedPageGroup:
    """Neighbouring offloaded pages of one group of a sequence.

    Attributes:
        group: name of the group.
        first: column of the first page.
        staging: [slots, lanes of a layer, pages of a lane] pages of the arena.
        host: the pages in offload memory.
        offset: first of their columns that the sequence uses.
    """

    group: str
    first: int
    staging: PageNumbers
    host: HostPages
    offset: int = 0

    @property
    def columns(self) -> int:
        """Number of pages of a lane."""
        return int(self.staging.shape[2])

    @property
    def slots(self) -> int:
        """Number of layers whose pages the staging holds at a time."""
        return len(self.staging)

    def positions(self, page_tokens: int) -> NDArray[np.int32] | None:
        """Logical positions [lanes, slots] of its slots; None if lanes are in order."""
        if self.host.positions is None:
            return None
        start = self.offset * page_tokens
        return self.host.positions[:, start : start + self.columns * page_tokens]

    def place(self, lane: int, column: int) -> int:
        """Index of a page of a lane of a layer among the pages of the layer in `host`."""
        return lane * self.host.columns + self.offset + column - self.first


ReadPositions = Callable[[PageClass, PageNumbers], NDArray[np.int32]]
SaveBounds = Callable[[PageClass, PageNumbers, NDArray[np.int64]], None]


class HostPageStore:
    """Saves pages to the offload memory and loads them into staging.

    Args:
        memory: holds the pages.
        pool: host pool of the offloaded bytes; no other object uses it.
        read_positions: reads logical positions of the slots of pages, for a class that stores them.
        save_bounds: keeps the bounds of pages that are saved to these bytes; None: there are none.
    """

    def __init__(
        self,
        memory: KVMemory,
        pool: HostPool,
        read_positions: ReadPositions | None,
        save_bounds: SaveBounds | None = None,
    ) -> None:
        self._memory, self._pool, self._read_positions = memory, pool, read_positions
        self._save_bounds = save_bounds

    def reserve(self, page_class: PageClass, pages: int) -> HostSpace:
        """Reserve offload memory; cached prefixes that no sequence uses are evicted for it."""
        while True:
            try:
                return self._pool.reserve({page_class: pages})
            except HostMemoryFull:
                if not self._memory.listeners.free_offloaded():
                    raise

    def reserve_layers(self, group: LaneGroup, columns: int) -> list[HostSpace]:
        """Reserve offload memory for pages of every layer, all or none."""
        spaces = list[HostSpace]()
        try:
            for _ in group.layers if columns else ():
                spaces.append(self.reserve(group.page_class, columns * group.lanes_per_layer))
        except HostMemoryFull:
            for space in spaces:
                self._pool.release(space)
            raise
        return spaces

    def save(
        self, spaces: Sequence[HostSpace], page_class: PageClass, pages: PageNumbers
    ) -> NDArray[np.int32] | None:
        """Save pages [lanes, columns] of layers; return the positions of slots if pages store them.

        Returns:
            [lanes, slots], or None if lanes are in order.
        """
        for space, of_layer in zip(spaces, pages.reshape(len(spaces), -1), strict=True):
            self._pool.save(space, page_class, of_layer)
            if self._save_bounds is not None:
                self._save_bounds(page_class, of_layer, page_starts(space, page_class))
        self._pool.copies.wait()
        if not page_class.positions or self._read_positions is None:
            return None
        return self._read_positions(page_class, pages.reshape(-1)).reshape(len(pages), -1)

    def load(self, table: LaneTable, row: int, layer: int, held: OffloadedPageGroup) -> None:
        """Load the offloaded pages of a layer of a row into their staging."""
        per_layer, stop = table.group.lanes_per_layer, held.first + held.columns
        for lane in range(per_layer):
            pages = table.pages[row, layer * per_layer + lane, held.first : stop].copy()
            first = held.place(lane, held.first)
            self._pool.load(held.host.layers[layer], table.group.page_class, pages, first)
        self._pool.copies.wait()

    def leave(self, used: Iterable[HostPages]) -> None:
        """Free offloaded bytes, unless other sequences or cached prefixes use them."""
        for host in used:
            host.users -= 1
            if not host.users:
                for space in host.layers:
                    self._pool.release(space)


@dataclass(frozen=True, slots=True)
class _Movable:
    """Pages of one group of a sequence that can be offloaded.

    Attributes:
        table: page table of the group.
        first: column of the first page.
        pages: [lanes, columns] the pages.
        rows: sequences that share all of them; they are offloaded together.
        cached: cached references to some of them, and their first columns.
        num_freed: pages to which nothing else refers.
    """

    table: LaneTable
    first: int
    pages: PageNumbers
    rows: list[int]
    cached: dict[int, int]
    num_freed: int

    @property
    def num_staged(self) -> int:
        """Staging pages that they need."""
        return staged_pages(self.table, self.pages.shape[1])


class OffloadedPrefixes(MemoryListener):
    """The offloaded prefixes of all sequences of a memory; implements `OffloadedRows`.

    Args:
        memory: holds the sequences.
        pool: host pool of the offloaded bytes; no other object uses it.
        read_positions: reads logical positions of the slots of pages, for a class that stores them.
        activations: stored activations of the sequences; None if none are stored.
        save_bounds: as for `HostPageStore`.

    Attributes:
        pool: see above.
        use: the step that reads the staging pages.
    """

    def __init__(
        self,
        memory: KVMemory,
        pool: HostPool,
        read_positions: ReadPositions | None = None,
        activations: ActivationAllocator | None = None,
        save_bounds: SaveBounds | None = None,
    ) -> None:
        self._memory, self.pool, self.use = memory, pool, StagingUse()
        self.store = HostPageStore(memory, pool, read_positions, save_bounds)
        self._activations = activations
        self._page_groups: dict[int, list[OffloadedPageGroup]] = {}
        # of cached references: by group, the pages in offload memory, first column, columns
        self._cached: dict[int, dict[str, tuple[HostPages, int, int]]] = {}
        memory.offloaded = self
        memory.listeners.subscribe(self)

    @property
    def rows(self) -> frozenset[int]:
        """Rows of the sequences with an offloaded prefix."""
        return frozenset(self._page_groups)

    def page_groups(self, row: int, group: str | None = None) -> Sequence[OffloadedPageGroup]:
        """Offloaded page groups of a sequence, of one lane group or of all."""
        held = self._page_groups.get(row, ())
        return [each for each in held if group in (None, each.group)]

    def row_bytes(self, row: int) -> int:
        """Offloaded bytes that a sequence uses."""
        groups = [(held, self._memory.tables[held.group].group) for held in self.page_groups(row)]
        return sum(h.columns * g.num_lanes * g.page_class.page_bytes for h, g in groups)

    def batch_key(self, row: int) -> int | None:
        """Equal for sequences that share staging pages, which must run in one batch."""
        page_groups = self._page_groups.get(row)
        return id(page_groups[0]) if page_groups else None

    def positions(self, row: int, group: str, index: int, slots: range) -> NDArray[np.int64]:
        """Logical positions of slots of an offloaded prefix, in the first lane of a layer.

        Args:
            row: the sequence.
            group: name of the layer's lane group.
            index: index of the layer inside its group.
            slots: slots of the offloaded prefix.
        """
        table, found = self._memory.tables[group], list[NDArray[np.int32]]()
        lane, tokens = index * table.group.lanes_per_layer, table.group.page_class.tokens
        for held in self.page_groups(row, group):
            of_lanes = held.positions(tokens)
            if of_lanes is None:
                return np.array(slots, dtype=np.int64)
            found.append(of_lanes[lane])
        return np.concatenate(found)[slots.start : slots.stop].astype(np.int64)

    # ---- offload -------------------------------------------------------------------------------

    def gain_bytes(self, row: int, slots: int, rows: Collection[int] | None = None) -> int:
        """Bytes of the arena that offloading the slots before `slots` would free.

        Args:
            row: the sequence.
            slots: as for `offload`.
            rows: sequences whose pages may be offloaded; None: all.
        """
        return sum(
            (found.num_freed - found.num_staged) * found.table.group.page_class.page_bytes
            for found in self._movable(row, slots, rows)
        )

    def offload(self, row: int, slots: int, rows: Collection[int] | None = None) -> int:
        """Offload the whole pages before slot `slots`; return the bytes moved.

        Pages that other sequences or cached prefixes share are offloaded for all of them. Groups
        with no more layers than staging slots, and groups with a window, are not offloaded: they
        would free nothing.

        Args:
            row: the sequence.
            slots: number of its first slots.
            rows: sequences whose pages may be offloaded; None: all.

        Raises:
            OutOfPages: too few pages to stage a group; groups moved before it stay offloaded.
            HostMemoryFull: the pool cannot hold a group; groups moved before it stay offloaded.
        """
        movable = list(self._movable(row, slots, rows))
        self.use.finalize()
        return sum(map(self._offload, movable))

    def movable_pages(self, row: int, slots: int) -> Iterator[tuple[LaneTable, int, int]]:
        """Each table with pages to offload, its first page to offload, and the pages of a lane."""
        for table in self._memory.tables.values():
            group = table.group
            if not can_be_offloaded(group):
                continue
            first = int(table.staged[row])
            columns = min(slots, int(table.num_slots[row].min())) // group.page_class.tokens - first
            if columns > 0:
                yield table, first, columns

    def _movable(self, row: int, slots: int, allowed: Collection[int] | None) -> Iterator[_Movable]:
        for table, first, columns in self.movable_pages(row, slots):
            pages, rows = table.pages[row, :, first : first + columns], [row]
            counts = self._memory.pools[table.group.page_class].ref_counts
            cached: dict[int, int] = {}
            if (counts[pages] > 1).any():
                live = self._memory.live_rows
                live = live[table.staged[live] == first]
                shared = (table.pages[live, :, first : first + columns] == pages).all(axis=1)
                rows = live[shared[:, 0]].tolist()
                if allowed is not None and not set(rows) <= set(allowed):
                    continue
                differ = (shared != shared[:, :1]).any(axis=0)
                pages = pages[:, : int(np.argmax(differ)) if differ.any() else columns]
                cached = self._references(table.group.name, pages, len(counts))
            others = counts[pages] - len(rows)
            for key, column in cached.items():
                width = self._memory.cached_references[key][table.group.name].shape[1]
                others[:, column : column + width] -= 1
            freed = int(np.count_nonzero(others <= 0))
            yield _Movable(table, first, pages.copy(), rows, cached, freed)

    def _references(self, group: str, pages: PageNumbers, num_pages: int) -> dict[int, int]:
        """Cached references to some of these pages [lanes, columns], and their first columns."""
        found, place = dict[int, int](), np.full(num_pages, -1)
        place[pages[0]] = np.arange(pages.shape[1])
        for key, by_group in self._memory.cached_references.items():
            named = by_group.get(group)
            column = -1 if named is None or not named.size else int(place[named[0, 0]])
            if named is None or column < 0:
                continue
            if np.array_equal(named, pages[:, column : column + named.shape[1]]):
                found[key] = column
        return found

    def _offload(self, movable: _Movable) -> int:
        memory, table, rows, first = self._memory, movable.table, movable.rows, movable.first
        group, old, columns = table.group, movable.pages, movable.pages.shape[1]
        pool, staged = memory.pools[group.page_class], movable.num_staged
        if movable.num_freed < staged and not memory.fits({group.page_class: staged}):
            raise OutOfPages(f"{staged} pages needed to stage {columns} of each lane")
        spaces = self.store.reserve_layers(group, columns)
        positions = self.store.save(spaces, group.page_class, old)
        memory.listeners.offloading(group.name, list(movable.cached))
        users = len(rows) + len(movable.cached)
        page_positions = table.page_positions[rows[0], :, first : first + columns].copy()
        host = HostPages(spaces, columns, positions, page_positions, users)
        for key, column in movable.cached.items():
            pages = memory.cached_references[key].pop(group.name)
            self._cached.setdefault(key, {})[group.name] = host, column, pages.shape[1]
            pool.release(pages.reshape(-1))
        for _ in rows:
            pool.release(old.reshape(-1))
        page_group = OffloadedPageGroup(
            group.name, first, stage(memory, table, rows, first, columns, SLOTS), host
        )
        for holder in rows:
            table.staged[holder] = first + columns
            table.repeated[holder] += old.size - page_group.staging.size
            self._page_groups.setdefault(holder, []).append(page_group)
        return old.size * group.page_class.page_bytes

    # ---- sequences and cached prefixes that share offloaded pages ------------------------------

    def forked(self, parent: int, child: int) -> None:
        """Let a fork share the offloaded pages of its parent."""
        for page_group in self._page_groups.get(parent, ()):
            page_group.host.users += 1
            self._page_groups.setdefault(child, []).append(page_group)

    def released(self, rows: Rows) -> None:
        """Free the offloaded pages of sequences."""
        for row in self._page_groups.keys() & set(rows.tolist()):
            self.use.finalize()
            self.store.leave(each.host for each in self._page_groups.pop(row))

    def release_references(self, keys: Sequence[int]) -> None:
        """Free the offloaded pages of cached references."""
        for key in keys:
            self.store.leave(host for host, _, _ in self._cached.pop(key, {}).values())

    def pages_to_start(self, keys: Sequence[int]) -> dict[PageClass, int]:
        """Pages of each class that `start` allocates."""
        needed: dict[PageClass, int] = {}
        for key in keys:
            for name, (_, _, columns) in self._cached.get(key, {}).items():
                table = self._memory.tables[name]
                page_class = table.group.page_class
                needed[page_class] = needed.get(page_class, 0) + staged_pages(table, columns)
        return needed

    def start(self, row: int, keys: Sequence[int]) -> None:
        """Append the offloaded pages of consecutive cached references to an empty row."""
        found = [each for key in keys for each in self._cached.get(key, {}).items()]
        for name in dict.fromkeys(name for name, _ in found):
            runs = list[tuple[HostPages, int, int]]()
            for host, offset, columns in (each for own, each in found if own == name):
                if runs and runs[-1][0] is host and sum(runs[-1][1:]) == offset:
                    offset, columns = runs[-1][1], runs.pop()[2] + columns
                runs.append((host, offset, columns))
            for host, offset, columns in runs:
                host.users += 1
                self.append([row], name, host, offset, columns, SLOTS)

    def append(
        self, rows: Sequence[int], name: str, host: HostPages, offset: int, columns: int, slots: int
    ) -> None:
        """Append offloaded pages, with staging, to rows that hold the pages before them."""
        table = self._memory.tables[name]
        first, tokens = int(table.staged[rows[0]]), table.group.page_class.tokens
        staging = allocate_staging(self._memory, table, len(rows), columns, slots)
        page_group = OffloadedPageGroup(name, first, staging, host, offset)
        entries = entries_of(table, staging)
        counts = np.full((1, len(entries)), columns, dtype=np.int32)
        for row in rows:
            place = table.append(np.array([row]), counts, entries.reshape(-1))
            held = host.page_positions[:, offset : offset + columns]
            table.page_positions[place] = held.reshape(-1)
            table.num_slots[row] += columns * tokens
            table.staged[row] += columns
            table.repeated[row] += entries.size - staging.size
            self._page_groups.setdefault(row, []).append(page_group)

    # ---- sequences outside of the arena --------------------------------------------------------

    def detach(self, rows: Sequence[int]) -> "DetachedRows | None":
        """Take over the offloaded pages of sequences that leave the arena; None if there are none.

        The bytes stay offloaded. The sequences are released next.
        """
        if not self.rows.intersection(rows):
            return None
        self.use.finalize()
        page_groups = [self._page_groups.pop(row, []) for row in rows]
        stored = [
            None if self._activations is None else self._activations.detach(row) for row in rows
        ]
        return DetachedRows(self, page_groups, self._activations, stored)

    # ---- steps and evictions -------------------------------------------------------------------

    def read(self, row: int, group: str, layers: range) -> None:
        """Load the offloaded pages of layers (at most one) into staging, until the next read."""
        if self._memory.tables[group].staged[row]:
            assert len(layers) == 1, "layers share staging pages"
            self.use.clear()
            for held in self.page_groups(row, group):
                self.store.load(self._memory.tables[group], row, layers.start, held)

    def compact(
        self, row: int, group: str, moves: SlotMoves, retained: Mask, offloaded: int
    ) -> None:
        """Evict slots layer by layer, inside the staging pages of the layer.

            load to staging | move slots | save the pages that stay offloaded | copy or free others

        In all other layers, the bytes of these staging pages are in offload memory.
        """
        self.use.clear()
        memory, table, old = self._memory, self._memory.tables[group], self.page_groups(row, group)
        pool, per_layer = memory.pools[table.group.page_class], table.group.lanes_per_layer
        spaces, in_place = self._spaces_of(table.group, old, offloaded)
        kept, positions = list[PageNumbers](), list[NDArray[np.int32]]()
        before, staged = table.pages[row].copy(), int(table.staged[row])
        columns, stays = retained.shape[1], after_first(retained, offloaded)
        named = [before[lane, :columns][own] for lane, own in enumerate(retained)]
        for layer in range(len(table.group.layers)):
            lanes = slice(layer * per_layer, (layer + 1) * per_layer)
            for held in old:
                self.store.load(table, row, layer, held)
            own = (moves.lane >= lanes.start) & (moves.lane < lanes.stop)
            moved = SlotMoves(moves.lane[own], moves.source[own], moves.target[own])
            move_slots(memory, table, row, moved)
            first = np.stack([pages[:offloaded] for pages in named[lanes]])
            if in_place:
                for held in old:
                    self.pool.release(held.host.layers[layer])
            if offloaded:
                if pool.page_class.has_bounds:
                    full = np.full(first.size, pool.page_class.tokens)
                    memory.store.set_bounds(pool.page_class, first.reshape(-1), full)
                if in_place:
                    spaces.append(self.store.reserve(pool.page_class, first.size))
                found = self.store.save(spaces[layer : layer + 1], pool.page_class, first)
                positions += [] if found is None else [found]
            resident = before[lanes, staged:columns]
            pool.release(resident[(resident >= 0) & ~stays[lanes, staged:]])
            for pages, of_lane in zip(named[lanes], stays[lanes, :staged], strict=True):
                rest, num_copied = pages[offloaded:], int(of_lane.sum())
                copies = pool.allocate(num_copied)
                memory.store.copy_pages(pool.page_class, rest[:num_copied], copies)
                kept.append(np.concatenate([copies, rest[num_copied:]]))
        slots = min(held.slots for held in old)
        staging = np.concatenate([held.staging[:slots] for held in old], axis=2)[:, :, :offloaded]
        retain_layers(pool, table, staging)
        pool.release(before[:, :staged].reshape(-1))
        held_positions = table.page_positions[row, :, :columns]
        page_positions = [at[own] for at, own in zip(held_positions, retained, strict=True)]
        self._drop(row, group, free=not in_place)
        table.clear(np.array([row]))
        entries = entries_of(table, staging)
        counts = np.array([[offloaded + len(rest) for rest in kept]], dtype=np.int32)
        pages = [part for both in zip(entries, kept, strict=True) for part in both]
        place = table.append(np.array([row]), counts, np.concatenate(pages))
        table.page_positions[place] = np.concatenate(page_positions)
        if offloaded:
            host = HostPages(
                spaces,
                offloaded,
                np.concatenate(positions) if positions else None,
                np.stack([at[:offloaded] for at in page_positions]),
            )
            table.staged[row], table.repeated[row] = offloaded, entries.size - staging.size
            new = OffloadedPageGroup(group, 0, staging, host)
            self._page_groups.setdefault(row, []).append(new)

    def _spaces_of(
        self, group: LaneGroup, old: Sequence[OffloadedPageGroup], columns: int
    ) -> tuple[list[HostSpace], bool]:
        """Offload memory for pages of all layers; none if that of the old pages is used again.

        Raises:
            OutOfPages: the old pages are shared, and too little is free; nothing was changed.
        """
        if any(held.host.users > 1 for held in old):
            try:
                return self.store.reserve_layers(group, columns), False
            except HostMemoryFull as error:  # unused cached prefixes have been evicted
                if any(held.host.users > 1 for held in old):
                    raise OutOfPages("no offload memory for pages that others share") from error
        return [], True

    def _drop(self, row: int, group: str, *, free: bool) -> None:
        """Remove the page groups of a group of a sequence; free those that nothing else uses."""
        dropped = self.page_groups(row, group)
        left = [held for held in self._page_groups.pop(row) if held.group != group]
        if left:
            self._page_groups[row] = left
        self.store.leave(held.host for held in dropped if free)

    # ---- staging -------------------------------------------------------------------------------

    def restage(self, row: int, slots: int = SLOTS, *, pack: bool = False) -> int:
        """Allocate the staging of a sequence again; return the bytes of the arena that it frees.

        Sequences that share offloaded pages are staged again together.

        Args:
            row: the sequence.
            slots: most layers to stage at a time. With one, the copy of a layer starts after the
                attention of the previous layer.
            pack: whether to move all pages of the sequences into as few slabs as can hold them.
        """
        self.use.finalize()
        memory, before = self._memory, self._memory.row_bytes(row)
        # rows and page groups that are staged again together
        rows, page_groups = [row], list[OffloadedPageGroup]()
        for member in rows:
            for page_group in self.page_groups(member):
                if not any(page_group is found for found in page_groups):
                    page_groups.append(page_group)
                    rows += [other for other in self.holders(page_group) if other not in rows]
        for old in page_groups:
            table, columns = memory.tables[old.group], slice(old.first, old.first + old.columns)
            for holder in self.holders(old):
                memory.pools[table.group.page_class].release(
                    table.pages[holder, :, columns].ravel()
                )
        if pack:
            repack(memory, *rows)
        for old in page_groups:
            table, holders = memory.tables[old.group], self.holders(old)
            fewer = min(slots, old.slots)
            new = replace(old, staging=stage(memory, table, holders, old.first, old.columns, fewer))
            for holder in holders:
                table.repeated[holder] += old.staging.size - new.staging.size
                held = self._page_groups[holder]
                self._page_groups[holder] = [new if other is old else other for other in held]
        return before - memory.row_bytes(row)

    def holders(self, page_group: OffloadedPageGroup) -> list[int]:
        """Rows whose entries point to the staging of a page group."""
        lists = self._page_groups.items()
        return [row for row, held in lists if any(other is page_group for other in held)]


class DetachedRows:
    """Offloaded pages of sequences that were swapped out together.

    Args:
        prefixes: offloaded prefixes of the memory.
        page_groups: offloaded page groups of each sequence.
        activations: allocator of stored activations; None if none are stored.
        stored: detached activations of each sequence.

    Attributes:
        staging: pages of each class that `attach` allocates.
    """

    def __init__(
        self,
        prefixes: OffloadedPrefixes,
        page_groups: Sequence[list[OffloadedPageGroup]],
        activations: ActivationAllocator | None,
        stored: Sequence[Stored | None],
    ) -> None:
        self._prefixes, self._page_groups = prefixes, page_groups
        self._activations, self._stored = activations, stored
        self._distinct = list(dict.fromkeys(itertools.chain(*page_groups)))
        staging: dict[PageClass, int] = {}
        for held in self._distinct:
            [page_class] = held.host.layers[0].extents
            staging[page_class] = staging.get(page_class, 0) + held.staging.size
        self.staging: Mapping[PageClass, int] = staging

    def attach(self, rows: Sequence[int]) -> None:
        """Append the pages to the empty rows of the resumed sequences, with new staging."""
        for held in self._distinct:
            own = zip(rows, self._page_groups, strict=True)
            sharing = [row for row, groups in own if held in groups]
            self._prefixes.append(
                sharing, held.group, held.host, held.offset, held.columns, held.slots
            )
        for row, stored in zip(rows, self._stored, strict=True):
            if self._activations is not None and stored is not None:
                self._activations.attach(row, stored)

    def discard(self) -> None:
        """Free the bytes of sequences that will not resume."""
        self._prefixes.store.leave(held.host for held in itertools.chain(*self._page_groups))
        for stored in self._stored:
            if self._activations is not None and stored is not None:
                self._activations.discard(stored)
