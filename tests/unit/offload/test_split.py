"""Splits between recompute, transfer, CPU attention and loads: closed forms and all splits."""

import math
import random
from dataclasses import replace

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
from quire.layout.model import ModelSpec
from quire.offload.split import (
    COPY,
    Loading,
    MeasuredRates,
    OffloadRates,
    activation_gate,
    host_split,
    pipelined_seconds,
    pipelined_split,
    read_seconds,
    restore_seconds,
    restore_split,
    share_rows,
)
from quire.offload.step_log import ATTEND, HOST_ATTEND, KV_IN, LAYER, PROJECT, X_IN, Timed
from quire.plan.preemption_costs import assumed_prefill
from quire.plan.rates import PrefillRates
from support import offload_shapes as shapes
from support.model_specs import PUBLIC_SHAPES
from support.offload_shapes import LLAMA_3_8B, OPT_6_7B, OPT_13B, OPT_30B


def serial_seconds(rates: OffloadRates, tokens: int | float, x_tokens: int | float) -> float:
    """Recompute, then transfer (ALISA): nothing overlaps within a layer."""
    transfer_s = rates.x_s * x_tokens + rates.kv_s * (tokens - x_tokens)
    return rates.link_s + transfer_s + rates.recompute_s * x_tokens + rates.other_s


def step_seconds(
    rates: OffloadRates,
    tokens: int | float,
    x_tokens: int | float,
    num_layers: int,
    chunks: int = 1,
) -> float:
    """A step through all layers with nothing but KV and X on the wire: the first, then steady ones.

    Args:
        tokens, x_tokens: of each layer, and of these, recomputed.
        chunks: equal segments of X; the KV of each is recomputed when it is loaded.

    Raises:
        ConfigError: `link_s` is not 0: its place in the transfer order is unknown.
    """
    if rates.link_s:
        raise ConfigError(f"expected nothing else on the link, got link_s={rates.link_s}")
    landed_s, made_s = rates.x_s * x_tokens, rates.recompute_s * x_tokens
    recomputed_s = max(landed_s / chunks + made_s, landed_s + made_s / chunks)
    first_s = max(recomputed_s, landed_s + rates.kv_s * (tokens - x_tokens)) + rates.other_s
    return first_s + (num_layers - 1) * pipelined_seconds(rates, tokens, x_tokens)


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
H200 = {"link_bytes_per_s": 55e9, "flops_per_s": 650e12}


def of_ratios(xi: float, rho: float, other: float = 0.0) -> OffloadRates:
    return OffloadRates(kv_s=1.0, x_s=xi, recompute_s=rho, other_s=other)


@pytest.mark.parametrize(
    ("split", "seconds"), [(paper_split, paper_seconds), (pipelined_split, pipelined_seconds)]
)
@given(RATES, TOKENS, st.integers(1, 7))
def test_split_is_the_best_of_all_splits(split, seconds, rates, tokens, unit):
    allowed = {*range(0, tokens, unit), tokens}

    found = split(rates, tokens, unit)

    assert found in allowed
    min_s = min(seconds(rates, tokens, x) for x in allowed)
    assert seconds(rates, tokens, found) == pytest.approx(min_s, rel=1e-12)
    assert pipelined_seconds(rates, tokens, 0) <= serial_seconds(rates, tokens, 0)


@given(SECONDS, st.floats(0.01, 4), st.floats(0.01, 4))
def test_gains_are_ratios_of_the_formulas(kv_s, xi, rho):
    rates = OffloadRates(kv_s=kv_s, x_s=xi * kv_s, recompute_s=rho * kv_s)
    tokens = 10**6
    paper_s = paper_seconds(rates, tokens, paper_split(rates, tokens))
    pipelined_s = pipelined_seconds(rates, tokens, pipelined_split(rates, tokens))
    assert paper_gain(rates) == pytest.approx(kv_s * tokens / paper_s, rel=1e-4)
    assert pipelined_gain(rates) == pytest.approx(kv_s * tokens / pipelined_s, rel=1e-4)
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
    rates = offload_rates(model, **H200)
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
        *((2, 2, 1.59, 2.00), (1.0625, 2, 1.04, 1.06), (1.0625, 1.0625, 1.43, 1.77)),
        *((0.5625, 2, 1.0, 1.0), (0.5625, 0.5625, 1.29, 1.41), (2, 1.0625, 2.20, 3.12)),
        (2, 0.5625, 2.76, 3.48),
    ],
    ids=["16+16", "8+16", "8+8", "4+16", "4+4", "16 from 8", "16 from 4"],
)
def test_gains_depend_on_the_codecs_of_kv_and_activations(kv_bytes, x_bytes, paper, pipelined):
    """A multi-head model of width 4,096, H200; groups of 64: 1.0625 and 0.5625 B per element."""
    rates = offload_rates(
        OPT_6_7B,
        **H200,
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
    loaded = OffloadRates(kv_s=1.0, x_s=1.0, recompute_s=1.0, link_s=1.0)
    for match, refused in {
        "x_s of 0 seconds or more, got -1": lambda: replace(loaded, x_s=-1.0),
        "kv_s and host_s above 0": lambda: replace(loaded, kv_s=0.0),
        "above 0": lambda: offload_rates(OPT_13B, link_bytes_per_s=0, flops_per_s=1e12),
        "link_s=1": lambda: step_seconds(loaded, 1, 0, 2),
        "units": lambda: pipelined_split(of_ratios(0.5, 0.5), -1),
        "0 to 3 tokens": lambda: share_rows((1, 2), 4),
    }.items():
        with pytest.raises(ConfigError, match=match):
            refused()


@pytest.mark.parametrize(
    ("model", "ratio"),
    [
        *((model, 0.5) for model in (OPT_13B, shapes.LLAMA_2_7B, shapes.PHI_3_MINI)),
        *((shapes.QWEN_3_0_6B, 0.5), (shapes.QWEN_3_1_7B, 1.0), (LLAMA_3_8B, 2.0)),
        *((shapes.LLAMA_3_2_1B, 2.0), (shapes.QWEN_2_5_0_5B, 3.5)),
        # 512 + 64 numbers per token and layer, and 7,168 of hidden states
        (ModelSpec.from_config(PUBLIC_SHAPES["deepseek-v3"]), 7168 / 576),
    ],
)
def test_gate_compares_activation_and_kv_bytes(model, ratio):
    gate = activation_gate(model)

    assert gate.x_ratio == ratio
    assert gate.pays == (ratio < 1)
    reason = f"activations are {ratio:.1f}x the KV of this model"
    assert gate.reason.startswith(reason)
    assert gate.pays or gate.reason == f"{reason}: KV alone is transferred"
    assert not activation_gate(OPT_13B, kv_value_bytes=0.5625).pays  # 4-bit KV, plain activations
    assert activation_gate(OPT_13B, kv_value_bytes=0.5625, x_value_bytes=0.5625).pays
    assert activation_gate(LLAMA_3_8B, x_value_bytes=0.5625).pays


POSITIVE = st.floats(1e-2, 1e2)


def division_s(rates, tokens, host):
    others_s = min(pipelined_seconds(rates, tokens - host, x) for x in range(tokens - host + 1))
    return max(others_s, rates.host_s * host + rates.other_s * (host > 0))


@given(RATES, POSITIVE, st.integers(0, 24))
def test_host_split_is_the_best_of_all_splits(rates, host_s, tokens):
    rates = replace(rates, host_s=host_s, x_s=min(rates.x_s, rates.kv_s))  # x = k: none recomputed
    found = host_split(rates, tokens)
    best_s = min(division_s(rates, tokens, host) for host in range(tokens + 1))
    assert division_s(rates, tokens, found) <= best_s * (1 + 1e-9)


@given(POSITIVE, POSITIVE, st.floats(1, 5), st.integers(1, 500))
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
        rates = offload_rates(model, **H200, host_bytes_per_s=host)
        tokens = 10_000
        found = host_split(rates, tokens)

        left = tokens - found
        others_s = pipelined_seconds(rates, left, pipelined_split(rates, left))
        seconds = max(rates.host_s * found, others_s)
        assert rates.kv_s * tokens / seconds == pytest.approx(gain, abs=0.1)
    assert host_split(OffloadRates(kv_s=1.0, x_s=0.5, recompute_s=1.0), 90) == 0


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
        *((LLAMA_3_8B, 16_384, 55e9, 39, 36, 0.09), (LLAMA_3_8B, 16_384, 6.9e9, 311, 181, 0.42)),
        *((LLAMA_3_8B, 16_384, 11e9, 195, 133, 0.32), (LLAMA_3_8B, 16_384, 1.1e9, 1952, 382, 0.80)),
        *((OPT_6_7B, 4096, 6.9e9, 311, 72, None), (OPT_6_7B, 4096, 55e9, 39, 27, None)),
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


LAYERS, LENGTH, KV_BYTES, X_BYTES = 8, 1000, 1_000_000, 500_000
MACHINE = {  # a link of 1 GB/s: k = 1 ms, x = 0.5 ms, r = 0.58 ms
    COPY: (1e-5, 1e-9),
    PROJECT: (1e-4, 0.58e-3),
    ATTEND: (1e-4, 1e-5),
    LAYER: (2.4e-3, 0.0),
}


def measured(prior, **options):
    return MeasuredRates(prior, **{"kv_bytes": KV_BYTES, "x_bytes": X_BYTES} | options)


def step(x, machine, noise, draw):
    """The operations of a step, which take the times of a machine."""

    def timed(kind, tokens, num_bytes):
        call_s, unit_s = machine.get(kind, machine[COPY])
        seconds = (call_s + unit_s * (num_bytes or tokens)) * draw.lognormvariate(0, noise)
        return Timed(kind, 0, tokens, num_bytes, 1.0, 1.0 + seconds)

    return [
        timed(kind, tokens, num_bytes)
        for _ in range(LAYERS)
        for kind, tokens, num_bytes in (
            *((X_IN, x, x * X_BYTES), (KV_IN, LENGTH - x, (LENGTH - x) * KV_BYTES)),
            *((PROJECT, x, 0), (ATTEND, LENGTH, 0), (LAYER, 1, 0)),
        )
    ]


def split_of(rates):
    return pipelined_split(rates.layer(LENGTH), LENGTH)


@pytest.mark.parametrize("seed", range(6))
def test_wrong_initial_rates_are_corrected_within_a_few_steps(seed):
    wrong = MACHINE | {COPY: (1e-5, 3e-10), PROJECT: (1e-4, 2e-3), LAYER: (1e-4, 0.0)}
    rates, draw = measured(wrong), random.Random(seed)
    for _ in range(4):
        rates.learn(step(split_of(rates), MACHINE, 0.05, draw))
    assert split_of(rates) == pytest.approx(split_of(measured(MACHINE)), rel=0.05)


@pytest.mark.parametrize("factor", [0.25, 0.5, 2, 4])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
def test_split_follows_a_link_speed_change_within_ten_steps(factor, noise):
    changed = MACHINE | {COPY: (1e-5, 1e-9 / factor)}
    rates, draw = measured(MACHINE), random.Random(1)

    for machine in [MACHINE] * 12 + [changed] * 10:
        rates.learn(step(split_of(rates), machine, noise, draw))

    true = measured(changed).layer(LENGTH)
    best_s, found_s = (
        pipelined_seconds(true, LENGTH, x) for x in (pipelined_split(true, LENGTH), split_of(rates))
    )
    assert found_s <= best_s * (1.05 + noise / 2)


def test_rates_of_a_layer_have_its_weights_and_the_fixed_times_of_chunks():
    rates = measured(MACHINE, weight_bytes=6e6)
    plain, chunked = (rates.layer(100, batches=3, chunks=chunks) for chunks in (0, 4))
    assert plain.host_s == math.inf
    assert (plain.kv_s, plain.x_s) == pytest.approx((1e-3, 5e-4))
    assert plain.other_s == pytest.approx(1e-4 + 1e-3 + 2.4e-3)
    assert plain.link_s == pytest.approx(2e-3)
    assert chunked.link_s - plain.link_s == pytest.approx(4e-5)
    assert chunked.other_s - plain.other_s == pytest.approx(4e-4)
    assert measured(MACHINE | {HOST_ATTEND: (0.0, 2e-3)}).layer(100).host_s == 2e-3
