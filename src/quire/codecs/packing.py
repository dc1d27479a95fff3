"""Codes of less than a byte, packed so that registers unpack them without shuffling.

A byte holds codes from as many stretches of the vector, which are equally long:

    4 bits     byte i = code i | code (i + n/2) << 4
    2 bits     byte i = code i | code (i + n/4) << 2 | code (i + n/2) << 4 | code (i + 3n/4) << 6
    3 bits     the two low bits of all codes as above, then the high ones: byte i has those of the
               codes i, i + n/8, ..., i + 7n/8, from its lowest bit on

So a load of neighbouring bytes, masked and shifted, gives neighbouring codes of one stretch.
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
    """The codes again."""
    if bits == 3:
        low = packed.shape[-1] // 3 * 2
        return _unpack_even(packed[..., :low], 2) | _unpack_even(packed[..., low:], 1) << 2
    return _unpack_even(packed, bits)


def _pack_even(codes: Tensor, bits: int) -> Tensor:
    packed, *others = codes.chunk(8 // bits, dim=-1)
    for place, stretch in enumerate(others, start=1):
        packed = packed | stretch << place * bits
    return packed


def _unpack_even(packed: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    stretches = [packed >> shift & mask for shift in range(0, 8, bits)]
    return torch.cat(stretches, dim=-1)


# ---- half ----------------------------------------------------------------------------------------

# Float16 numbers beside codes: rounded down or up, so that a range never loses its ends.

LARGEST = 65504.0


def finite(vectors: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Float32 numbers that float16 can reach; NaN stays."""
    return vectors.float().clamp(-LARGEST, LARGEST)


def half_below(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """The largest float16 that is not above a number."""
    nearest = numbers.half()
    bits = nearest.view(torch.int16)
    # sign and magnitude: one less above zero, one more below, and below zero comes the smallest
    lower = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -(2**15) + 1))
    return torch.where(nearest.float() > numbers, lower.to(torch.int16).view(torch.half), nearest)


def half_above(numbers: Float[Tensor, "*shape"]) -> Float16[Tensor, "*shape"]:
    """The smallest float16 that is not below a number."""
    return -half_below(-numbers)
