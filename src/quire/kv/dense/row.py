"""The KV of one row, taken out of a batch: packed, without pads, in any memory."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from quire.kv.dense.meter import ByteMeter

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
