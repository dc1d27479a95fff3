"""Rows of the slab: the query of each row, and the number of rows."""

from collections.abc import Sequence

import torch

from quire.hf.dynamic.query import Query, QueryState
from quire.kv.dense.in_place import SlabRows
from quire.kv.dense.meter import ByteMeter
from quire.kv.dense.row import KVShape, RowKV
from quire.kv.dense.slab import DenseSlab
from quire.kv.dense.window import Window, spare_columns


class BatchSlots:
    """The rows of the slab and their queries.

    Args:
        shape: shape of a token's KV.
        meter: counts the slab's bytes.
        limit: maximum number of columns; None: no limit.
        holds: whether free rows keep their memory until the last row is freed, so that the slab is
            not copied when a row is freed.

    Attributes:
        slab: None before the first row.
        rows: the query in each row of the slab; None if the row is free.
        planned: columns that queries are certain to need; a new slab has at least this many.
    """

    def __init__(
        self, shape: KVShape, meter: ByteMeter, limit: int | None, *, holds: bool = True
    ) -> None:
        self.slab: DenseSlab | None = None
        self.rows: list[Query | None] = []
        self.planned, self._holds = 0, holds
        self._shape, self._meter, self._limit = shape, meter, limit

    def plan_for(self, columns: int) -> None:
        """Set the number of columns that queries are certain to need."""
        self.planned = columns

    @property
    def live(self) -> list[Query]:
        """Queries in rows."""
        return [query for query in self.rows if query is not None]

    @property
    def columns(self) -> int:
        """Columns of the longest row."""
        return self.slab.window.width if self.slab else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab."""
        return self.slab.num_bytes if self.slab else 0

    # ---- number of rows ------------------------------------------------------------------------

    def start_over(self, rows: int, columns: int) -> None:
        """Allocate an empty slab of exactly this size; it grows only if needed."""
        self.close()
        self.slab = DenseSlab(self._shape, rows, columns, meter=self._meter, limit=self._limit)
        self.slab.window.planned = self.planned
        self.rows = [None] * rows

    def resize(self, rows: int, longest: int) -> None:
        """Change the number of rows, never below the occupied ones; free rows are last.

        Args:
            rows: requested number.
            longest: tokens of the longest query to be placed.
        """
        if self.slab is None or not self.live:
            window = Window(0, limit=self._limit, planned=self.planned)
            self.start_over(rows, window.new_capacity(max(1, longest)))
            return
        kept: list[int | None] = [i for i, query in enumerate(self.rows) if query is not None]
        kept += [None] * (rows - len(kept))
        self.slab.release_prefix()
        self.slab.window.planned = self.planned
        if self._holds and len(kept) <= self.slab.held_rows:
            self.slab.take_rows(kept)
        else:
            self.slab.select(kept, longest)
        self.rows = [None if row is None else self.rows[row] for row in kept]
        for row, query in enumerate(self.rows):
            if query is not None:
                query.row = row

    def peak_bytes(self, rows: int, columns: int) -> int:
        """Peak bytes of the slab while it grows to this many rows and columns."""
        spare = spare_columns(columns)
        if self.slab is not None and rows == self.slab.rows:
            window, capacity = self.slab.window, self.slab.window.capacity
            if window.has_room(columns - window.width):
                return self.num_bytes
            if columns + spare // 2 <= capacity:
                return self._shape.growing_bytes(rows, capacity)
        return self._shape.growing_bytes(rows, columns + spare)

    def close(self) -> None:
        """Free the slab."""
        if self.slab is not None:
            self.slab.free()
        self.slab, self.rows = None, []

    # ---- queries in rows -----------------------------------------------------------------------

    def embed(self, query: Query) -> None:
        """Place a query with KV in a free row and copy its KV there."""
        assert self.slab is not None
        assert isinstance(query.kv, RowKV), "only prefilled queries can be embedded"
        row = self.place(query)
        self.slab.release_prefix()
        self.slab.embed(row, query.kv)
        query.drop_kv()

    def place(self, query: Query) -> int:
        """Place a query in a free row; the next forward processes its tokens."""
        row = query.row = self.rows.index(None)
        self.rows[row] = query
        query.state = QueryState.RUNNING
        return row

    def reserve_rows(self, group: Sequence[Query]) -> tuple[SlabRows, Sequence[Query]]:
        """Place queries in adjacent free rows, in which their prompts will be prefilled.

        Returns:
            The rows, and the queries from the start of the group that were placed in them.
        """
        assert self.slab is not None
        first = self.rows.index(None)
        taken = (i for i in range(first, len(self.rows)) if self.rows[i] is not None)
        group = group[: next(taken, len(self.rows)) - first]
        self.slab.release_prefix()
        self.slab.window.planned = self.planned
        columns = max(query.num_to_read for query in group)
        found = SlabRows(self.slab, first, len(group), columns)
        for row, query in enumerate(group, first):
            self.rows[row], query.row = query, row
        return found, group

    def leave(self, query: Query, *, clear: bool = True) -> None:
        """Free a query's row."""
        assert self.slab is not None
        assert query.row is not None
        if clear:
            self.slab.clear(query.row)
            self.slab.release_prefix()
        self.rows[query.row] = None
        query.row = None

    def swap_out(self, query: Query, device: torch.device, meter: ByteMeter) -> None:
        """Swap a query's KV out, and free its row.

        Raises:
            HostMemoryFull: not enough free memory in the pool; no state was changed.
        """
        assert self.slab is not None
        assert query.row is not None
        query.kv = self.slab.extract(query.row, device, meter)
        self.leave(query)


def final_columns(queries: Sequence[Query]) -> int:
    """Columns of a batch whose queries start together and run to their end."""
    longest = max(query.num_to_read for query in queries)
    return longest + max(query.columns_left for query in queries)
