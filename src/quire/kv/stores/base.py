"""The seam of stores: where a lane's next page comes from, and where a page it lets go of goes.

Whatever the store, KV lies in pages and page tables name them, so every attention backend reads
every store. What differs is which page numbers a lane gets, what is kept aside for it, and what
has to be copied when it grows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kv.arena import Arena
from quire.kv.page_bytes import PageBytes
from quire.kv.pages import CountedPages, PageNumbers
from quire.kv.tables import LaneTable, Rows
from quire.layout.pages import CacheLayout, LaneGroup, PageClass

NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one lane group needs before some rows can take more tokens.

    Attributes:
        table: the group's.
        rows: [rows] row numbers.
        new: [rows, lanes] pages to append.
        shared: [rows, lanes] whether the lane's last page must be copied before it is written.
    """

    table: LaneTable
    rows: Rows
    new: NDArray[np.int32]
    shared: NDArray[np.bool_]

    @property
    def page_class(self) -> PageClass:
        """What the pages hold."""
        return self.table.group.page_class

    @property
    def num_pages(self) -> int:
        """Pages to give, copies included."""
        return int(self.new.sum()) + int(self.shared.sum())


class Placement(ABC):
    """Gives pages of one arena to the lanes of all sequences.

    A page that is kept aside for a lane (reserved: no table names it, nobody else gets it) has one
    reference, so `used + free == total` holds for every store.

    Args:
        arena: the bytes.
        pools: the pages of each class in it.

    Attributes:
        num_copies: lanes that were copied to another place because they grew.
        copied_bytes: bytes of those copies.
        copying_peak_bytes: most bytes of pages in use while lanes were copied.
        longest_tokens: of a sequence; None where only the arena bounds it.
        border_slabs: slabs that the pages of one class may lie in beyond those that they fill.
    """

    shares: bool  # a page can have several holders: forks share, prefixes are lent
    drops_pages: bool  # a page can leave from the front or the middle of a lane
    reserves: bool  # pages are kept aside for lanes

    def __init__(self, arena: Arena, pools: Mapping[PageClass, CountedPages]) -> None:
        self.arena, self.pools = arena, dict(pools)
        self.num_copies = 0
        self.copied_bytes = 0
        self.copying_peak_bytes = 0
        self.longest_tokens: int | None = None
        self.border_slabs = 0

    def fits(self, pages: Mapping[PageClass, int]) -> bool:
        """Whether so many pages of each class can be given at once, wherever they lie."""
        return self._slabs_needed(pages) <= self.arena.num_free_slabs

    def _slabs_needed(self, pages: Mapping[PageClass, int]) -> int:
        return sum(self.pools[c].slabs_needed(n) for c, n in pages.items())

    def shortage(self, pages: Mapping[PageClass, int]) -> str:
        """What pages of each class that do not fit lack, in whole slabs: for errors."""
        slab_bytes, free = self.arena.slab_bytes, self.arena.num_free_slabs
        return (
            f"{self._slabs_needed(pages) * slab_bytes:,} B more in slabs of {slab_bytes:,} B are "
            f"needed, {free * slab_bytes:,} of {self.arena.total_bytes:,} B are free"
        )

    # ---- growing lanes -------------------------------------------------------------------------

    @abstractmethod
    def can_give(self, demands: Sequence[Demand]) -> bool:
        """Whether `reserve` would succeed."""

    @abstractmethod
    def reserve(self, demands: Sequence[Demand], page_bytes: PageBytes) -> None:
        """See to it that `give` can serve these demands, all or nothing; may move lanes.

        Raises:
            OutOfPages: nothing was changed.
        """

    @abstractmethod
    def give(self, table: LaneTable, rows: Rows, counts: NDArray[np.int32]) -> PageNumbers:
        """The next `counts` [rows, lanes] pages of these lanes, row by row, lane by lane."""

    # ---- shrinking lanes -----------------------------------------------------------------------

    @abstractmethod
    def take_back(self, table: LaneTable, pages: PageNumbers) -> None:
        """Take pages that a lane no longer names, from its end, or from anywhere if `drops_pages`.

        Args:
            table: which no longer names them.
            pages: their numbers.
        """

    @abstractmethod
    def pass_window(self, table: LaneTable, row: int, lane: int, pages: PageNumbers) -> None:
        """Take the pages of one lane that have fallen behind its window; needs `drops_pages`."""

    @abstractmethod
    def close(self, table: LaneTable, rows: Rows, pages: PageNumbers) -> None:
        """Take everything that rows hold, of which the table named `pages`."""

    # ---- what is held --------------------------------------------------------------------------

    @abstractmethod
    def reserved_pages(self, table: LaneTable, rows: Rows) -> NDArray[np.int32]:
        """Pages [rows, lanes] kept aside for lanes beyond those their table names."""

    @abstractmethod
    def set_aside_pages(self, table: LaneTable, rows: Rows) -> PageNumbers:
        """The numbers of those pages, row by row, lane by lane."""

    @abstractmethod
    def peak_pages(
        self, group: LaneGroup, tokens: NDArray[np.int64], most_slots: int
    ) -> NDArray[np.int64]:
        """Pages a lane holds at its peak, reserved ones and what a move needs included.

        Args:
            group: the lane's.
            tokens: it must hold at most, of whole sequences or what eviction leaves; any shape.
            most_slots: where eviction or a window bound what a lane of the group must hold.
        """

    @abstractmethod
    def check(self, table: LaneTable) -> None:
        """Prove that what is kept aside fits what the table names.

        Raises:
            InvariantError: it does not.
        """


# from lane groups, bytes of the arena and most sequences at once
PlacementMaker = Callable[[CacheLayout, int, int], Placement]


def pages_by_class(demands: Sequence[Demand]) -> dict[PageClass, int]:
    """Pages of each class, copies included."""
    pages: dict[PageClass, int] = {}
    for demand in demands:
        pages[demand.page_class] = pages.get(demand.page_class, 0) + demand.num_pages
    return pages
