"""Which columns of a slab are in use: all rows end at one column, so appending is one write.

    column      0        lo                      hi       capacity
                |  free   |  row 0:  . . a b c d  |  free   |
                |         |  row 1:  e f g h i j  |         |

Tokens are appended at hi. When the rows that reached furthest back have gone, lo moves on, which
costs nothing. Only when hi reaches the capacity is the window moved to the front, or the slab
grows.
"""

from dataclasses import dataclass

from quire.errors import InvariantError, SlabFull

_LEAST_SPARE_COLUMNS, _SPARE_SHARE = 4, 8


def spare_columns(width: int) -> int:
    """Columns kept free behind a window of this width.

    Moving the window copies `width` columns and buys as many steps as there are free ones. A step
    reads the whole window anyway, so an eighth of it makes moving cheap beside reading.
    """
    return max(_LEAST_SPARE_COLUMNS, width // _SPARE_SHARE)


@dataclass(slots=True)
class Window:
    """Columns in use.

    Attributes:
        capacity: columns there are.
        lo, hi: the first in use, and the first behind them.
        limit: most columns there may ever be; None: any.
        planned: columns that will be needed for certain, so that growing need not stop before.
    """

    capacity: int
    lo: int = 0
    hi: int = 0
    limit: int | None = None
    planned: int = 0

    @property
    def width(self) -> int:
        """Columns in use."""
        return self.hi - self.lo

    def has_room(self, columns: int) -> bool:
        """Whether so many fit behind hi as it is."""
        return self.hi + columns <= self.capacity

    def capacity_for(self, columns: int) -> int:
        """The capacity that takes so many more: as it is where moving to the front is enough.

        Raises:
            SlabFull: they would pass the limit.
        """
        needed = self.width + columns
        if self.limit is not None and needed > self.limit:
            raise SlabFull(
                f"expected at most capacity_tokens={self.limit:,} columns, got {needed:,}: raise "
                "it, or use a batcher that leaves no holes, such as baton_pd"
            )
        planned = needed <= self.planned <= self.capacity
        if planned or self.capacity - needed >= spare_columns(needed) // 2:
            return self.capacity
        return self.new_capacity(needed)

    def new_capacity(self, needed: int) -> int:
        """Of a slab that is made for so many columns: what is planned, or some to spare."""
        if needed <= self.planned:
            return self.planned
        capacity = needed + spare_columns(needed)
        return capacity if self.limit is None else min(capacity, self.limit)

    def check(self) -> None:
        """Prove that the numbers fit each other.

        Raises:
            InvariantError: they do not.
        """
        if not 0 <= self.lo <= self.hi <= self.capacity:
            raise InvariantError(f"expected 0 <= lo <= hi <= capacity, got {self}")
