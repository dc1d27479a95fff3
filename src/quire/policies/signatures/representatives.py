"""Representatives: one token from each of equal slices, in the order of distances.

distance   0 1 1 1 | 2 2 2 3 | 3 4 4 4       12 tokens, 3 representatives, one per slice
                ^         ^        ^         `middle`: the second of four, the lower of the two
score      5 1 9 2 | 4 4 1 3 | 2 0 7 1
               ^     ^               ^       `best`: the highest score, ties to the first
"""

import numpy as np
import torch
from numpy.typing import NDArray

from quire.errors import UnknownName
from quire.policies.choose import Floats, count_of
from quire.policies.lots import lots_of

MIDDLE, RANDOM, BEST = "middle", "random", "best"
PICKS = (MIDDLE, RANDOM, BEST)


def check_pick(pick: str) -> None:
    """Refuse an unknown pick.

    Raises:
        UnknownName: with the known picks.
    """
    if pick not in PICKS:
        raise UnknownName("pick", pick, PICKS)


def choose_representatives(
    distance: NDArray[np.int64],
    grouped: NDArray[np.bool_],
    count: NDArray[np.int64],
    seeds: tuple[int, tuple[int, ...]] | None = None,
) -> NDArray[np.bool_]:
    """Sort by (distance, position), cut into `count` equal slices, select one of each.

    Slice i of m tokens in B slices is [i m // B, (i + 1) m // B).

    Args:
        distance: [layer, unit] of each token or piece; units in the order of positions.
        grouped: [layer, unit] units to sort.
        count: [layer] number of representatives; all units if there are fewer.
        seeds: for a random unit of each slice, the seed and the layers' numbers; None: the middle.
    """
    chosen = np.zeros(grouped.shape, dtype=bool)
    units = grouped.shape[1]
    if not units or not count.any():
        return chosen
    total = count_of(grouped)[:, None]
    slices = np.minimum(count[:, None], total)
    cuts = np.arange(slices.max() + 1) * total // np.maximum(slices, 1)
    first, length = cuts[:, :-1], np.diff(cuts)
    picked = np.minimum(first + _inside(length, first, seeds), units - 1)
    places = np.take_along_axis(_ranked(distance, grouped), picked, axis=1) % units
    layer, number = np.nonzero(np.arange(slices.max()) < slices)
    chosen[layer, places[layer, number]] = True
    return chosen


def choose_best(
    distance: NDArray[np.int64],
    grouped: NDArray[np.bool_],
    count: NDArray[np.int64],
    score: Floats,
) -> NDArray[np.bool_]:
    """Cut the same slices as `choose_representatives`, select the best score of each.

    Args:
        distance: [row, unit] of each token or piece; units in the order of positions.
        grouped: [row, unit] units to sort.
        count: [row] number of representatives; all units if there are fewer.
        score: [row, unit] score of each unit.
    """
    chosen = np.zeros(grouped.shape, dtype=bool)
    units, total = grouped.shape[1], count_of(grouped)
    slices = np.minimum(count, total)
    if not slices.any():
        return chosen
    order = _ranked(distance, grouped) % units
    ranked = np.take_along_axis(score, order, axis=1).ravel()
    number = np.arange(slices.max() + 1)
    cuts = number * total[:, None] // np.maximum(slices, 1)[:, None]
    # the last cut of a row starts the units that belong to no slice
    real = (number <= slices[:, None]) & (cuts < units)
    starts = (cuts + np.arange(len(grouped))[:, None] * units)[real]
    lengths = np.diff(starts, append=len(ranked))
    best = np.maximum.reduceat(ranked, starts).repeat(lengths)
    places = np.where(ranked == best, np.arange(len(ranked)), len(ranked))
    picked = np.minimum.reduceat(places, starts)[(number < slices[:, None])[real]]
    row, rank = np.divmod(picked, units)
    chosen[row, order[row, rank]] = True
    return chosen


def _ranked(distance: NDArray[np.int64], grouped: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Sort (distance, index) as one number in each layer; ungrouped units come last."""
    units = distance.shape[1]
    past_end = (int(distance.max(initial=0)) + 1) * units
    kind = np.int32 if past_end <= np.iinfo(np.int32).max else np.int64
    numbers = np.where(grouped, distance * units + np.arange(units), past_end).astype(kind)
    numbers.sort(axis=1)
    ranked: NDArray[np.int64] = numbers.astype(np.int64)
    return ranked


def _inside(
    length: NDArray[np.int64],
    first: NDArray[np.int64],
    seeds: tuple[int, tuple[int, ...]] | None,
) -> NDArray[np.int64]:
    """Return the selected index within each slice."""
    if seeds is None:
        return (length - 1) // 2
    seed, layers = seeds
    lots = lots_of(seed, torch.tensor(layers)[:, None], torch.from_numpy(first))
    drawn: NDArray[np.int64] = lots.numpy() % np.maximum(length, 1)
    return drawn
