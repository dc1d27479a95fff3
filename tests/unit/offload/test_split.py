"""Splits between KV recompute and transfer: closed forms compared with all splits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.kvpr import (
    offload_rates,
    paper_gain,
    paper_seconds,
    paper_split,
    pipelined_gain,
)
from quire.errors import ConfigError
from quire.offload.split import OffloadRates, pipelined_seconds, pipelined_split, share_rows
from support.offload_formulas import serial_seconds, step_seconds
from support.offload_shapes import LLAMA_3_8B, OPT_6_7B, OPT_13B, OPT_30B

SECONDS = st.floats(1e-3, 1e3)
RATES = st.builds(
    OffloadRates,
    kv_s=SECONDS,
    x_s=SECONDS,
    recompute_s=SECONDS,
    other_s=st.just(0.0) | st.floats(0, 1e4),
    link_s=st.just(0.0) | st.floats(0, 1e4),
)
TOKENS = st.integers(0, 60)


def of_ratios(xi: float, rho: float, other: float = 0.0) -> OffloadRates:
    return OffloadRates(kv_s=1.0, x_s=xi, recompute_s=rho, other_s=other)


@given(RATES, TOKENS, st.integers(1, 7))
def test_paper_split_is_the_best_of_all_splits(rates, tokens, unit):
    allowed = {*range(0, tokens, unit), tokens}

    found = paper_split(rates, tokens, unit)

    assert found in allowed
    min_s = min(paper_seconds(rates, tokens, x) for x in allowed)
    assert paper_seconds(rates, tokens, found) == pytest.approx(min_s, rel=1e-12)


@given(RATES, TOKENS, st.integers(1, 7))
def test_pipelined_split_is_the_best_of_all_splits(rates, tokens, unit):
    allowed = {*range(0, tokens, unit), tokens}

    found = pipelined_split(rates, tokens, unit)

    assert found in allowed
    min_s = min(pipelined_seconds(rates, tokens, x) for x in allowed)
    assert pipelined_seconds(rates, tokens, found) == pytest.approx(min_s, rel=1e-12)


@given(RATES, TOKENS)
def test_best_split_is_not_slower_than_transferring_all_kv(rates, tokens):
    found = pipelined_split(rates, tokens)

    whole_s = pipelined_seconds(rates, tokens, 0)
    assert pipelined_seconds(rates, tokens, found) <= whole_s * (1 + 1e-12)
    assert whole_s <= serial_seconds(rates, tokens, 0)


@given(SECONDS, st.floats(0.01, 4), st.floats(0.01, 4))
def test_gains_are_ratios_of_the_formulas(kv_s, xi, rho):
    rates = OffloadRates(kv_s=kv_s, x_s=xi * kv_s, recompute_s=rho * kv_s)
    tokens = 10**6
    paper, pipelined = paper_split(rates, tokens), pipelined_split(rates, tokens)
    whole_s = kv_s * tokens

    assert paper_gain(rates) == pytest.approx(
        whole_s / paper_seconds(rates, tokens, paper), rel=1e-4
    )
    assert pipelined_gain(rates) == pytest.approx(
        whole_s / pipelined_seconds(rates, tokens, pipelined), rel=1e-4
    )
    assert pipelined_gain(rates) >= paper_gain(rates) >= 1


def test_link_load_increases_the_split_and_device_load_decreases_it():
    rates = of_ratios(0.5, 1.0)
    loaded = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=1.0, link_s=300.0)

    assert pipelined_split(rates, 1000) == 666
    assert pipelined_split(loaded, 1000) == 866
    assert pipelined_split(of_ratios(0.5, 1.0, other=300.0), 1000) == 466


@pytest.mark.parametrize(
    ("model", "rho", "seconds", "paper_s", "pipelined_s"),
    [(OPT_6_7B, 0.47, 1.374, 0.905, 0.693), (OPT_13B, 0.58, 2.147, 1.467, 1.153)],
    ids=["opt-6.7b", "opt-13b"],
)
def test_split_on_an_a100_with_pcie_4(model, rho, seconds, paper_s, pipelined_s):
    """25 GB/s, 220 TFLOP/s, 64 rows of 1,024 tokens.

    rho = 2 h B / (p v) = 2 * 4096 * 25e9 / (2 * 220e12) = 0.465. KV of OPT-6.7B: 64 * 1024 *
    32 layers * 16,384 B = 34.36 GB / 25 GB/s = 1.374 s; / (1.465 / 0.965) = 0.905; / (1 + 0.5 /
    0.465) = 0.662, which over 32 layers that begin with a bubble is 0.693 s.
    """
    rates = offload_rates(model, link_bytes_per_s=25e9, flops_per_s=220e12)
    tokens, layers = 64 * 1024, model.num_layers

    assert rates.x_ratio == 0.5
    assert rates.recompute_ratio == pytest.approx(rho, abs=0.005)
    assert layers * rates.kv_s * tokens == pytest.approx(seconds, rel=0.01)
    paper = paper_split(rates, tokens)
    assert layers * paper_seconds(rates, tokens, paper) == pytest.approx(paper_s, rel=0.01)
    split = pipelined_split(rates, tokens)
    whole_s = step_seconds(rates, tokens, split, layers)
    assert whole_s == pytest.approx(pipelined_s, rel=0.05)


@pytest.mark.parametrize(
    ("model", "rows", "tokens", "kv_gb", "prefetch_ms", "paper_ms", "pipelined_ms", "share"),
    [
        (OPT_6_7B, 64, 1024, 34.4, 625, 393, 312, 1.0),
        (OPT_13B, 64, 1024, 53.7, 976, 636, 488, 1.0),
        (OPT_30B, 32, 1024, 45.1, 820, 565, 450, 0.90),
        (LLAMA_3_8B, 64, 4096, 34.4, 625, 625, 625, 0.0),
    ],
    ids=["opt-6.7b", "opt-13b", "opt-30b", "llama-3-8b"],
)
def test_split_on_an_h200_with_pcie_5(
    model, rows, tokens, kv_gb, prefetch_ms, paper_ms, pipelined_ms, share
):
    """Values predicted for 55 GB/s and 650 TFLOP/s."""
    rates = offload_rates(model, link_bytes_per_s=55e9, flops_per_s=650e12)
    total, layers = rows * tokens, model.num_layers

    kv_bytes = total * model.kv_bytes_per_token(2)
    assert kv_bytes / 1e9 == pytest.approx(kv_gb, rel=0.01)
    assert 1e3 * layers * rates.kv_s * total == pytest.approx(prefetch_ms, rel=0.01)
    paper_s = layers * paper_seconds(rates, total, paper_split(rates, total))
    assert 1e3 * paper_s == pytest.approx(paper_ms, rel=0.01)
    split = pipelined_split(rates, total)
    steady_s = layers * pipelined_seconds(rates, total, split)
    assert split / total == pytest.approx(share, abs=0.03)
    assert 1e3 * steady_s == pytest.approx(pipelined_ms, rel=0.02)


@pytest.mark.parametrize(
    ("kv_bytes", "x_bytes", "paper", "pipelined"),
    [
        (2, 2, 1.59, 2.00),
        (1.0625, 2, 1.04, 1.06),
        (1.0625, 1.0625, 1.43, 1.77),
        (0.5625, 2, 1.0, 1.0),
        (0.5625, 0.5625, 1.29, 1.41),
        (2, 1.0625, 2.20, 3.12),
        (2, 0.5625, 2.76, 3.48),
    ],
    ids=["16+16", "8+16", "8+8", "4+16", "4+4", "16 from 8", "16 from 4"],
)
def test_gains_depend_on_the_codecs_of_kv_and_activations(kv_bytes, x_bytes, paper, pipelined):
    """A multi-head model of width 4,096, H200; groups of 64: 1.0625 and 0.5625 B per element."""
    rates = offload_rates(
        OPT_6_7B,
        link_bytes_per_s=55e9,
        flops_per_s=650e12,
        kv_value_bytes=kv_bytes,
        x_value_bytes=x_bytes,
    )

    assert paper_gain(rates) == pytest.approx(paper, abs=0.02)
    assert pipelined_gain(rates) == pytest.approx(pipelined, abs=0.04)


def test_paper_split_in_a_pipelined_runtime_is_up_to_a_third_slower():
    for rho, waste in ((0.47, 0.31), (0.35, 0.26), (0.81, 0.13), (1.1, 0.09)):
        rates = of_ratios(0.5, rho)
        paper, best = (split(rates, 10**5) for split in (paper_split, pipelined_split))

        layers = 32
        slow_s, fast_s = (step_seconds(rates, 10**5, x, layers) for x in (paper, best))
        assert slow_s / fast_s - 1 == pytest.approx(waste, abs=0.03)


@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=6), st.floats(0, 1), st.sampled_from([1, 16])
)
def test_share_rows_divides_a_split_in_whole_pages(lengths, share, page):
    total = math.floor(sum(lengths) * share)

    found = share_rows(tuple(lengths), total, page)

    assert all(0 <= x <= n for x, n in zip(found, lengths, strict=True))
    assert all(x % page == 0 or x == n for x, n in zip(found, lengths, strict=True))
    missing = total - sum(found)
    remainders = [n - x for n, x in zip(lengths, found, strict=True) if x < n]
    assert 0 <= missing < page or (total == sum(found))
    assert not missing or all(missing < min(page, remainder) for remainder in remainders)


def test_invalid_rates_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match="x_s of 0 seconds or more, got -1"):
        OffloadRates(kv_s=1.0, x_s=-1.0, recompute_s=1.0)
    with pytest.raises(ConfigError, match="kv_s and host_s above 0"):
        OffloadRates(kv_s=0.0, x_s=1.0, recompute_s=1.0)
    with pytest.raises(ConfigError, match="above 0"):
        offload_rates(OPT_13B, link_bytes_per_s=0, flops_per_s=1e12)
    with pytest.raises(ConfigError, match="link_s=1"):
        step_seconds(OffloadRates(kv_s=1.0, x_s=1.0, recompute_s=1.0, link_s=1.0), 1, 0, 2)
    with pytest.raises(ConfigError, match="units"):
        pipelined_split(of_ratios(0.5, 0.5), -1)
    with pytest.raises(ConfigError, match="0 to 3 tokens"):
        share_rows((1, 2), 4)
