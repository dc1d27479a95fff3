"""The ring store: sliding-window lanes are ring buffers of their own pages; other lanes are paged.

    window of 8 tokens, pages of 4    table  [a b c]     slots 0..11
    token 12 reuses page a                   [b c | a]   a is the new last page: slots 12..15

The ring holds the window and the rest of one page, which is what decoding needs. Once the ring is
full, the lane neither allocates nor frees pages during decode, so its memory is constant and decode
cannot run out of pages in it. A longer prefill chunk temporarily allocates more pages.

Reused pages move to the end of the page table, so slots stay in position order and `page_positions`
gives the new positions of a reused page. Attention backends need no special case for rings.

Source: rolling buffer cache (Mistral 7B, Jiang et al. 2023, section 2). Differs: the ring consists
of pages instead of single slots, which costs at most one page more, and prompts are prefilled in
chunks of any size.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.kv.arena import Arena
from quire.kv.page_bytes import PageBytes
from quire.kv.pages import PageNumbers, PagePool
from quire.kv.stores.base import NO_PAGES, Demand, Placement, pages_by_class
from quire.kv.stores.paged import bounded_pages, require_pages
from quire.kv.tables import NO_PAGE, LaneTable, Rows
from quire.layout.pages import CacheLayout, LaneGroup


@final
class Ring(Placement):
    """The ring store: pages one by one, but window lanes reuse their pages.

    Args:
        layout: lane groups of every sequence.
        total_bytes: size of the arena.
        max_rows: maximum number of concurrent sequences.

    Raises:
        ConfigError: the arena cannot hold one page.
    """

    shares, drops_pages, reserves = True, True, True

    def __init__(self, layout: CacheLayout, total_bytes: int, max_rows: int) -> None:
        arena = Arena(total_bytes, [c.page_bytes for c in layout.page_classes])
        super().__init__(arena, {c: PagePool(arena, c) for c in layout.page_classes})
        # [rows, lanes] the page reserved as the lane's next last page: between steps the window
        # needs all pages of its ring but one
        self._spare = {
            group.name: np.full((max_rows, group.num_lanes), NO_PAGE, dtype=np.int32)
            for group in layout.groups
            if group.window is not None
        }

    def can_allocate(self, demands: Sequence[Demand]) -> bool:
        """See `Placement`."""
        pages = pages_by_class(demands)
        for demand in demands:
            own = self.num_reserved_pages(demand.table, demand.rows)
            pages[demand.page_class] -= int(np.minimum(demand.new, own).sum())
        return self.fits(pages)

    def reserve(self, demands: Sequence[Demand], page_bytes: PageBytes) -> None:
        """See `Placement`."""
        require_pages(self, demands)

    def allocate(self, table: LaneTable, rows: Rows, counts: NDArray[np.int32]) -> PageNumbers:
        """See `Placement`: reuse the lane's reserved page first."""
        pool, spare = self.pools[table.group.page_class], self._spare.get(table.group.name)
        if spare is None:
            return pool.allocate(int(counts.sum()))
        own = (spare[rows] != NO_PAGE) & (counts > 0)
        first = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
        pages = np.full(int(counts.sum()), NO_PAGE, dtype=np.int32)
        pages[first[own]] = spare[rows][own]
        spare[rows] = np.where(own, NO_PAGE, spare[rows])
        missing = pages == NO_PAGE
        pages[missing] = pool.allocate(int(np.count_nonzero(missing)))
        return pages

    def free(self, table: LaneTable, pages: PageNumbers) -> None:
        """See `Placement`."""
        self.pools[table.group.page_class].release(pages)

    def free_outside_window(
        self, table: LaneTable, row: int, lane: int, pages: PageNumbers
    ) -> None:
        """See `Placement`: reserve one unshared page for the lane if its ring lacks a page."""
        pool, spare = self.pools[table.group.page_class], self._spare[table.group.name]
        alone = np.flatnonzero(pool.ref_counts[pages] == 1)[:1]
        complete = table.num_pages[row, lane] >= ring_pages(table.group)
        if len(alone) and spare[row, lane] == NO_PAGE and not complete:
            spare[row, lane] = pages[alone[0]]
            pages = np.delete(pages, alone)
        pool.release(pages)

    def free_rows(self, table: LaneTable, rows: Rows, pages: PageNumbers) -> None:
        """See `Placement`."""
        pool = self.pools[table.group.page_class]
        pool.release(pages)
        pool.release(self.reserved_pages(table, rows))
        if table.group.window is not None:
            self._spare[table.group.name][rows] = NO_PAGE

    def num_reserved_pages(self, table: LaneTable, rows: Rows) -> NDArray[np.int32]:
        """See `Placement`."""
        spare = self._spare.get(table.group.name)
        if spare is None:
            return np.zeros((len(rows), table.group.num_lanes), dtype=np.int32)
        reserved: NDArray[np.int32] = (spare[rows] != NO_PAGE).astype(np.int32)
        return reserved

    def reserved_pages(self, table: LaneTable, rows: Rows) -> PageNumbers:
        """See `Placement`."""
        spare = self._spare.get(table.group.name)
        if spare is None:
            return NO_PAGES
        pages: PageNumbers = spare[rows][spare[rows] != NO_PAGE]
        return pages

    def release_reserved(self, table: LaneTable, rows: Rows) -> NDArray[np.bool_]:
        """See `Placement`."""
        lanes = self.num_reserved_pages(table, rows) > 0
        if lanes.any():
            self.pools[table.group.page_class].release(self.reserved_pages(table, rows))
            self._spare[table.group.name][rows] = NO_PAGE
        return lanes

    def reserve_again(self, table: LaneTable, rows: Rows, lanes: NDArray[np.bool_]) -> None:
        """See `Placement`."""
        pool, count = self.pools[table.group.page_class], int(lanes.sum())
        if count and self.fits({table.group.page_class: count}):
            row, lane = np.nonzero(lanes)
            self._spare[table.group.name][rows[row], lane] = pool.allocate(count)

    def peak_pages(
        self, group: LaneGroup, tokens: NDArray[np.int64], most_slots: int
    ) -> NDArray[np.int64]:
        """See `Placement`: a ring never needs more pages than prefill."""
        return bounded_pages(group, tokens, most_slots)

    def check(self, table: LaneTable) -> None:
        """See `Placement`."""
        if table.group.window is not None:
            spare = self._spare[table.group.name] != NO_PAGE
            if (spare & (table.num_pages >= ring_pages(table.group))).any():
                raise InvariantError(f"a ring of group {table.group.name!r} holds too many pages")


def ring_pages(group: LaneGroup) -> int:
    """Return the pages of a lane in decode: window, new token, and the rest of one page."""
    return group.page_class.pages_for(group.slots_at_most(1 << 60, 1))
