"""Key and value tensors of a slab, layer by layer; the slab tracks the meaning of the columns."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quire.kv.dense.meter import ByteMeter
from quire.kv.dense.row import KVShape, Layer

_ALL = slice(None)
_MIN_BLOCK = 32  # columns: smaller ones would be many small copies


class SlabTensors:
    """Key and value tensors, [rows, heads, capacity, dim] per layer, with every byte counted."""

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
