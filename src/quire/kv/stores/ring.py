"""Ring: a sliding window's lane goes round in its own pages; lanes of full attention stay paged.

    window of 8 tokens, pages of 4    table  [a b c]     slots 0..11
    token 12 pushes page a out               [b c | a]   a is the new tail: slots 12..15

The ring is what decoding needs, window and one page's rest. After the first time round such a lane
takes no page from the pool and returns none, so its memory is constant and decoding cannot run out
in it. A chunk of a prompt that is longer takes more pages for its time.

The table is turned as pages pass, so slots stay in position order and `page_positions` says where a
page stands after it has wrapped: no attention backend needs to know of rings.

Source: rolling buffer cache (Mistral 7B, Jiang et al. 2023, section 2). Differs: pages go round
instead of single slots, which costs at most one page more, and prompts are read in chunks of any
size.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.kv.arena import Arena
from quire.kv.page_bytes import PageBytes
from quire.kv.pages import PageNumbers, PagePool
from quire.kv.spans import offsets
from quire.kv.stores.base import NO_PAGES, Demand, Placement, pages_by_class
from quire.kv.stores.paged import bounded_pages, require_pages
from quire.kv.tables import LaneTable, Rows
from quire.spec.pages import CacheLayout, LaneGroup


class SparePages:
    """Stacks of pages, one for each lane of a group.

    Attributes:
        counts: int32 [rows, lanes].
        pages: int32 [rows, lanes, most]; only the first `counts` of each lane mean something.
    """

    def __init__(self, max_rows: int, num_lanes: int, most: int) -> None:
        self.counts = np.zeros((max_rows, num_lanes), dtype=np.int32)
        self.pages = np.zeros((max_rows, num_lanes, most), dtype=np.int32)

    def push(self, row: int, lane: int, pages: PageNumbers) -> None:
        """Put pages on a lane's stack."""
        held = int(self.counts[row, lane])
        self.pages[row, lane, held : held + len(pages)] = pages
        self.counts[row, lane] = held + len(pages)

    def pop(self, rows: Rows, wanted: NDArray[np.int32]) -> tuple[PageNumbers, NDArray[np.bool_]]:
        """Take up to `wanted` [rows, lanes] pages of each lane.

        Returns:
            [wanted.sum()] page numbers lane by lane, and which of them there were.
        """
        taken = np.minimum(wanted, self.counts[rows])
        self.counts[rows] -= taken
        index, lane = np.nonzero(wanted)
        counts = wanted[index, lane]
        nth = offsets(counts)
        there = nth < np.repeat(taken[index, lane], counts)
        row, lane = np.repeat(rows[index], counts), np.repeat(lane, counts)
        pages = np.zeros(len(nth), dtype=np.int32)
        left = self.counts[row, lane]
        pages[there] = self.pages[row[there], lane[there], (left + nth)[there]]
        return pages, there

    def of(self, rows: Rows) -> PageNumbers:
        """All pages on the stacks of these rows."""
        filled = np.arange(self.pages.shape[2]) < self.counts[rows][:, :, None]
        pages: PageNumbers = self.pages[rows][filled]
        return pages


@final
class Ring(Placement):
    """Pages one by one, except that window lanes keep theirs.

    Args:
        layout: lane groups of every sequence.
        total_bytes: the arena.
        max_rows: sequences that can exist at once.

    Raises:
        ConfigError: the arena holds not one page.
    """

    shares, drops_pages, reserves = True, True, True

    def __init__(self, layout: CacheLayout, total_bytes: int, max_rows: int) -> None:
        arena = Arena(total_bytes, [c.page_bytes for c in layout.page_classes])
        super().__init__(arena, {c: PagePool(arena, c) for c in layout.page_classes})
        self._spare = {
            group.name: SparePages(max_rows, group.num_lanes, ring_pages(group))
            for group in layout.groups
            if group.window is not None
        }

    def can_give(self, demands: Sequence[Demand]) -> bool:
        """See `Placement`."""
        pages = pages_by_class(demands)
        for demand in demands:
            own = self.reserved_pages(demand.table, demand.rows)
            pages[demand.page_class] -= int(np.minimum(demand.new, own).sum())
        return self.fits(pages)

    def reserve(self, demands: Sequence[Demand], page_bytes: PageBytes) -> None:
        """See `Placement`."""
        require_pages(self, demands)

    def give(self, table: LaneTable, rows: Rows, counts: NDArray[np.int32]) -> PageNumbers:
        """See `Placement`: from the lane's own pages first."""
        pool, spare = self.pools[table.group.page_class], self._spare.get(table.group.name)
        if spare is None:
            return pool.allocate(int(counts.sum()))
        pages, there = spare.pop(rows, counts)
        if not there.all():
            pages[~there] = pool.allocate(int(np.count_nonzero(~there)))
        return pages

    def take_back(self, table: LaneTable, pages: PageNumbers) -> None:
        """See `Placement`."""
        self.pools[table.group.page_class].release(pages)

    def pass_window(self, table: LaneTable, row: int, lane: int, pages: PageNumbers) -> None:
        """See `Placement`: the lane keeps what its ring lacks, unless somebody else reads it."""
        pool, spare = self.pools[table.group.page_class], self._spare[table.group.name]
        held = int(table.num_pages[row, lane] + spare.counts[row, lane])
        room = max(0, ring_pages(table.group) - held)
        alone = np.flatnonzero(pool.ref_counts[pages] == 1)[:room]
        spare.push(row, lane, pages[alone])
        pool.release(np.delete(pages, alone))

    def close(self, table: LaneTable, rows: Rows, pages: PageNumbers) -> None:
        """See `Placement`."""
        pool, spare = self.pools[table.group.page_class], self._spare.get(table.group.name)
        pool.release(pages)
        if spare is not None:
            pool.release(spare.of(rows))
            spare.counts[rows] = 0

    def reserved_pages(self, table: LaneTable, rows: Rows) -> NDArray[np.int32]:
        """See `Placement`."""
        spare = self._spare.get(table.group.name)
        if spare is None:
            return np.zeros((len(rows), table.group.num_lanes), dtype=np.int32)
        return spare.counts[rows]

    def kept_aside(self, table: LaneTable, rows: Rows) -> PageNumbers:
        """See `Placement`."""
        spare = self._spare.get(table.group.name)
        return NO_PAGES if spare is None else spare.of(rows)

    def peak_pages(
        self, group: LaneGroup, tokens: NDArray[np.int64], most_slots: int
    ) -> NDArray[np.int64]:
        """See `Placement`: a ring is never larger than what reading a prompt needs."""
        return bounded_pages(group, tokens, most_slots)

    def check(self, table: LaneTable) -> None:
        """See `Placement`."""
        spare = self._spare.get(table.group.name)
        if spare is not None:
            held = table.num_pages + spare.counts
            if ((spare.counts > 0) & (held > ring_pages(table.group))).any():
                raise InvariantError(f"a ring of group {table.group.name!r} holds too many pages")


def ring_pages(group: LaneGroup) -> int:
    """Pages of a lane that decodes: its window, the new token, and one page's rest behind it."""
    return group.page_class.pages_for(group.slots_at_most(1 << 60, 1))
