"""Symmetric int8 with a scale for each channel that was measured once and never changes.

So a token needs nothing beside its codes and no other token. Numbers beyond what was measured
become the largest code.

Formula: scale = max |x| / 127 over the measured tokens; code = round(x / scale), half to even.
Bound: |x - decoded| <= scale / 2 where |x| <= 127 scale.
Source: papers and kernels with calibrated scales; "The KV cache: the hidden memory giant" gives
this one as `quantize_kv_to_int8`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.affine import to_codes
from quire.codecs.base import Codec, Planes
from quire.codecs.packing import finite
from quire.codecs.registry import register

TOP = 127
NAN_CODE = -128  # there is no scale beside a token to say that it holds one


@register("int8_channel")
@dataclass(frozen=True, slots=True)
class Int8Channel(Codec):
    """Constants: `scale` [head, 1, head_dim], float32."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        numbers = finite(vectors)
        codes = to_codes(numbers, self.constant("scale"), -TOP, TOP)
        return (codes.masked_fill(numbers.isnan(), NAN_CODE).to(torch.int8),)

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        (codes,) = planes
        return codes.float().masked_fill(codes == NAN_CODE, torch.nan) * self.constant("scale")

    def measure(self, vectors: Float[Tensor, "head token head_dim"]) -> Mapping[str, Tensor]:
        return {"scale": finite(vectors).abs().amax(dim=-2, keepdim=True) / TOP}
