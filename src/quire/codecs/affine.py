"""Affine codes: x is zero + scale * code, with scale and zero in float16.

The zero is the smallest number, rounded down. The scale is the smallest one that reaches the
largest number, rounded up. Codes are computed from these stored values, so |x - decoded| <= scale /
2 holds for any magnitude. If all numbers are the same float16, scale and codes are 0.
"""

import torch
from jaxtyping import Bool, Float, Float16, Shaped, UInt8
from torch import Tensor


def pack(codes: UInt8[Tensor, "*batch width"], bits: int) -> UInt8[Tensor, "*batch bytes"]:
    """Pack codes below 2 ** bits; bits is 2, 3, 4 or 8."""
    if bits == 3:
        return torch.cat([_pack_even(codes & 3, 2), _pack_even(codes >> 2, 1)], dim=-1)
    return _pack_even(codes, bits)


def unpack(packed: UInt8[Tensor, "*batch bytes"], bits: int) -> UInt8[Tensor, "*batch width"]:
    """Unpack codes that `pack` has packed."""
    if bits == 3:
        low = packed.shape[-1] // 3 * 2
        return _unpack_even(packed[..., :low], 2) | _unpack_even(packed[..., low:], 1) << 2
    return _unpack_even(packed, bits)


def _pack_even(codes: Tensor, bits: int) -> Tensor:
    packed, *others = codes.chunk(8 // bits, dim=-1)
    for number, segment in enumerate(others, start=1):
        packed = packed | segment << number * bits
    return packed


def _unpack_even(packed: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    segments = [packed >> shift & mask for shift in range(0, 8, bits)]
    return torch.cat(segments, dim=-1)


# Float16 scales and zeros: rounded down or up, so that a range always includes its ends.

LARGEST = 65504.0


def finite(vectors: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Clamp to the range of float16, in float32; NaN stays NaN."""
    return vectors.float().clamp(-LARGEST, LARGEST)


def half_below(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """Round to the largest float16 that is not above the number."""
    nearest = numbers.half()
    bits = nearest.view(torch.int16)
    # sign and magnitude: bits - 1 for positive, bits + 1 for negative numbers; below zero is the
    # negative subnormal of smallest magnitude
    lower = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -(2**15) + 1))
    return torch.where(nearest.float() > numbers, lower.to(torch.int16).view(torch.half), nearest)


def half_above(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """Round to the smallest float16 that is not below the number."""
    return -half_below(-numbers)


Affine = tuple[
    UInt8[Tensor, "*shape"], Shaped[Tensor, "*scale_shape"], Shaped[Tensor, "*scale_shape"]
]


def encode_affine(
    numbers: Float[Tensor, "*shape"],
    bits: int,
    dim: int,
    outliers: Bool[Tensor, "*shape"] | None = None,
) -> Affine:
    """Return codes, scales and zeros.

    Args:
        numbers: float32, finite or NaN.
        bits: bits of a code.
        dim: dimension over which numbers share a scale; retained with size 1.
        outliers: mask of numbers that are stored elsewhere and do not widen the range.
    """
    low, high = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    if outliers is not None:
        low = numbers.masked_fill(outliers, torch.inf).amin(dim, keepdim=True)
        high = numbers.masked_fill(outliers, -torch.inf).amax(dim, keepdim=True)
        all_outliers = outliers.all(dim, keepdim=True)
        low, high = low.masked_fill(all_outliers, 0.0), high.masked_fill(all_outliers, 0.0)
    top = (1 << bits) - 1
    zeros = half_below(low)
    scales = half_above((high - zeros.float()) / top)
    codes = to_codes((numbers - zeros.float()), scales, 0, top)
    return codes.to(torch.uint8), scales, zeros


def encode_affine_again(
    numbers: Float[Tensor, "*shape"],
    bits: int,
    dim: int,
    before: tuple[Tensor, Tensor],
    keeps: Bool[Tensor, "..."],
) -> Affine:
    """Return codes, scales and zeros after some of the numbers were replaced.

    If all numbers are within the range of the scale and zero before, these are kept. Numbers that
    were decoded with them get the same codes again, without an error.

    Args:
        numbers: float32, finite or NaN.
        bits: bits of a code.
        dim: dimension over which numbers share a scale; retained with size 1.
        before: scales and zeros before.
        keeps: where some of the numbers are not replaced; broadcast over the scales.
    """
    _, scales, zeros = encode_affine(numbers, bits, dim)
    top = (1 << bits) - 1
    low, high = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    least, most = before[1].float(), before[0].float() * top + before[1].float()
    within = keeps & (low >= least) & (high <= most)
    scales, zeros = torch.where(within, before[0], scales), torch.where(within, before[1], zeros)
    return to_codes(numbers - zeros.float(), scales, 0, top).to(torch.uint8), scales, zeros


def decode_affine(
    codes: UInt8[Tensor, "*shape"],
    scales: Shaped[Tensor, "*scale_shape"],
    zeros: Shaped[Tensor, "*scale_shape"],
) -> Float[Tensor, "*shape"]:
    """Decode codes to numbers, float32."""
    return codes.float() * scales.float() + zeros.float()


def to_codes(
    numbers: Float[Tensor, "*shape"], scales: Shaped[Tensor, "*scale_shape"], low: int, high: int
) -> Float[Tensor, "*shape"]:
    """Round to the nearest multiples of a scale, half to even; 0 if the scale is 0."""
    scale = scales.float()
    codes = (numbers / scale.masked_fill(scale == 0, 1.0)).round().clamp(low, high)
    return codes.nan_to_num(nan=0.0)  # the scale of a NaN is NaN, so it decodes to NaN
