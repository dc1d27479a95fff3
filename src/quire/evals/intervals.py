"""Confidence interval of a mean by the bootstrap (Efron 1979)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2_000


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


def mean_of(values: Sequence[float], *, seed: int = 0) -> Mean:
    """Mean and interval of at least one value; equal for equal values."""
    numbers = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(numbers), size=(RESAMPLES, len(numbers)))
    low, high = np.percentile(numbers[drawn].mean(axis=1), [2.5, 97.5])
    return Mean(float(numbers.mean()), float(low), float(high), len(numbers), float(numbers.max()))
