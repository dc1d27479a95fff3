"""Division of KV between transfer, recompute and CPU attention, compared with all divisions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.kvpr import offload_rates
from quire.offload.split import OffloadRates, host_split, pipelined_seconds, pipelined_split
from support.offload_shapes import LLAMA_3_8B, OPT_6_7B

SECONDS = st.floats(1e-2, 1e2)


def division_s(rates, tokens, host):
    others_s = min(pipelined_seconds(rates, tokens - host, x) for x in range(tokens - host + 1))
    return max(others_s, rates.host_s * host + rates.other_s * (host > 0))


@given(
    st.builds(
        OffloadRates,
        kv_s=SECONDS,
        x_s=SECONDS,
        recompute_s=SECONDS,
        host_s=SECONDS,
        other_s=st.floats(0, 300),
        link_s=st.just(0.0) | st.floats(0, 300),
    ),
    st.integers(0, 24),
)
def test_host_split_is_the_best_of_all_splits(rates, tokens):
    if rates.x_s >= rates.kv_s:  # nothing is recomputed
        rates = replace(rates, x_s=rates.kv_s)
    found = host_split(rates, tokens)

    best_s = min(division_s(rates, tokens, host) for host in range(tokens + 1))
    assert division_s(rates, tokens, found) <= best_s * (1 + 1e-9)


@given(SECONDS, SECONDS, st.floats(1, 5), st.integers(1, 500))
def test_rates_of_transfer_and_cpu_attention_add_without_activations(kv_s, host_s, xi, tokens):
    rates = OffloadRates(kv_s=kv_s, x_s=xi * kv_s, recompute_s=1.0, host_s=host_s)

    found = host_split(rates, tokens)

    seconds = max(host_s * found, kv_s * (tokens - found))
    assert seconds <= tokens / (1 / kv_s + 1 / host_s) + max(kv_s, host_s)


@pytest.mark.parametrize(
    ("model", "gains"),
    [(OPT_6_7B, (3.1, 3.8, 5.6, 8.3)), (LLAMA_3_8B, (2.1, 2.8, 4.6, 7.3))],
    ids=["opt-6.7b", "llama-3-8b"],
)
def test_gains_of_cpu_attention_on_an_h200(model, gains):
    for host, gain in zip((60e9, 100e9, 200e9, 350e9), gains, strict=True):
        rates = offload_rates(
            model, link_bytes_per_s=55e9, flops_per_s=650e12, host_bytes_per_s=host
        )

        tokens = 10_000
        found = host_split(rates, tokens)

        left = tokens - found
        others_s = pipelined_seconds(rates, left, pipelined_split(rates, left))
        seconds = max(rates.host_s * found, others_s)
        assert rates.kv_s * tokens / seconds == pytest.approx(gain, abs=0.1)


def test_without_cpu_attention_the_host_share_is_zero():
    assert host_split(OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=1.0), 90) == 0
