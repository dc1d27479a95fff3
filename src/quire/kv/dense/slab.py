"""A dense slab: keys and values of a batch, [rows, heads, capacity, head_dim] per layer.

Every row ends at the same column (`quire.kv.dense.space`), so a decode step is one write and one
attention over a view. `positions` gives the logical position of each column of a row, or -1.
Positions are never derived from columns and keys are stored after RoPE, so columns can be moved,
skipped and left empty. Slots without a token hold zeros: a weight of 0 times infinity would be NaN.

The slab is resized layer by layer: two whole slabs never exist at once.

Prompts are prefilled directly into rows of a slab, without a temporary KV tensor:

    column        lo            hi         capacity
    row 2:        a b c d e f g h            prefill: left-aligned, padding after the tokens
    row 3:        i j k l m . . .
    row 3:        . . . i j k l m            after `register`: right-aligned, as all rows of a slab
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import InvariantError
from quire.kv.dense.row import NOTHING, POSITION_BYTES, KVShape, Layer, RowKV, padded_positions
from quire.kv.dense.space import ByteMeter, Window

_ALL = slice(None)
_MIN_BLOCK = 32  # columns: smaller ones would be many small copies


class SlabTensors:
    """Key and value tensors, [rows, heads, capacity, dim] per layer, with every byte counted.

    `DenseSlab` tracks the meaning of the columns.
    """

    def __init__(
        self, shape: KVShape, rows: int, capacity: int, *, meter: ByteMeter, filler: float
    ) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._shape, self._meter, self._filler = shape, meter, filler
        try:
            for parts, dims in zip((self.keys, self.values), self._dims(), strict=True):
                for layer, dim in enumerate(dims):
                    parts.append(self._empty(layer, dim, rows, capacity))
        except BaseException:
            self.free()
            raise

    def write(
        self,
        layer: int,
        keys: Float[Tensor, "rows head column key_dim"],
        values: Float[Tensor, "rows head column value_dim"],
        columns: slice,
        pads: Bool[Tensor, "rows column"] | None,
        rows: slice = _ALL,
    ) -> None:
        """Write columns of a layer; slots marked in `pads` are set to the filler."""
        for whole, new in ((self.keys[layer], keys), (self.values[layer], values)):
            target = whole[rows, :, columns]
            target.copy_(new)
            if pads is not None:
                target.masked_fill_(pads[:, None, :, None], self._filler)

    def put(self, row: int, layers: Sequence[Layer], columns: slice) -> None:
        for layer, (keys, values) in enumerate(layers):
            self.keys[layer][row, :, columns] = keys
            self.values[layer][row, :, columns] = values

    def fill(self, rows: slice, columns: slice) -> None:
        for part in (*self.keys, *self.values):
            part[rows, :, columns] = self._filler

    def copy(self, row: int, source: int, columns: slice) -> None:
        for part in (*self.keys, *self.values):
            part[row, :, columns] = part[source, :, columns]

    def view(self, layer: int, row: int, columns: slice) -> Layer:
        return self.keys[layer][row, :, columns], self.values[layer][row, :, columns]

    def move(self, lo: int, hi: int, shift: int, rows: slice = _ALL) -> None:
        """Move columns lo .. hi by `shift`, block by block; the temporary copy is one block."""
        if not shift:
            return
        size = max(abs(shift), _MIN_BLOCK)
        blocks = [slice(begin, min(begin + size, hi)) for begin in range(lo, hi, size)]
        for part in (*self.keys, *self.values):
            for block in blocks if shift < 0 else reversed(blocks):
                target = slice(block.start + shift, block.stop + shift)
                moved = part[rows, :, block]
                part[rows, :, target] = moved.clone() if size > abs(shift) else moved

    def rebuild(
        self, rows: Sequence[int | None], capacity: int, source: slice, target: slice
    ) -> None:
        """Change rows and capacity, one tensor after the other: two whole slabs never exist."""
        for parts, dims in zip((self.keys, self.values), self._dims(), strict=True):
            for layer, (old, dim) in enumerate(zip(list(parts), dims, strict=True)):
                new = self._empty(layer, dim, len(rows), capacity)
                copy_rows(new[:, :, target], old[:, :, source], rows)
                self._drop(parts, layer)
                parts[layer] = new

    def split(self, lengths: Sequence[int]) -> list[list[Layer]]:
        """Split each row's first columns into packed tensors; the slab's tensors are freed."""
        keys = [self._split(self.keys, layer, lengths) for layer in range(len(self.keys))]
        values = [self._split(self.values, layer, lengths) for layer in range(len(self.values))]
        rows = range(len(lengths))
        return [[(k[row], v[row]) for k, v in zip(keys, values, strict=True)] for row in rows]

    def _split(self, parts: list[Tensor], layer: int, lengths: Sequence[int]) -> list[Tensor]:
        rows = [part[:, :length] for part, length in zip(parts[layer], lengths, strict=True)]
        self._meter.reserve(sum(part.numel() * part.element_size() for part in rows))
        rows = [_packed(part) for part in rows]
        self._drop(parts, layer)
        return rows

    def free(self) -> None:
        for parts in (self.keys, self.values):
            for layer in range(len(parts)):
                self._drop(parts, layer)

    def _drop(self, parts: list[Tensor], layer: int) -> None:
        self._meter.release(parts[layer].numel() * parts[layer].element_size())
        parts[layer] = parts[layer].new_empty(0)

    def _dims(self) -> tuple[list[int], list[int]]:
        layers = self._shape.layers
        return [layer.key_dim for layer in layers], [layer.value_dim for layer in layers]

    def _empty(self, layer: int, dim: int, rows: int, capacity: int) -> Tensor:
        size = (rows, self._shape.layers[layer].num_kv_heads, capacity, dim)
        empty = torch.full(size, self._filler, dtype=self._shape.dtype, device=self._shape.device)
        self._meter.reserve(empty.numel() * empty.element_size())
        return empty


def copy_rows(new: Tensor, old: Tensor, rows: Sequence[int | None]) -> None:
    """Copy row rows[i] of `old` to row i of `new`; rows[i] = None leaves row i unchanged."""
    for i, row in enumerate(rows):
        if row is not None:
            new[i] = old[row]


def _packed(part: Tensor) -> Tensor:
    whole = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    return part if whole else part.clone(memory_format=torch.contiguous_format)


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


class SlabRows:
    """Empty rows of a slab, used as a separate slab during prefill."""

    def __init__(self, slab: DenseSlab, first: int, rows: int, columns: int) -> None:
        slab.reach_back(columns)
        start = slab.window.hi - columns
        self.rows, self.window = rows, Window(slab.window.hi, lo=start, hi=start)
        self._slab, self._rows = slab, slice(first, first + rows)
        self._new_columns = 0
        self._pads: Bool[Tensor, "row column"] | None = None

    def begin(self, counts: Sequence[int], columns: int, *, at_start: bool = True) -> None:
        """Begin a chunk with `counts` new tokens per row, padded at the end."""
        assert at_start, "prompts are prefilled left-aligned"
        device = self._slab.positions.device
        offset, count = torch.arange(columns, device=device), torch.tensor(counts, device=device)
        self._new_columns = columns
        self._pads = None if min(counts) == columns else offset >= count[:, None]

    def append(
        self,
        layer: int,
        keys: Float[Tensor, "rows head column key_dim"],
        values: Float[Tensor, "rows head column value_dim"],
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new columns; return views (no copies) of all prefilled columns."""
        tensors, hi = self._slab.tensors, self.window.hi + self._new_columns
        new, seen = slice(self.window.hi, hi), slice(self.window.lo, hi)
        tensors.write(layer, keys, values, new, self._pads, self._rows)
        return (
            tensors.keys[layer][self._rows, :, seen],
            tensors.values[layer][self._rows, :, seen],
        )

    def end(self) -> None:
        self.window.hi += self._new_columns
        self._new_columns, self._pads = 0, None

    def register(self, lengths: Sequence[int]) -> None:
        """Right-align each row's tokens after the prefill and register the rows in the slab."""
        lo, hi = self.window.lo, self.window.hi
        for row, tokens in enumerate(lengths, self._rows.start):
            only = slice(row, row + 1)
            pads = hi - lo - tokens
            self._slab.tensors.move(lo, lo + tokens, pads, only)
            self._slab.tensors.fill(only, slice(lo, lo + pads))
            self._slab.register(row, tokens)
