"""8-bit floats (e4m3), one scale per vector.

Formula: scale = max |x| / 448, rounded up to float16; code = x / scale as e4m3, half to even.
Bound: |x - decoded| <= max(|x| / 16, scale / 1024): three mantissa bits, and steps of 2 ** -9 below
2 ** -6.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.affine import finite, half_above
from quire.codecs.base import Codec, Planes
from quire.codecs.registry import register

TOP = 448.0
_TYPE = "float8_e4m3fn"


@register("fp8")
@dataclass(frozen=True, slots=True)
class Float8(Codec):
    """Codec with the bytes of torch.float8_e4m3fn as codes."""

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        dtype = getattr(torch, _TYPE, None)
        if dtype is None:
            return f"this build of torch has no {_TYPE}"
        try:
            torch.zeros(1, device=device).to(dtype).float()
        except (RuntimeError, TypeError) as error:
            return f"torch cannot convert to {_TYPE} on {device}: {error}"
        return None

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        numbers = finite(vectors)
        scales = half_above(numbers.abs().amax(dim=-1, keepdim=True) / TOP)
        scale = scales.float().masked_fill(scales == 0, 1.0)
        codes = (numbers / scale).clamp(-TOP, TOP).to(getattr(torch, _TYPE))
        return codes.view(torch.uint8), scales

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        codes, scales = planes
        return codes.contiguous().view(getattr(torch, _TYPE)).float() * scales.float()
