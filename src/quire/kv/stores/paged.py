"""The paged store: pages are allocated one by one on demand, anywhere in the arena.

Waste is the empty part of each lane's last page. Pages outside a window are freed.

Source: PagedAttention (Kwon et al. 2023); papers/001, "Paged allocation".
"""

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, OutOfPages
from quire.kv.arena import Arena, pages_per_slab
from quire.kv.page_bytes import PageBytes
from quire.kv.pages import PageNumbers, PagePool
from quire.kv.stores.base import NO_PAGES, Demand, Placement, pages_by_class
from quire.kv.tables import LaneTable, Rows
from quire.layout.pages import CacheLayout, LaneGroup, PageClass


@final
class Paged(Placement):
    """The paged store.

    Args:
        layout: lane groups of every sequence.
        total_bytes: size of the arena.
        max_rows: maximum number of concurrent sequences.
        arena: arena that provides the slabs; None to create one.

    Raises:
        ConfigError: the arena cannot hold one page.
    """

    shares, drops_pages, reserves = True, True, False

    def __init__(
        self, layout: CacheLayout, total_bytes: int, max_rows: int, *, arena: Arena | None = None
    ) -> None:
        arena = arena or Arena(total_bytes, [c.page_bytes for c in layout.page_classes])
        super().__init__(arena, {c: PagePool(arena, c) for c in layout.page_classes})

    def add_page_class(self, page_class: PageClass) -> None:
        """See `Placement`."""
        if page_class in self.pools:
            return
        if pages_per_slab(self.arena.slab_bytes, page_class.page_bytes) < 1:
            raise ConfigError(
                f"a page of {page_class.page_bytes:,} B is larger than a slab of "
                f"{self.arena.slab_bytes:,} B; raise --kv-memory, or name the rule in --evict or "
                "--evict-allow when the engine starts"
            )
        self.pools[page_class] = PagePool(self.arena, page_class)

    def can_allocate(self, demands: Sequence[Demand]) -> bool:
        """See `Placement`."""
        return self.fits(pages_by_class(demands))

    def reserve(self, demands: Sequence[Demand], page_bytes: PageBytes) -> None:
        """See `Placement`."""
        require_pages(self, demands)

    def allocate(self, table: LaneTable, rows: Rows, counts: NDArray[np.int32]) -> PageNumbers:
        """See `Placement`."""
        return self.pools[table.group.page_class].allocate(int(counts.sum()))

    def free(self, table: LaneTable, pages: PageNumbers) -> None:
        """See `Placement`."""
        self.pools[table.group.page_class].release(pages)

    def free_outside_window(
        self, table: LaneTable, row: int, lane: int, pages: PageNumbers
    ) -> None:
        """See `Placement`."""
        self.free(table, pages)

    def free_rows(self, table: LaneTable, rows: Rows, pages: PageNumbers) -> None:
        """See `Placement`."""
        self.free(table, pages)

    def num_reserved_pages(self, table: LaneTable, rows: Rows) -> NDArray[np.int32]:
        """See `Placement`."""
        return np.zeros((len(rows), table.group.num_lanes), dtype=np.int32)

    def reserved_pages(self, table: LaneTable, rows: Rows) -> PageNumbers:
        """See `Placement`."""
        return NO_PAGES

    def peak_pages(
        self, group: LaneGroup, tokens: NDArray[np.int64], most_slots: int
    ) -> NDArray[np.int64]:
        """See `Placement`."""
        return bounded_pages(group, tokens, most_slots)

    def check(self, table: LaneTable) -> None:
        """See `Placement`: no pages are reserved."""


def require_pages(placement: Placement, demands: Sequence[Demand]) -> None:
    """Refuse demands for which there are too few free pages.

    Raises:
        OutOfPages: too few free pages; the message states the needed and free bytes.
    """
    if not placement.can_allocate(demands):
        raise OutOfPages(placement.shortage(pages_by_class(demands)))


def bounded_pages(
    group: LaneGroup, tokens: NDArray[np.int64], most_slots: int
) -> NDArray[np.int64]:
    """Return the pages of a lane that holds at most `most_slots` slots."""
    pages: NDArray[np.int64] = -(-np.minimum(tokens, most_slots) // group.page_class.tokens)
    return pages
