"""The arena: all KV bytes of a device, carved into slabs that page pools borrow and return.

Knows bytes and slab numbers, no pages and no tensors. A slab serves one page class at a time, so
pages of any sizes live side by side without a static split.
"""

import math
from collections.abc import Sequence

from quire.errors import ConfigError, InvariantError
from quire.layout.pages import PAGE_ALIGNMENT_BYTES

HUGE_PAGE_BYTES = 2 * 1024 * 1024
SLABS_OF_A_SMALL_ARENA = 64
PAGES_OF_A_SLAB = 32  # where the arena allows it: taking a slab costs more than taking a page


def choose_slab_bytes(
    total_bytes: int, page_bytes: Sequence[int], *, whole_pages: bool = False
) -> int:
    """Bytes of a slab: about 2 MiB, at most 1/64 of a small arena, whole pages where possible.

    Pages of more than 64 KiB get larger slabs, of 32 pages.

    A common multiple of the page sizes wastes nothing at slab borders. Where the least common
    multiple is too large for the arena, slabs hold at least four of the largest pages, unless
    only `whole_pages` will do.
    """
    wanted = max(HUGE_PAGE_BYTES, PAGES_OF_A_SLAB * max(page_bytes))
    target = min(wanted, total_bytes // SLABS_OF_A_SMALL_ARENA)
    common = math.lcm(*page_bytes)
    if common <= target:
        return target // common * common
    if whole_pages or len(set(page_bytes)) == 1:
        return common
    return min(
        common, max(target // PAGE_ALIGNMENT_BYTES * PAGE_ALIGNMENT_BYTES, 4 * max(page_bytes))
    )


def pages_per_slab(slab_bytes: int, page_bytes: int) -> int:
    """Whole pages that every slab holds; a border of slabs may cut one."""
    return slab_bytes // page_bytes - (1 if slab_bytes % page_bytes else 0)


class Arena:
    """Fixed bytes in equal slabs.

    Args:
        total_bytes: the user's KV memory; rounded down to whole slabs (`total_bytes` after that).
        page_bytes: sizes of the pages that will live here.
        whole_pages: no border of slabs cuts a page, so that pages of two slabs can be neighbours.

    Attributes:
        size_option: gives `total_bytes`.

    Raises:
        ConfigError: not even one slab fits.
    """

    size_option = "--kv-memory"

    def __init__(
        self, total_bytes: int, page_bytes: Sequence[int], *, whole_pages: bool = False
    ) -> None:
        self._page_bytes, self._whole_pages = tuple(page_bytes), whole_pages
        self.slab_bytes = choose_slab_bytes(total_bytes, page_bytes, whole_pages=whole_pages)
        self.num_slabs = total_bytes // self.slab_bytes
        if self.num_slabs < 1:
            raise ConfigError(
                f"a KV memory of {total_bytes:,} B holds no page: {self.slab_bytes:,} B are needed "
                f"(largest page {max(page_bytes):,} B); raise --kv-memory or lower --block-size"
            )
        self._free = list(range(self.num_slabs - 1, -1, -1))

    def slab_bytes_of(self, total_bytes: int) -> int:
        """Bytes of a slab in an arena of another size, for the same pages."""
        return choose_slab_bytes(total_bytes, self._page_bytes, whole_pages=self._whole_pages)

    def bytes_for(self, total_bytes: int, pages: Sequence[tuple[int, int]]) -> int:
        """Bytes of the slabs that pages fill in an arena of another size.

        Args:
            total_bytes: of that arena; its slabs have the size that follows.
            pages: bytes of one page and number of pages, of each class.
        """
        slab_bytes = self.slab_bytes_of(total_bytes)
        return slab_bytes * sum(
            -(-count // pages_per_slab(slab_bytes, page_bytes)) for page_bytes, count in pages
        )

    @property
    def total_bytes(self) -> int:
        """Bytes in whole slabs."""
        return self.num_slabs * self.slab_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes that page numbers range over."""
        return self.total_bytes

    @property
    def num_free_slabs(self) -> int:
        """Slabs no pool holds."""
        return len(self._free)

    @property
    def free_slabs(self) -> frozenset[int]:
        """Numbers of the slabs no pool holds."""
        return frozenset(self._free)

    def take_slab(self) -> int:
        """Hand out a slab; the caller has checked `num_free_slabs`."""
        return self._free.pop()

    def take_this_slab(self, slab: int) -> None:
        """Hand out a slab of `free_slabs`."""
        self._free.remove(slab)

    def give_slab(self, slab: int) -> None:
        """Take a slab back."""
        self._free.append(slab)

    def check(self) -> None:
        """Prove that no slab is free twice.

        Raises:
            InvariantError: one is.
        """
        if len(set(self._free)) != len(self._free):
            raise InvariantError("the arena holds a slab twice in its free list")
