"""How attention inputs (X) are kept on the host and carried: as computed, or in a codec's codes.

A row is one token's: its numbers in vectors of up to 64, of each the bytes of all planes.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from quire.codecs.base import DTYPES
from quire.codecs.registry import make_codec
from quire.layout.codecs import WIDEST_GROUP, CodecSpec


class ActivationCodec:
    """Rows of bytes of inputs, and back.

    Args:
        spec: of a codec that writes tokens one by one and needs no constants; None: as computed.
        hidden: numbers of an input.
        dtype: of each, as the model computes them.

    Attributes:
        hidden, dtype: as given.
        row_bytes: of one token in one layer.

    Raises:
        ConfigError: the codec does not suit vectors of this width.
    """

    def __init__(self, spec: CodecSpec | None, hidden: int, dtype: torch.dtype) -> None:
        self.hidden, self.dtype = hidden, dtype
        self.row_bytes = hidden * dtype.itemsize
        self._codec = None
        if spec is not None:
            self._width = max(w for w in range(1, WIDEST_GROUP + 1) if hidden % w == 0)
            self._codec, self._planes = make_codec(spec, self._width), spec.planes(self._width)
            vector_bytes = sum(plane.record_bytes for plane in self._planes)
            self.row_bytes = hidden // self._width * vector_bytes

    def encode(self, inputs: Float[Tensor, "token hidden"]) -> UInt8[Tensor, "token row_bytes"]:
        """Rows of inputs; as computed they are the same memory."""
        if self._codec is None:
            return inputs.contiguous().view(torch.uint8)
        vectors = inputs.view(len(inputs), -1, self._width).float()
        planes = [plane.contiguous().view(torch.uint8) for plane in self._codec.encode(vectors)]
        return torch.cat(planes, dim=-1).view(len(inputs), -1)

    def decode(self, rows: UInt8[Tensor, "token row_bytes"]) -> Float[Tensor, "token hidden"]:
        """Inputs of rows, in the model's dtype."""
        if self._codec is None:
            return rows.view(self.dtype)
        vectors = rows.view(len(rows), self.hidden // self._width, -1)
        sizes = [plane.record_bytes for plane in self._planes]
        parts = torch.split(vectors, sizes, dim=-1)
        planes = [
            part.contiguous().view(DTYPES[plane.dtype])
            for part, plane in zip(parts, self._planes, strict=True)
        ]
        return self._codec.decode(planes).to(self.dtype).view(len(rows), self.hidden)
