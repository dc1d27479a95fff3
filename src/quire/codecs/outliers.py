"""int4 with outliers: the largest numbers of a vector are stored as float16, the rest in groups.

Outliers are excluded before the range of a group is computed, so a large channel does not reduce
the precision of its neighbours. Ties prefer lower channels.

Bound: as for `grouped` with the remaining scales; outliers are rounded to float16.
Source: SqueezeLLM's dense-and-sparse split (Kim et al. 2023), per vector as in KVQuant.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quire.codecs.affine import decode_affine, encode_affine, finite, pack, unpack
from quire.codecs.base import DTYPES, Codec, Planes
from quire.codecs.grouped import in_groups
from quire.codecs.registry import register


@register("int4_outliers")
@dataclass(frozen=True, slots=True)
class Int4Outliers(Codec):
    """Codec that stores `percent` of a vector's elements, at least one, as outliers."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        numbers = finite(vectors)
        index = largest(numbers, self)
        groups, is_outlier = in_groups(numbers, self), in_groups(channel_mask(index, self), self)
        codes, scales, zeros = encode_affine(groups, self.spec.code_bits, -1, is_outlier)
        packed = pack(codes.flatten(-2), self.spec.code_bits)
        return packed, scales.squeeze(-1), zeros.squeeze(-1), *outlier_planes(numbers, index, self)

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        packed, scales, zeros, index, values = planes
        codes = in_groups(unpack(packed, self.spec.code_bits), self)
        numbers = decode_affine(codes, scales[..., None], zeros[..., None]).flatten(-2)
        return write_outliers(numbers, index, values)


def largest(numbers: Float[Tensor, "*batch head_dim"], codec: Codec) -> Tensor:
    """Return the channels [*batch, outlier] of a vector's largest numbers."""
    order = numbers.abs().sort(dim=-1, descending=True, stable=True).indices
    return order[..., : codec.spec.num_outliers(codec.head_dim)]


def channel_mask(index: Tensor, codec: Codec) -> Bool[Tensor, "*batch head_dim"]:
    """Return a mask that is True at these channels."""
    shape = (*index.shape[:-1], codec.head_dim)
    mask = torch.zeros(shape, dtype=torch.bool, device=index.device)
    return mask.scatter_(-1, index, value=True)


def outlier_planes(
    numbers: Float[Tensor, "*batch head_dim"], index: Tensor, codec: Codec
) -> tuple[Tensor, Tensor]:
    """Return channels and values of outliers in their storage types."""
    planes = {plane.name: plane for plane in codec.spec.planes(codec.head_dim)}
    stored = index.to(DTYPES[planes["outlier_indices"].dtype])
    return stored, numbers.gather(-1, index).half()


def write_outliers(
    numbers: Float[Tensor, "*batch head_dim"], index: Tensor, values: Tensor
) -> Float[Tensor, "*batch head_dim"]:
    """Write outliers to their channels; slots that are not live may get arbitrary channels."""
    channel = index.long().clamp(0, numbers.shape[-1] - 1)
    return numbers.scatter_(-1, channel, values.float())
