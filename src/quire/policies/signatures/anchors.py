"""What Hamming distances are measured from: made up, or made from the signatures themselves.

random        bits drawn by lot from the seed
alternating   0 1 0 1 ..., from 0 on
mean          what most of the grouped signatures say; half of them counts as 0
zeros, ones   all bits alike
farthest      with several: the mean, then each time the signature farthest from those there are

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

# Bits in words of 64, and how many of them differ.

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


# ---- anchors -------------------------------------------------------------------------------------

RANDOM, ALTERNATING, MEAN, ZEROS, ONES = "random", "alternating", "mean", "zeros", "ones"
FARTHEST = "farthest"
ANCHORS = (RANDOM, ALTERNATING, MEAN, ZEROS, ONES, FARTHEST)
SEVERAL = (RANDOM, MEAN, FARTHEST)
MOST_ANCHORS = 64  # each is a pass over all tokens, and a request may say how many


def check_anchor(kind: str, count: int) -> None:
    """Refuse an anchor that is none, and several that would all be one.

    Raises:
        UnknownName: with the anchors there are.
        ConfigError: no anchor at all, far too many, several alike, or one that needs others.
    """
    if kind not in ANCHORS:
        raise UnknownName("anchor", kind, ANCHORS)
    if not 1 <= count <= MOST_ANCHORS:
        raise ConfigError(f"expected from 1 to {MOST_ANCHORS} anchors, got {count}")
    if kind == FARTHEST and count == 1:
        raise ConfigError(
            "anchor=farthest is for several anchors; use mean, or kvcrush with anchors=2 or more"
        )
    if count > 1 and kind not in SEVERAL:
        raise ConfigError(
            f"{count} anchors of kind {kind!r} are all one; use {', '.join(SEVERAL)}, or 1 anchor"
        )


@dataclass(frozen=True)
class Signatures:
    """Of the tokens, or pieces, of some layers.

    Attributes:
        bits: [layer, bit, unit] what they are made of.
        grouped: [layer, unit] those that others may stand for.
        layers: numbers of the layers.
    """

    bits: NDArray[np.bool_]
    grouped: NDArray[np.bool_]
    layers: tuple[int, ...]

    @cached_property
    def words(self) -> Words:
        """[layer, unit, word] the same, packed."""
        return pack(self.bits)

    def majority(self, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[layer, bit] what more than half of some signatures say.

        Args:
            among: [layer, unit] those that are asked.
        """
        return 2 * count_of(self.bits & among[:, None]) > count_of(among)[:, None]


def nearest_anchor(
    signatures: Signatures, kind: str, count: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[layer, unit] how far each signature is from the nearest of `count` anchors, and which it is.

    One distance for each token and anchor, no more. Of equally near ones the first.
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
    """[layer, 1, word] an anchor of each layer, packed."""
    if kind == FARTHEST and number:
        assert nearest is not None, "the first one is the mean"
        far = np.where(signatures.grouped, nearest, -1).argmax(axis=1)
        return np.take_along_axis(signatures.words, far[:, None, None], axis=1)
    bits = _made(signatures, kind, number, 1 if kind == FARTHEST else count, seed)
    return pack(bits[:, :, None])


def _made(
    signatures: Signatures, kind: str, number: int, count: int, seed: int
) -> NDArray[np.bool_]:
    """[layer, bit]."""
    layers, width, _ = signatures.bits.shape
    places = np.arange(width)
    if kind in (MEAN, FARTHEST):
        return signatures.majority(_slice_of(signatures.grouped, number, count))
    if kind == RANDOM:
        numbers = torch.tensor(signatures.layers)[:, None]
        lots = lots_of(seed, numbers, torch.from_numpy(number * width + places))
        drawn: NDArray[np.bool_] = (lots % 2 == 1).numpy()
        return drawn
    made = {ALTERNATING: places % 2 == 1, ZEROS: places < 0, ONES: places >= 0}
    same: NDArray[np.bool_] = made[kind][None].repeat(layers, axis=0)
    return same


def _slice_of(among: NDArray[np.bool_], number: int, count: int) -> NDArray[np.bool_]:
    """The `number`-th of `count` equal runs, in the order of positions."""
    if count == 1:
        return among
    place, total = among.cumsum(axis=1) - 1, count_of(among)[:, None]
    first, end = number * total // count, (number + 1) * total // count
    run: NDArray[np.bool_] = among & (place >= first) & (place < end)
    return run
