"""Confidence interval of a mean by the bootstrap (Efron 1979); exact if all values are equal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

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
    """Mean and interval of at least one value; equal for equal values.

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
