"""Shapes of a dense cache: bytes of a token, one packed row, positions of new columns."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kv.dense.meter import ByteMeter

# What a token takes in each layer of a dense cache: heads, dimensions, bytes.

POSITION_BYTES = 4
"""Of a slot's logical position in a slab."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys and values of one token.

    Attributes:
        num_kv_heads: heads that are cached.
        key_dim, value_dim: numbers of a head; not the same in some models.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers of a token."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KVShape:
    """All layers of a model.

    Attributes:
        layers: from the first to the last.
        dtype: of keys and values.
        device: where they lie.
    """

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return sum(layer.numbers for layer in self.layers) * self.dtype.itemsize

    def slab_bytes(self, rows: int, capacity: int) -> int:
        """A slab of this size: keys, values, positions."""
        return (self.token_bytes + POSITION_BYTES) * rows * capacity

    def growing_bytes(self, rows: int, capacity: int) -> int:
        """Most that is held while a slab comes to this size: a layer's keys are there twice."""
        heads = max(
            found.num_kv_heads * max(found.key_dim, found.value_dim) for found in self.layers
        )
        largest = heads * self.dtype.itemsize
        return self.slab_bytes(rows, capacity) + (largest + POSITION_BYTES) * rows * capacity


# ---- row -----------------------------------------------------------------------------------------

# The KV of one row, taken out of a batch: packed, without pads, in any memory.

Layer = tuple[Float[Tensor, "head token key_dim"], Float[Tensor, "head token value_dim"]]


class RowKV:
    """Keys and values of a sequence's tokens 0 .. tokens, one pair a layer.

    Args:
        layers: (keys, values) of each layer.
        meter: of the memory they lie in; they are counted there already.

    Attributes:
        layers: as given; empty after `free`.
        tokens: of the sequence.
    """

    def __init__(self, layers: Sequence[Layer], meter: ByteMeter) -> None:
        self.layers = tuple(layers)
        self.tokens = self.layers[0][0].shape[1]
        self._meter = meter

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.numel() * part.element_size() for pair in self.layers for part in pair)

    def lies_in(self, meter: ByteMeter) -> bool:
        """Whether its bytes are counted there."""
        return self._meter is meter

    def moved(self, device: torch.device, meter: ByteMeter) -> "RowKV":
        """The same numbers in another memory; this one is freed.

        Raises:
            HostPoolFull: they do not fit; nothing was changed.
        """
        with meter.taking(self.num_bytes):
            layers = [(keys.to(device), values.to(device)) for keys, values in self.layers]
        self.free()
        return RowKV(layers, meter)

    def free(self) -> None:
        """Give the bytes back."""
        self._meter.give(self.num_bytes)
        self.layers = ()


# ---- positions -----------------------------------------------------------------------------------

# Logical positions of a slab's new columns.

NOTHING = -1
"""The position of a slot that holds no token."""


def padded_positions(
    known: Int[Tensor, " rows"], counts: Sequence[int], columns: int, *, at_start: bool
) -> Int[Tensor, "rows column"]:
    """Positions of new columns, NOTHING for pads.

    Args:
        known: tokens that each row has.
        counts: new ones of each row, at most `columns`.
        columns: new ones.
        at_start: a row's tokens are the first of them, else the last.
    """
    count = torch.tensor(counts, device=known.device)[:, None]
    column = torch.arange(columns, device=known.device)
    offset = column if at_start else column - (columns - count)
    return torch.where((offset >= 0) & (offset < count), known[:, None] + offset, NOTHING)
