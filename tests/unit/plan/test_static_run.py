"""Steps of a static batch by Batch-Max's algorithms, and their time at given rates."""

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
from quire.layout.model import ModelSpec
from quire.plan.batch_verdict import RowStep, row_steps, run_seconds
from quire.plan.rates import DecodeRates, PrefillRates, StepRates

EXTREME = EvictionSpec(cap=2, every=1, when=DECODE)
READ_BYTES_PER_S = 23.8e9
FLOPS_PER_S = 2e12
# a product of 64 rows took 0.55 ms: [64, 2048] x [2048, 2048]
BLOCK_FLOPS_PER_S = 2 * 64 * 2048 * 2048 / 0.55e-3
LLAMA_125M = ModelSpec.from_config(
    {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": 768,
        "intermediate_size": 2_048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8_192,
        "tie_word_embeddings": False,
    }
)


def steps_of(spec, prompt, new):
    return [(s.new, s.before, s.evicted_from) for s in row_steps(spec, prompt, new)]


def test_prompt_is_prefilled_to_the_cap_and_then_in_blocks():
    """Algorithm 1 with a cap of 6 and p = 2: 6, then evict 2 and add 2, the last block is 1.

    The row then has 4 + 1 tokens; one more is decoded before 2 are evicted at the cap.
    """
    spec = EvictionSpec(cap=6, every=2, when=PREFILL_AND_DECODE)

    assert steps_of(spec, 9, 5) == [
        (6, 0, 0),
        (2, 4, 6),
        (1, 4, 6),
        (1, 5, 0),
        (1, 4, 6),
        (1, 5, 0),
        (1, 4, 6),
    ]


def test_decode_schedule_prefills_the_whole_prompt_and_evicts_before_decoding():
    """Algorithm 2: retain the newest token and the next one."""
    assert steps_of(EXTREME, 9, 4) == [(9, 0, 0), (1, 1, 9), (1, 1, 2), (1, 1, 2)]


def test_prefill_end_schedule_evicts_once():
    spec = EvictionSpec(cap=4, every=1, when=PREFILL_END)

    assert steps_of(spec, 9, 4) == [(9, 0, 0), (1, 4, 9), (1, 5, 0), (1, 6, 0)]


def test_without_a_cap_no_token_is_evicted():
    assert steps_of(KEEP_ALL, 3, 3) == [(3, 0, 0), (1, 3, 0), (1, 4, 0)]


@pytest.mark.parametrize(("prompt", "new"), [(0, 1), (1, 0)])
def test_empty_prompt_or_output_is_refused(prompt, new):
    with pytest.raises(ConfigError, match="1 token or more"):
        list(row_steps(KEEP_ALL, prompt, new))


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


def test_decode_time_is_at_min_the_prefill_time():
    """10 rows: 0.45 + 7 * 0.05 = 0.8 s extrapolated, but prefill of 10 tokens takes 0.1 s each."""
    run = run_seconds(RATES, [RowStep(new=1, before=9, decodes=True)], 10)

    assert run.decode_s == pytest.approx(1.0 + 0.001 * 10 * 10)


def test_zero_rows_are_refused():
    with pytest.raises(ConfigError, match="1 row or more"):
        run_seconds(RATES, [], 0)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 66), (2, 66), (3, 76), (4, 86), (6, 78), (8, 70), (16, 110)]
)
def test_batch_time_is_interpolated_linearly(rows, seconds):
    """2, 4, 8 and 12 rows: 6 take 86 - 16 * 2 / 4, and 16 take 90 + 4 * 20 / 4."""
    rates = DecodeRates(batch_s=((2, 66), (4, 86), (8, 70), (12, 90)))

    assert rates.products_s(rows) == pytest.approx(seconds)


def test_extrapolated_batch_time_does_not_decrease():
    assert DecodeRates(batch_s=((2, 86.0), (4, 70.0))).products_s(40) == 70


@pytest.mark.parametrize(("rows", "seconds"), [(1, 2.0), (4, 2.0), (9, 2.0)])
def test_single_measured_batch_applies_to_all_batches(rows, seconds):
    assert DecodeRates(batch_s=((4, 2.0),)).products_s(rows) == seconds


@pytest.mark.parametrize(
    "options",
    [
        {"batch_s": ()},
        {"batch_s": ((1, 0.0),)},
        {"batch_s": ((1, float("nan")),)},
        {"batch_s": ((2, 1.0), (2, 1.0))},
        {"batch_s": ((0, 1.0),)},
        {"batch_s": ((1, 1.0),), "slot_s": -1.0},
    ],
)
def test_invalid_rates_are_refused(options):
    with pytest.raises(ConfigError):
        DecodeRates(**options)


# ---- worked arithmetic: 125M, prompts 3,584, 512 new, cap 896, p = 64, pool of 2 x 4,096 tokens


def test_full_kv_and_decode_only_at_the_floor():
    """FKV and ED at batch 2.

    A token: 2 FLOP for each of 75.5M weights; a prompt: 541 GFLOP and 237 GFLOP of attention, at
    2 TFLOP/s 0.389 s; two of them 0.778 s. Weights that are read: 100.1M of 2 B, at 23.8 GB/s
    8.41 ms a step; KV: 12,288 B a token, so 2 x 3,840 tokens on average 3.97 ms.
    """
    floor = floor_rates(LLAMA_125M, read_bytes_per_s=READ_BYTES_PER_S, flops_per_s=FLOPS_PER_S)
    full = run_seconds(floor, row_steps(KEEP_ALL, 3_584, 512), 2)
    extreme = run_seconds(floor, row_steps(EXTREME, 3_584, 512), 2)

    assert full.prefill_s == extreme.prefill_s == pytest.approx(0.778, abs=5e-4)
    assert extreme.decode_s == pytest.approx(511 * 8.41e-3, rel=2e-3)
    assert full.decode_s == pytest.approx(511 * (8.41e-3 + 3.97e-3), rel=2e-3)


def test_batch_max_at_the_floor_is_1_9_times_decode_only_and_2_6_times_full_kv():
    """The pool holds 8 rows of 896 tokens with their statistics: 4 times the rows of ED and FKV.

    Blocks of 64 tokens have the rate of products of 64 rows, half of a whole prompt's.
    """
    floor = floor_rates(
        LLAMA_125M,
        read_bytes_per_s=READ_BYTES_PER_S,
        flops_per_s=FLOPS_PER_S,
        block_flops_per_s=BLOCK_FLOPS_PER_S,
    )
    spec = EvictionSpec(cap=896, every=64)
    full = run_seconds(floor, row_steps(KEEP_ALL, 3_584, 512), 2)
    extreme = run_seconds(floor, row_steps(EXTREME, 3_584, 512), 2)
    batch_max = run_seconds(floor, row_steps(spec, 3_584, 512), 8)

    assert round(batch_max.tokens_per_s / extreme.tokens_per_s, 1) == 1.9
    assert round(batch_max.tokens_per_s / full.tokens_per_s, 1) == 2.6
