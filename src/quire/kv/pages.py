"""The arena, all KV bytes of a device in slabs, and page pools, which allocate pages in slabs.

The arena tracks bytes and slab numbers, no pages and no tensors. A slab serves one page class at a
time, so page classes of different sizes share the arena without a static split.

Copies in flight may still read freed pages. A page is used again only after its copy:

    swap-out   pages 4 5 6 --copy stream--> host     pages 4 5 6 are free at once
    allocate   pages 5 6                             computation waits for the copy first

These fences are ranges of bytes, because the slab of a freed page can be allocated to another page
class, or to another member of a shared arena.

A page pool allocates the pages of one page class and counts their references. A page number is an
offset in the arena: page n of a class with pages of b bytes starts at byte n * b. Kernels index the
arena as an array of pages, without per-slab arithmetic. A slab serves the page numbers that are
wholly inside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.layout.pages import PageClass, choose_slab_bytes, pages_per_slab, slabs_for
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
        size_option: the command-line option that sets `total_bytes` and `unpaged_bytes`.
        unpaged_bytes: bytes of this option that hold no pages, such as bounds of offloaded pages.
        fences: copies in flight that read pages.
    """

    size_option = "--kv-memory"
    unpaged_bytes = 0

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


PageNumbers = NDArray[np.int32]
NO_PAGES = np.empty(0, dtype=np.int32)


class PagePool:
    """Reference-counted pages of one class; pages of a lane can be anywhere in the arena.

    Allocation costs O(1) per page, with one NumPy slice per slab. A slab whose last page is freed
    is returned to the arena at once.

    Attributes:
        ref_counts: int32 [pages] number of references to each page; 0 for a free page.
        num_shared: pages with more than one reference; if 0, writers skip the copy-on-write check.
        num_used: pages with at least one reference.
    """

    def __init__(self, arena: Arena, page_class: PageClass) -> None:
        self.page_class = page_class
        self.ref_counts = np.zeros(arena.span_bytes // page_class.page_bytes, dtype=np.int32)
        self.num_shared = 0
        self.num_used = 0
        self._arena = arena
        # slab -> stack of its free pages, and number of valid entries of the stack
        self._stacks: dict[int, PageNumbers] = {}
        self._num_free: dict[int, int] = {}
        self._partial: dict[int, None] = {}  # slabs with a free page, newest last
        self._free_in_slabs = 0

    @property
    def pages_per_slab(self) -> int:
        """Minimum number of whole pages in a slab; a page can cross a slab boundary."""
        return pages_per_slab(self._arena.slab_bytes, self.page_class.page_bytes)

    @property
    def held_slabs(self) -> frozenset[int]:
        return frozenset(self._stacks)

    @property
    def used_bytes(self) -> int:
        return self.num_used * self.page_class.page_bytes

    @property
    def tail_bytes(self) -> int:
        covered = sum(map(len, self._stacks.values())) * self.page_class.page_bytes
        return len(self._stacks) * self._arena.slab_bytes - covered

    @property
    def num_free(self) -> int:
        return self._free_in_slabs

    @property
    def free_bytes(self) -> int:
        return self.num_free * self.page_class.page_bytes

    def slabs_needed(self, num_pages: int) -> int:
        return max(0, -(-(num_pages - self.num_free) // self.pages_per_slab))

    def allocate(self, num_pages: int) -> PageNumbers:
        """Each with one reference."""
        if self.slabs_needed(num_pages) > self._arena.num_free_slabs:
            raise OutOfPages(
                f"expected {num_pages} free pages of {self.page_class.page_bytes:,} B, got "
                f"{self.num_free} in held slabs and {self._arena.num_free_slabs} free slabs of "
                f"{self.pages_per_slab} pages"
            )
        pages = np.empty(num_pages, dtype=np.int32)
        filled = 0
        while filled < num_pages:
            slab = next(reversed(self._partial)) if self._partial else self._allocate_slab()
            filled += self._pop(slab, pages[filled:])
        self.ref_counts[pages] = 1
        self.num_used += num_pages
        self._before_use(pages)
        return pages

    def retain(self, pages: PageNumbers) -> None:
        """Add one reference to each page (all distinct, all in use)."""
        self._before_use(pages)
        self.num_shared += int(np.count_nonzero(self.ref_counts[pages] == 1))
        self.ref_counts[pages] += 1

    def release(self, pages: PageNumbers) -> None:
        """Drop one reference per entry of `pages` (duplicates allowed); free unreferenced pages."""
        if len(pages) <= 1:  # frequent: the prefix cache evicts block by block
            for page in pages.tolist():
                left = int(self.ref_counts[page]) - 1
                self.ref_counts[page] = left
                if left == 0:
                    self._push(np.array([page], dtype=np.int32))
                elif left == 1:
                    self.num_shared -= 1
            return
        before = self.ref_counts[pages]
        if self.num_shared:
            pages, times = np.unique(pages, return_counts=True)
            before = self.ref_counts[pages]
            after = before - times
            self.ref_counts[pages] = after
            self.num_shared -= int(np.count_nonzero((before > 1) & (after <= 1)))
            pages = pages[after == 0]
        else:
            self.ref_counts[pages] = before - 1
        self._push(pages)

    def _before_use(self, pages: PageNumbers) -> None:
        """Order later computation after copies in flight that read these pages."""
        self._arena.fences.before_use(pages, self.page_class.page_bytes)

    def _allocate_slab(self) -> int:
        slab = self._arena.allocate_slab()
        page_bytes, slab_bytes = self.page_class.page_bytes, self._arena.slab_bytes
        first, end = -(-slab * slab_bytes // page_bytes), (slab + 1) * slab_bytes // page_bytes
        self._stacks[slab] = np.arange(end - 1, first - 1, -1, dtype=np.int32)
        self._num_free[slab] = end - first
        self._free_in_slabs += end - first
        self._partial[slab] = None
        return slab

    def _pop(self, slab: int, into: PageNumbers) -> int:
        free = self._num_free[slab]
        taken = min(free, len(into))
        into[:taken] = self._stacks[slab][free - taken : free][::-1]
        self._num_free[slab] = free - taken
        self._free_in_slabs -= taken
        if taken == free:
            del self._partial[slab]
        return taken

    def _push(self, pages: PageNumbers) -> None:
        self.num_used -= len(pages)
        slabs = pages.astype(np.int64) * self.page_class.page_bytes // self._arena.slab_bytes
        if len(pages) > 1:
            order = np.argsort(slabs, kind="stable")
            pages, slabs = pages[order], slabs[order]
        borders = [0, *(np.flatnonzero(slabs[1:] != slabs[:-1]) + 1).tolist(), len(pages)]
        for start, end in pairwise(borders):
            if end > start:  # false only if no page was freed
                self._push_to_slab(int(slabs[start]), pages[start:end])

    def _push_to_slab(self, slab: int, pages: PageNumbers) -> None:
        free = self._num_free[slab]
        self._stacks[slab][free : free + len(pages)] = pages
        self._num_free[slab] = free + len(pages)
        self._free_in_slabs += len(pages)
        if self._num_free[slab] == len(self._stacks[slab]):
            self._free_in_slabs -= self._num_free.pop(slab)
            del self._stacks[slab]
            self._partial.pop(slab, None)
            self._arena.free_slab(slab)
        else:
            self._partial[slab] = None

    def check(self) -> None:
        used = free = 0
        for slab, stack in self._stacks.items():
            idle = stack[: self._num_free[slab]]
            if len(np.unique(idle)) != len(idle) or self.ref_counts[idle].any():
                raise InvariantError(
                    f"the free list of slab {slab} has a page in use, or a page twice"
                )
            free += len(idle)
            used += len(stack) - len(idle)
        counted = int(np.count_nonzero(self.ref_counts))
        shared = int(np.count_nonzero(self.ref_counts > 1))
        if (used, free, shared) != (counted, self._free_in_slabs, self.num_shared) or (
            used != self.num_used
        ):
            raise InvariantError(
                f"pool of {self.page_class.page_bytes} B pages: {used} used and {free} free by "
                f"slabs, {counted} referenced, counters say {self.num_used} used and "
                f"{self._free_in_slabs} free"
            )
