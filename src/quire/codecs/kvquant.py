"""Codebook indices: each channel scaled by its measured range, outliers stored separately.

Intended for keys before RoPE, whose channels have similar magnitudes in all tokens. A number is
scaled to [-1, 1] by its channel's range and stored as the index of the nearest entry of the layer's
codebook, which k-means has fitted. The numbers of a vector that are largest relative to their
ranges are stored as float16.

Bound: half the distance between the two nearest entries, in units of half the channel's range, if
the number is inside the codebook's ends.
Source: KVQuant (Hooper et al. 2024), keys: per channel, before RoPE, non-uniform, 1 % outliers.
Differs: a fixed number of outliers per vector instead of a threshold, so that the bytes of a token
are fixed; k-means without Fisher weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.affine import finite, pack, unpack
from quire.codecs.base import Codec, Planes
from quire.codecs.outliers import largest, outlier_planes, write_outliers
from quire.codecs.registry import register

ITERATIONS, MAX_SAMPLES = 30, 1 << 16


@register("kvquant4", "kvquant3")
@dataclass(frozen=True, slots=True)
class KVQuant(Codec):
    """Codec with constants `low`, `high` [head, 1, head_dim] and an ascending `codebook`."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        numbers = finite(vectors)
        places, book = self._places(numbers), self.constant("codebook")
        codes = torch.bucketize(places.nan_to_num(nan=0.0).contiguous(), (book[1:] + book[:-1]) / 2)
        index = largest(places, self)  # NaN sorts as the largest number
        packed = pack(codes.to(torch.uint8), self.spec.code_bits)
        return packed, *outlier_planes(numbers, index, self)

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        packed, index, values = planes
        places = self.constant("codebook")[unpack(packed, self.spec.code_bits).long()]
        middle, half = self._ranges()
        return write_outliers(places * half + middle, index, values)

    def measure(self, vectors: Float[Tensor, "head token head_dim"]) -> Mapping[str, Tensor]:
        numbers, share = finite(vectors), self.spec.percent / 200
        ends = torch.tensor([share, 1 - share], device=numbers.device)
        low, high = numbers.quantile(ends, dim=-2, keepdim=True).unbind()
        middle, half = (low + high) / 2, (high - low) / 2
        places = ((numbers - middle) / half.masked_fill(half == 0, 1.0)).clamp(-1, 1).flatten()
        step = max(1, len(places) // MAX_SAMPLES)
        book = _k_means(places[::step].contiguous(), 1 << self.spec.code_bits)
        return {"low": low, "high": high, "codebook": book}

    def _ranges(self) -> tuple[Tensor, Tensor]:
        low, high = self.constant("low"), self.constant("high")
        return (low + high) / 2, (high - low) / 2

    def _places(self, numbers: Tensor) -> Tensor:
        middle, half = self._ranges()
        return (numbers - middle) / half.masked_fill(half == 0, 1.0)


def _k_means(numbers: Float[Tensor, " number"], entries: int) -> Float[Tensor, " entries"]:
    """Compute ascending cluster means, starting from quantiles."""
    book = numbers.quantile((torch.arange(entries, device=numbers.device) + 0.5) / entries)
    for _ in range(ITERATIONS):
        nearest = torch.bucketize(numbers, (book[1:] + book[:-1]) / 2)
        count = torch.bincount(nearest, minlength=entries)
        total = torch.zeros_like(book).index_add_(0, nearest, numbers)
        book = torch.where(count > 0, total / count.clamp_min(1), book).sort().values
    return book
