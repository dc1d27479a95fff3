"""Confidence intervals of fractions and of means, by SciPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Sample = NDArray[np.float64]


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a fraction.

    Args:
        hits: number of successes, at most `n`.
        n: number of draws, above 0.

    Returns:
        Lower and upper end, inside [0, 1].
    """
    interval = stats.binomtest(hits, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap_mean(
    groups: Sequence[Sequence[float] | Sample],
    *,
    groups_too: bool,
    resamples: int = 2_000,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over the groups' means.

    Numbers are resampled with replacement inside each group; with `groups_too` the groups are
    resampled first. The ends are the 2.5 and 97.5 percentiles of the resampled means.

    Args:
        groups: numbers by group, such as differences of pairs.
        groups_too: whether the groups are resampled before their numbers.
        resamples: number of resamples.
        seed: random seed.

    Source: Efron 1979; of groups first, then inside them: Davison and Hinkley 1997, section 3.8.
    """
    samples = [_sample(group) for group in groups]
    rng = np.random.default_rng(seed)

    def mean_of_means(*resampled: Sample, axis: int) -> Sample:
        means: Sample = np.mean([numbers.mean(axis=axis) for numbers in resampled], axis=0)
        return means

    def mean_of_drawn(drawn: NDArray[np.int64], axis: int) -> Sample:
        means: Sample = np.empty(drawn.shape)
        for number, sample in enumerate(samples):
            chosen = drawn == number
            if chosen.any():
                found = _resample((sample,), np.mean, int(chosen.sum()), rng)
                means[chosen] = found.bootstrap_distribution
        mean: Sample = means.mean(axis=axis)
        return mean

    if groups_too and len(samples) > 1:
        found = _resample((np.arange(len(samples)),), mean_of_drawn, resamples, rng)
    else:
        found = _resample(samples, mean_of_means, resamples, rng)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _sample(numbers: Sequence[float] | Sample) -> Sample:
    """At least two numbers, as SciPy requires; the mean of one number has no spread."""
    found = np.asarray(numbers, dtype=np.float64)
    return found if len(found) > 1 else np.repeat(found, 2)


def _resample(
    data: Sequence[NDArray[Any]], statistic: Any, resamples: int, rng: np.random.Generator
) -> Any:
    return stats.bootstrap(
        data, statistic, n_resamples=resamples, method="percentile", vectorized=True, rng=rng
    )
