"""Anchors of Hamming distances: fixed patterns, or computed from the signatures.

random        random bits from the seed
alternating   0 1 0 1 ..., starting with 0
mean          majority of the grouped signatures; exactly half counts as 0
zeros, ones   all bits equal
farthest      with several anchors: the mean, then repeatedly the signature farthest from all so far

Source: KVCrush (Jha et al. 2025), section III-B and table II; `zeros` and `ones` are OpenVINO's.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from quire.errors import ConfigError, UnknownName
from quire.policies.best import count_of
from quire.policies.lots import lots_of

# ---- bits ----------------------------------------------------------------------------------------

# Bits packed in words of 64, and Hamming distances.

WORD_BITS = 64
_PART_BITS = 16
_POWERS = (1 << np.arange(_PART_BITS)).astype(np.uint16)

Words = NDArray[np.uint64]


def pack(bits: NDArray[np.bool_]) -> Words:
    """Pack bits to words, [layer, unit, word], lowest bit first; the last word is zero-padded.

    Args:
        bits: [layer, bit, unit].
    """
    layers, count, units = bits.shape
    words = np.zeros((layers, units, -(-count // WORD_BITS) * WORD_BITS // _PART_BITS), np.uint16)
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
    differ: NDArray[np.int64] = np.bitwise_count(words ^ anchor).sum(axis=-1, dtype=np.int64)
    return differ


# ---- anchors -------------------------------------------------------------------------------------

RANDOM, ALTERNATING, MEAN, ZEROS, ONES = "random", "alternating", "mean", "zeros", "ones"
FARTHEST = "farthest"
ANCHORS = (RANDOM, ALTERNATING, MEAN, ZEROS, ONES, FARTHEST)
SEVERAL = (RANDOM, MEAN, FARTHEST)
MOST_ANCHORS = 64  # each costs a pass over all tokens, and a request may set the number


def check_anchor(kind: str, count: int) -> None:
    """Refuse an unknown anchor, and several anchors that would be identical.

    Raises:
        UnknownName: with the known anchors.
        ConfigError: the count is out of range, the anchors would be identical, or `farthest` has no
            other anchor.
    """
    if kind not in ANCHORS:
        raise UnknownName("anchor", kind, ANCHORS)
    if not 1 <= count <= MOST_ANCHORS:
        raise ConfigError(f"expected from 1 to {MOST_ANCHORS} anchors, got {count}")
    if kind == FARTHEST and count == 1:
        raise ConfigError(
            "anchor=farthest needs several anchors; use mean, or kvcrush with anchors=2 or more"
        )
    if count > 1 and kind not in SEVERAL:
        raise ConfigError(
            f"{count} anchors of kind {kind!r} are identical; use {', '.join(SEVERAL)}, or 1 anchor"
        )


@dataclass(frozen=True)
class Signatures:
    """Signatures of the tokens, or pieces, of some layers.

    Attributes:
        bits: [layer, bit, unit] the signatures.
        grouped: [layer, unit] units that representatives may replace.
        layers: numbers of the layers.
    """

    bits: NDArray[np.bool_]
    grouped: NDArray[np.bool_]
    layers: tuple[int, ...]

    @cached_property
    def words(self) -> Words:
        """[layer, unit, word] packed signatures."""
        return pack(self.bits)

    def majority(self, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the majority bits of some signatures, [layer, bit].

        Args:
            among: [layer, unit] signatures to count.
        """
        return 2 * count_of(self.bits & among[:, None]) > count_of(among)[:, None]


def nearest_anchor(
    signatures: Signatures, kind: str, count: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distance to the nearest of `count` anchors, and its index, [layer, unit] each.

    Computes one distance per token and anchor. Ties prefer the first anchor.
    """
    words = signatures.words
    nearest = hamming(words, _anchor(signatures, kind, 0, count, seed))
    which = np.zeros_like(nearest)
    for number in range(1, count):
        distance = hamming(words, _anchor(signatures, kind, number, count, seed, nearest))
        which[distance < nearest] = number
        np.minimum(distance, nearest, out=nearest)
    return nearest, which


def _anchor(
    signatures: Signatures,
    kind: str,
    number: int,
    count: int,
    seed: int,
    nearest: NDArray[np.int64] | None = None,
) -> Words:
    """Return one packed anchor of each layer, [layer, 1, word]."""
    if kind == FARTHEST and number:
        assert nearest is not None, "the first anchor is the mean"
        far = np.where(signatures.grouped, nearest, -1).argmax(axis=1)
        return np.take_along_axis(signatures.words, far[:, None, None], axis=1)
    bits = _anchor_bits(signatures, kind, number, 1 if kind == FARTHEST else count, seed)
    return pack(bits[:, :, None])


def _anchor_bits(
    signatures: Signatures, kind: str, number: int, count: int, seed: int
) -> NDArray[np.bool_]:
    """Return the bits of an anchor, [layer, bit]."""
    layers, width, _ = signatures.bits.shape
    places = np.arange(width)
    if kind in (MEAN, FARTHEST):
        return signatures.majority(_slice_of(signatures.grouped, number, count))
    if kind == RANDOM:
        numbers = torch.tensor(signatures.layers)[:, None]
        lots = lots_of(seed, numbers, torch.from_numpy(number * width + places))
        drawn: NDArray[np.bool_] = (lots % 2 == 1).numpy()
        return drawn
    patterns = {ALTERNATING: places % 2 == 1, ZEROS: places < 0, ONES: places >= 0}
    same: NDArray[np.bool_] = patterns[kind][None].repeat(layers, axis=0)
    return same


def _slice_of(among: NDArray[np.bool_], number: int, count: int) -> NDArray[np.bool_]:
    """Return the `number`-th of `count` equal runs, in the order of positions."""
    if count == 1:
        return among
    place, total = among.cumsum(axis=1) - 1, count_of(among)[:, None]
    first, end = number * total // count, (number + 1) * total // count
    run: NDArray[np.bool_] = among & (place >= first) & (place < end)
    return run
