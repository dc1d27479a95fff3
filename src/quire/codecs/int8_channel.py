"""Symmetric int8 with one scale per channel, measured once.

A token is stored as codes only and does not depend on other tokens. Numbers beyond the measured
range are clamped to the largest code.

Formula: scale = max |x| / 127 over the measured tokens; code = round(x / scale), half to even.
Bound: |x - decoded| <= scale / 2 if |x| <= 127 scale.
Source: papers and kernels with calibrated scales; "The KV cache: the hidden memory giant" describes
this one as `quantize_kv_to_int8`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.affine import finite, to_codes
from quire.codecs.base import Codec, Planes
from quire.codecs.registry import register

TOP = 127
NAN_CODE = -128  # marks a NaN, because a token has no scale that could be NaN


@register("int8_channel")
@dataclass(frozen=True, slots=True)
class Int8Channel(Codec):
    """Codec with the constant `scale` [head, 1, head_dim], float32."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        numbers = finite(vectors)
        codes = to_codes(numbers, self.constant("scale"), -TOP, TOP)
        return (codes.masked_fill(numbers.isnan(), NAN_CODE).to(torch.int8),)

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        (codes,) = planes
        return codes.float().masked_fill(codes == NAN_CODE, torch.nan) * self.constant("scale")

    def measure(self, vectors: Float[Tensor, "head token head_dim"]) -> Mapping[str, Tensor]:
        return {"scale": finite(vectors).abs().amax(dim=-2, keepdim=True) / TOP}
