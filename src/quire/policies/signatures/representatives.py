"""Some tokens for all of them: one from each of equal slices, in the order of their distances.

distance   0 1 1 1 | 2 2 2 3 | 3 4 4 4       12 tokens, 3 stand for them: one of each slice
                ^         ^        ^         `middle`: the second of four, the lower of the two
"""

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import UnknownName
from quire.policies.choose import choose_slots, count_true
from quire.policies.lots import lots_of

MIDDLE, RANDOM = "middle", "random"
PICKS = (MIDDLE, RANDOM)


def check_pick(pick: str) -> None:
    """Refuse a pick that is none.

    Raises:
        UnknownName: with those there are.
    """
    if pick not in PICKS:
        raise UnknownName("pick", pick, PICKS)


def choose_representatives(
    distance: Int[Tensor, "layer unit"],
    grouped: Bool[Tensor, "layer unit"],
    count: Int[Tensor, " layer"],
    seeds: tuple[int, Int[Tensor, " layer"]] | None = None,
) -> Bool[Tensor, "layer unit"]:
    """Sort by (distance, position), cut into `count` equal slices, take one of each.

    Slice i of m tokens in B slices is [i m // B, (i + 1) m // B).

    Args:
        distance: of each token or piece; units in the order of positions.
        grouped: those that are sorted.
        count: representatives; all where there are no more tokens.
        seeds: where one of a slice is drawn by lot, the seed and the layers' numbers; else its
            middle is taken.
    """
    chosen = np.zeros(grouped.shape, dtype=bool)
    units, wanted = chosen.shape[1], count.cpu().numpy()
    if not units or not wanted.any():
        return torch.from_numpy(chosen).to(distance.device)
    among = grouped.cpu().numpy()
    ranked = _ranked(distance.cpu().numpy(), among)
    total = np.count_nonzero(among, axis=1)[:, None]
    slices = np.minimum(wanted[:, None], total)
    number = np.arange(wanted.max())
    cuts = np.arange(wanted.max() + 1) * total // np.maximum(slices, 1)
    first, length = cuts[:, :-1], np.diff(cuts)
    picked = np.minimum(first + _inside(length, first, seeds), units - 1)
    places = np.take_along_axis(ranked, picked, axis=1) % units  # the place, off the distance
    layer, slot = np.nonzero(number < slices)
    chosen[layer, places[layer, slot]] = True
    return torch.from_numpy(chosen).to(distance.device)


def _ranked(distance: NDArray[np.int64], among: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Distance and place as one number, in order in each layer; the largest behind the others.

    In NumPy, on the host: what stays is needed there, and rows are sorted many times faster.
    """
    units = distance.shape[1]
    last = np.iinfo(np.int64).max
    return np.sort(np.where(among, distance * units + np.arange(units), last), axis=1)


def _inside(
    length: NDArray[np.int64],
    first: NDArray[np.int64],
    seeds: tuple[int, Int[Tensor, " layer"]] | None,
) -> NDArray[np.int64]:
    """Which of each slice is taken, from its first on."""
    if seeds is None:
        middle: NDArray[np.int64] = (length - 1) // 2
        return middle
    seed, layers = seeds
    lots: NDArray[np.int64] = lots_of(seed, layers.cpu()[:, None], torch.from_numpy(first)).numpy()
    return lots % np.maximum(length, 1)


def of_each_anchor(
    which: Int[Tensor, "layer unit"],
    grouped: Bool[Tensor, "layer unit"],
    count: Int[Tensor, " layer"],
    anchors: int,
) -> Int[Tensor, "layer anchor"]:
    """Representatives of each anchor's tokens, in proportion to how many they are.

    The largest fractions are rounded up (ties to the lower anchor), the total is kept.
    """
    if anchors == 1:
        return torch.minimum(count, count_true(grouped))[:, None]
    near = torch.stack([(grouped & (which == n)).sum(dim=1) for n in range(anchors)], dim=1)
    total = near.sum(dim=1, keepdim=True)
    wanted = torch.minimum(count[:, None], total)
    down = wanted * near // total.clamp_min(1)
    rest = wanted * near - down * total  # integers: equal fractions are equal
    open_ = down < near
    left = (wanted - down.sum(dim=1, keepdim=True))[:, 0]
    return down + choose_slots(rest.double(), open_, torch.zeros_like(open_), left)
