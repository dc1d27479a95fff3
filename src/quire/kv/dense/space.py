"""The space of a slab, without tensors: its columns in use and its bytes.

All rows end at one column, so appending is one write:

    column      0        lo                      hi       capacity
                |  free   |  row 0:  . . a b c d  |  free   |
                |         |  row 1:  e f g h i j  |         |

Tokens are appended at hi. When the longest rows have finished, lo increases, without moving data.
Only when hi reaches the capacity, the window is moved to column 0 or the slab grows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from quire.errors import HostMemoryFull, InvariantError, SlabFull

_MIN_SPARE_COLUMNS, _SPARE_SHARE = 4, 8


def spare_columns(width: int) -> int:
    """Return the number of free columns to allocate after a window of this width.

    Moving the window copies `width` columns, and the next move follows after one step per free
    column. A step reads the whole window, so with an eighth of the width a move costs little.
    """
    return max(_MIN_SPARE_COLUMNS, width // _SPARE_SHARE)


@dataclass(slots=True)
class Window:
    """The range of columns in use."""

    capacity: int
    lo: int = 0  # first column in use
    hi: int = 0  # column after the last one in use
    limit: int | None = None
    planned: int = 0  # known to be needed; growing allocates at least this many

    @property
    def width(self) -> int:
        return self.hi - self.lo

    def has_room(self, columns: int) -> bool:
        """Return whether `columns` more columns fit after hi without moving or growing."""
        return self.hi + columns <= self.capacity

    def capacity_for(self, columns: int) -> int:
        """Unchanged if moving suffices."""
        needed = self.width + columns
        if self.limit is not None and needed > self.limit:
            raise SlabFull(
                f"expected at most capacity_tokens={self.limit:,} columns, got {needed:,}: raise "
                "capacity_tokens, or use a batcher without empty columns, such as baton_pd"
            )
        planned = needed <= self.planned <= self.capacity
        if planned or self.capacity - needed >= spare_columns(needed) // 2:
            return self.capacity
        return self.new_capacity(needed)

    def new_capacity(self, needed: int) -> int:
        """Return the capacity of a new slab for `needed` columns, spare columns included."""
        if needed <= self.planned:
            return self.planned
        capacity = needed + spare_columns(needed)
        return capacity if self.limit is None else min(capacity, self.limit)

    def check(self) -> None:
        if not 0 <= self.lo <= self.hi <= self.capacity:
            raise InvariantError(f"expected 0 <= lo <= hi <= capacity, got {self}")


class ByteMeter:
    """Byte counter of one memory (device or CPU)."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.peak_bytes = 0

    def can_reserve(self, num_bytes: int) -> bool:
        return self.limit_bytes is None or self.used_bytes + num_bytes <= self.limit_bytes

    def reserve(self, num_bytes: int) -> None:
        """Nothing changes on `HostMemoryFull`."""
        if not self.can_reserve(num_bytes):
            raise HostMemoryFull(
                f"expected {num_bytes:,} B more within {self.limit_bytes:,} B of CPU memory, "
                f"{self.used_bytes:,} B are in use: raise swap_space"
            )
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    @contextmanager
    def reserving(self, num_bytes: int) -> Iterator[None]:
        """Count `num_bytes` as in use; undo this if the body of the `with` block raises."""
        self.reserve(num_bytes)
        try:
            yield
        except BaseException:
            self.release(num_bytes)
            raise

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
