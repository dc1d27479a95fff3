"""Confidence intervals of means: of values, and of shares of several tasks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

RESAMPLES, TAIL = 2_000, 0.025
SHARE, DIFFERENCE = (0.0, 1.0), (-1.0, 1.0)
"""Limits of the values of a score from 0 to 1, and of the difference of two."""

MIN_PROMPTS = 6
"""Prompts of a verdict: fewer equal signs are no difference at 95 % (2 * 0.5**6 < 0.05)."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its 95 % interval."""

    mean: float
    low: float  # 2.5 percentile of the means of resampled values
    high: float  # 97.5 percentile
    count: int
    most: float = float("inf")  # largest value

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def mean_of(
    values: Sequence[float], *, limits: tuple[float, float] | None = None, seed: int = 0
) -> Mean:
    """Mean and interval of at least one value, by the bootstrap (Efron 1979).

    Equal values have an exact interval between limits, else none.

    Args:
        values: one of each prompt.
        limits: least and largest possible value; None: equal values have no interval.
        seed: of the bootstrap.
    """
    numbers = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(numbers), size=(RESAMPLES, len(numbers)))
    low, high = np.percentile(numbers[drawn].mean(axis=1), [2.5, 97.5])
    found = Mean(float(numbers.mean()), float(low), float(high), len(numbers), float(numbers.max()))
    return found if limits is None else bounded(found, limits)


def mean_of_tasks(
    tasks: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]],
    others: Sequence[NDArray[np.float64]] | None = None,
    *,
    seed: int = 0,
) -> Mean:
    """Mean over tasks of mean value over mean full value, with its interval.

    Prompts of a task have random weights (Bayesian bootstrap, Rubin 1981). One task, drawn anew for
    each set of weights, has one prompt more, with the least possible value for the lower end and
    the largest for the upper end. For a task of right and wrong answers that is the interval of
    Clopper and Pearson (1934); without the prompt, an interval near the limits is too narrow.

    Args:
        tasks: values and full values of the prompts of each task, all at least 0.
        others: values of the same prompts; the result is the difference of two such means.
        seed: of the weights.
    """
    rng, (mean, count), ends = np.random.default_rng(seed), (0.0, 0), np.zeros((2, RESAMPLES))
    most = 0.0
    longer = rng.integers(len(tasks), size=RESAMPLES)
    for task, (values, full) in enumerate(tasks):
        number, largest = len(values), max(values.max(), full.max())
        weights = rng.standard_exponential((RESAMPLES, number + 1))
        weights[:, -1] *= longer == task
        weights /= weights.sum(axis=1, keepdims=True)
        gains, least = values, 0.0
        if others is not None:
            gains, least = values - others[task], -largest
        scale = weights[:, :-1] @ full + weights[:, -1] * full.mean()
        by_prompts = weights[:, :-1] @ gains
        for end, limit in zip(ends, (least, largest), strict=True):
            end += (by_prompts + weights[:, -1] * limit) / scale / len(tasks)
        most = max(most, float(values.max() / full.mean()))
        mean, count = mean + gains.mean() / full.mean() / len(tasks), count + number
    low, high = np.percentile(ends[0], 100 * TAIL), np.percentile(ends[1], 100 * (1 - TAIL))
    return Mean(float(mean), float(low), float(high), count, most)


def prompts_to_show(share: float) -> int:
    """Number of equal prompts whose exact interval (`bounded`) begins at a share below 1."""
    return math.ceil(math.log(TAIL) / math.log(share))


def bounded(found: Mean, limits: tuple[float, float]) -> Mean:
    """The exact interval of equal values between two limits, of which the bootstrap has none.

    If more than this fraction of all prompts had other values, `count` prompts would show one of
    them with a probability above 0.975: the interval of Clopper and Pearson (1934) of 0 or `count`
    successes. The others are at the limits at most.
    """
    if found.low < found.high:
        return found
    other = 1 - (TAIL ** (1 / found.count))
    low, high = (found.mean + other * (limit - found.mean) for limit in limits)
    return replace(found, low=low, high=high)
