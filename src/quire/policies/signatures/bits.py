"""Bits in words of 64, and how many of them differ."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

WORD_BITS = 64
_PAIRS, _FOURS, _BYTES = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F
_ONES = 0x0101010101010101


def pack(bits: Bool[Tensor, "*shape bit"]) -> Int[Tensor, "*shape word"]:
    """Bits as int64 words, the first in the lowest place; what is left of the last word is 0."""
    count = bits.shape[-1]
    words = -(-count // WORD_BITS)
    padded = torch.nn.functional.pad(bits, (0, words * WORD_BITS - count)).long()
    shifts = torch.arange(WORD_BITS, device=bits.device)
    shifted = padded.view(*bits.shape[:-1], words, WORD_BITS) << shifts
    # bits stand apart: a sum is their union, its sign the last
    packed: Tensor = shifted.sum(dim=-1)
    return packed


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
    """Bits that are set in each word: pairs, fours and bytes are added up side by side."""
    words = words - ((words >> 1) & _PAIRS)
    words = (words & _FOURS) + ((words >> 2) & _FOURS)
    words = (words + (words >> 4)) & _BYTES
    return (words * _ONES) >> (WORD_BITS - 8)
