"""Some tokens for all of them: one from each of equal slices, in the order of their distances.

distance   0 1 1 1 | 2 2 2 3 | 3 4 4 4       12 tokens, 3 stand for them: one of each slice
                ^         ^        ^         `middle`: the second of four, the lower of the two
"""

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from quire.errors import UnknownName
from quire.policies.choose import choose_slots
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
    units = distance.shape[1]
    most = int(count.max()) if count.numel() else 0
    if not units or most < 1:
        return torch.zeros_like(grouped)
    places = torch.arange(units, device=distance.device)
    last = torch.iinfo(torch.int64).max
    ranked = _ascending(torch.where(grouped, distance * units + places, last))
    total = grouped.sum(dim=1, keepdim=True)
    slices = torch.minimum(count[:, None], total).clamp_min(1)
    number = torch.arange(most, device=distance.device)
    first, end = number * total // slices, (number + 1) * total // slices
    picked = first + _inside(end - first, first, seeds)
    there = number < torch.minimum(count[:, None], total)
    chosen = ranked.gather(1, picked.clamp(0, units - 1)) % units  # the place, off the distance
    # a layer with fewer slices than the others writes True nowhere
    return torch.zeros_like(grouped).scatter_reduce_(1, chosen, there, "amax")


def _ascending(numbers: Int[Tensor, "layer unit"]) -> Int[Tensor, "layer unit"]:
    """Each layer's numbers in order. NumPy sorts rows many times faster than torch on CPUs."""
    if numbers.device.type != "cpu":
        return numbers.sort(dim=1).values
    return torch.from_numpy(np.sort(numbers.numpy(), axis=1))


def _inside(
    length: Int[Tensor, "layer slice"],
    first: Int[Tensor, "layer slice"],
    seeds: tuple[int, Int[Tensor, " layer"]] | None,
) -> Int[Tensor, "layer slice"]:
    if seeds is None:
        return (length - 1) // 2
    seed, layers = seeds
    return lots_of(seed, layers[:, None], first) % length.clamp_min(1)


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
        return torch.minimum(count, grouped.sum(dim=1))[:, None]
    near = torch.stack([(grouped & (which == n)).sum(dim=1) for n in range(anchors)], dim=1)
    total = near.sum(dim=1, keepdim=True)
    wanted = torch.minimum(count[:, None], total)
    down = wanted * near // total.clamp_min(1)
    rest = wanted * near - down * total  # integers: equal fractions are equal
    open_ = down < near
    left = (wanted - down.sum(dim=1, keepdim=True))[:, 0]
    return down + choose_slots(rest.double(), open_, torch.zeros_like(open_), left)
