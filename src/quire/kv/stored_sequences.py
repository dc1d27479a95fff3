"""Sequences outside the arena: page counts of their lanes, and their stored pages.

row 0  lanes -> 0 1 2 3 | row 1  lanes -> 0 1 4    numbers of stored pages of one class
stored pages of the class: 0 1 2 3 4               a shared page is stored once
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.layout.pages import PageClass

PagesByClass = Mapping[PageClass, PageNumbers]


@dataclass(frozen=True, slots=True)
class SwappedLanes:
    """A lane group of a sequence outside the arena, pages lane by lane, not offloaded ones."""

    num_pages: NDArray[np.int32]  # [lanes]
    num_slots: NDArray[np.int32]  # [lanes]
    page_positions: NDArray[np.int32]  # [pages] position of the first slot, valid for ordered lanes
    stored: NDArray[np.int32]  # [pages] index among the stored pages of the class


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """The bookkeeping of one sequence outside the arena."""

    length: int  # logical, including a head that was not stored
    peak_bytes: int
    lanes: Mapping[str, SwappedLanes]  # by name of the group
    statistics: frozenset[str]  # private groups that the sequence uses


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """A copy between the arena and swap space that has ended."""

    back: bool  # whether pages were copied into the arena
    num_bytes: int
    seconds: float


@runtime_checkable
class StoredPages(Protocol):
    """Bytes of pages outside the arena."""

    def save(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy pages out of the arena, or start to: fences of the arena then order their reuse."""

    def load(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy the stored pages into pages of the arena; later computation has them."""

    def free(self) -> None:
        """Free the stored bytes."""


@runtime_checkable
class SwapSpace(Protocol):
    """Fixed bytes outside the arena, such as `quire.offload.swap.host_pool.HostPool`."""

    @property
    def free_bytes(self) -> int:
        """Free bytes."""

    def store(self, pages: Mapping[PageClass, int]) -> StoredPages:
        """Space for pages of each class, all or none."""
        ...

    def timed_copies(self) -> Sequence[TimedCopy] | None:
        """Copies that ended since the last call; None if copies have ended when a call returns."""
        ...


@runtime_checkable
class OffloadedPages(Protocol):
    """Offloaded first pages of swapped sequences; their bytes stay where they are."""

    staging: Mapping[PageClass, int]

    def attach(self, rows: Sequence[int]) -> None:
        """Append the pages to the empty rows of the resumed sequences."""

    def discard(self) -> None:
        """Free the bytes that no sequence uses."""


@runtime_checkable
class OffloadedRows(Protocol):
    """The offloaded pages of a KV memory's sequences."""

    def detach(self, rows: Sequence[int]) -> OffloadedPages | None:
        """Take over the offloaded pages of sequences that leave the arena; None if there are none.

        The caller releases the rows next.
        """
        ...


class Payloads:
    """Stored pages in separately allocated memory, as returned by `PageBytes.read_pages`."""

    def __init__(self) -> None:
        self._payloads: dict[PageClass, object] = {}

    def save(self, memory: KVMemory, pages: PagesByClass) -> None:
        for page_class, numbers in pages.items():
            self._payloads[page_class] = memory.store.read_pages(page_class, numbers)

    def load(self, memory: KVMemory, pages: PagesByClass) -> None:
        for page_class, numbers in pages.items():
            memory.store.write_pages(page_class, numbers, self._payloads[page_class])

    def free(self) -> None:
        self._payloads.clear()


@dataclass(frozen=True, slots=True)
class Swapped:
    """Sequences that were swapped out together; shared pages are stored once."""

    sequences: tuple[SwappedSequence, ...]  # in the order of the `swap_out` call
    pages: Mapping[PageClass, int]  # stored pages of each class
    stored: StoredPages  # bytes of the stored pages
    keep_from: int = 0  # tokens of a head to recompute; 0 if all tokens are stored
    offloaded: OffloadedPages | None = None  # first pages of the sequences

    @property
    def needed_pages(self) -> dict[PageClass, int]:
        needed = dict(self.pages)
        for page_class, pages in ({} if self.offloaded is None else self.offloaded.staging).items():
            needed[page_class] = needed.get(page_class, 0) + pages
        return needed

    @property
    def num_bytes(self) -> int:
        return sum(c.page_bytes * n for c, n in self.pages.items())

    def discard(self) -> None:
        """Free the stored bytes of a request that will not resume (a cancelled request)."""
        self.stored.free()
        if self.offloaded is not None:
            self.offloaded.discard()
