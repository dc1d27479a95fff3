"""Codes of less than a byte, packed so that registers unpack them without shuffles.

A byte holds one code from each of several equal segments of the vector:

    4 bits     byte i = code i | code (i + n/2) << 4
    2 bits     byte i = code i | code (i + n/4) << 2 | code (i + n/2) << 4 | code (i + 3n/4) << 6
    3 bits     the two low bits of all codes as above, then the high bits: byte i has those of the
               codes i, i + n/8, ..., i + 7n/8, from its lowest bit on

A load of consecutive bytes, shifted and masked, gives consecutive codes of one segment.
"""

import torch
from jaxtyping import Float, Float16, UInt8
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


# ---- half ----------------------------------------------------------------------------------------

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
