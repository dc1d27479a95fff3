"""Costs of preemption: formulas compared with brute force and with published values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.plan.preemption_costs import (
    Holding,
    best_split,
    choose,
    hybrid_seconds,
    recompute_seconds,
    swap_seconds,
)
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates

KIB = 1024


def costs_of(
    *, copy_rate=1e9, call_s=0.0, piece_s=0.0, token_s=1e-6, square_s=0.0, step_s=0.0, chunk=512
):
    rate = CopyRate(bytes_per_s=copy_rate, call_s=call_s, piece_s=piece_s)
    return Costs(
        copies=CopyRates(out=rate, back=rate),
        prefill=PrefillRates(token_s=token_s, square_s=square_s, call_s=step_s),
        chunk_tokens=chunk,
    )


RANDOM_COSTS = st.builds(
    costs_of,
    copy_rate=st.floats(1e5, 1e11),
    call_s=st.floats(0, 1e-2),
    piece_s=st.floats(0, 1e-3),
    token_s=st.floats(1e-7, 1e-2),
    square_s=st.just(0.0) | st.floats(1e-10, 1e-5),
    step_s=st.floats(0, 1e-2),
    chunk=st.integers(1, 4096),
)


@pytest.mark.parametrize(
    ("parameters", "kv_kib", "a100", "h200", "small_blocks"),
    [
        (6.44e9, 512, 1.54, 1.13, 0.10),
        (12.58e9, 800, 1.92, 1.41, 0.13),
        (6.98e9, 128, 6.7, 4.9, 0.44),
        (68.45e9, 320, 26, 19, 1.7),
    ],
    ids=["opt-6.7b", "opt-13b", "llama-3-8b", "llama-3-70b"],
)
def test_ratio_of_recompute_to_swap_for_four_models_on_three_links(
    parameters, kv_kib, a100, h200, small_blocks
):
    """Recompute of a token takes 2 P / v, swap-out and swap-in 2 kv / B: P * B / (v * kv).

    Llama-3-8B has 6.98e9 parameters without embeddings and 131,072 B of KV a token. At 25 GB/s and
    200 TFLOP/s (A100): 6.98e9 * 25e9 / (200e12 * 131,072) = 6.7. At 55 GB/s and 600 (H200): 4.9.
    At 5 GB/s, which small blocks reach, and 600: 0.44, so there recomputing is cheaper.
    """
    for link, flops, expected in (
        (25e9, 200e12, a100),
        (55e9, 600e12, h200),
        (5e9, 600e12, small_blocks),
    ):
        costs = costs_of(copy_rate=link, token_s=2 * parameters / flops)
        tokens, kv_bytes = 1000, 1000 * kv_kib * KIB
        ratio = recompute_seconds(costs, tokens) / swap_seconds(costs, kv_bytes)

        assert ratio == pytest.approx(expected, rel=0.03)
        holding = Holding(tokens=tokens, kv_bytes=kv_bytes)
        cheaper = "swap" if expected > 1 else "recompute"
        assert choose(costs, holding, host_bytes=kv_bytes).how == cheaper


def test_swap_cost_counts_calls_pieces_and_bytes_in_both_directions():
    """(0.01 + 3 * 0.001 + 2e6 / 1e9) * 2 = 0.030."""
    costs = costs_of(call_s=0.01, piece_s=0.001)

    assert swap_seconds(costs, 2_000_000, pieces=3) == pytest.approx(0.030)
    assert swap_seconds(costs, 0) == 0


@given(RANDOM_COSTS, st.integers(0, 300), st.integers(0, 300))
def test_recompute_cost_is_the_sum_over_tokens(costs, cached, more):
    """Token p attends to p + 1 positions: (p + 1)^2 - p^2 = 2 p + 1 of the square."""
    prefill, tokens = costs.prefill, cached + more
    each = [
        prefill.token_s + prefill.call_s / costs.chunk_tokens + prefill.square_s * (2 * p + 1)
        for p in range(cached, tokens)
    ]

    assert recompute_seconds(costs, tokens, cached) == pytest.approx(sum(each))


@given(RANDOM_COSTS, st.data())
def test_best_split_is_the_cheapest_page_border(costs, data):
    page = data.draw(st.sampled_from([1, 4, 16]))
    tokens = data.draw(st.integers(1, 40 * page))
    page_bytes = data.draw(st.integers(1, 1 << 20))
    cached = data.draw(st.integers(0, tokens))
    kv_bytes = -(-tokens // page) * page_bytes
    host_bytes = data.draw(st.integers(0, 2 * kv_bytes))
    holding = Holding(tokens=tokens, kv_bytes=kv_bytes, cached_tokens=cached, page_tokens=page)
    possible = [
        border
        for border in range(page, tokens, page)
        if border >= cached and holding.tail_bytes(border) <= host_bytes
    ]

    found = best_split(costs, holding, host_bytes)

    if not possible:
        assert found is None
        return
    assert found in possible
    least = min(hybrid_seconds(costs, holding, border) for border in possible)
    assert hybrid_seconds(costs, holding, found) == pytest.approx(least, rel=1e-9)


def test_hybrid_recomputes_early_tokens_and_swaps_late_ones():
    """k = 4e-6 s a token both ways, t = 1e-6, a = 1e-9: l = 3e-6 / 2e-9 = 1500, of 4096 tokens.

    Borders are every 16: 1504 costs less than 1488 because it is nearer to 1500.
    """
    costs = costs_of(copy_rate=1e9, token_s=1e-6, square_s=1e-9)
    holding = Holding(tokens=4096, kv_bytes=4096 * 2000, page_tokens=16)

    assert best_split(costs, holding, host_bytes=1 << 30) == 1504
    choice = choose(costs, holding, host_bytes=1 << 30)
    assert (choice.how, choice.keep_from) == ("hybrid", 1504)
    assert choice.reason.startswith("swap 16.38 ms, recompute 20.87 ms, hybrid ")


def test_hybrid_swaps_the_tail_that_fits_the_swap_space():
    costs = costs_of(copy_rate=1e9, token_s=1e-3)
    holding = Holding(tokens=1024, kv_bytes=1024 * 1000, page_tokens=16)

    choice = choose(costs, holding, host_bytes=100 * 16_000 // 4)

    assert (choice.how, choice.keep_from) == ("hybrid", 1024 - 25 * 16)
    assert "1,024,000 B exceed the 400,000 B" in choice.reason


@given(RANDOM_COSTS, st.data())
def test_choice_is_never_more_expensive_than_swap_or_recompute(costs, data):
    tokens = data.draw(st.integers(1, 2000))
    pages = -(-tokens // 16)
    holding = Holding(
        tokens=tokens,
        kv_bytes=pages * data.draw(st.integers(1, 1 << 20)),
        cached_tokens=data.draw(st.integers(0, tokens)),
        page_tokens=data.draw(st.sampled_from([0, 16])),
    )
    host_bytes = data.draw(st.integers(0, 2 * holding.kv_bytes))

    choice = choose(costs, holding, host_bytes)

    costs_by_choice = {"recompute": recompute_seconds(costs, tokens, holding.cached_tokens)}
    if holding.kv_bytes <= host_bytes:
        costs_by_choice["swap"] = swap_seconds(costs, holding.kv_bytes)
    for name, seconds in costs_by_choice.items():
        assert choice.seconds <= seconds
        assert choice.how != name or choice.seconds == seconds
    assert (choice.how == "hybrid") == (choice.keep_from > 0)
    assert choice.how == "hybrid" or choice.how in costs_by_choice


def test_equal_costs_swap_and_cached_tokens_recompute():
    costs = costs_of(copy_rate=2e9, token_s=1e-6)
    kv_bytes = 1000 * 1000

    equal = Holding(tokens=1000, kv_bytes=kv_bytes)
    cached = Holding(tokens=1000, kv_bytes=kv_bytes, cached_tokens=500)

    assert choose(costs, equal, host_bytes=kv_bytes).how == "swap"
    assert choose(costs, cached, host_bytes=kv_bytes).how == "recompute"
    assert choose(costs, equal, host_bytes=0).how == "recompute"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: CopyRate(bytes_per_s=0), "bytes_per_s above 0, got 0"),
        (lambda: CopyRate(bytes_per_s=math.nan), "above 0, got nan"),
        (lambda: CopyRate(bytes_per_s=1, call_s=-1), "call_s of 0 seconds or more, got -1"),
        (lambda: CopyRate(bytes_per_s=1, piece_s=math.inf), "piece_s of 0 seconds"),
        (lambda: PrefillRates(token_s=0), "token_s above 0"),
        (lambda: PrefillRates(token_s=1, square_s=-1), "square_s of 0 seconds"),
        (lambda: costs_of(chunk=0), "chunk_tokens of 1 or more"),
        (lambda: Holding(tokens=-1, kv_bytes=0), "0 or more"),
        (
            lambda: Holding(tokens=1, kv_bytes=0, cached_tokens=2),
            "at most 1 cached tokens, .* got 2",
        ),
    ],
    ids=["rate", "nan", "call", "piece", "token", "square", "chunk", "negative", "cached"],
)
def test_invalid_rates_and_holdings_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()
