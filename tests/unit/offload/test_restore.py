"""Prefix load: the split between load and recompute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.offload.split import (
    Loading,
    read_seconds,
    restore_seconds,
    restore_split,
)
from quire.plan.preemption_costs import assumed_prefill
from quire.plan.rates import PrefillRates
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
