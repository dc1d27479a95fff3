"""The columns of a slab that are in use: all rows end at one column, so appending is one write.

    column      0        lo                      hi       capacity
                |  free   |  row 0:  . . a b c d  |  free   |
                |         |  row 1:  e f g h i j  |         |

Tokens are appended at hi. When the longest rows have finished, lo increases, without moving data.
Only when hi reaches the capacity, the window is moved to column 0 or the slab grows.
"""

from dataclasses import dataclass

from quire.errors import InvariantError, SlabFull

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
