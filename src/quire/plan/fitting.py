"""Rates from measured times: recursive least squares, non-negative fits.

seconds = x . coefficients        x: amounts, such as (1 call, 3 pieces, 7e6 bytes)
"""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError

# Online estimates: recursive least squares with forgetting and robust weights.

_MAX_VARIANCE = 30.0  # relative, of a coefficient: a few samples outweigh the prior
_MIN_CHANGE = 0.1  # least factor of a coefficient per sample, which keeps times positive
_CLIP = 3.0  # in spreads; larger errors get less weight
_SPREAD_PACE = 0.2
_MIN_SPREAD = 0.02


class RateEstimator:
    """Recursive least squares with exponential forgetting (Ljung, System Identification, 11.2).

    Differs from the textbook. Errors are relative to the prediction, because a copy of 1 GiB varies
    by more seconds than one of 1 MiB. A sample with an error above three times the usual error gets
    proportionally less weight (Huber). Coefficients stay positive. The variance of an amount that
    has not occurred for long is bounded. All variances are relative to the current coefficients.

    Args:
        prior: initial coefficients; a coefficient of 0 stays 0.
        forgetting: factor on a sample's weight per new sample; 0.97 remembers about 33 samples.
    """

    def __init__(self, prior: Sequence[int | float], forgetting: float = 0.97) -> None:
        self._coefficients = np.array(prior, dtype=np.float64)
        self._forgetting = forgetting
        self._variance = np.eye(len(prior)) * _MAX_VARIANCE
        self._spread = 1.0  # usual relative error
        self.num_samples = 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Current estimates of seconds per unit of each amount."""
        return tuple(float(value) for value in self._coefficients)

    def predict(self, amounts: Sequence[int | float]) -> float:
        return float(np.dot(self._coefficients, amounts))

    def add(self, amounts: Sequence[int | float], seconds: int | float) -> None:
        """Learn from one measurement; a time of 0 or infinity is ignored."""
        predicted_s = self.predict(amounts)
        if not 0 < seconds < math.inf or predicted_s <= 0:
            return
        shares = self._coefficients * np.asarray(amounts, dtype=np.float64) / predicted_s
        error = seconds / predicted_s - 1
        gain = self._variance @ shares
        gain /= self._forgetting / self._weight(abs(error)) + shares @ gain
        self._variance -= np.outer(gain, shares @ self._variance)
        change = np.maximum(1 + gain * error, _MIN_CHANGE)
        self._coefficients *= change
        self._variance /= self._forgetting * np.outer(change, change)
        shrink = np.sqrt(np.minimum(1.0, _MAX_VARIANCE / np.diagonal(self._variance)))
        self._variance *= np.outer(shrink, shrink)
        self.num_samples += 1

    def _weight(self, error: int | float) -> float:
        """Weight of a sample with this error, 0 to 1; updates the usual error."""
        limit = _CLIP * self._spread
        clipped = min(error, limit)
        self._spread += _SPREAD_PACE * (clipped - self._spread)
        self._spread = max(self._spread, _MIN_SPREAD)
        return limit / error if error > limit else 1.0


# Fits of seconds = amounts . coefficients with non-negative coefficients.


def fit_seconds(
    amounts: Sequence[Sequence[int | float]], seconds: Sequence[int | float]
) -> tuple[float, ...]:
    """Coefficients with the least relative error, all 0 or more.

    The constrained optimum is an ordinary least-squares fit of its positive coefficients (Lawson
    and Hanson, Solving Least Squares Problems, chapter 23). There are few coefficients, so all
    subsets are tried.
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
