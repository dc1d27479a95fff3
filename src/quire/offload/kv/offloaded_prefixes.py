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

This module does the bookkeeping; a `PageBytes` does the copies.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, OutOfPages
from quire.kv.listeners import MemoryListener
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.repacking import repack
from quire.kv.tables import LaneTable, Rows
from quire.layout.layout import SLOTS, can_be_offloaded
from quire.layout.pages import PageClass
from quire.offload.kv.staging import StagingUse, set_pages, stage, staged_pages
from quire.offload.swap.host_pool import HostPool, HostSpace

ReadPositions = Callable[[PageClass, PageNumbers], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class OffloadedPageGroup:
    """Pages of one group of one sequence that were offloaded together.

    Attributes:
        group: name of the group.
        first: column of the first page.
        layers: location of the pages' bytes for each layer of the group, lane by lane.
        staging: [slots, lanes of a layer, pages of a lane] pages of the arena.
        positions: [lanes, slots] logical positions of the slots; None if lanes are in order.
    """

    group: str
    first: int
    layers: Sequence[HostSpace]
    staging: PageNumbers
    positions: NDArray[np.int32] | None = None

    @property
    def columns(self) -> int:
        """Number of pages of a lane."""
        return int(self.staging.shape[2])

    @property
    def slots(self) -> int:
        """Number of layers whose pages the staging holds at a time."""
        return len(self.staging)


class OffloadedPrefixes(MemoryListener):
    """The offloaded prefixes of all sequences of a memory.

    Args:
        memory: holds the sequences.
        pool: host pool of the offloaded bytes; no other object uses it.
        read_positions: reads logical positions of the slots of pages, for a class that stores them.

    Attributes:
        pool: see above.
        use: the step that reads the staging pages.

    Raises:
        ConfigError: the store keeps lanes contiguous.
    """

    def __init__(
        self, memory: KVMemory, pool: HostPool, read_positions: ReadPositions | None = None
    ) -> None:
        if not memory.placement.shares:
            raise ConfigError(
                "expected a store with pages at any location, such as paged: the first pages of a "
                "contiguous lane cannot be offloaded"
            )
        self._memory, self.pool = memory, pool
        self._page_groups: dict[int, list[OffloadedPageGroup]] = {}
        self.use = StagingUse()
        self._read_positions = read_positions
        memory.listeners.subscribe(self)

    @property
    def rows(self) -> frozenset[int]:
        """Rows of the sequences with an offloaded prefix."""
        return frozenset(self._page_groups)

    def page_groups(self, row: int) -> Sequence[OffloadedPageGroup]:
        """Offloaded page groups of a sequence; empty if it has none."""
        return self._page_groups.get(row, ())

    def row_bytes(self, row: int) -> int:
        """Offloaded bytes of a sequence."""
        return sum(map(self._bytes, self.page_groups(row)))

    def gain_bytes(self, row: int, slots: int, holders: int = 1) -> int:
        """Bytes of the arena that offloading the slots before `slots` would free.

        Args:
            row: the sequence.
            slots: as for `offload`.
            holders: maximum references of a page that counts as freed: 2 if a cached prefix, which
                can be evicted, may reference it, else 1.
        """
        gained = 0
        for table, first, columns in self.movable_pages(row, slots):
            own = self._own(table, row, first, columns, holders)
            staged = staged_pages(table, columns)
            gained += (own - staged) * table.group.page_class.page_bytes
        return gained

    def offload(self, row: int, slots: int) -> int:
        """Offload the whole pages before slot `slots`; return the bytes moved.

        Groups with no more layers than staging slots, and groups with a window, are not offloaded:
        they would free nothing.

        Raises:
            OutOfPages: too few pages to stage a group; groups moved before it stay offloaded.
            HostMemoryFull: the pool cannot hold a group; groups moved before it stay offloaded.
        """
        movable = list(self.movable_pages(row, slots))
        self.use.finalize()
        moved = [self._offload(table, row, first, columns) for table, first, columns in movable]
        return sum(map(self._bytes, moved))

    def released(self, rows: Rows) -> None:
        """Free the offloaded pages of sequences."""
        freed = self._page_groups.keys() & set(rows.tolist())
        if freed:
            self.use.finalize()
        for row in freed:
            self._free(row)

    def _free(self, row: int) -> None:
        """Free the offloaded bytes of a sequence."""
        for page_group in self._page_groups.pop(row, ()):
            table = self._memory.tables[page_group.group]
            table.staged[row] = table.repeated[row] = 0
            for space in page_group.layers:
                self.pool.release(space)

    def load_back(self, row: int) -> None:
        """Load all pages of a sequence back into the arena; its staging pages are reused for them.

        Raises:
            OutOfPages: too few pages for the others; nothing was changed.
        """
        needed: dict[PageClass, int] = {}
        for page_group in self.page_groups(row):
            table = self._memory.tables[page_group.group]
            page_class = table.group.page_class
            pages = page_group.columns * table.group.num_lanes - page_group.staging.size
            needed[page_class] = needed.get(page_class, 0) + pages
        if not self._memory.fits(needed):
            raise OutOfPages(f"{sum(needed.values())} pages needed to load an offloaded prefix")
        self.use.finalize()
        for page_group in self.page_groups(row):
            self._load_back(row, page_group)
        self._free(row)

    def halve_staging(self, row: int) -> int:
        """Keep one slot of a sequence's staging and free the other; return the bytes freed.

        From then on the copy of a layer starts after the attention of the previous layer.
        """
        before = self._memory.row_bytes(row)
        if any(page_group.slots > 1 for page_group in self.page_groups(row)):
            self.use.finalize()
            self._page_groups[row] = [
                self._halved(row, page_group) for page_group in self.page_groups(row)
            ]
        return before - self._memory.row_bytes(row)

    def repack(self, row: int) -> None:
        """Move the pages of a sequence into as few slabs as can hold them.

        Its staging pages are allocated again; every step loads their contents.
        """
        self.use.finalize()
        memory, page_groups = self._memory, self.page_groups(row)
        for page_group in page_groups:
            table, end = memory.tables[page_group.group], page_group.first + page_group.columns
            named = table.pages[row, :, page_group.first : end]
            memory.pools[table.group.page_class].release(named.ravel())
        repack(memory, row)
        for i, page_group in enumerate(page_groups):
            place = (
                memory.tables[page_group.group],
                row,
                page_group.first,
                page_group.columns,
                page_group.slots,
            )
            self._page_groups[row][i] = replace(page_group, staging=stage(memory, *place))

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
        staged = staged_pages(table, columns)
        fits_behind = (
            self._own(table, row, first, columns) >= staged
        )  # freed pages hold the staging
        if not fits_behind and not memory.fits({group.page_class: staged}):
            raise OutOfPages(f"{staged} pages needed to stage {columns} of each lane")
        old = table.pages[row, :, first : first + columns].copy()
        layers = self._save(group.page_class, old.reshape(len(group.layers), -1))
        positions = None
        if group.page_class.positions and self._read_positions is not None:
            positions = self._read_positions(group.page_class, old.reshape(-1))
            positions = positions.reshape(len(old), -1)
        pool.release(old.reshape(-1))
        staging = stage(self._memory, table, row, first, columns, SLOTS)
        table.staged[row] = first + columns
        table.repeated[row] += group.num_lanes * columns - staging.size
        page_group = OffloadedPageGroup(group.name, first, layers, staging, positions)
        self._page_groups.setdefault(row, []).append(page_group)
        return page_group

    def _halved(self, row: int, page_group: OffloadedPageGroup) -> OffloadedPageGroup:
        """Reduce a page group to one staging slot, to which the entries of all layers point."""
        table = self._memory.tables[page_group.group]
        group, pool = table.group, self._memory.pools[table.group.page_class]
        columns = slice(page_group.first, page_group.first + page_group.columns)
        old = table.pages[row, :, columns].reshape(len(group.layers), -1)
        first = page_group.staging[:1]
        moved = (old != old[0]).any(axis=1)  # layers of the other slot
        for _ in range(int(moved.sum())):
            pool.retain(first.reshape(-1))
        pool.release(old[moved].reshape(-1))
        set_pages(table, row, page_group.first, np.tile(first[0], (len(group.layers), 1)))
        table.repeated[row] += page_group.staging.size - first.size
        return replace(page_group, staging=first)

    def _load_back(self, row: int, page_group: OffloadedPageGroup) -> None:
        memory, table = self._memory, self._memory.tables[page_group.group]
        group, pool = table.group, memory.pools[table.group.page_class]
        columns = slice(page_group.first, page_group.first + page_group.columns)
        staged = page_group.slots * group.lanes_per_layer  # lanes that take over the staging pages
        old = table.pages[row, staged:, columns].reshape(-1).copy()
        fresh = np.concatenate([page_group.staging.reshape(-1), pool.allocate(old.size)])
        for pages, space in zip(
            fresh.reshape(len(group.layers), -1), page_group.layers, strict=True
        ):
            self.pool.load(space, group.page_class, pages)
        self.pool.copies.wait()
        set_pages(table, row, page_group.first, fresh.reshape(group.num_lanes, -1))
        pool.release(old)

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
