"""What is left of sequences outside the arena: the shape of their lanes, and where their pages are.

row 0  lanes -> 0 1 2 3 | row 1  lanes -> 0 1 4    numbers of stored pages of one class
stored pages of the class: 0 1 2 3 4               each page once, whoever shares it
"""

from collections.abc import Mapping
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
    """One group of a sequence outside the arena, pages lane by lane.

    Attributes:
        num_pages, num_slots: [lanes].
        page_positions: [pages], of ordered lanes.
        stored: [pages], which of the stored pages of the class each one is.
    """

    num_pages: NDArray[np.int32]
    num_slots: NDArray[np.int32]
    page_positions: NDArray[np.int32]
    stored: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SwappedSequence:
    """The bookkeeping of one sequence outside the arena.

    Attributes:
        length: logical, with the head where that was left out.
        peak_bytes: the most bytes it has held.
        lanes: by name of the group.
        statistics: names of the private groups it uses.
    """

    length: int
    peak_bytes: int
    lanes: Mapping[str, SwappedLanes]
    statistics: frozenset[str]


@runtime_checkable
class StoredPages(Protocol):
    """Bytes of pages outside the arena."""

    def save(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy pages out of the arena; done when it returns."""

    def load(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy them into pages of the arena; done when it returns."""

    def free(self) -> None:
        """Let the bytes go."""


@runtime_checkable
class SwapSpace(Protocol):
    """Fixed bytes outside the arena; `quire.offload.swap.host_pool.HostPool` is one."""

    @property
    def free_bytes(self) -> int:
        """Bytes that nothing holds."""
        ...

    def store(self, pages: Mapping[PageClass, int]) -> StoredPages:
        """Take room for so many pages of each class, all or nothing.

        Raises:
            HostPoolFull: there is not as much; nothing was changed.
        """
        ...


class Payloads:
    """Bytes that `PageBytes.read_pages` gave: memory of their own, outside any pool."""

    def __init__(self) -> None:
        self._payloads: dict[PageClass, object] = {}

    def save(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Read pages."""
        for page_class, numbers in pages.items():
            self._payloads[page_class] = memory.store.read_pages(page_class, numbers)

    def load(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Write pages."""
        for page_class, numbers in pages.items():
            memory.store.write_pages(page_class, numbers, self._payloads[page_class])

    def free(self) -> None:
        """Drop the payloads."""
        self._payloads.clear()


@dataclass(frozen=True, slots=True)
class Swapped:
    """Sequences outside the arena that went together, each shared page once.

    Attributes:
        sequences: in the order they were named.
        pages: stored pages of each class.
        stored: their bytes.
        keep_from: tokens of the head that was left out and must be computed again; 0 where all
            is here.
    """

    sequences: tuple[SwappedSequence, ...]
    pages: Mapping[PageClass, int]
    stored: StoredPages
    keep_from: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes stored."""
        return sum(c.page_bytes * n for c, n in self.pages.items())

    def discard(self) -> None:
        """Let the bytes go: nobody will come back for them (a cancelled request)."""
        self.stored.free()
