"""Extents of a fixed range of bytes: who may write where on the host.

    | taken | free | taken    | free  | taken | free            |
      first fit: the lowest hole that holds all of it, else the largest holes in whole units

Knows bytes, no pages and no tensors.
"""

from bisect import bisect_left
from dataclasses import dataclass

from quire.errors import InvariantError


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Bytes from `start` on.

    Attributes:
        start: first byte.
        num_bytes: how many.
    """

    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.start + self.num_bytes


class ExtentMap:
    """Free extents of a range, ascending; neighbours are always joined.

    Args:
        total_bytes: the range.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self._free = [Extent(0, total_bytes)] if total_bytes else []

    @property
    def free_extents(self) -> tuple[Extent, ...]:
        """The holes, ascending."""
        return tuple(self._free)

    def fits(self, num_units: int, unit_bytes: int) -> bool:
        """Whether so many units can be given, each in one piece."""
        return sum(hole.num_bytes // unit_bytes for hole in self._free) >= num_units

    def allocate(self, num_units: int, unit_bytes: int) -> tuple[Extent, ...] | None:
        """Take whole units: in one extent where a hole is large enough, else in as few as can be.

        Args:
            num_units: how many.
            unit_bytes: of each; an extent holds whole ones.

        Returns:
            Extents that add up to all units; None, and nothing taken, where they do not fit.
        """
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
        """Give extents back.

        Raises:
            InvariantError: one is free already, in part or whole, or lies outside.
        """
        for extent in extents:
            self._give(extent)

    def _give(self, extent: Extent) -> None:
        at = bisect_left(self._free, extent)
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        low = before.end if before else 0
        high = after.start if after else self.total_bytes
        if not low <= extent.start <= extent.end <= high:
            raise InvariantError(f"{extent} is given back, but is free already or was never given")
        self.free_bytes += extent.num_bytes
        start, end, first, last = extent.start, extent.end, at, at
        if before and before.end == start:
            start, first = before.start, at - 1
        if after and after.start == end:
            end, last = after.end, at + 1
        self._free[first:last] = [Extent(start, end - start)]

    def check(self, taken: tuple[Extent, ...]) -> None:
        """Prove that free and taken extents tile the range, and that free neighbours are joined.

        Raises:
            InvariantError: a byte is missing, or counted twice.
        """
        if sum(hole.num_bytes for hole in self._free) != self.free_bytes:
            raise InvariantError(f"{self.free_bytes:,} B are noted as free, the holes differ")
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
