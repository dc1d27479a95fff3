"""The arena: all KV bytes of a device, divided into slabs that page pools allocate and free.

The arena tracks bytes and slab numbers, no pages and no tensors. A slab serves one page class at a
time, so page classes of different sizes share the arena without a static split.

Copies in flight may still read freed pages. A page is used again only after its copy:

    swap-out   pages 4 5 6 --copy stream--> host     pages 4 5 6 are free at once
    allocate   pages 5 6                             computation waits for the copy first

These fences are ranges of bytes, because the slab of a freed page can be allocated to another page
class, or to another member of a shared arena.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError
from quire.layout.pages import choose_slab_bytes, slabs_for
from quire.layout.sizes import rounded_size


@runtime_checkable
class CopyInFlight(Protocol):
    """A copy out of the arena, as the computation sees it."""

    def result(self) -> None:
        """Make later computation wait for the copy."""

    def done(self) -> bool:
        """Whether the copy has ended."""


@dataclass(frozen=True, slots=True)
class _Fence:
    """Pages that a copy reads."""

    first_bytes: NDArray[np.int64]  # int64 [pages] first byte of each page, ascending
    page_bytes: int  # of each page
    copy: CopyInFlight

    def overlaps(self, first_bytes: NDArray[np.int64], num_bytes: int) -> bool:
        before_end = np.searchsorted(self.first_bytes, first_bytes + num_bytes)
        last = self.first_bytes[np.maximum(before_end - 1, 0)]
        return bool(((before_end > 0) & (last + self.page_bytes > first_bytes)).any())


class CopyFences:
    """Copies that read pages of an arena.

    The members of a shared arena copy on streams of their own, so that a copy that was added first
    may end last.
    """

    def __init__(self) -> None:
        self._fences: list[_Fence] = []

    def __len__(self) -> int:
        return len(self._fences)

    def add(self, pages: NDArray[np.int32], page_bytes: int, copy: CopyInFlight) -> None:
        self._fences = [fence for fence in self._fences if not fence.copy.done()]
        if len(pages):
            first_bytes = np.sort(pages.astype(np.int64)) * page_bytes
            self._fences.append(_Fence(first_bytes, page_bytes, copy))

    def before_use(self, pages: NDArray[np.int32], page_bytes: int) -> None:
        """Make later computation wait for the copies that read these pages."""
        if not self._fences:  # nearly always
            return
        first_bytes, left = pages.astype(np.int64) * page_bytes, []
        for fence in self._fences:
            if fence.overlaps(first_bytes, page_bytes):
                fence.copy.result()
            elif not fence.copy.done():
                left.append(fence)
        self._fences = left


class Arena:
    """A fixed number of bytes in slabs of equal size.

    Attributes:
        size_option: the command-line option that sets `total_bytes`.
        fences: copies in flight that read pages.
    """

    size_option = "--kv-memory"

    def __init__(self, total_bytes: int, page_bytes: Sequence[int]) -> None:
        self._page_bytes = tuple(page_bytes)
        self.fences = CopyFences()
        self.slab_bytes = choose_slab_bytes(total_bytes, page_bytes)
        self.num_slabs = total_bytes // self.slab_bytes
        if self.num_slabs < 1:
            raise ConfigError(
                f"expected a KV memory of {self.slab_bytes:,} B or more, got {total_bytes:,} B "
                f"(largest page {max(page_bytes):,} B); raise --kv-memory or lower --block-size"
            )
        self._free = list(range(self.num_slabs - 1, -1, -1))

    def slab_bytes_of(self, total_bytes: int) -> int:
        return choose_slab_bytes(total_bytes, self._page_bytes)

    def fitting_bytes(self, pages: Sequence[tuple[int, int]]) -> int:
        """The smallest size of an arena for (page bytes, number of pages), rounded up.

        An arena of another size may have slabs of another size, so the size is searched for.
        """
        total_bytes, needed_bytes = 0, rounded_size(sum(size * count for size, count in pages))
        while needed_bytes > total_bytes:
            total_bytes = needed_bytes
            slab_bytes = self.slab_bytes_of(total_bytes)
            needed_bytes = rounded_size(slab_bytes * slabs_for(slab_bytes, pages))
        return total_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def span_bytes(self) -> int:
        return self.total_bytes

    @property
    def num_free_slabs(self) -> int:
        return len(self._free)

    @property
    def free_slabs(self) -> frozenset[int]:
        return frozenset(self._free)

    def allocate_slab(self) -> int:
        """Allocate a slab; the caller must have checked `num_free_slabs`."""
        return self._free.pop()

    def free_slab(self, slab: int) -> None:
        self._free.append(slab)

    def check(self) -> None:
        if len(set(self._free)) != len(self._free):
            raise InvariantError("a slab is twice in the free list of the arena")
