"""What a token takes in each layer of a dense cache: heads, dimensions, bytes."""

from dataclasses import dataclass

import torch

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
