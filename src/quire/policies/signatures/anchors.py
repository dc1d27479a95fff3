"""Anchors of Hamming distances: fixed patterns, or computed from the signatures.

random        random bits from the seed
alternating   0 1 0 1 ..., starting with 0
mean          majority of the grouped signatures; exactly half counts as 0
zeros, ones   all bits equal

Source: KVCrush (Jha et al. 2025), section III-B and table II; `zeros` and `ones` are OpenVINO's.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire.errors import UnknownName
from quire.policies.choose import count_of
from quire.policies.lots import lots_of

# Bits packed in words of 64, and Hamming distances.

WORD_BITS = 64
_PART_BITS = 16
_POWERS = (1 << np.arange(_PART_BITS)).astype(np.uint16)

_BITS_OF_BYTES = np.unpackbits(
    np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"
).astype(np.float64)  # a product of floats is faster, and exact

Words = NDArray[np.uint64]


def num_words(bits: int) -> int:
    """Return the words that hold this number of bits."""
    return -(-bits // WORD_BITS)


def pack(bits: NDArray[np.bool_]) -> Words:
    """Pack bits to words, [layer, unit, word], lowest bit first; the last word is zero-padded.

    Args:
        bits: [layer, bit, unit].
    """
    layers, count, units = bits.shape
    words = np.zeros((layers, units, num_words(count) * WORD_BITS // _PART_BITS), np.uint16)
    numbers = bits.view(np.uint8)
    for part, first in enumerate(range(0, count, _PART_BITS)):
        own = numbers[:, first : first + _PART_BITS]
        # a sum of products is several times faster than shifts or numpy.packbits on this axis
        np.einsum("lbu,b->lu", own, _POWERS[: own.shape[1]], out=words[:, :, part])
    return words.view(np.uint64)


def unpack(words: Words, count: int) -> NDArray[np.bool_]:
    """Unpack the first `count` bits of words, [..., bit]."""
    shifts = np.arange(WORD_BITS, dtype=np.uint64)
    bits = (words[..., None] >> shifts) & np.uint64(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :count].astype(bool)


def hamming(words: Words, anchor: Words) -> NDArray[np.int64]:
    """Count the bits in which signatures differ from an anchor, [...].

    Args:
        words: [..., word] packed signatures.
        anchor: the same number of words; shapes broadcast.
    """
    differ = np.bitwise_count(words ^ anchor)
    distance: NDArray[np.int64]
    if words.shape[-1] == 1:  # a copy is faster than a sum
        distance = differ[..., 0].astype(np.int64)
    else:
        distance = differ.sum(axis=-1, dtype=np.int64)
    return distance


RANDOM, ALTERNATING, MEAN, ZEROS, ONES = "random", "alternating", "mean", "zeros", "ones"
ANCHORS = (RANDOM, ALTERNATING, MEAN, ZEROS, ONES)


def check_anchor(kind: str) -> None:
    """Refuse an unknown anchor.

    Raises:
        UnknownName: with the known anchors.
    """
    if kind not in ANCHORS:
        raise UnknownName("anchor", kind, ANCHORS)


@dataclass(frozen=True)
class Signatures:
    """Signatures of the tokens, or pieces, of some retained sets.

    Attributes:
        words: [row, unit, word] packed bits; each token of a piece has words of its own.
        width: bits of a token.
        grouped: [row, unit] units that representatives may replace.
        numbers: numbers of the rows, from which random bits are drawn.
    """

    words: Words
    width: int
    grouped: NDArray[np.bool_]
    numbers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of a unit."""
        return int(self.words.shape[2]) // num_words(self.width)

    @property
    def bits(self) -> NDArray[np.bool_]:
        """[row, bit, unit] the signatures, token by token."""
        by_token = self.words.reshape(*self.words.shape[:2], self.tokens, -1)
        bits = unpack(by_token, self.width)
        return bits.reshape(*self.words.shape[:2], -1).transpose(0, 2, 1)

    def packed(self, bits: NDArray[np.bool_]) -> Words:
        """Pack one signature for each row, [row, 1, word].

        Args:
            bits: [row, bit] token by token.
        """
        return pack(bits.reshape(-1, self.width, 1)).reshape(len(bits), 1, -1)

    def majority(self, among: NDArray[np.bool_]) -> Words:
        """Return the majority bits of some signatures, [row, 1, word].

        Args:
            among: [row, unit] signatures to count.
        """
        count = self._counts_of_tokens if self.tokens == 1 else self._counts_of_pieces
        more: NDArray[np.bool_] = 2 * count(among) > count_of(among)[:, None]
        parts = more.reshape(len(more), -1, WORD_BITS).reshape(-1, WORD_BITS, 1)
        return pack(parts).reshape(len(more), 1, -1)

    def _counts_of_tokens(self, among: NDArray[np.bool_]) -> NDArray[np.int64]:
        """[row, bit of all words] by tables of bytes, which are many times fewer than tokens."""
        rows, first = len(among), np.arange(len(among))[:, None] * 256
        counts = np.zeros((rows, self.words.shape[2] * WORD_BITS), dtype=np.int64)
        numbers = self.words.view(np.uint8)
        for place in range(-(-self.width // 8)):
            table = np.bincount((first + numbers[:, :, place])[among], minlength=rows * 256)
            counts[:, 8 * place : 8 * place + 8] = table.reshape(rows, 256) @ _BITS_OF_BYTES
        return counts

    def _counts_of_pieces(self, among: NDArray[np.bool_]) -> NDArray[np.int64]:
        row, unit = np.nonzero(among)
        counts = np.zeros((len(among), self.words.shape[2] * WORD_BITS), dtype=np.int64)
        if len(row):
            bits = np.unpackbits(self.words[row, unit].view(np.uint8), axis=1, bitorder="little")
            first = np.flatnonzero(np.diff(row, prepend=-1))
            counts[row[first]] = np.add.reduceat(bits, first, axis=0, dtype=np.int64)
        return counts


def anchor_distance(signatures: Signatures, kind: str, seed: int) -> NDArray[np.int64]:
    """Return the distance of each signature to the anchor of its row, [row, unit]."""
    if kind == MEAN:
        return hamming(signatures.words, signatures.majority(signatures.grouped))
    return hamming(signatures.words, fixed_anchor(signatures, kind, seed))


def fixed_anchor(signatures: Signatures, kind: str, seed: int) -> Words:
    """Return an anchor that does not depend on the signatures, packed, [row, 1, word].

    Args:
        signatures: for their width and the numbers of their rows.
        kind: random, alternating, zeros or ones.
        seed: seed of a random anchor.
    """
    places = np.arange(signatures.width * signatures.tokens)
    if kind == RANDOM:
        numbers = torch.tensor(signatures.numbers)[:, None]
        lots = lots_of(seed, numbers, torch.from_numpy(places))
        drawn: NDArray[np.bool_] = (lots % 2 == 1).numpy()
        return signatures.packed(drawn)
    patterns = {ALTERNATING: places % 2 == 1, ZEROS: places < 0, ONES: places >= 0}
    same: NDArray[np.bool_] = patterns[kind][None].repeat(len(signatures.words), axis=0)
    return signatures.packed(same)
