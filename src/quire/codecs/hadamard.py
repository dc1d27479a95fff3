"""Affine codes of the rotated vector; the rotation spreads outlier channels over all channels.

Formula: y = H x with Sylvester's matrix over sqrt(d), computed as a fast Walsh-Hadamard transform.
If d is not a power of two, H is block diagonal with blocks of the largest power of two that divides
d. y is encoded in groups, then scales and zeros are multiplied by |y| / |decoded y| to preserve the
norm of the vector. H is symmetric and its own inverse.
Bound, in norm: |x - decoded| <= 2 e. e is the error of y before the norm correction, at most
sqrt(d) / 2 times the largest scale. The multiplied scales and zeros are rounded to float16.
Source: QuaRot (Ashkboos et al. 2024) for the rotation, TurboQuant (Zandieh et al. 2025) for the
norm correction, without its second stage.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.affine import decode_affine, encode_affine, finite, pack, unpack
from quire.codecs.base import Codec, Planes
from quire.codecs.grouped import in_groups
from quire.codecs.registry import register

ROTATED = ("int4_hadamard", "int3_hadamard")
"""Rules of rotated vectors. A kernel that reads their codes as those of plain vectors needs rotated
queries, and its outputs are rotated back."""


@register(*ROTATED)
@dataclass(frozen=True, slots=True)
class Hadamard(Codec):
    """Codec of rotated vectors. Products of queries and keys do not change if both are rotated."""

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
    """Rotate float32 vectors; the rotation is its own inverse.

    Computed as sums and differences, because a matrix product rounds differently in batches of
    other sizes: a token has the same codes in every batch.
    """
    head_dim = vectors.shape[-1]
    block, half = head_dim & -head_dim, 1
    rotated = vectors.reshape(-1, block)
    buffers = torch.empty_like(rotated), torch.empty_like(rotated)
    while half < block:
        shape = len(rotated), block // (2 * half), 2, half
        first, second = rotated.view(shape).unbind(2)
        rotated = buffers[0]
        sums, differences = rotated.view(shape).unbind(2)
        torch.add(first, second, out=sums)
        torch.sub(first, second, out=differences)
        buffers, half = buffers[::-1], 2 * half
    return rotated.mul(1 / math.sqrt(block)).view(vectors.shape)
