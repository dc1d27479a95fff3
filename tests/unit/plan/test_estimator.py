"""Rates learned from samples: with a wrong prior, with outliers, after a change."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.plan.fitting import RateEstimator
from quire.plan.preemption_costs import LearnedCosts
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates

CALL_S, BYTE_S = 2e-3, 1e-9


def copies(rng, count, *, byte_s=BYTE_S, noise=0.05):
    """(amounts, seconds) of swaps from 100 KB to 100 MB."""
    for _ in range(count):
        amounts = (1, 10 ** rng.uniform(5, 8))
        yield amounts, (CALL_S + byte_s * amounts[1]) * rng.gauss(1, noise)


def fitted(prior, samples, **options):
    estimator = RateEstimator(prior, **options)
    for amounts, seconds in samples:
        estimator.add(amounts, seconds)
    return estimator


@pytest.mark.parametrize("factor", [0.02, 0.3, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("seed", range(3))
def test_samples_outweigh_a_wrong_prior(factor, seed):
    samples = copies(random.Random(seed), 200)

    estimator = fitted((CALL_S * factor, BYTE_S * factor), samples)

    assert estimator.coefficients == pytest.approx((CALL_S, BYTE_S), rel=0.15)


@pytest.mark.parametrize("factor", [10.0, 0.1, 1000.0])
def test_single_outlier_changes_rates_little(factor):
    """Usual errors are 5 %; the outlier is limited to three of them, about 15 %."""
    rng = random.Random(1)
    estimator = fitted((CALL_S, BYTE_S), copies(rng, 100))
    amounts = (1, 3e7)
    before = estimator.predict(amounts)

    estimator.add(amounts, before * factor)

    assert estimator.predict(amounts) == pytest.approx(before, rel=0.05)


def test_occasional_outliers_do_not_bias_rates():
    rng = random.Random(2)
    samples = [
        (amounts, seconds * (10 if i % 20 == 7 else 1))
        for i, (amounts, seconds) in enumerate(copies(rng, 300))
    ]

    estimator = fitted((CALL_S, BYTE_S), samples)

    assert estimator.predict((1, 3e7)) == pytest.approx(CALL_S + 3e7 * BYTE_S, rel=0.15)


@pytest.mark.parametrize("change", [4.0, 0.25])
@pytest.mark.parametrize("forgetting", [0.95, 0.98])
def test_changed_rate_is_followed(change, forgetting):
    rng = random.Random(3)
    estimator = fitted((CALL_S, BYTE_S), copies(rng, 150), forgetting=forgetting)
    assert estimator.predict((0, 1e8)) == pytest.approx(1e8 * BYTE_S, rel=0.1)

    for amounts, seconds in copies(rng, 250, byte_s=BYTE_S * change):
        estimator.add(amounts, seconds)

    assert estimator.predict((0, 1e8)) == pytest.approx(1e8 * BYTE_S * change, rel=0.15)


def test_unobserved_coefficient_is_retained():
    """A thousand large copies do not identify the cost of a call, which must be retained."""
    rng = random.Random(4)
    estimator = fitted((CALL_S, BYTE_S), copies(rng, 100))
    for _ in range(1000):
        estimator.add((1, 1e9), (CALL_S + BYTE_S * 1e9) * rng.gauss(1, 0.05))

    assert estimator.coefficients[1] == pytest.approx(BYTE_S, rel=0.1)
    for amounts, seconds in copies(rng, 60):
        estimator.add(amounts, seconds)
    assert estimator.coefficients == pytest.approx((CALL_S, BYTE_S), rel=0.3)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 1e6) | st.just(math.nan) | st.just(math.inf)),
        max_size=60,
    )
)
def test_rates_stay_positive_for_any_samples(samples):
    estimator = RateEstimator((CALL_S, BYTE_S))

    for amount, seconds in samples:
        estimator.add((1, amount), seconds)

    assert all(0 < value < math.inf for value in estimator.coefficients)


def test_non_positive_times_are_ignored():
    estimator = RateEstimator((CALL_S, BYTE_S))

    for seconds in (0.0, -1.0, math.nan, math.inf):
        estimator.add((1, 10), seconds)

    assert (estimator.num_samples, estimator.coefficients) == (0, (CALL_S, BYTE_S))


PRIOR = Costs(
    copies=CopyRates(
        out=CopyRate(bytes_per_s=1e9, call_s=1e-4, piece_s=1e-5),
        back=CopyRate(bytes_per_s=1e9, call_s=1e-4, piece_s=1e-5),
    ),
    prefill=PrefillRates(token_s=1e-4, square_s=1e-9, call_s=1e-3),
    chunk_tokens=256,
)


def test_learned_costs_start_at_the_stored_costs():
    learned = LearnedCosts(PRIOR)

    assert learned.costs.chunk_tokens == 256
    for direction in ("out", "back"):
        stored, known = getattr(PRIOR.copies, direction), getattr(learned.costs.copies, direction)
        assert known.seconds(1e6, 3) == pytest.approx(stored.seconds(1e6, 3))
    assert learned.costs.prefill == PRIOR.prefill


def test_swap_out_swap_in_and_prefill_are_learned_separately():
    """Swap-out 4 GB/s, swap-in 0.5 GB/s, 30 us per token, attention 5 ns per squared position."""
    rng, learned = random.Random(5), LearnedCosts(PRIOR)
    for _ in range(300):
        num_bytes = int(10 ** rng.uniform(5, 8))
        learned.copied_out(num_bytes, 1e-4 + num_bytes / 4e9)
        learned.copied_back(num_bytes, 1e-4 + num_bytes / 0.5e9)
        tokens, before = rng.randint(16, 512), rng.randint(0, 8000)
        square = (before + tokens) ** 2 - before**2
        learned.read(tokens, before, 2e-3 + 30e-6 * tokens + 5e-9 * square)

    costs = learned.costs
    assert costs.copies.out.bytes_per_s == pytest.approx(4e9, rel=0.02)
    assert costs.copies.back.bytes_per_s == pytest.approx(0.5e9, rel=0.02)
    assert costs.prefill.token_s == pytest.approx(30e-6, rel=0.02)
    assert costs.prefill.square_s == pytest.approx(5e-9, rel=0.02)
    assert costs.prefill.call_s == pytest.approx(2e-3, rel=0.05)
    assert learned.num_samples == 900


def test_rates_stored_as_zero_are_learned():
    """A non-negative fit may store zeros; the samples then have a call of 3 ms."""
    direction = CopyRate(bytes_per_s=1e9)
    prior = Costs(
        copies=CopyRates(out=direction, back=direction), prefill=PrefillRates(token_s=1e-5)
    )
    rng, learned = random.Random(6), LearnedCosts(prior)
    for _ in range(200):
        num_bytes = int(10 ** rng.uniform(5, 8))
        learned.copied_out(num_bytes, 3e-3 + num_bytes / 1e9)
        tokens, before = rng.randint(16, 512), rng.randint(0, 8000)
        square = (before + tokens) ** 2 - before**2
        learned.read(tokens, before, 1e-5 * tokens + 5e-9 * square)

    out, prefill = learned.costs.copies.out, learned.costs.prefill
    assert out.call_s + out.piece_s == pytest.approx(3e-3, rel=0.05)
    assert out.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert prefill.square_s == pytest.approx(5e-9, rel=0.05)
