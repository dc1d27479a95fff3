"""Prefill directly into rows of a slab, without a temporary KV tensor.

column        lo            hi         capacity
row 2:        a b c d e f g h            prefill: left-aligned, padding after the tokens
row 3:        i j k l m . . .
row 3:        . . . i j k l m            after `register`: right-aligned, as all rows of a slab
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quire.kv.dense.slab import DenseSlab
from quire.kv.dense.window import Window


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
