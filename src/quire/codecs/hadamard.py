"""Affine codes of the rotated vector: a rotation spreads what single channels have over all.

Formula: y = H x with Sylvester's matrix over sqrt(d); where d is no power of two, in blocks of the
largest one that divides it. y is encoded in groups, then scales and zeros are multiplied by
|y| / |decoded y|, so that a vector keeps its length. H is symmetric and its own inverse.
Bound: |x - decoded| <= 2 |y - y before the correction| in length, and that is at most
sqrt(d) / 2 of the largest scale; the multiplied scales and zeros are rounded to float16.
Source: QuaRot (Ashkboos et al. 2024) for the rotation, TurboQuant (Zandieh et al. 2025) for the
length, of which the second stage is left out.
"""

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.affine import decode_affine, encode_affine
from quire.codecs.base import Codec, Planes
from quire.codecs.grouped import in_groups
from quire.codecs.packing import finite, pack, unpack
from quire.codecs.registry import register


@register("int4_hadamard", "int3_hadamard")
@dataclass(frozen=True, slots=True)
class Hadamard(Codec):
    """Queries rotated likewise give the same products, so a kernel need not turn keys back."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        rotated = finite(rotate(finite(vectors)))
        codes, scales, zeros = encode_affine(in_groups(rotated, self), self.spec.code_bits, -1)
        found = decode_affine(codes, scales, zeros).flatten(-2)
        length, found_length = (x.norm(dim=-1)[..., None, None] for x in (rotated, found))
        longer = torch.where(found_length > 0, length / found_length, 1.0)
        packed = pack(codes.flatten(-2), self.spec.code_bits)
        corrected = (finite(x.float() * longer).half().squeeze(-1) for x in (scales, zeros))
        return packed, *corrected

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        packed, scales, zeros = planes
        codes = in_groups(unpack(packed, self.spec.code_bits), self)
        return rotate(decode_affine(codes, scales[..., None], zeros[..., None]).flatten(-2))


def rotate(vectors: Float[Tensor, "*batch head_dim"]) -> Float[Tensor, "*batch head_dim"]:
    """Float32 vectors rotated; rotated twice, they are back."""
    head_dim = vectors.shape[-1]
    block = head_dim & -head_dim
    turned = vectors.reshape(-1, block) @ _sylvester(block, vectors.device)
    return turned.view(vectors.shape)


@cache
def _sylvester(size: int, device: torch.device) -> Float[Tensor, "size size"]:
    with torch.inference_mode(mode=False):  # used outside of it too
        matrix = torch.ones(1, 1, device=device)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix]), torch.cat([matrix, -matrix])], dim=1)
        return matrix.mul_(size**-0.5)
