"""The host pool: a fixed amount of CPU memory for pages of preempted requests (swap space).

Pages are stored byte for byte as in the arena, by page class and lane, so that the pages of a layer
are contiguous and copies are large. This module does the bookkeeping; `HostCopies` does the copies.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, HostMemoryFull, InvariantError
from quire.kv.extents import Extent, ExtentMap
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.swap import PagesByClass, TimedCopy
from quire.layout.pages import PAGE_ALIGNMENT_BYTES, CacheLayout, PageClass


@runtime_checkable
class HostCopies(Protocol):
    """Copies whole pages between the arena and an extent of host memory."""

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Start to copy pages of the arena to consecutive host bytes from `start`."""

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Start to copy consecutive host bytes from `start` into pages of the arena."""

    def wait(self) -> None:
        """Wait for all started copies, or have later use of their pages ordered after them."""


@runtime_checkable
class CopiesInFlight(HostCopies, Protocol):
    """`HostCopies` whose `wait` returns before the copies have ended."""

    def timed(self) -> Sequence[TimedCopy]:
        """Return the copies that ended since the last call."""
        ...


class NoCopies:
    """`HostCopies` without bytes, for simulations."""

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Do nothing."""

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class HostSpace:
    """Space in the pool for the pages of one swap-out.

    Attributes:
        key: identity in the pool.
        extents: extents of each page class; the pages of a class fill them in order.
    """

    key: int
    extents: Mapping[PageClass, tuple[Extent, ...]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all extents."""
        return sum(e.num_bytes for extents in self.extents.values() for e in extents)

    @property
    def num_extents(self) -> int:
        """Number of extents; one for each page class without fragmentation."""
        return sum(map(len, self.extents.values()))


MAX_AUTO_BYTES = 4 << 30  # pinning more delays the start on a device
AUTO_SHARE = 0.125  # of the free memory; the rest is for activations and other processes


def auto_swap_bytes(kv_bytes: int, free_bytes: int, layout: CacheLayout) -> int:
    """Default size of the swap space in bytes; 0 if no request would fit.

    Args:
        kv_bytes: size of the KV memory, which preempted requests rarely exceed.
        free_bytes: CPU memory that is left when all other memory of the engine is in use.
        layout: pages of a sequence.
    """
    size_bytes = min(kv_bytes, MAX_AUTO_BYTES, int(AUTO_SHARE * max(0, free_bytes)))
    return size_bytes if size_bytes >= layout.smallest_sequence_bytes else 0


def refuse_too_small(host_bytes: int, layout: CacheLayout) -> None:
    """Refuse a host pool that cannot hold any request; 0 (no pool) is accepted.

    Raises:
        ConfigError: the pool is smaller than the shortest sequence.
    """
    min_bytes = layout.smallest_sequence_bytes
    if 0 < host_bytes < min_bytes:
        raise ConfigError(
            f"expected a host pool of {min_bytes:,} B or more (a page of every lane), got "
            f"{host_bytes:,} B, in which no request fits; raise --swap-space, or set it to 0 "
            "to recompute preempted requests"
        )


class HostPool:
    """CPU memory of fixed size. Invariant: `used_bytes + free_bytes == total_bytes`.

    Args:
        total_bytes: size, rounded down to a multiple of the page alignment.
        copies: copies the bytes; default: none.
    """

    def __init__(self, total_bytes: int, copies: HostCopies | None = None) -> None:
        self.total_bytes = total_bytes // PAGE_ALIGNMENT_BYTES * PAGE_ALIGNMENT_BYTES
        self.copies: HostCopies = copies or NoCopies()
        self.peak_bytes = 0
        self._map = ExtentMap(self.total_bytes)
        self._spaces: dict[int, HostSpace] = {}
        self._keys = itertools.count()

    @property
    def free_bytes(self) -> int:
        """Bytes of no space."""
        return self._map.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all spaces."""
        return self.total_bytes - self.free_bytes

    @property
    def spaces(self) -> tuple[HostSpace, ...]:
        """Allocated spaces."""
        return tuple(self._spaces.values())

    def store(self, pages: Mapping[PageClass, int]) -> "Pooled":
        """Reserve space for pages that will be saved; see `reserve`."""
        return Pooled(self, self.reserve(pages))

    def timed_copies(self) -> Sequence[TimedCopy] | None:
        return self.copies.timed() if isinstance(self.copies, CopiesInFlight) else None

    def reserve(self, pages: Mapping[PageClass, int]) -> HostSpace:
        """Reserve space for a number of pages of each class, all or none.

        Raises:
            HostMemoryFull: too few free bytes; nothing was changed.
        """
        extents: dict[PageClass, tuple[Extent, ...]] = {}
        for page_class, count in pages.items():
            taken = self._map.allocate(count, page_class.page_bytes)
            if taken is None:
                for given in extents.values():
                    self._map.release(given)
                needed = sum(c.page_bytes * n for c, n in pages.items())
                raise HostMemoryFull(
                    f"{needed:,} B are to be swapped out, and {self.free_bytes:,} of "
                    f"{self.total_bytes:,} B of the host pool are free; raise --swap-space"
                )
            extents[page_class] = taken
        space = HostSpace(next(self._keys), extents)
        self._spaces[space.key] = space
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return space

    def release(self, space: HostSpace) -> None:
        """Free a space.

        Raises:
            InvariantError: the space is free already.
        """
        if self._spaces.pop(space.key, None) is None:
            raise InvariantError(f"host space {space.key} is free already")
        for extents in space.extents.values():
            self._map.release(extents)

    def has(self, space: HostSpace) -> bool:
        """Whether a space is allocated."""
        return space.key in self._spaces

    def clear(self) -> None:
        """Free all spaces when the engine closes."""
        for space in self.spaces:
            self.release(space)

    def save(self, space: HostSpace, page_class: PageClass, pages: PageNumbers) -> None:
        """Start to copy pages of a class into its extents."""
        done = 0
        for extent in space.extents[page_class]:
            count = extent.num_bytes // page_class.page_bytes
            self.copies.save(page_class, pages[done : done + count], extent.start)
            done += count

    def load(
        self, space: HostSpace, page_class: PageClass, pages: PageNumbers, first: int = 0
    ) -> None:
        """Start to copy pages of a space into pages of the arena.

        Args:
            space: the source.
            page_class: page class of the pages.
            pages: pages of the arena.
            first: index in the space of the first page to copy.
        """
        done = 0
        for start, count in self.places(space, page_class, first, len(pages)):
            self.copies.load(page_class, pages[done : done + count], start)
            done += count

    def places(
        self, space: HostSpace, page_class: PageClass, first: int, num_pages: int
    ) -> Iterator[tuple[int, int]]:
        """First byte and number of pages of each contiguous run of a class's pages.

        Args:
            space: holds the pages.
            page_class: page class of the pages.
            first: index of the first page in the space.
            num_pages: number of pages from the first.
        """
        for extent in space.extents[page_class]:
            held = extent.num_bytes // page_class.page_bytes
            count = min(held - first, num_pages)
            if count > 0:
                yield extent.start + first * page_class.page_bytes, count
            num_pages -= max(0, count)
            first = max(0, first - held)

    def check(self) -> None:
        """Check that every byte is free or in exactly one space.

        Raises:
            InvariantError: a byte is in no space or in several.
        """
        spaces = self.spaces
        self._map.check(tuple(e for s in spaces for part in s.extents.values() for e in part))
        if sum(space.num_bytes for space in spaces) != self.used_bytes:
            raise InvariantError("the host pool's spaces do not add up to the bytes in use")
        if not self.used_bytes <= self.peak_bytes <= self.total_bytes:
            raise InvariantError(f"peak {self.peak_bytes:,} B of {self.total_bytes:,} B")


def page_starts(space: HostSpace, page_class: PageClass) -> NDArray[np.int64]:
    """First byte of each page of a class in a space, in order."""
    size = page_class.page_bytes
    own = [np.arange(e.start, e.start + e.num_bytes, size) for e in space.extents[page_class]]
    return np.concatenate(own)


@dataclass(frozen=True, slots=True)
class Pooled:
    """Pages in a host pool.

    Attributes:
        pool: the pool.
        space: space of the pages in the pool.
    """

    pool: HostPool
    space: HostSpace

    def save(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy pages into the pool."""
        for page_class, numbers in pages.items():
            self.pool.save(self.space, page_class, numbers)
        self.pool.copies.wait()

    def load(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy pages out of the pool."""
        for page_class, numbers in pages.items():
            self.pool.load(self.space, page_class, numbers)
        self.pool.copies.wait()

    def free(self) -> None:
        """Free the space."""
        self.pool.release(self.space)
