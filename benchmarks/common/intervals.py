"""Confidence intervals of shares and of means."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959964  # two-sided, 95 %


def wilson(hits: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's interval of a share: where the true one lies in 95 of 100 such draws.

    Args:
        hits: of `n`; n > 0.
        n: draws.
        z: quantile of the normal distribution.

    Returns:
        Lower and upper end, inside [0, 1].

    Source: Wilson 1927: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n).
    """
    share, squared = hits / n, z * z
    middle = share + squared / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + squared / (4 * n * n))
    whole = 1 + squared / n
    return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


def bootstrap_mean(
    groups: Sequence[Sequence[float] | NDArray[np.float64]],
    *,
    groups_too: bool,
    resamples: int = 2_000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % interval of the mean over groups of their means, by resampling.

    Numbers are drawn again, with replacement, inside each group; with `groups_too` the groups are
    drawn first. The ends are the 2.5 and 97.5 percentiles of what comes out.

    Args:
        groups: numbers, such as differences of pairs, by group.
        groups_too: whether other groups could have been asked as well.
        resamples: draws.
        seed: of the draws.

    Source: Efron 1979; of groups first, then inside them: Davison and Hinkley 1997, section 3.8.
    """
    rng, count = np.random.default_rng(seed), len(groups)
    drawn = np.broadcast_to(np.arange(count), (resamples, count))
    if groups_too:
        drawn = rng.integers(count, size=(resamples, count))
    means = np.empty((resamples, count))
    for number, group in enumerate(groups):
        numbers, places = np.asarray(group, dtype=np.float64), np.nonzero(drawn == number)
        picked = rng.integers(len(numbers), size=(len(places[0]), len(numbers)))
        means[places] = numbers[picked].mean(axis=1)
    low, high = np.percentile(means.mean(axis=1), (2.5, 97.5))
    return float(low), float(high)
