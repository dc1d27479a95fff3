"""Costs of preemption: formulas, published values, stored and learned rates; ceilings."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.layout.model import ExtraSpec, ModelSpec
from quire.plan.ceilings import (
    FORMAT,
    Ceilings,
    Machine,
    NotUsable,
    ProductRate,
    default_path,
    read_ceilings,
    write_ceilings,
)
from quire.plan.fitting import RateEstimator, fit_seconds
from quire.plan.preemption_costs import (
    ASSUMED_COPY,
    ASSUMED_FLOPS_PER_S,
    Holding,
    LearnedCosts,
    assumed_prefill,
    best_split,
    choose,
    hybrid_seconds,
    known_costs,
    recompute_seconds,
    swap_seconds,
)
from quire.plan.rates import CopyRate, CopyRates, Costs, PrefillRates, model_key
from support.model_specs import CACHE_KINDS

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
        *((6.44e9, 512, 1.54, 1.13, 0.10), (12.58e9, 800, 1.92, 1.41, 0.13)),
        *((6.98e9, 128, 6.7, 4.9, 0.44), (68.45e9, 320, 26, 19, 1.7)),
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
    links = ((25e9, 200e12, a100), (55e9, 600e12, h200), (5e9, 600e12, small_blocks))
    for link, flops, expected in links:
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
    borders = [border for border in range(page, tokens, page) if border >= cached]
    possible = [border for border in borders if holding.tail_bytes(border) <= host_bytes]

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
    # the tail that fits the swap space
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


def test_invalid_rates_and_holdings_are_refused():
    for match, make in {
        "bytes_per_s above 0, got 0": lambda: CopyRate(bytes_per_s=0),
        "above 0, got nan": lambda: CopyRate(bytes_per_s=math.nan),
        "call_s of 0 seconds or more, got -1": lambda: CopyRate(bytes_per_s=1, call_s=-1),
        "piece_s of 0 seconds": lambda: CopyRate(bytes_per_s=1, piece_s=math.inf),
        "token_s above 0": lambda: PrefillRates(token_s=0),
        "square_s of 0 seconds": lambda: PrefillRates(token_s=1, square_s=-1),
        "chunk_tokens of 1 or more": lambda: costs_of(chunk=0),
        "0 or more": lambda: Holding(tokens=-1, kv_bytes=0),
        "at most 1 cached .* got 2": lambda: Holding(tokens=1, kv_bytes=0, cached_tokens=2),
    }.items():
        with pytest.raises(ConfigError, match=match):
            make()


CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = ModelSpec.from_config(CONFIG | {"max_position_embeddings": 512})
HERE = Machine(cpu="a processor", threads=2, torch="2.13.0")
COPIES = CopyRates(
    out=CopyRate(bytes_per_s=5e9, call_s=1e-5, piece_s=1e-6), back=CopyRate(bytes_per_s=4e9)
)
PREFILL = PrefillRates(token_s=1e-5, square_s=1e-9, call_s=1e-3)
STORED = Ceilings(
    machine=HERE,
    read_bytes_per_s=20e9,
    copy_bytes_per_s=10e9,
    products=(ProductRate(dtype="bfloat16", rows=64, inner=64, columns=128, flops_per_s=1e11),),
    copies={"cpu": COPIES},
    prefill={model_key(MODEL, dtype="bfloat16", device="cpu"): PREFILL},
)


def costs(found, **changes):
    options = {"dtype": "bfloat16", "device": "cpu", "chunk_tokens": 256} | changes
    return known_costs(found, MODEL, **options)


def test_stored_costs_are_used_and_others_assumed(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    write_ceilings(STORED, path)
    known = costs(read_ceilings(path, HERE))
    assert (known.costs.copies, known.costs.prefill) == (COPIES, PREFILL)
    assert (known.costs.chunk_tokens, known.notice) == (256, "")

    known = costs(read_ceilings(path, replace(HERE, threads=1)))

    assert known.costs.copies.out == known.costs.copies.back == ASSUMED_COPY
    assert known.costs.prefill == assumed_prefill(MODEL, ASSUMED_FLOPS_PER_S)
    assert "assumed at first" in known.notice
    assert "measured with threads 2, not 1: run `quire profile MODEL`" in known.notice
    missing = NotUsable("ceilings.json does not exist: run `quire profile MODEL`")
    assert "does not exist" in costs(missing).notice
    for changes in ({"dtype": "float16"}, {"device": "a card"}):  # which were not measured
        other = costs(STORED, **changes)
        assert other.costs.prefill != PREFILL
        assert other.notice
    known = costs(replace(STORED, copies={}, prefill={}))
    assert known.costs.copies.out == ASSUMED_COPY
    assert known.costs.prefill == assumed_prefill(MODEL, 1e11)
    assert "copies with cpu were not measured" in known.notice
    assert "`quire profile MODEL`" in known.notice


def test_assumed_rates_count_heads_weights_and_latents_but_no_lookup_tables():
    """Two layers: q and o 64 x 64, k and v 64 x 32, MLP 3 x 64 x 128: 36,864 weights each.

    73,728 weights and 5 norms of 64; 2 FLOP a weight. Attention: 2 * 2 layers * 64 = 256.
    """
    rates = assumed_prefill(MODEL, 1e9)

    assert rates.token_s == pytest.approx(2 * 73_728 / 1e9, rel=0.01)
    assert rates.square_s == pytest.approx(256 / 1e9)
    # two layers, 4 heads with keys of 20 and values of 16, of latents of 32 + 8
    latent = assumed_prefill(CACHE_KINDS["latent"], 1e9)
    assert latent.square_s == pytest.approx(2 * 4 * (20 + 16) / 1e9)
    key = model_key(MODEL, dtype="bfloat16", device="cpu")

    assert re.fullmatch("llama, 2 layers of 64, .* parameters, bfloat16, cpu", key)

    # attention of 4 query heads: 2 x 16 numbers in two layers, 2 x 32 in the wide one
    model = CACHE_KINDS["by_layer"]
    rows = replace(model, extra=ExtraSpec(layer_vocab=1000, layer_width=2))
    weights = model.num_parameters - 2 * model.embedding_parameters

    rates, with_rows = (assumed_prefill(each, 1e9) for each in (model, rows))
    assert rates.square_s == pytest.approx(4 * (16 + 16 + 64) / 1e9)
    assert rates.token_s == pytest.approx(2 * weights / 1e9)
    own = rows.num_parameters - model.num_parameters - 3 * 1000 * 2
    assert with_rows.token_s == pytest.approx(2 * (weights + own) / 1e9)


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


def test_single_outlier_changes_rates_little_and_occasional_ones_do_not_bias_them():
    """Usual errors are 5 %; the outlier is limited to three of them, about 15 %."""
    amounts = (1, 3e7)
    for factor in (10.0, 0.1, 1000.0):
        estimator = fitted((CALL_S, BYTE_S), copies(random.Random(1), 100))
        before = estimator.predict(amounts)
        estimator.add(amounts, before * factor)
        assert estimator.predict(amounts) == pytest.approx(before, rel=0.05)

    pairs = enumerate(copies(random.Random(2), 300))
    samples = [(amounts, s * (10 if i % 20 == 7 else 1)) for i, (amounts, s) in pairs]

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
    estimator = RateEstimator((CALL_S, BYTE_S))
    for seconds in (0.0, -1.0, math.nan, math.inf):
        estimator.add((1, 10), seconds)  # is ignored
    assert (estimator.num_samples, estimator.coefficients) == (0, (CALL_S, BYTE_S))


PRIOR = costs_of(call_s=1e-4, piece_s=1e-5, token_s=1e-4, square_s=1e-9, step_s=1e-3, chunk=256)


def test_swap_out_swap_in_and_prefill_are_learned_separately():
    """Swap-out 4 GB/s, swap-in 0.5 GB/s, 30 us per token, attention 5 ns per squared position."""
    rng, learned = random.Random(5), LearnedCosts(PRIOR)
    assert learned.costs.chunk_tokens == 256
    for direction in ("out", "back"):
        stored, known = getattr(PRIOR.copies, direction), getattr(learned.costs.copies, direction)
        assert known.seconds(1e6, 3) == pytest.approx(stored.seconds(1e6, 3))
    assert learned.costs.prefill == PRIOR.prefill
    for _ in range(300):
        num_bytes = int(10 ** rng.uniform(5, 8))
        learned.copied_out(num_bytes, 1e-4 + num_bytes / 4e9)
        learned.copied_back(num_bytes, 1e-4 + num_bytes / 0.5e9)
        tokens, before = rng.randint(16, 512), rng.randint(0, 8000)
        square = (before + tokens) ** 2 - before**2
        learned.read(tokens, before, 2e-3 + 30e-6 * tokens + 5e-9 * square)

    costs = learned.costs
    rates = (costs.copies.out.bytes_per_s, costs.copies.back.bytes_per_s)
    assert rates == pytest.approx((4e9, 0.5e9), rel=0.02)
    assert costs.prefill.token_s == pytest.approx(30e-6, rel=0.02)
    assert costs.prefill.square_s == pytest.approx(5e-9, rel=0.02)
    assert costs.prefill.call_s == pytest.approx(2e-3, rel=0.05)
    assert learned.num_samples == 900


def test_rates_stored_as_zero_are_learned_and_negative_fits_are_zero():
    """A non-negative fit may store zeros; the samples then have a call of 3 ms."""
    rng, learned = random.Random(6), LearnedCosts(costs_of(token_s=1e-5))
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

    amounts = [(1, tokens, tokens**2) for tokens in (10, 50, 200, 1000)]
    seconds = [2e-3 + 1e-5 * tokens + 3e-9 * square for _, tokens, square in amounts]
    assert fit_seconds(amounts, seconds) == pytest.approx((2e-3, 1e-5, 3e-9))
    for amounts, seconds in (([], []), ([(1, 1)], [0.0]), ([(1, 1), (1, 2)], [1.0, -1.0])):
        with pytest.raises(ConfigError, match="times above 0"):
            fit_seconds(amounts, seconds)
    # times 1, 3 for amounts 1, 2: the free fit has a call of -1; without calls b = 1.15:
    # relative errors of 1 and 2/3 of the slope b: minimise (b - 1)^2 + (2 b / 3 - 1)^2, so
    # b = (1 + 2/3) / (1 + 4/9) = 15/13
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


# ---- stored ceilings -----------------------------------------------------------------------------


def rate(rows: int, flops_per_s: float, *, inner: int = 8, columns: int = 8, dtype="bfloat16"):
    return ProductRate(
        dtype=dtype, rows=rows, inner=inner, columns=columns, flops_per_s=flops_per_s
    )


CEILINGS = replace(
    STORED,
    products=(
        *(rate(64, 900.0), rate(1, 100.0), rate(8, 400.0)),
        *(rate(8, 50.0, inner=8, columns=800), rate(8, 7.0, dtype="float32")),
    ),
)


def test_product_rate_is_that_of_shapes_or_interpolated_in_log_rows():
    """The logarithmic midpoint of 8 and 64 rows is sqrt(8 * 64) = 22.6 rows.

    4 rows are two of the three doublings from 1 to 8: 100 + 2/3 * (400 - 100) = 300.
    16 rows are one of the three doublings from 8 to 64: 400 + 1/3 * (900 - 400) = 566.7.
    """
    assert CEILINGS.product_rate(4, 8, 8) == pytest.approx(300)
    assert CEILINGS.product_rate(16, 8, 8) == pytest.approx(400 + 500 / 3)

    # [8, 200]: ln(200 / 8) = 3.2 from [8, 8], ln(800 / 200) = 1.4 from [8, 800]
    assert [CEILINGS.product_rate(rows, 8, 8) for rows in (8, 1000)] == [400, 900]
    assert CEILINGS.product_rate(1, 8, 800) == CEILINGS.product_rate(8, 8, 200) == 50
    assert CEILINGS.product_rate(8, 9, 12) == 400
    assert CEILINGS.peak_product_rate() == 900
    assert CEILINGS.peak_product_rate("float32") == 7
    with pytest.raises(ConfigError, match="float16, only in: bfloat16, float32"):
        CEILINGS.peak_product_rate("float16")
    with pytest.raises(ConfigError, match="sizes of 1 or more"):
        CEILINGS.product_rate(0, 8, 8)


def test_ceilings_are_read_back_but_those_of_another_machine_are_not_usable(tmp_path):
    path = tmp_path / "new" / "ceilings.json"

    write_ceilings(CEILINGS, path)

    assert read_ceilings(path, HERE) == CEILINGS
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    earlier = {"one_thread_read_bytes_per_s": 1.0, "attention_bytes_per_s": {"native": 1.0}}
    for text in (damaged(), damaged(**earlier)):
        (tmp_path / "c.json").write_text(text)
        assert isinstance(read_ceilings(tmp_path / "c.json", HERE), Ceilings)

    for field, changed in {"cpu": "another", "threads": 1, "torch": "3.0"}.items():
        found = read_ceilings(path, replace(HERE, **{field: changed}))
        assert isinstance(found, NotUsable)
        assert f"measured with {field} {getattr(HERE, field)}, not {changed}" in found.reason
        assert "quire profile" in found.reason
    missing = read_ceilings(tmp_path / "none.json", HERE)
    assert isinstance(missing, NotUsable)
    assert "does not exist" in missing.reason


def damaged(**changes: object) -> str:
    stored = {
        "format": FORMAT,
        "machine": {"cpu": "a processor", "threads": 2, "torch": "2.13.0"},
        "read_bytes_per_s": 1.0,
        "copy_bytes_per_s": 1.0,
        "products": [],
    }
    changed = {key: value for key, value in (stored | changes).items() if value != "absent"}
    return json.dumps(changed)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", '"x"', "{", "\udcff"),  # not UTF-8
        *(damaged(format=number) for number in (FORMAT - 1, FORMAT + 1)),
        *(damaged(read_bytes_per_s=rate) for rate in (0, -1.0, math.nan, "fast", "absent")),
        damaged(copy_of_something=1.0),
        damaged(machine=[]),
        damaged(copies=[]),
        damaged(copies={"cpu": {"out": {"bytes_per_s": 1.0}}}),
        damaged(copies={"cpu": {"out": {"bytes_per_s": 0}, "back": {"bytes_per_s": 1.0}}}),
        damaged(copies={"cpu": {"out": {"speed": 1}, "back": {"bytes_per_s": 1.0}}}),
        damaged(prefill={"a model": {"token_s": -1.0}}),
        damaged(prefill={"a model": 3.0}),
        damaged(machine={"cpu": "a processor"}),
        damaged(products={}),
        damaged(products=[{}]),
        damaged(products=[1]),
        damaged(products=[{"dtype": "x", "rows": 0, "inner": 1, "columns": 1, "flops_per_s": 1.0}]),
    ],
)
def test_damaged_file_is_not_usable(tmp_path: Path, text: str):
    (tmp_path / "c.json").write_text(text, errors="surrogateescape")

    found = read_ceilings(tmp_path / "c.json", HERE)

    assert isinstance(found, NotUsable)
    assert "not a valid ceilings file" in found.reason


def test_failed_write_keeps_the_old_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "c.json"
    write_ceilings(CEILINGS, path)
    monkeypatch.setattr("quire.layout.files.os.replace", fail)

    with pytest.raises(ConfigError, match="No space left"):
        write_ceilings(replace(CEILINGS, read_bytes_per_s=1.0), path)
    assert list(tmp_path.iterdir()) == [path]
    assert read_ceilings(path, HERE) == CEILINGS
    with pytest.raises(ConfigError, match="cannot write"):
        write_ceilings(CEILINGS, path / "c.json")


def test_default_path_is_in_the_user_cache():
    home = Path.home() / ".cache" / "quire" / "ceilings.json"
    assert default_path({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/quire/ceilings.json")
    assert default_path({}) == home
    assert default_path({"XDG_CACHE_HOME": "not/absolute"}) == home
