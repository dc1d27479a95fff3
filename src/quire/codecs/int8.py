"""Symmetric int8, one scale per vector: the elements of one head of one token.

Formula: scale = max |x| / 127, rounded up to float16; code = round(x / scale), half to even.
Bound: |x - decoded| <= scale / 2.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.affine import finite, half_above, to_codes
from quire.codecs.base import Codec, Planes
from quire.codecs.registry import register

TOP = 127


@register("int8")
@dataclass(frozen=True, slots=True)
class Int8(Codec):
    """Codec whose scale depends on the vector alone."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        numbers = finite(vectors)
        scales = half_above(numbers.abs().amax(dim=-1, keepdim=True) / TOP)
        return to_codes(numbers, scales, -TOP, TOP).to(torch.int8), scales

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        codes, scales = planes
        return codes.float() * scales.float()
