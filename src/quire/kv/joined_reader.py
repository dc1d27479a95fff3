"""Reads the layers of several lane groups together, for rules that divide a cap over all layers."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kv.lane_reader import LaneReader


class JoinedReader:
    """Readers of different layers of one row, one after the other; see `LaneReader`."""

    def __init__(self, readers: Sequence[LaneReader]) -> None:
        self._readers = readers
        self.heads_per_layer = readers[0].heads_per_layer
        self.layers = tuple(layer for reader in readers for layer in reader.layers)

    @property
    def positions(self) -> Int[Tensor, "lane slot"]:
        """Logical positions, ascending; a lane is a KV head."""
        return _joined([reader.positions for reader in self._readers], -1)

    @property
    def statistics(self) -> Mapping[str, Tensor]:
        """Attention statistics by name, [lane, ...]."""
        found = [reader.statistics for reader in self._readers]
        return {name: _joined([of[name] for of in found]) for name in found[0]}

    def keys(self) -> Float[Tensor, "lane slot head_dim"]:
        return _joined([reader.keys() for reader in self._readers])

    def values(self) -> Float[Tensor, "lane slot head_dim"]:
        return _joined([reader.values() for reader in self._readers])


def _joined(parts: Sequence[Tensor], filler: int = 0) -> Tensor:
    """Concatenate [lane, slot, ...] tensors, filled up to the longest lanes."""
    longest = max(part.shape[1] for part in parts)
    filled = []
    for part in parts:
        shape = (part.shape[0], longest - part.shape[1], *part.shape[2:])
        filled.append(torch.cat([part, part.new_full(shape, filler)], dim=1))
    return torch.cat(filled)
