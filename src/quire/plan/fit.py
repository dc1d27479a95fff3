"""Fits times to what was done: seconds = amounts . coefficients, none of them below zero."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError


def fit_seconds(
    amounts: Sequence[Sequence[int | float]], seconds: Sequence[int | float]
) -> tuple[float, ...]:
    """Coefficients with the least relative error, all 0 or more.

    The best fit under that condition is a plain least-squares fit of those that are above 0
    (Lawson and Hanson, Solving Least Squares Problems, chapter 23). There are few, so all subsets
    are tried.

    Args:
        amounts: how much of each unit was done, one row for each measurement.
        seconds: what it took, above 0.

    Raises:
        ConfigError: no measurement, or one that took no time.
    """
    if not len(seconds) or min(seconds) <= 0:
        raise ConfigError(f"expected times above 0 to fit, got {list(seconds)}")
    rows = np.asarray(amounts, dtype=np.float64) / np.asarray(seconds, dtype=np.float64)[:, None]
    units = rows.shape[1]
    best, least = np.zeros(units), np.inf
    for count in range(1, units + 1):
        for columns in combinations(range(units), count):
            found = _fit(rows, list(columns))
            error = float(np.sum((rows @ found - 1) ** 2))
            if found.min() >= 0 and error < least:
                best, least = found, error
    return tuple(float(value) for value in best)


def _fit(rows: NDArray[np.float64], columns: list[int]) -> NDArray[np.float64]:
    scale = np.abs(rows[:, columns]).max(axis=0)
    scale[scale == 0] = 1.0
    solved = np.linalg.lstsq(rows[:, columns] / scale, np.ones(len(rows)), rcond=None)[0]
    found = np.zeros(rows.shape[1])
    found[columns] = solved / scale
    return found
