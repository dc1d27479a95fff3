"""A dense slab: keys and values of a batch, [rows, heads, capacity, head_dim] per layer.

Every row ends at the same column (`quire.kv.dense.window`), so a decode step is one write and one
attention over a view. `positions` gives the logical position of each column of a row, or -1.
Positions are never derived from columns and keys are stored after RoPE, so columns can be moved,
skipped and left empty. Slots without a token hold zeros: a weight of 0 times infinity would be NaN.

The slab is resized layer by layer: two whole slabs never exist at once.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.errors import InvariantError
from quire.kv.dense.meter import ByteMeter
from quire.kv.dense.row import NOTHING, POSITION_BYTES, KVShape, Layer, RowKV, padded_positions
from quire.kv.dense.tensors import SlabTensors, copy_rows
from quire.kv.dense.window import Window


class DenseSlab:
    """Dense KV of a batch: positions [rows, capacity]; NaN as filler shows reads of free slots."""

    def __init__(
        self,
        shape: KVShape,
        rows: int,
        capacity: int,
        *,
        meter: ByteMeter,
        limit: int | None = None,
        filler: float = 0.0,
    ) -> None:
        self.window = Window(capacity, limit=limit)
        self.lengths = [0] * rows
        self._starts: list[int | None] = [None] * rows
        self._shape, self._meter = shape, meter
        self._new_columns = 0
        self._pads: Tensor | None = None
        self.tensors = SlabTensors(shape, rows, capacity, meter=meter, filler=filler)
        self.positions = self._no_positions(rows, capacity)

    # ---- what it holds -------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return self._shape.slab_bytes(self.held_rows, self.window.capacity)

    @property
    def held_rows(self) -> int:
        """Allocated rows; `take_rows` does not free rows."""
        return len(self.positions)

    # ---- a forward -----------------------------------------------------------------------------

    def begin(self, counts: Sequence[int], columns: int, *, at_start: bool = False) -> None:
        """Begin a forward; new tokens are right-aligned in new columns, `at_start` left-aligned."""
        self._ensure_columns(columns)
        lo, hi = self.window.hi, self.window.hi + columns
        self._new_columns, self._pads = columns, None
        if columns == 1 and min(counts) == 1:
            new = torch.tensor(self.lengths, device=self.positions.device)[:, None]
        else:
            known = torch.tensor(self.lengths, device=self.positions.device)
            new = padded_positions(known, counts, columns, at_start=at_start)
            self._pads = new == NOTHING
        self.positions[: self.rows, lo:hi] = new
        for row, count in enumerate(counts):
            if count and self._starts[row] is None:
                self._starts[row] = lo if at_start else hi - count
            self.lengths[row] += count

    def append(
        self,
        layer: int,
        keys: Float[Tensor, "rows head column key_dim"],
        values: Float[Tensor, "rows head column value_dim"],
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new columns; views (no copies) of all columns in use."""
        lo, hi = self.window.hi, self.window.hi + self._new_columns
        rows, used = slice(0, self.rows), slice(self.window.lo, hi)
        self.tensors.write(layer, keys, values, slice(lo, hi), self._pads, rows)
        return self.tensors.keys[layer][rows, :, used], self.tensors.values[layer][rows, :, used]

    def end(self) -> None:
        self.window.hi += self._new_columns
        self._new_columns, self._pads = 0, None

    @property
    def new_columns(self) -> int:
        return self._new_columns

    @property
    def seen_positions(self) -> Int[Tensor, "rows column"]:
        return self.positions[: self.rows, self.window.lo : self.window.hi + self._new_columns]

    # ---- rows ----------------------------------------------------------------------------------

    def embed(self, row: int, kv: RowKV) -> None:
        """Copy a sequence into an empty row, its last token in the last column in use."""
        if self._starts[row] is not None:
            raise InvariantError(f"row {row} of the slab holds a sequence already")
        self.reach_back(kv.tokens)
        hi = self.window.hi
        self.tensors.put(row, kv.layers, slice(hi - kv.tokens, hi))
        self.register(row, kv.tokens)

    def register(self, row: int, tokens: int) -> None:
        """Register a sequence whose tokens are in the last columns in use of an empty row."""
        columns = slice(self.window.hi - tokens, self.window.hi)
        self.positions[row, columns] = torch.arange(
            tokens, device=self.positions.device, dtype=self.positions.dtype
        )
        self.lengths[row], self._starts[row] = tokens, columns.start

    def clear(self, row: int) -> None:
        used = slice(self.window.lo, self.window.hi)
        self.tensors.fill(slice(row, row + 1), used)
        self.positions[row, used] = NOTHING
        self.lengths[row], self._starts[row] = 0, None

    def extract(self, row: int, device: torch.device, meter: ByteMeter) -> RowKV:
        """Copy a row's sequence, packed without padding."""
        with meter.reserving(self.lengths[row] * self._shape.token_bytes):
            return RowKV(self._packed(row, device), meter)

    def _packed(self, row: int, device: torch.device) -> list[Layer]:
        columns = (self.positions[row, : self.window.hi] >= 0).nonzero().flatten()
        first, last = int(columns[0]), int(columns[-1])
        views = [
            self.tensors.view(layer, row, slice(first, last + 1))
            for layer in range(len(self._shape.layers))
        ]
        if last - first + 1 > len(columns):  # vector shaping leaves empty columns between tokens
            inner = columns - first
            views = [(k.index_select(1, inner), v.index_select(1, inner)) for k, v in views]
        return [(k.to(device, copy=True), v.to(device, copy=True)) for k, v in views]

    def split(self) -> list[RowKV]:
        """Split the slab into rows of packed KV; the slab's memory is freed."""
        found = self.tensors.split(self.lengths)
        self._drop_positions()
        return [RowKV(parts, self._meter) for parts in found]

    def free(self) -> None:
        self.tensors.free()
        self._drop_positions()

    # ---- sizes ---------------------------------------------------------------------------------

    def release_prefix(self) -> None:
        """Exclude leading columns that no row uses from the window; no data moves."""
        starts = [start for start in self._starts if start is not None]
        self.window.lo = min(starts, default=self.window.hi)

    def select(self, rows: Sequence[int | None], width: int = 0) -> None:
        """Rebuild with old rows (None: an empty row) in this order, with the smallest capacity."""
        width = max(width, self.window.width, 1)
        self._rebuild(rows, self.window.new_capacity(width), hi=width)

    def take_rows(self, rows: Sequence[int | None]) -> None:
        """Rearrange in place: old rows in ascending order, then None for each empty row."""
        retained = [row for row in rows if row is not None]
        used = slice(self.window.lo, self.window.hi)
        for row, old in enumerate(retained):
            if row != old:
                self.tensors.copy(row, old, used)
                self.positions[row] = self.positions[old]
        empty = slice(len(retained), len(rows))
        self.tensors.fill(empty, used)
        self.positions[empty] = NOTHING
        self._keep(rows)

    def reach_back(self, columns: int) -> None:
        """Extend the window to at least `columns` columns by adding empty columns at its start."""
        window = self.window
        if not window.width:
            window.lo = window.hi = min(max(columns, window.hi), window.capacity)
        if columns > window.capacity:
            self._rebuild(range(self.rows), window.new_capacity(columns), hi=columns)
        elif columns > window.hi:
            self._move_to(columns)
        first = min(window.lo, window.hi - columns)
        self.tensors.fill(slice(None), slice(first, window.lo))
        self.positions[:, first : window.lo] = NOTHING
        window.lo = first

    def _ensure_columns(self, columns: int) -> None:
        if self.window.has_room(columns):
            return
        capacity = self.window.capacity_for(columns)
        if capacity == self.window.capacity:
            self._move_to(self.window.width)
        else:
            self._rebuild(range(self.rows), capacity, hi=self.window.width)

    def _move_to(self, hi: int) -> None:
        """Move the window in place so that it ends at column `hi`."""
        used, width = slice(self.window.lo, self.window.hi), self.window.width
        shift = hi - used.stop
        self.tensors.move(used.start, used.stop, shift)
        self.positions[:, hi - width : hi] = self.positions[:, used].clone()
        self._moved(shift, hi)

    def _rebuild(self, rows: Sequence[int | None], capacity: int, *, hi: int) -> None:
        """Reallocate the slab with another size; the window's last column becomes hi - 1."""
        width, shift = self.window.width, hi - self.window.hi
        source, target = slice(self.window.lo, self.window.hi), slice(hi - width, hi)
        self.tensors.rebuild(rows, capacity, source, target)
        positions = self._no_positions(len(rows), capacity)
        copy_rows(positions[:, target], self.positions[:, source], rows)
        self._drop_positions()
        self.positions = positions
        self._keep(rows)
        self.window.capacity = capacity
        self._moved(shift, hi)

    def _keep(self, rows: Sequence[int | None]) -> None:
        self.lengths = [0 if row is None else self.lengths[row] for row in rows]
        self._starts = [None if row is None else self._starts[row] for row in rows]

    def _moved(self, shift: int, hi: int) -> None:
        width = self.window.width
        self._starts = [None if start is None else start + shift for start in self._starts]
        self.window.lo, self.window.hi = hi - width, hi

    def _no_positions(self, rows: int, capacity: int) -> Int[Tensor, "rows capacity"]:
        self._meter.reserve(POSITION_BYTES * rows * capacity)
        return torch.full((rows, capacity), NOTHING, dtype=torch.int32, device=self._shape.device)

    def _drop_positions(self) -> None:
        self._meter.release(POSITION_BYTES * self.positions.numel())
        self.positions = self.positions.new_empty(0)
