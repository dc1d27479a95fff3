"""Non-negative fits of times, compared with a grid search and with the true coefficients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.plan.fitting import fit_seconds


def test_fit_recovers_the_true_coefficients():
    amounts = [(1, tokens, tokens**2) for tokens in (10, 50, 200, 1000)]
    seconds = [2e-3 + 1e-5 * tokens + 3e-9 * tokens**2 for tokens in (10, 50, 200, 1000)]

    assert fit_seconds(amounts, seconds) == pytest.approx((2e-3, 1e-5, 3e-9))


def test_negative_coefficients_are_fitted_as_zero():
    """Times 1, 3 for amounts 1, 2: the free fit has a call of -1; without calls b = 1.15.

    Relative errors of 1 and 2/3 of the slope b: minimise (b - 1)^2 + (2 b / 3 - 1)^2, so
    b = (1 + 2/3) / (1 + 4/9) = 15/13.
    """
    assert fit_seconds([(1, 1), (1, 2)], [1, 3]) == pytest.approx((0, 15 / 13))


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(0, 50), st.floats(0.1, 10)),
        min_size=1,
        max_size=6,
    )
)
def test_no_grid_point_has_a_smaller_error(samples):
    amounts = [(first, second) for first, second, _ in samples]
    seconds = [elapsed_s for _, _, elapsed_s in samples]
    rows = np.array(amounts) / np.array(seconds)[:, None]

    def error(point):
        return float(np.sum((rows @ np.asarray(point) - 1) ** 2))

    found = fit_seconds(amounts, seconds)

    assert min(found) >= 0
    steps = np.concatenate([[0.0], np.geomspace(1e-4, 10, 12)])
    nearby = [(found[0] * a, found[1] * b) for a in (0.9, 1, 1.1) for b in (0.9, 1, 1.1)]
    grid = [(a, b) for a in steps for b in steps]
    assert all(error(found) <= error(point) + 1e-9 for point in (*grid, *nearby))


def test_missing_or_non_positive_times_are_refused():
    for amounts, seconds in (([], []), ([(1, 1)], [0.0]), ([(1, 1), (1, 2)], [1.0, -1.0])):
        with pytest.raises(ConfigError, match="times above 0"):
            fit_seconds(amounts, seconds)
