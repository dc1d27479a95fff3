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
once, and the sequences share their staging. Such sequences must run in one batch.

Offloaded pages and activations of swapped sequences stay in offload memory:

    preempted   resident pages -> swap space     offloaded pages, activations: unchanged
    resumed     swap space -> new pages          staging is allocated again

This module does the bookkeeping; a `PageBytes` does the copies.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.errors import OutOfPages
from quire.kv.listeners import MemoryListener
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.repacking import repack
from quire.kv.swap import OffloadedPages
from quire.kv.tables import LaneTable, Rows
from quire.layout.layout import SLOTS, can_be_offloaded
from quire.layout.pages import PageClass
from quire.offload.kv.staging import (
    StagingUse,
    allocate_staging,
    entries_of,
    set_pages,
    stage,
    staged_pages,
)
from quire.offload.recompute.activation_allocator import ActivationAllocator, Stored
from quire.offload.swap.host_pool import HostPool, HostSpace


@dataclass(frozen=True, slots=True)
class OffloadedPageGroup:
    """Pages of one group of one sequence that were offloaded together.

    Attributes:
        group: name of the group.
        first: column of the first page.
        layers: location of the pages' bytes for each layer of the group, lane by lane.
        staging: [slots, lanes of a layer, pages of a lane] pages of the arena.
        positions: [lanes, slots] logical positions of the slots; None if lanes are in order.
        page_positions: [lanes, pages of a lane] logical position of the first slot of each page.
    """

    group: str
    first: int
    layers: Sequence[HostSpace]
    staging: PageNumbers
    positions: NDArray[np.int32] | None = None
    page_positions: PageNumbers | None = None

    @property
    def columns(self) -> int:
        """Number of pages of a lane."""
        return int(self.staging.shape[2])

    @property
    def slots(self) -> int:
        """Number of layers whose pages the staging holds at a time."""
        return len(self.staging)


ReadPositions = Callable[[PageClass, PageNumbers], NDArray[np.int32]]


class OffloadedPrefixes(MemoryListener):
    """The offloaded prefixes of all sequences of a memory.

    Args:
        memory: holds the sequences.
        pool: host pool of the offloaded bytes; no other object uses it.
        read_positions: reads logical positions of the slots of pages, for a class that stores them.

    Attributes:
        pool: see above.
        use: the step that reads the staging pages.
    """

    def __init__(
        self, memory: KVMemory, pool: HostPool, read_positions: ReadPositions | None = None
    ) -> None:
        self._memory, self.pool = memory, pool
        self._page_groups: dict[int, list[OffloadedPageGroup]] = {}
        self._detached: list[list[OffloadedPageGroup]] = []  # of sequences outside of the arena
        self.use = StagingUse()
        self._read_positions = read_positions
        memory.listeners.subscribe(self)

    @property
    def rows(self) -> frozenset[int]:
        """Rows of the sequences with an offloaded prefix."""
        return frozenset(self._page_groups)

    @property
    def all_page_groups(self) -> list[OffloadedPageGroup]:
        """Page groups of all sequences in the arena."""
        return list(itertools.chain.from_iterable(self._page_groups.values()))

    def page_groups(self, row: int) -> Sequence[OffloadedPageGroup]:
        """Offloaded page groups of a sequence; empty if it has none."""
        return self._page_groups.get(row, ())

    def row_bytes(self, row: int) -> int:
        """Offloaded bytes of a sequence."""
        return sum(map(self._bytes, self.page_groups(row)))

    def batch_key(self, row: int) -> int | None:
        """Equal for sequences that share offloaded pages, which must run in one batch."""
        page_groups = self.page_groups(row)
        return id(page_groups[0].layers) if page_groups else None

    def sharers(self, row: int, slots: int) -> frozenset[int]:
        """Rows whose pages `offload` moves: those that share the next pages of a sequence."""
        found = {row}
        for table, first, columns in self.movable_pages(row, slots):
            found.update(self._sharers(table, row, first, columns)[0])
        return frozenset(found)

    def gain_bytes(self, row: int, slots: int, holders: int = 0) -> int:
        """Bytes of the arena that offloading the slots before `slots` would free.

        Args:
            row: the sequence.
            slots: as for `offload`.
            holders: further references of a page that counts as freed: 1 if a cached prefix, which
                can be evicted, may reference it, else 0.
        """
        gained = 0
        for table, first, columns in self.movable_pages(row, slots):
            rows, columns = self._sharers(table, row, first, columns)
            own = self._own(table, row, first, columns, len(rows) + holders)
            staged = staged_pages(table, columns)
            gained += (own - staged) * table.group.page_class.page_bytes
        return gained

    def offload(self, row: int, slots: int) -> int:
        """Offload the whole pages before slot `slots`; return the bytes moved.

        Pages that other sequences share are offloaded for all of them. Groups with no more layers
        than staging slots, and groups with a window, are not offloaded: they would free nothing.

        Raises:
            OutOfPages: too few pages to stage a group; groups moved before it stay offloaded.
            HostMemoryFull: the pool cannot hold a group; groups moved before it stay offloaded.
        """
        movable = list(self.movable_pages(row, slots))
        self.use.finalize()
        moved = [self._offload(table, row, first, columns) for table, first, columns in movable]
        return sum(map(self._bytes, moved))

    def forked(self, parent: int, child: int) -> None:
        """Let a fork share the offloaded pages of its parent."""
        if parent in self._page_groups:
            self._page_groups[child] = list(self._page_groups[parent])

    def released(self, rows: Rows) -> None:
        """Free the offloaded pages of sequences."""
        freed = self._page_groups.keys() & set(rows.tolist())
        if freed:
            self.use.finalize()
        for row in freed:
            self._free(row)

    def _free(self, row: int) -> None:
        """Free the offloaded bytes of a sequence that no other sequence shares."""
        for page_group in self._page_groups.pop(row, ()):
            table = self._memory.tables[page_group.group]
            table.staged[row] = table.repeated[row] = 0
            self._free_unheld(page_group)

    def is_shared(self, row: int) -> bool:
        """Whether other sequences share offloaded pages of a sequence."""
        return len(self._connected(row)[0]) > 1

    def forget(self, row: int, group: str) -> None:
        """Free the offloaded bytes of a group of a sequence; its entries name other pages now."""
        table, held = self._memory.tables[group], self._page_groups.pop(row, [])
        left = [page_group for page_group in held if page_group.group != group]
        if left:
            self._page_groups[row] = left
        table.staged[row] = table.repeated[row] = 0
        for page_group in held:
            if page_group.group == group:
                self._free_unheld(page_group)

    def _free_unheld(self, page_group: OffloadedPageGroup) -> None:
        """Free the offloaded bytes of a page group, unless a sequence still uses them."""
        lists = (*self._page_groups.values(), *self._detached)
        if not any(held.layers is page_group.layers for held in itertools.chain(*lists)):
            for space in page_group.layers:
                self.pool.release(space)

    # ---- sequences outside of the arena --------------------------------------------------------

    def detach(self, row: int) -> list[OffloadedPageGroup]:
        """Return the page groups of a sequence that leaves the arena; their bytes stay offloaded.

        The sequence is released next; later, `attach` or `discard` is called with the list.
        """
        self.use.finalize()
        self._detached.append(page_groups := self._page_groups.pop(row, []))
        return page_groups

    def staging_pages(
        self, page_groups: Sequence[list[OffloadedPageGroup]]
    ) -> dict[PageClass, int]:
        """Pages of each class that `attach` allocates for detached sequences."""
        needed: dict[PageClass, int] = {}
        distinct = {id(group): group for group in itertools.chain(*page_groups)}
        for page_group in distinct.values():
            page_class = self._memory.tables[page_group.group].group.page_class
            needed[page_class] = needed.get(page_class, 0) + page_group.staging.size
        return needed

    def discard(self, page_groups: Sequence[list[OffloadedPageGroup]]) -> None:
        """Free the offloaded bytes of detached sequences that will not resume."""
        self._forget_detached(page_groups)
        for page_group in itertools.chain(*page_groups):
            if self.pool.has(page_group.layers[0]):
                self._free_unheld(page_group)

    def _forget_detached(self, page_groups: Sequence[list[OffloadedPageGroup]]) -> None:
        self._detached = [
            held for held in self._detached if not any(held is own for own in page_groups)
        ]

    def attach(self, rows: Sequence[int], page_groups: Sequence[list[OffloadedPageGroup]]) -> None:
        """Append the offloaded pages of detached sequences to their new, empty rows.

        Args:
            rows: the new rows; the caller has checked that the staging pages are free.
            page_groups: the lists that `detach` returned, one for each row.
        """
        staged: dict[int, PageNumbers] = {}
        for own in page_groups:
            for page_group in own:
                if id(page_group) not in staged:
                    table = self._memory.tables[page_group.group]
                    times = sum(any(g is page_group for g in other) for other in page_groups)
                    place = (times, page_group.columns, page_group.slots)
                    staged[id(page_group)] = allocate_staging(self._memory, table, *place)
        renewed = {
            id(page_group): replace(page_group, staging=staged[id(page_group)])
            for page_group in itertools.chain(*page_groups)
        }
        for row, own in zip(rows, page_groups, strict=True):
            self._page_groups[row] = [renewed[id(page_group)] for page_group in own]
            for page_group in self._page_groups[row]:
                self._append(row, page_group)
        self._forget_detached(page_groups)

    def _append(self, row: int, page_group: OffloadedPageGroup) -> None:
        """Append the pages of a page group to the table of a row that holds those before them."""
        table = self._memory.tables[page_group.group]
        entries = entries_of(table, page_group.staging)
        counts = np.full((1, len(entries)), page_group.columns, dtype=np.int32)
        place = table.append(np.array([row]), counts, entries.reshape(-1))
        if page_group.page_positions is not None:
            table.page_positions[place] = page_group.page_positions.reshape(-1)
        table.num_slots[row] += page_group.columns * table.group.page_class.tokens
        table.staged[row] += page_group.columns
        table.repeated[row] += entries.size - page_group.staging.size

    def load_back(self, row: int) -> None:
        """Load all pages of a sequence back into the arena; its staging pages are reused for them.

        Pages that other sequences share are loaded for all of them.

        Raises:
            OutOfPages: too few pages for the others; nothing was changed.
        """
        rows, page_groups = self._connected(row)
        needed: dict[PageClass, int] = {}
        for page_group in page_groups:
            table = self._memory.tables[page_group.group]
            page_class = table.group.page_class
            pages = page_group.columns * table.group.num_lanes - page_group.staging.size
            needed[page_class] = needed.get(page_class, 0) + pages
        if not self._memory.fits(needed):
            raise OutOfPages(f"{sum(needed.values())} pages needed to load an offloaded prefix")
        self.use.finalize()
        for page_group in page_groups:
            self._load_back(self._holders(page_group), page_group)
        for other in rows:
            self._free(other)

    def halve_staging(self, row: int) -> int:
        """Keep one slot of a sequence's staging and free the other; return the bytes freed.

        From then on the copy of a layer starts after the attention of the previous layer.
        """
        before = self._memory.row_bytes(row)
        for page_group in list(self.page_groups(row)):
            if page_group.slots > 1:
                self.use.finalize()
                rows = self._holders(page_group)
                self._replace(rows, page_group, self._halved(rows, page_group))
        return before - self._memory.row_bytes(row)

    def repack(self, row: int) -> None:
        """Move the pages of a sequence into as few slabs as can hold them.

        Its staging pages are allocated again; every step loads their contents. Sequences that share
        offloaded pages are packed together.
        """
        self.use.finalize()
        memory, (rows, page_groups) = self._memory, self._connected(row)
        for page_group in page_groups:
            table, end = memory.tables[page_group.group], page_group.first + page_group.columns
            for holder in self._holders(page_group):
                named = table.pages[holder, :, page_group.first : end]
                memory.pools[table.group.page_class].release(named.ravel())
        repack(memory, *rows)
        for page_group in page_groups:
            holders = self._holders(page_group)
            place = (
                memory.tables[page_group.group],
                holders,
                page_group.first,
                page_group.columns,
                page_group.slots,
            )
            self._replace(holders, page_group, replace(page_group, staging=stage(memory, *place)))

    def positions(self, row: int, group: str, index: int, slots: range) -> NDArray[np.int64]:
        """Logical positions of slots of an offloaded prefix, in the first lane of a layer.

        Args:
            row: the sequence.
            group: name of the layer's lane group.
            index: index of the layer inside its group.
            slots: slots of the offloaded prefix.
        """
        page_groups = [
            page_group for page_group in self.page_groups(row) if page_group.group == group
        ]
        if not page_groups or page_groups[0].positions is None:
            return np.array(slots, dtype=np.int64)
        lane = index * self._memory.tables[group].group.lanes_per_layer
        found = np.concatenate(
            [
                page_group.positions[lane]
                for page_group in page_groups
                if page_group.positions is not None
            ]
        )
        return found[slots.start : slots.stop].astype(np.int64)

    # ---- sharing -------------------------------------------------------------------------------

    def _holders(self, page_group: OffloadedPageGroup) -> list[int]:
        """Rows whose entries point to the staging of a page group."""
        lists = self._page_groups.items()
        return [row for row, held in lists if any(other is page_group for other in held)]

    def _connected(self, row: int) -> tuple[list[int], list[OffloadedPageGroup]]:
        """Rows and page groups that are loaded back together: a prefix has no gaps."""
        rows, page_groups = [row], list[OffloadedPageGroup]()
        for member in rows:
            for page_group in self.page_groups(member):
                if not any(page_group is found for found in page_groups):
                    page_groups.append(page_group)
                    rows += [other for other in self._holders(page_group) if other not in rows]
        return rows, page_groups

    def _replace(
        self, rows: Sequence[int], old: OffloadedPageGroup, new: OffloadedPageGroup
    ) -> None:
        for row in rows:
            held = self._page_groups[row]
            self._page_groups[row] = [new if other is old else other for other in held]

    def _sharers(
        self, table: LaneTable, row: int, first: int, columns: int
    ) -> tuple[list[int], int]:
        """Rows that share the next pages of a row in all lanes, and the columns they all share."""
        own = table.pages[row, :, first : first + columns]
        if (self._memory.pools[table.group.page_class].ref_counts[own] <= 1).all():
            return [row], columns
        live = self._memory.live_rows
        live = live[table.staged[live] == first]
        shared = (table.pages[live, :, first : first + columns] == own).all(axis=1)
        differ = (shared != shared[:, :1]).any(axis=0)
        same = int(np.argmax(differ)) if differ.any() else columns
        return live[shared[:, 0]].tolist(), same

    # ---- one group -----------------------------------------------------------------------------

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

    def _offload(self, table: LaneTable, row: int, first: int, columns: int) -> OffloadedPageGroup:
        memory, group = self._memory, table.group
        pool = memory.pools[group.page_class]
        rows, columns = self._sharers(table, row, first, columns)
        staged = staged_pages(table, columns)
        fits_behind = (
            self._own(table, row, first, columns, len(rows)) >= staged
        )  # freed pages hold the staging
        if not fits_behind and not memory.fits({group.page_class: staged}):
            raise OutOfPages(f"{staged} pages needed to stage {columns} of each lane")
        old = table.pages[row, :, first : first + columns].copy()
        layers = self._save(group.page_class, old.reshape(len(group.layers), -1))
        positions = None
        if group.page_class.positions and self._read_positions is not None:
            positions = self._read_positions(group.page_class, old.reshape(-1))
            positions = positions.reshape(len(old), -1)
        page_positions = table.page_positions[row, :, first : first + columns].copy()
        for _ in rows:
            pool.release(old.reshape(-1))
        staging = stage(self._memory, table, rows, first, columns, SLOTS)
        page_group = OffloadedPageGroup(
            group.name, first, layers, staging, positions, page_positions
        )
        for holder in rows:
            table.staged[holder] = first + columns
            table.repeated[holder] += group.num_lanes * columns - staging.size
            self._page_groups.setdefault(holder, []).append(page_group)
        return page_group

    def _halved(self, rows: Sequence[int], page_group: OffloadedPageGroup) -> OffloadedPageGroup:
        """Reduce a page group to one staging slot, to which the entries of all layers point."""
        table = self._memory.tables[page_group.group]
        group, pool = table.group, self._memory.pools[table.group.page_class]
        columns = slice(page_group.first, page_group.first + page_group.columns)
        first = page_group.staging[:1]
        for row in rows:
            old = table.pages[row, :, columns].reshape(len(group.layers), -1)
            moved = (old != first.reshape(-1)).any(axis=1)  # layers of the other slot
            for _ in range(int(moved.sum())):
                pool.retain(first.reshape(-1))
            pool.release(old[moved].reshape(-1))
            set_pages(table, row, page_group.first, np.tile(first[0], (len(group.layers), 1)))
            table.repeated[row] += page_group.staging.size - first.size
        return replace(page_group, staging=first)

    def _load_back(self, rows: Sequence[int], page_group: OffloadedPageGroup) -> None:
        memory, table = self._memory, self._memory.tables[page_group.group]
        group, pool = table.group, memory.pools[table.group.page_class]
        columns = slice(page_group.first, page_group.first + page_group.columns)
        staged = page_group.slots * group.lanes_per_layer  # lanes that take over the staging pages
        old = [table.pages[row, staged:, columns].reshape(-1).copy() for row in rows]
        added = pool.allocate(old[0].size)
        for _ in rows[1:]:
            pool.retain(added)
        fresh = np.concatenate([page_group.staging.reshape(-1), added])
        for pages, space in zip(
            fresh.reshape(len(group.layers), -1), page_group.layers, strict=True
        ):
            self.pool.load(space, group.page_class, pages)
        self.pool.copies.wait()
        for row, named in zip(rows, old, strict=True):
            set_pages(table, row, page_group.first, fresh.reshape(group.num_lanes, -1))
            pool.release(named)

    def _save(self, page_class: PageClass, by_layer: PageNumbers) -> list[HostSpace]:
        """Save the bytes of pages [layer, page] to the pool, all or none."""
        spaces: list[HostSpace] = []
        try:
            for pages in by_layer:
                spaces.append(self.pool.reserve({page_class: len(pages)}))
                self.pool.save(spaces[-1], page_class, pages)
        except BaseException:
            for space in spaces:
                self.pool.release(space)
            raise
        self.pool.copies.wait()
        return spaces

    def _own(self, table: LaneTable, row: int, first: int, columns: int, holders: int = 1) -> int:
        """Number of pages with at most `holders` references."""
        pages = table.pages[row, :, first : first + columns]
        counts = self._memory.pools[table.group.page_class].ref_counts[pages]
        return int(np.count_nonzero(counts <= holders))

    def _bytes(self, page_group: OffloadedPageGroup) -> int:
        group = self._memory.tables[page_group.group].group
        return page_group.columns * group.num_lanes * group.page_class.page_bytes


class DetachedRows:
    """Offloaded pages of sequences that were swapped out together.

    Args:
        prefixes: offloaded prefixes of the memory.
        page_groups: offloaded page groups of each sequence; still in `prefixes.detached`.
        activations: allocator and detached blocks of each sequence; empty if none are stored.

    Attributes:
        staging: pages of each class that `attach` allocates.
    """

    def __init__(
        self,
        prefixes: OffloadedPrefixes,
        page_groups: Sequence[list[OffloadedPageGroup]],
        activations: Sequence[tuple[ActivationAllocator, Stored] | None],
    ) -> None:
        self._prefixes, self._page_groups = prefixes, page_groups
        self._activations = activations
        self.staging: Mapping[PageClass, int] = prefixes.staging_pages(page_groups)

    def attach(self, rows: Sequence[int]) -> None:
        self._prefixes.attach(rows, self._page_groups)
        for row, found in zip(rows, self._activations, strict=True):
            if found is not None:
                allocator, stored = found
                allocator.attach(row, stored)

    def discard(self) -> None:
        self._prefixes.discard(self._page_groups)
        for found in self._activations:
            if found is not None:
                allocator, stored = found
                allocator.discard(stored)


class OffloadedRowsOf:
    """Implements `OffloadedRows` for an engine.

    Args:
        prefixes: offloaded prefixes of the memory.
        allocator: stored activations; None if none are stored.
    """

    def __init__(self, prefixes: OffloadedPrefixes, allocator: ActivationAllocator | None) -> None:
        self._prefixes, self._allocator = prefixes, allocator

    def detach(self, rows: Sequence[int]) -> OffloadedPages | None:
        if not self._prefixes.rows.intersection(rows):
            return None
        activations = [self._activations_of(row) for row in rows]
        page_groups = [self._prefixes.detach(row) for row in rows]
        return DetachedRows(self._prefixes, page_groups, activations)

    def _activations_of(self, row: int) -> tuple[ActivationAllocator, Stored] | None:
        stored = None if self._allocator is None else self._allocator.detach(row)
        if stored is None or self._allocator is None:
            return None
        return self._allocator, stored
