"""The seam of stores: allocation and freeing of the pages of lanes.

In every store, KV is in pages and page tables list them, so every attention backend reads every
store. Stores differ in the page numbers that a lane gets, the pages that are reserved for it, and
the data that must be copied when it grows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.kv.arena import Arena
from quire.kv.page_bytes import PageBytes
from quire.kv.pages import CountedPages, PageNumbers
from quire.kv.tables import LaneTable, Rows
from quire.layout.pages import CacheLayout, LaneGroup, PageClass

NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Demand:
    """Pages that one lane group needs before some rows can grow.

    Attributes:
        table: page table of the group.
        rows: [rows] row numbers.
        new: [rows, lanes] number of pages to append.
        shared: [rows, lanes] whether the lane's last page must be copied before it is written.
    """

    table: LaneTable
    rows: Rows
    new: NDArray[np.int32]
    shared: NDArray[np.bool_]

    @property
    def page_class(self) -> PageClass:
        """Page class of the group."""
        return self.table.group.page_class

    @property
    def num_pages(self) -> int:
        """Pages to allocate, copies included."""
        return int(self.new.sum()) + int(self.shared.sum())


class Placement(ABC):
    """Base class of stores: allocates pages of one arena to the lanes of all sequences.

    A page that is reserved for a lane (in no page table and not free) has one reference, so
    `used + free == total` holds for every store.

    Args:
        arena: the arena.
        pools: page pool of each page class.

    Attributes:
        num_copies: number of lanes that were copied to larger runs.
        copied_bytes: bytes of these copies.
        copying_peak_bytes: peak bytes of pages in use while lanes were copied.
        longest_tokens: maximum tokens of a sequence; None if only the arena limits it.
        border_slabs: slabs that the pages of one class may occupy beyond those that they fill.
    """

    shares: bool  # a page can have several references: forks and cached prefixes share pages
    drops_pages: bool  # a page can be freed at the beginning or in the middle of a lane
    reserves: bool  # pages are reserved for lanes

    def __init__(self, arena: Arena, pools: Mapping[PageClass, CountedPages]) -> None:
        self.arena, self.pools = arena, dict(pools)
        self.num_copies = 0
        self.copied_bytes = 0
        self.copying_peak_bytes = 0
        self.longest_tokens: int | None = None
        self.border_slabs = 0

    def fits(self, pages: Mapping[PageClass, int]) -> bool:
        """Return whether this many pages of each class can be allocated, at any location."""
        return self._slabs_needed(pages) <= self.arena.num_free_slabs

    def _slabs_needed(self, pages: Mapping[PageClass, int]) -> int:
        return sum(self.pools[c].slabs_needed(n) for c, n in pages.items())

    def shortage(self, pages: Mapping[PageClass, int]) -> str:
        """Return an error text for pages that do not fit: needed and free bytes in whole slabs."""
        slab_bytes, free = self.arena.slab_bytes, self.arena.num_free_slabs
        return (
            f"{self._slabs_needed(pages) * slab_bytes:,} B more in slabs of {slab_bytes:,} B are "
            f"needed, {free * slab_bytes:,} of {self.arena.total_bytes:,} B are free"
        )

    def add_page_class(self, page_class: PageClass) -> None:
        """Add a page pool for pages of another class, for statistics of a request's rule.

        Raises:
            ConfigError: the store reserves lanes in advance, or a page is larger than a slab.
        """
        raise ConfigError("lanes of this store are reserved in advance; use --kv-store paged")

    # ---- growing lanes -------------------------------------------------------------------------

    @abstractmethod
    def can_allocate(self, demands: Sequence[Demand]) -> bool:
        """Return whether `reserve` would succeed."""

    @abstractmethod
    def reserve(self, demands: Sequence[Demand], page_bytes: PageBytes) -> None:
        """Ensure that `allocate` can serve all of these demands, or change nothing; may move lanes.

        Raises:
            OutOfPages: too few free pages; nothing changed.
        """

    @abstractmethod
    def allocate(self, table: LaneTable, rows: Rows, counts: NDArray[np.int32]) -> PageNumbers:
        """Allocate the next `counts` [rows, lanes] pages of lanes, row by row, lane by lane."""

    # ---- shrinking lanes -----------------------------------------------------------------------

    @abstractmethod
    def free(self, table: LaneTable, pages: PageNumbers) -> None:
        """Free pages that were removed from a lane's end, or from anywhere if `drops_pages`.

        Args:
            table: page table from which the pages were removed.
            pages: page numbers.
        """

    @abstractmethod
    def free_outside_window(
        self, table: LaneTable, row: int, lane: int, pages: PageNumbers
    ) -> None:
        """Free pages of one lane that are outside its window; requires `drops_pages`."""

    @abstractmethod
    def free_rows(self, table: LaneTable, rows: Rows, pages: PageNumbers) -> None:
        """Free all pages of rows: `pages`, which were in the table, and reserved pages."""

    # ---- reserved pages ------------------------------------------------------------------------

    @abstractmethod
    def num_reserved_pages(self, table: LaneTable, rows: Rows) -> NDArray[np.int32]:
        """Return the number of reserved pages [rows, lanes], which are not in the table."""

    @abstractmethod
    def reserved_pages(self, table: LaneTable, rows: Rows) -> PageNumbers:
        """Return the page numbers of the reserved pages, row by row, lane by lane."""

    def release_reserved(self, table: LaneTable, rows: Rows) -> NDArray[np.bool_]:
        """Release the reserved pages of rows; return the lanes [rows, lanes] that had one."""
        return np.zeros((len(rows), table.group.num_lanes), dtype=bool)

    def reserve_again(  # noqa: B027 - most stores reserve no pages
        self, table: LaneTable, rows: Rows, lanes: NDArray[np.bool_]
    ) -> None:
        """Reserve a page again for each of these lanes [rows, lanes].

        If too few pages are free, none is reserved: a lane then allocates its next page.
        """

    @abstractmethod
    def peak_pages(
        self, group: LaneGroup, tokens: NDArray[np.int64], most_slots: int
    ) -> NDArray[np.int64]:
        """Return the peak pages of a lane, reserved pages and pages needed for a move included.

        Args:
            group: lane group of the lane.
            tokens: maximum tokens of the lane, of whole sequences or after eviction; any shape.
            most_slots: maximum slots of a lane of the group due to eviction or a window.
        """

    @abstractmethod
    def check(self, table: LaneTable) -> None:
        """Check that reserved pages are consistent with the page table.

        Raises:
            InvariantError: they are not.
        """


# arguments: layout, bytes of the arena, maximum number of sequences
PlacementMaker = Callable[[CacheLayout, int, int], Placement]


def pages_by_class(demands: Sequence[Demand]) -> dict[PageClass, int]:
    """Sum the demanded pages of each class, copies included."""
    pages: dict[PageClass, int] = {}
    for demand in demands:
        pages[demand.page_class] = pages.get(demand.page_class, 0) + demand.num_pages
    return pages
