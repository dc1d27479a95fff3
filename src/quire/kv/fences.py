"""Copies in flight that still read pages: a page is used again only after its copy.

    swap-out   pages 4 5 6 --copy stream--> host     pages 4 5 6 are free at once
    allocate   pages 5 6                             computation waits for the copy first

Bookkeeping only. Ranges are bytes of the arena, because the slab of a freed page can be allocated
to another page class, or to another member of a shared arena.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


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
