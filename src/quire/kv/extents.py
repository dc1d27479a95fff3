"""Allocation of extents in a fixed range of bytes of CPU memory.

    | used  | free | used     | free  | used  | free            |
      first fit: the lowest hole that holds the whole request, else the largest holes in whole units

The map tracks bytes, no pages and no tensors.
"""

from bisect import bisect_left
from dataclasses import dataclass

from quire.errors import InvariantError


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A contiguous range of bytes."""

    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        """Offset of the byte after the last one."""
        return self.start + self.num_bytes


class ExtentMap:
    """The free extents of a range, ascending; adjacent free extents are always joined."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self._free = [Extent(0, total_bytes)] if total_bytes else []

    @property
    def free_extents(self) -> tuple[Extent, ...]:
        return tuple(self._free)

    def fits(self, num_units: int, unit_bytes: int) -> bool:
        return sum(hole.num_bytes // unit_bytes for hole in self._free) >= num_units

    def allocate(self, num_units: int, unit_bytes: int) -> tuple[Extent, ...] | None:
        """One extent if a hole is large enough, else few of whole units; None without a change."""
        if num_units == 0:
            return ()
        if not self.fits(num_units, unit_bytes):
            return None
        needed = num_units * unit_bytes
        first = next((hole for hole in self._free if hole.num_bytes >= needed), None)
        holes = [first] if first else sorted(self._free, key=lambda h: (-h.num_bytes, h.start))
        taken = []
        for hole in holes:
            units = min(hole.num_bytes // unit_bytes, num_units)
            num_units -= units
            if units:
                taken.append(self._take(hole, units * unit_bytes))
        return tuple(taken)

    def _take(self, hole: Extent, num_bytes: int) -> Extent:
        at = bisect_left(self._free, hole)
        rest = Extent(hole.start + num_bytes, hole.num_bytes - num_bytes)
        self._free[at : at + 1] = [rest] if rest.num_bytes else []
        self.free_bytes -= num_bytes
        return Extent(hole.start, num_bytes)

    def release(self, extents: tuple[Extent, ...]) -> None:
        for extent in extents:
            self._give(extent)

    def _give(self, extent: Extent) -> None:
        at = bisect_left(self._free, extent)
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        low = before.end if before else 0
        high = after.start if after else self.total_bytes
        if not low <= extent.start <= extent.end <= high:
            raise InvariantError(f"{extent} is freed, but is already free or was never allocated")
        self.free_bytes += extent.num_bytes
        start, end, first, last = extent.start, extent.end, at, at
        if before and before.end == start:
            start, first = before.start, at - 1
        if after and after.start == end:
            end, last = after.end, at + 1
        self._free[first:last] = [Extent(start, end - start)]

    def check(self, taken: tuple[Extent, ...]) -> None:
        """Free and used extents must tile the range, and adjacent free extents be joined."""
        if sum(hole.num_bytes for hole in self._free) != self.free_bytes:
            raise InvariantError(f"{self.free_bytes:,} B are counted as free, the holes differ")
        position = 0
        for extent in sorted((*self._free, *taken)):
            if extent.start != position or extent.num_bytes < 1:
                raise InvariantError(f"expected an extent at byte {position:,}, got {extent}")
            position = extent.end
        if position != self.total_bytes:
            raise InvariantError(f"extents end at byte {position:,} of {self.total_bytes:,}")
        pairs = zip(self._free, self._free[1:], strict=False)
        if any(left.end == right.start for left, right in pairs):
            raise InvariantError("two free extents touch and were not joined")
