"""Bits in words of 64, and how many of them differ."""

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 64
_PART_BITS = 16
_POWERS = (1 << np.arange(_PART_BITS)).astype(np.uint16)

Words = NDArray[np.uint64]


def pack(bits: NDArray[np.bool_]) -> Words:
    """[layer, unit, word] bits, the first in the lowest place; what is left of the last word is 0.

    Args:
        bits: [layer, bit, unit].
    """
    layers, count, units = bits.shape
    words = np.zeros((layers, units, -(-count // WORD_BITS) * WORD_BITS // _PART_BITS), np.uint16)
    numbers = bits.view(np.uint8)
    for part, first in enumerate(range(0, count, _PART_BITS)):
        own = numbers[:, first : first + _PART_BITS]
        # a sum of products: several times faster than shifts, or than numpy.packbits on this axis
        np.einsum("lbu,b->lu", own, _POWERS[: own.shape[1]], out=words[:, :, part])
    return words.view(np.uint64)


def unpack(words: Words, count: int) -> NDArray[np.bool_]:
    """[..., bit] the first `count` bits of words."""
    shifts = np.arange(WORD_BITS, dtype=np.uint64)
    bits = (words[..., None] >> shifts) & np.uint64(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :count].astype(bool)


def hamming(words: Words, anchor: Words) -> NDArray[np.int64]:
    """[...] in how many bits signatures differ from an anchor.

    Args:
        words: [..., word] of the signatures.
        anchor: of the same number of bits; shapes broadcast.
    """
    differ: NDArray[np.int64] = np.bitwise_count(words ^ anchor).sum(axis=-1, dtype=np.int64)
    return differ
