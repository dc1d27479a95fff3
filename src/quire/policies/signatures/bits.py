"""Bits in words of 64, and how many of them differ."""

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

WORD_BITS = 64
_BYTE_BITS = 8
_PAIRS, _FOURS, _BYTES = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F
_ONES = 0x0101010101010101
_GATHER = 0x0102040810204080
"""Times eight bytes of 0 or 1: those eight bits are the highest byte, the first the lowest."""


def pack(bits: Bool[Tensor, "*shape bit"]) -> Int[Tensor, "*shape word"]:
    """Bits as int64 words, the first in the lowest place; what is left of the last word is 0."""
    count = bits.shape[-1]
    groups, words = -(-count // _BYTE_BITS), -(-count // WORD_BITS)
    padded = torch.nn.functional.pad(bits, (0, groups * _BYTE_BITS - count)).contiguous()
    eights = padded.view(torch.uint8).view(torch.int64)  # eight bytes of 0 or 1
    in_bytes = ((eights * _GATHER) >> (WORD_BITS - _BYTE_BITS)).to(torch.uint8)
    missing = words * WORD_BITS // _BYTE_BITS - groups
    return torch.nn.functional.pad(in_bytes, (0, missing)).view(torch.int64)


def unpack(words: Int[Tensor, "*shape word"], count: int) -> Bool[Tensor, "*shape bit"]:
    """The first `count` bits of words."""
    shifts = torch.arange(WORD_BITS, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)[..., :count]


def hamming(
    words: Int[Tensor, "*shape word"], anchor: Int[Tensor, "*other word"]
) -> Int[Tensor, "*shape"]:
    """In how many bits signatures differ from an anchor.

    Args:
        words: of the signatures.
        anchor: of the same number of bits; shapes broadcast.
    """
    return popcount(words ^ anchor).sum(dim=-1)


def popcount(words: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Bits that are set in each word: pairs, fours and bytes are added up side by side.

    On CPUs by the processor's own instruction, through NumPy.
    """
    if words.device.type == "cpu":
        counted = np.bitwise_count(words.numpy().view(np.uint64))
        return torch.from_numpy(counted.astype(np.int64))
    words = words - ((words >> 1) & _PAIRS)
    words = (words & _FOURS) + ((words >> 2) & _FOURS)
    words = (words + (words >> 4)) & _BYTES
    return (words * _ONES) >> (WORD_BITS - 8)
