"""Shapes of a dense cache: bytes of a token, one packed row, positions of new columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kv.dense.space import ByteMeter

POSITION_BYTES = 4
"""Bytes of a slot's logical position in a slab."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one token's keys and values in one layer."""

    num_kv_heads: int
    key_dim: int  # elements per head; keys and values differ in some models
    value_dim: int

    @property
    def numbers(self) -> int:
        """Elements of a token's keys and values."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of the dense KV of a model."""

    layers: tuple[LayerShape, ...]  # first to last
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return sum(layer.numbers for layer in self.layers) * self.dtype.itemsize

    def slab_bytes(self, rows: int, capacity: int) -> int:
        return (self.token_bytes + POSITION_BYTES) * rows * capacity

    def growing_bytes(self, rows: int, capacity: int) -> int:
        """Return the peak bytes while a slab is resized to this size.

        The largest tensor of a layer and the positions exist twice.
        """
        heads = max(
            found.num_kv_heads * max(found.key_dim, found.value_dim) for found in self.layers
        )
        largest = heads * self.dtype.itemsize
        return self.slab_bytes(rows, capacity) + (largest + POSITION_BYTES) * rows * capacity


Layer = tuple[Float[Tensor, "head token key_dim"], Float[Tensor, "head token value_dim"]]


class RowKV:
    """Keys and values of a sequence's first `tokens` tokens, packed, one pair per layer.

    The row is outside a batch, in device or CPU memory.
    """

    def __init__(self, layers: Sequence[Layer], meter: ByteMeter) -> None:
        self.layers = tuple(layers)
        self.tokens = self.layers[0][0].shape[1]
        self._meter = meter

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)

    def lies_in(self, meter: ByteMeter) -> bool:
        return self._meter is meter

    def moved(self, device: torch.device, meter: ByteMeter) -> "RowKV":
        """Copy the row to another memory and free this one; nothing changes if it does not fit."""
        with meter.reserving(self.num_bytes):
            layers = [(keys.to(device), values.to(device)) for keys, values in self.layers]
        self.free()
        return RowKV(layers, meter)

    def free(self) -> None:
        self._meter.release(self.num_bytes)
        self.layers = ()


NOTHING = -1
"""The position of a slot that holds no token."""


def padded_positions(
    known: Int[Tensor, " rows"], counts: Sequence[int], columns: int, *, at_start: bool
) -> Int[Tensor, "rows column"]:
    """Return the positions of new columns, NOTHING for padding."""
    count = torch.tensor(counts, device=known.device)[:, None]
    column = torch.arange(columns, device=known.device)
    offset = column if at_start else column - (columns - count)
    return torch.where((offset >= 0) & (offset < count), known[:, None] + offset, NOTHING)
