"""Steps and times of a static batch by Batch-Max's algorithms; whether eviction pays."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.batch_max.floor import floor_rates
from quire.errors import ConfigError
from quire.layout.eviction import (
    DECODE,
    KEEP_ALL,
    PREFILL_AND_DECODE,
    PREFILL_END,
    SCHEDULES,
    EvictionSpec,
)
from quire.plan.batch_verdict import (
    ARMS,
    ArmBatch,
    RowStep,
    arm_rules,
    judge_blocks,
    row_steps,
    run_seconds,
)
from quire.plan.rates import DecodeRates, PrefillRates, StepRates
from support.model_specs import small_spec

EXTREME = EvictionSpec(cap=2, every=1, when=DECODE)
RATES_OF_MACHINE = {"read_bytes_per_s": 23.8e9, "flops_per_s": 2e12}
# a product of 64 rows took 0.55 ms: [64, 2048] x [2048, 2048]
BLOCK_FLOPS_PER_S = 2 * 64 * 2048 * 2048 / 0.55e-3
SHAPE = {"num_heads": 12, "num_kv_heads": 4, "head_dim": 64, "hidden_size": 768}
SHAPE |= {"intermediate_size": 2_048, "vocab_size": 32_000, "max_positions": 8_192}
LLAMA_125M = small_spec(*[None] * 12, **SHAPE)


def steps_of(spec, prompt, new):
    return [(s.new, s.before, s.evicted_from) for s in row_steps(spec, prompt, new)]


def test_prompts_are_prefilled_and_evicted_by_their_schedule():
    """Algorithm 1 with a cap of 6 and p = 2: 6, then evict 2 and add 2, the last block is 1.

    The row then has 4 + 1 tokens; one more is decoded before 2 are evicted at the cap.
    """
    spec = EvictionSpec(cap=6, every=2, when=PREFILL_AND_DECODE)

    decoded = [(1, 5, 0), (1, 4, 6)] * 2
    assert steps_of(spec, 9, 5) == [(6, 0, 0), (2, 4, 6), (1, 4, 6), *decoded]
    # algorithm 2: retain the newest token and the next one
    assert steps_of(EXTREME, 9, 4) == [(9, 0, 0), (1, 1, 9), (1, 1, 2), (1, 1, 2)]
    spec = EvictionSpec(cap=4, every=1, when=PREFILL_END)
    assert steps_of(spec, 9, 4) == [(9, 0, 0), (1, 4, 9), (1, 5, 0), (1, 6, 0)]
    assert steps_of(KEEP_ALL, 3, 3) == [(3, 0, 0), (1, 3, 0), (1, 4, 0)]


@given(
    lengths=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    schedule=st.tuples(st.integers(2, 40), st.integers(1, 39)),
    when=st.sampled_from(SCHEDULES),
)
def test_every_token_is_processed_once_within_the_peak_of_the_spec(lengths, schedule, when):
    (prompt, new), (cap, every) = lengths, schedule
    spec = EvictionSpec(cap=cap, every=min(every, cap - 1), when=when)
    steps = list(row_steps(spec, prompt, new))

    assert sum(step.new for step in steps) == prompt + new - 1
    assert sum(step.decodes for step in steps) == new - 1
    peak = max(step.before + step.new for step in steps)
    if when == "pressure":  # memory is never full
        assert peak == prompt + new - 1
    else:
        assert peak <= spec.peak_tokens(prompt + new - 1, prompt)


RATES = StepRates(
    whole=PrefillRates(call_s=1.0, token_s=0.1, square_s=0.01),
    blocks=PrefillRates(call_s=2.0, token_s=0.2, square_s=0.02),
    decode=DecodeRates(
        batch_s=((1, 0.35), (3, 0.45)), slot_s=0.001, evict_row_s=4.0, evict_slot_s=0.5
    ),
)


def test_run_time_follows_the_formula():
    """3 rows, cap 6, p = 2, prompt 8, 3 new.

    whole block   1 + 3 * (0.1 * 6 + 0.01 * 36)                  3.88
    block         2 + 3 * (0.2 * 2 + 0.02 * (36 - 16))           4.40
    decode        0.45 + 0.001 * 3 * 5 + 3 * (4 + 0.5 * 6)    21.465, after an eviction
    decode        0.45 + 0.001 * 3 * 6                 0.468
    """
    spec = EvictionSpec(cap=6, every=2, when=PREFILL_AND_DECODE)
    run = run_seconds(RATES, row_steps(spec, 8, 3), 3)

    assert run.prefill_s == pytest.approx(3.88 + 4.40)
    assert run.decode_s == pytest.approx(21.465 + 0.468)
    assert run.new_tokens == 9
    assert run.tokens_per_s == pytest.approx(9 / (3.88 + 4.40 + 21.465 + 0.468))
    # 10 rows: 0.45 + 7 * 0.05 = 0.8 s extrapolated, but prefill of 10 tokens takes 0.1 s each
    run = run_seconds(RATES, [RowStep(new=1, before=9, decodes=True)], 10)

    assert run.decode_s == pytest.approx(1.0 + 0.001 * 10 * 10)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 66), (2, 66), (3, 76), (4, 86), (6, 78), (8, 70), (16, 110)]
)
def test_batch_time_is_interpolated_linearly(rows, seconds):
    """2, 4, 8 and 12 rows: 6 take 86 - 16 * 2 / 4, and 16 take 90 + 4 * 20 / 4."""
    rates = DecodeRates(batch_s=((2, 66), (4, 86), (8, 70), (12, 90)))
    assert rates.products_s(rows) == pytest.approx(seconds)
    assert DecodeRates(batch_s=((2, 86.0), (4, 70.0))).products_s(40) == 70  # never decreases
    assert DecodeRates(batch_s=((4, 2.0),)).products_s(rows) == 2.0  # one batch for all


def test_empty_runs_and_invalid_rates_are_refused():
    for prompt, new in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="1 token or more"):
            list(row_steps(KEEP_ALL, prompt, new))
    with pytest.raises(ConfigError, match="1 row or more"):
        run_seconds(RATES, [], 0)
    times = ((), ((1, 0.0),), ((1, math.nan),), ((2, 1.0), (2, 1.0)), ((0, 1.0),))
    options = [{"batch_s": of_batches} for of_batches in times]
    for option in (*options, {"batch_s": ((1, 1.0),), "slot_s": -1.0}):
        with pytest.raises(ConfigError):
            DecodeRates(**option)


# ---- worked arithmetic: 125M, prompts 3,584, 512 new, cap 896, p = 64, pool of 2 x 4,096 tokens


def test_batch_max_at_the_floor_is_1_9_times_decode_only_and_2_6_times_full_kv():
    """FKV and ED at batch 2.

    A token: 2 FLOP for each of 75.5M weights; a prompt: 541 GFLOP and 237 GFLOP of attention, at
    2 TFLOP/s 0.389 s; two of them 0.778 s. Weights that are read: 100.1M of 2 B, at 23.8 GB/s
    8.41 ms a step; KV: 12,288 B a token, so 2 x 3,840 tokens on average 3.97 ms.
    """
    floor = floor_rates(LLAMA_125M, **RATES_OF_MACHINE)
    full = run_seconds(floor, row_steps(KEEP_ALL, 3_584, 512), 2)
    extreme = run_seconds(floor, row_steps(EXTREME, 3_584, 512), 2)

    assert full.prefill_s == extreme.prefill_s == pytest.approx(0.778, abs=5e-4)
    assert extreme.decode_s == pytest.approx(511 * 8.41e-3, rel=2e-3)
    assert full.decode_s == pytest.approx(511 * (8.41e-3 + 3.97e-3), rel=2e-3)

    # the pool holds 8 rows of 896 tokens with their statistics: 4 times the rows of ED and FKV;
    # blocks of 64 tokens have the rate of products of 64 rows, half of a whole prompt's
    floor = floor_rates(LLAMA_125M, block_flops_per_s=BLOCK_FLOPS_PER_S, **RATES_OF_MACHINE)
    spec = EvictionSpec(cap=896, every=64)
    full = run_seconds(floor, row_steps(KEEP_ALL, 3_584, 512), 2)
    extreme = run_seconds(floor, row_steps(EXTREME, 3_584, 512), 2)
    batch_max = run_seconds(floor, row_steps(spec, 3_584, 512), 8)

    assert round(batch_max.tokens_per_s / extreme.tokens_per_s, 1) == 1.9
    assert round(batch_max.tokens_per_s / full.tokens_per_s, 1) == 2.6


def verdict_of(rows, *, speeds=(None,) * 4, prompt=3_584, new=512, cap=896, batch=None):
    arms = [
        ArmBatch(arm=arm, rows=n, tokens_per_s=speed)
        for arm, n, speed in zip(ARMS, rows, speeds, strict=True)
    ]
    return judge_blocks(arms, cap=cap, prompt_tokens=prompt, new_tokens=new, batch=batch)


@pytest.mark.parametrize(
    ("rows", "speeds", "pays"),
    [
        ((2, 2, 2, 8), (30.0, 38.0, 42.0, 80.0), True),
        ((2, 2, 2, 3), (30.0, 38.0, 42.0, 41.0), False),  # a larger batch that is slower
        ((2, 4, 4, 4), (30.0, 38.0, 42.0, 80.0), False),  # an equal batch
        ((2, 2, 2, 8), (None, None, None, None), None),
        ((2, 2, 2, 8), (30.0, None, 42.0, 80.0), None),
        ((0, 0, 0, 3), (None, None, None, 9.0), True),  # only this arm has a row and a speed
    ],
)
def test_block_eviction_pays_if_it_is_faster(rows, speeds, pays):
    verdict = verdict_of(rows, speeds=speeds)

    assert verdict.pays is pays
    if rows == (2, 2, 2, 8) and pays:
        assert any("80 tokens/s" in reason and "1.90" in reason for reason in verdict.reasons)
        assert any("up to 2 rows" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ((0, 0, 0, 0), "not one request fits, with or without eviction"),
        ((0, 0, 0, 3), "not one request fits with full KV or with eviction in decode only"),
        ((0, 2, 1, 3), "not one request fits with full KV, and up to 2 rows with eviction in dec"),
    ],
)
def test_verdict_says_that_not_one_request_fits(rows, reason):
    verdict = verdict_of(rows, speeds=(None, None, None, 9.0))
    assert reason in " ".join(verdict.reasons)
    assert "0 rows" not in verdict.reasons[-1]


SMALL = {"speeds": (1.0, 1.0, 1.0, 9.0), "new": 512}


@pytest.mark.parametrize(
    ("rows", "options", "pays", "reason"),
    [
        ((2, 3, 3, 8), {"batch": 2}, False, "memory suffices"),
        ((2, 3, 3, 8), {"batch": 3}, False, "the whole prompts of the fixed batch of 3 rows fit"),
        ((2, 3, 3, 8), {"batch": 8}, True, "3 rows only"),
        ((2, 3, 3, 8), {"batch": 9}, False, "no variant fits 9 rows"),
        ((9, 9, 9, 12), SMALL | {"prompt": 896}, False, "is within the cap"),
        # 385 + 512 - 1 = 896 tokens: exactly the cap
        ((9, 9, 9, 12), SMALL | {"prompt": 385}, False, "nothing is evicted"),
    ],
)
def test_fixed_batch_pays_only_if_prompts_do_not_fit_and_exceed_the_cap(
    rows, options, pays, reason
):
    verdict = verdict_of(rows, **options)
    assert verdict.pays is pays
    assert reason in verdict.reasons[0]


def test_rules_of_arms_are_those_of_the_paper_with_caps_that_may_be_overridden():
    assert arm_rules("h2o:recent=8,cap=64,every=4,when=pressure") == {
        "full": "full",
        "decode": "h2o:recent=8,cap=64,every=4,when=decode",
        "decode_extreme": "recent:cap=2,every=1,when=decode",
        "prefill_and_decode": "h2o:recent=8,cap=64,every=4,when=prefill_and_decode",
    }

    assert arm_rules(cap="25%")["decode"] == "average:cap=25%,when=decode"
    other = arm_rules("tova:cap=9,every=2", cap="7", every=3)["decode"]
    assert other == "tova:cap=7,every=3,when=decode"
    assert arm_rules()["decode"] == "average:cap=25%,when=decode"
    assert arm_rules("tova:every=2")["decode"] == "tova:every=2,cap=25%,when=decode"
    with pytest.raises(ConfigError, match="such as average:cap=25%"):
        arm_rules("full")
