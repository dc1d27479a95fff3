"""Slabs: the equal parts of a KV memory, each with pages of one class."""

import math
from collections.abc import Iterable, Sequence

from quire.layout.pages import PAGE_ALIGNMENT_BYTES
from quire.layout.sizes import HUGE_PAGE_BYTES

SLABS_OF_A_SMALL_ARENA = 64
PAGES_OF_A_SLAB = 32  # if the arena is large enough: allocating a slab costs more than a page


def choose_slab_bytes(total_bytes: int, page_bytes: Sequence[int]) -> int:
    """Return the bytes of a slab: about 2 MiB, at most 1/64 of a small arena."""
    wanted = max(HUGE_PAGE_BYTES, PAGES_OF_A_SLAB * max(page_bytes))
    target = min(wanted, total_bytes // SLABS_OF_A_SMALL_ARENA)
    common = math.lcm(*page_bytes)
    if common <= target:
        return target // common * common
    if len(set(page_bytes)) == 1:
        return common
    return min(
        common, max(target // PAGE_ALIGNMENT_BYTES * PAGE_ALIGNMENT_BYTES, 4 * max(page_bytes))
    )


def pages_per_slab(slab_bytes: int, page_bytes: int) -> int:
    """Return the minimum number of whole pages in a slab; a page can cross a slab boundary."""
    return slab_bytes // page_bytes - (1 if slab_bytes % page_bytes else 0)


def slabs_for(slab_bytes: int, pages: Iterable[tuple[int, int]]) -> int:
    """Return the maximum number of slabs for (page bytes, number of pages) of each page class."""
    return sum(-(-count // pages_per_slab(slab_bytes, page_bytes)) for page_bytes, count in pages)
