"""What Hamming distances are measured from: made up, or made from the signatures themselves.

random        bits drawn by lot from the seed
alternating   0 1 0 1 ..., from 0 on
mean          what most of the grouped signatures say; half of them counts as 0
zeros, ones   all bits alike
farthest      with several: the mean, then each time the signature farthest from those there are

Source: KVCrush (Jha et al. 2025), section 3.2; `zeros` and `ones` are OpenVINO's.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from quire.errors import ConfigError, UnknownName
from quire.policies.choose import count_true
from quire.policies.lots import lots_of
from quire.policies.signatures.bits import hamming, pack

RANDOM, ALTERNATING, MEAN, ZEROS, ONES = "random", "alternating", "mean", "zeros", "ones"
FARTHEST = "farthest"
ANCHORS = (RANDOM, ALTERNATING, MEAN, ZEROS, ONES, FARTHEST)
SEVERAL = (RANDOM, MEAN, FARTHEST)


def check_anchor(kind: str, count: int) -> None:
    """Refuse an anchor that is none, and several that would all be one.

    Raises:
        UnknownName: with the anchors there are.
        ConfigError: no anchor at all, or several alike.
    """
    if kind not in ANCHORS:
        raise UnknownName("anchor", kind, ANCHORS)
    if count < 1:
        raise ConfigError(f"expected 1 anchor or more, got {count}")
    if count > 1 and kind not in SEVERAL:
        raise ConfigError(
            f"{count} anchors of kind {kind!r} are all one; use {', '.join(SEVERAL)}, or 1 anchor"
        )


@dataclass(frozen=True, slots=True)
class Signatures:
    """Of the tokens, or pieces, of some layers.

    Attributes:
        bits: what they are made of.
        grouped: those that others may stand for.
        layers: numbers of the layers.
    """

    bits: Bool[Tensor, "layer unit bit"]
    grouped: Bool[Tensor, "layer unit"]
    layers: Int[Tensor, " layer"]

    @property
    def words(self) -> Int[Tensor, "layer unit word"]:
        """The same, packed."""
        return pack(self.bits)


def nearest_anchor(
    signatures: Signatures, kind: str, count: int, seed: int
) -> tuple[Int[Tensor, "layer unit"], Int[Tensor, "layer unit"]]:
    """How far each signature is from the nearest of `count` anchors, and which that is.

    One distance for each token and anchor, no more. Of equally near ones the first.
    """
    words = signatures.words
    anchor = _anchor(signatures, kind, 0, count, seed)
    nearest = hamming(words, pack(anchor)[:, None])
    which = torch.zeros_like(nearest)
    for number in range(1, count):
        anchor = _anchor(signatures, kind, number, count, seed, nearest)
        distance = hamming(words, pack(anchor)[:, None])
        closer = distance < nearest
        nearest = torch.where(closer, distance, nearest)
        which.masked_fill_(closer, number)
    return nearest, which


def _anchor(
    signatures: Signatures,
    kind: str,
    number: int,
    count: int,
    seed: int,
    nearest: Int[Tensor, "layer unit"] | None = None,
) -> Bool[Tensor, "layer bit"]:
    layers, _, width = signatures.bits.shape
    places = torch.arange(width, device=signatures.bits.device)
    if kind == MEAN or (kind == FARTHEST and not number):
        slices = count if kind == MEAN else 1
        return majority(signatures.bits, _slice_of(signatures.grouped, number, slices))
    if kind == FARTHEST:
        assert nearest is not None, "the first one is the mean"
        far = torch.where(signatures.grouped, nearest, -1).argmax(dim=1)
        return signatures.bits[torch.arange(layers, device=far.device), far]
    if kind == RANDOM:
        lots = lots_of(seed, signatures.layers[:, None], number * width + places)
        return lots % 2 == 1
    made = {ALTERNATING: places % 2 == 1, ZEROS: places < 0, ONES: places >= 0}
    return made[kind].expand(layers, width)


def majority(
    bits: Bool[Tensor, "layer unit bit"], among: Bool[Tensor, "layer unit"]
) -> Bool[Tensor, "layer bit"]:
    """What more than half of some signatures say."""
    # a product of floats is many times faster than a sum of bools, and exact below 2 ** 24
    votes = torch.bmm(among[:, None].float(), bits.float())[:, 0]
    return 2 * votes > count_true(among)[:, None]


def _slice_of(
    among: Bool[Tensor, "layer unit"], number: int, count: int
) -> Bool[Tensor, "layer unit"]:
    """The `number`-th of `count` equal runs, in the order of positions."""
    if count == 1:
        return among
    place, total = among.cumsum(dim=1) - 1, among.sum(dim=1, keepdim=True)
    return among & (place >= number * total // count) & (place < (number + 1) * total // count)
