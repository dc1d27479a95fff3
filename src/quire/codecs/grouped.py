"""Affine codes of few bits, with a scale and zero for each group of neighbouring channels.

Formula and bound: see `quire.codecs.affine`; |x - decoded| <= scale / 2 of the group.
"""

from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor

from quire.codecs.affine import decode_affine, encode_affine, finite, pack, unpack
from quire.codecs.base import Codec, Planes
from quire.codecs.registry import register


@register("int4", "int3", "int2")
@dataclass(frozen=True, slots=True)
class Grouped(Codec):
    """Codec with groups along head_dim, token by token."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        groups = in_groups(finite(vectors), self)
        codes, scales, zeros = encode_affine(groups, self.spec.code_bits, -1)
        return pack(codes.flatten(-2), self.spec.code_bits), scales.squeeze(-1), zeros.squeeze(-1)

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        packed, scales, zeros = planes
        codes = in_groups(unpack(packed, self.spec.code_bits), self)
        return decode_affine(codes, scales[..., None], zeros[..., None]).flatten(-2)


def in_groups(
    numbers: Shaped[Tensor, "*batch head_dim"], codec: Codec
) -> Shaped[Tensor, "*batch group channel"]:
    """Reshape vectors to one dimension for groups and one for the channels of a group."""
    group = codec.spec.group_of(codec.head_dim)
    return numbers.reshape(*numbers.shape[:-1], codec.head_dim // group, group)
