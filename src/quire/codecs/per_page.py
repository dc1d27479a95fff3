"""Affine codes with a scale and zero for each channel of a page.

Keys have channels that are large in all tokens. Here the tokens of a page share a scale per
channel. So a page is encoded only when it is full. If an eviction replaces some of its tokens, the
page is encoded again. A channel keeps its scale if the new tokens are within its range; then the
other tokens keep their codes.

Formula and bound: see `quire.codecs.affine`; |x - decoded| <= scale / 2 of the channel, at each
encoding.
Source: KIVI (Liu et al. 2024), keys.
Differs from the paper: pages are encoded again when tokens are evicted; KIVI evicts none.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from quire.codecs.affine import (
    decode_affine,
    encode_affine,
    encode_affine_again,
    finite,
    pack,
    unpack,
)
from quire.codecs.base import Codec, Planes
from quire.codecs.registry import register


@register("int4_page", "int2_page")
@dataclass(frozen=True, slots=True)
class PerPage(Codec):
    """Codec with groups along the tokens of a page, channel by channel."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        codes, scales, zeros = encode_affine(finite(vectors), self.spec.code_bits, -2)
        return pack(codes, self.spec.code_bits), scales, zeros

    def encode_again(
        self,
        vectors: Float[Tensor, "*batch token head_dim"],
        planes: Planes,
        keeps: Bool[Tensor, "*batch"],
    ) -> tuple[Tensor, ...]:
        _, scales, zeros = planes
        codes, scales, zeros = encode_affine_again(
            finite(vectors), self.spec.code_bits, -2, (scales, zeros), keeps[..., None, None]
        )
        return pack(codes, self.spec.code_bits), scales, zeros

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        packed, scales, zeros = planes
        return decode_affine(unpack(packed, self.spec.code_bits), scales, zeros)
