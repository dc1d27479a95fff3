"""Prefix load: the split between load and recompute, chains of stores, and activation ranges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.kvpr import offload_rates
from quire.errors import ConfigError
from quire.plan.offload.resident import ActivationRange, activation_range
from quire.plan.offload.split import (
    Loading,
    OffloadRates,
    read_seconds,
    restore_seconds,
    restore_split,
)
from quire.plan.preemption_costs import assumed_prefill
from quire.plan.rates import PrefillRates
from support.offload_formulas import Stage, chain_seconds, loading_pays_from, x_restore_seconds
from support.offload_shapes import LLAMA_3_8B, OPT_6_7B

PREFILL = st.builds(
    PrefillRates,
    token_s=st.floats(1e-3, 10),
    square_s=st.just(0.0) | st.floats(1e-4, 1),
    call_s=st.just(0.0) | st.floats(0, 50),
)
LOADING = st.builds(Loading, token_s=st.floats(1e-3, 10), call_s=st.just(0.0) | st.floats(0, 50))


@given(PREFILL, LOADING, st.integers(0, 80), st.integers(1, 9))
def test_restore_split_is_the_best_of_all_splits(prefill, loading, tokens, unit):
    allowed = {*range(0, tokens, unit), tokens}

    found = restore_split(prefill, loading, tokens, unit)

    assert found in allowed
    best_s = min(restore_seconds(prefill, loading, tokens, x) for x in allowed)
    assert restore_seconds(prefill, loading, tokens, found) == pytest.approx(best_s)
    alone_s = min(read_seconds(prefill, tokens), loading.seconds(tokens))
    assert best_s <= alone_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("model", "tokens", "bytes_per_s", "load_ms", "restore_ms", "share"),
    [
        (LLAMA_3_8B, 16_384, 55e9, 39, 36, 0.09),
        (LLAMA_3_8B, 16_384, 6.9e9, 311, 181, 0.42),
        (LLAMA_3_8B, 16_384, 11e9, 195, 133, 0.32),
        (LLAMA_3_8B, 16_384, 1.1e9, 1952, 382, 0.80),
        (OPT_6_7B, 4096, 6.9e9, 311, 72, None),
        (OPT_6_7B, 4096, 55e9, 39, 27, None),
    ],
    ids=["pcie5", "nvme", "100Gb", "10Gb", "opt nvme", "opt pcie5"],
)
def test_restore_times_on_an_h200(model, tokens, bytes_per_s, load_ms, restore_ms, share):
    """600 TFLOP/s. 16,384 tokens of Llama-3-8B are 2.15 GB: 39 ms at 55 GB/s, 311 at 6.9 GB/s."""
    prefill = assumed_prefill(model, 600e12)
    loading = Loading(token_s=model.kv_bytes_per_token(2) / bytes_per_s)

    split = restore_split(prefill, loading, tokens)

    assert 1e3 * loading.seconds(tokens) == pytest.approx(load_ms, rel=0.02)
    restored_s = restore_seconds(prefill, loading, tokens, split)
    assert 1e3 * restored_s == pytest.approx(restore_ms, rel=0.05)
    if share is not None:
        assert split / tokens == pytest.approx(share, abs=0.02)


@given(PREFILL, LOADING)
def test_loading_is_faster_from_loading_pays_from(prefill, loading):
    length = loading_pays_from(prefill, loading)

    def gain_s(tokens):
        return read_seconds(prefill, tokens) - loading.seconds(tokens)

    if length == float("inf"):
        assert gain_s(10**6) <= 0
        return
    for factor in (1.01, 2, 50):
        assert gain_s(length * factor + 1e-3) >= -1e-6
    if length:
        assert gain_s(length * 0.99) <= 1e-6


@given(st.lists(st.floats(1, 100), min_size=1, max_size=4), st.floats(1, 50), st.integers(1, 30))
def test_chain_time_equals_the_chunk_simulation(rates, chunk, chunks):
    """A store sends a chunk once it has all of it and has sent the previous chunk."""
    done = [0.0] * len(rates)
    for _ in range(chunks):
        ready_s = 0.0
        for i, rate in enumerate(rates):
            ready_s = done[i] = max(ready_s, done[i]) + chunk / rate

    stages = [Stage(bytes_per_s=rate, chunk_bytes=chunk) for rate in rates]
    assert chain_seconds(stages, chunk * chunks) == pytest.approx(done[-1])


def test_stages_with_different_chunks_are_refused():
    with pytest.raises(ConfigError, match="equal chunks"):
        chain_seconds([Stage(bytes_per_s=1, chunk_bytes=n) for n in (1, 2)], 4)
    with pytest.raises(ConfigError, match="equal chunks"):
        chain_seconds([], 4)


def test_activations_restore_a_multi_head_prefix_with_half_the_bytes():
    rates = offload_rates(OPT_6_7B, link_bytes_per_s=6.9e9, flops_per_s=650e12)

    elapsed_s = x_restore_seconds(rates, 4096, 32)

    assert elapsed_s == pytest.approx(rates.kv_s * 4096 * 32 / 2, rel=0.05)


def test_activation_range_of_ten_percent_needs_three_quarters_of_the_bytes():
    """l = 0.68 S: X to 0.748 S at half a byte a byte of KV, KV from 0.612 S on: 0.374 + 0.388."""
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=0.97)
    split_range = activation_range(rates, 10_000, 10_000)

    assert split_range.host_bytes(10_000, kv_bytes=1.0, x_bytes=0.5) == pytest.approx(
        7_620, rel=0.01
    )
    assert ActivationRange(kv_from=0, x_until=10).host_bytes(10, kv_bytes=1, x_bytes=0.5) == 15
    assert [split_range.nearest(x, 10_000) for x in (0, 6_500, 9_999)] == [
        split_range.kv_from,
        6_500,
        split_range.x_until,
    ]


def test_activation_range_grows_with_the_sequence():
    rates = OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=1.0)
    split_range = activation_range(rates, 100, 1_000)

    assert split_range.kv_from == 59  # 66 of 100 less a tenth
    assert split_range.x_until == 733  # 666 of 1,000 and a tenth more
    with pytest.raises(ConfigError, match="got kv_from=3 and x_until=2"):
        ActivationRange(kv_from=3, x_until=2)
