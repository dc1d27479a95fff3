"""The host pool: fixed bytes beside the arena, where preempted sequences wait.

Pages lie there as in the arena, byte for byte, page class by page class and lane by lane, so that
the pages of a layer stand together and copies are large. Bookkeeping only; who moves the bytes is
asked through `HostCopies`.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from quire.errors import ConfigError, HostPoolFull, InvariantError
from quire.kv.extents import Extent, ExtentMap
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.kv.stored_sequences import PagesByClass
from quire.layout.pages import PAGE_ALIGNMENT_BYTES, CacheLayout, PageClass


@runtime_checkable
class HostCopies(Protocol):
    """Moves whole pages between the arena and an extent of the host's bytes."""

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Begin to copy pages of the arena to the host, one behind the other from byte `start`."""

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Begin to copy such bytes of the host into pages of the arena."""

    def wait(self) -> None:
        """Return when all copies that were begun are done."""


class NoCopies:
    """`HostCopies` without bytes, for simulations and schedules."""

    def save(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Nothing to copy."""

    def load(self, page_class: PageClass, pages: PageNumbers, start: int) -> None:
        """Nothing to copy."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True, slots=True)
class HostSpace:
    """Room in the pool for the pages of what was swapped out together.

    Attributes:
        key: identity in the pool.
        extents: of each page class; a class's pages fill them in order.
    """

    key: int
    extents: Mapping[PageClass, tuple[Extent, ...]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all extents."""
        return sum(e.num_bytes for extents in self.extents.values() for e in extents)

    @property
    def num_pieces(self) -> int:
        """Extents; one for each page class where nothing had to be split."""
        return sum(map(len, self.extents.values()))


def refuse_too_small(host_bytes: int, layout: CacheLayout) -> None:
    """Refuse a host pool in which nothing could ever wait. 0 is none, and good.

    Raises:
        ConfigError: it holds less than the shortest sequence.
    """
    least_bytes = layout.smallest_sequence_bytes
    if 0 < host_bytes < least_bytes:
        raise ConfigError(
            f"expected a host pool of {least_bytes:,} B or more (a page of every lane), got "
            f"{host_bytes:,} B, in which nothing could be swapped; raise --swap-space, or give "
            "0 to have preempted requests read again"
        )


class HostPool:
    """Fixed bytes on the host. `used_bytes + free_bytes == total_bytes` after every operation.

    Args:
        total_bytes: rounded down to whole cache lines, which pages are multiples of.
        copies: moves the bytes.
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
        """Bytes nobody holds."""
        return self._map.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that swapped pages hold."""
        return self.total_bytes - self.free_bytes

    @property
    def spaces(self) -> tuple[HostSpace, ...]:
        """What is swapped out now."""
        return tuple(self._spaces.values())

    def store(self, pages: Mapping[PageClass, int]) -> "Pooled":
        """Take room for pages that are to be saved here; see `reserve`."""
        return Pooled(self, self.reserve(pages))

    def reserve(self, pages: Mapping[PageClass, int]) -> HostSpace:
        """Take room for so many pages of each class, all or nothing.

        Raises:
            HostPoolFull: there is not as much; nothing was changed.
        """
        extents: dict[PageClass, tuple[Extent, ...]] = {}
        for page_class, count in pages.items():
            taken = self._map.allocate(count, page_class.page_bytes)
            if taken is None:
                for given in extents.values():
                    self._map.release(given)
                needed = sum(c.page_bytes * n for c, n in pages.items())
                raise HostPoolFull(
                    f"{needed:,} B are to be swapped out, {self.free_bytes:,} of "
                    f"{self.total_bytes:,} B of the host pool are free; raise --swap-space"
                )
            extents[page_class] = taken
        space = HostSpace(next(self._keys), extents)
        self._spaces[space.key] = space
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return space

    def release(self, space: HostSpace) -> None:
        """Give room back.

        Raises:
            InvariantError: it has been given back already.
        """
        if self._spaces.pop(space.key, None) is None:
            raise InvariantError(f"host space {space.key} has been given back already")
        for extents in space.extents.values():
            self._map.release(extents)

    def clear(self) -> None:
        """Give all room back: the engine closes, and nobody will come for it."""
        for space in self.spaces:
            self.release(space)

    def save(self, space: HostSpace, page_class: PageClass, pages: PageNumbers) -> None:
        """Begin to copy the pages of a class into its extents."""
        done = 0
        for extent in space.extents[page_class]:
            count = extent.num_bytes // page_class.page_bytes
            self.copies.save(page_class, pages[done : done + count], extent.start)
            done += count

    def load(
        self, space: HostSpace, page_class: PageClass, pages: PageNumbers, first: int = 0
    ) -> None:
        """Begin to copy pages of a class's extents into pages.

        Args:
            space: has them.
            page_class: theirs.
            pages: of the arena.
            first: which of the space's pages comes into the first of these; others follow.
        """
        done = 0
        for start, count in self.places(space, page_class, first, len(pages)):
            self.copies.load(page_class, pages[done : done + count], start)
            done += count

    def places(
        self, space: HostSpace, page_class: PageClass, first: int, num_pages: int
    ) -> Iterator[tuple[int, int]]:
        """First byte and number of pages of each piece in which neighbouring pages of a class lie.

        Args:
            space: has them.
            page_class: theirs.
            first: page of the space.
            num_pages: from there on.
        """
        for extent in space.extents[page_class]:
            held = extent.num_bytes // page_class.page_bytes
            count = min(held - first, num_pages)
            if count > 0:
                yield extent.start + first * page_class.page_bytes, count
            num_pages -= max(0, count)
            first = max(0, first - held)

    def check(self) -> None:
        """Prove that every byte is free or in exactly one space.

        Raises:
            InvariantError: one is not.
        """
        spaces = self.spaces
        self._map.check(tuple(e for s in spaces for part in s.extents.values() for e in part))
        if sum(space.num_bytes for space in spaces) != self.used_bytes:
            raise InvariantError("the host pool's spaces do not add up to the bytes in use")
        if not self.used_bytes <= self.peak_bytes <= self.total_bytes:
            raise InvariantError(f"peak {self.peak_bytes:,} B of {self.total_bytes:,} B")


@dataclass(frozen=True, slots=True)
class Pooled:
    """Bytes in a host pool.

    Attributes:
        pool: which.
        space: where in it.
    """

    pool: HostPool
    space: HostSpace

    def save(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy into the pool."""
        for page_class, numbers in pages.items():
            self.pool.save(self.space, page_class, numbers)
        self.pool.copies.wait()

    def load(self, memory: KVMemory, pages: PagesByClass) -> None:
        """Copy out of the pool."""
        for page_class, numbers in pages.items():
            self.pool.load(self.space, page_class, numbers)
        self.pool.copies.wait()

    def free(self) -> None:
        """Give the room back."""
        self.pool.release(self.space)
