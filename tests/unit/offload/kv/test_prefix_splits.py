"""Splits of offloaded prefixes: by rates, by limits, and with a link that changes its speed.

Times come from a simulated link and device.
"""

import pytest

from quire.offload.kv.prefix_splits import OffloadedPrefix, PrefixSplits, SplitLimits
from quire.offload.split import COPY, MeasuredRates, OffloadRates, pipelined_split
from quire.offload.step_log import ATTEND, HOST_ATTEND, KV_IN, LAYER, PROJECT, X_IN, Timed

KV_BYTES, X_BYTES, PAGE, COLUMNS, LAYERS = 100, 50, 4, 250, 8
TOKENS = PAGE * COLUMNS
PREFIXES = {0: OffloadedPrefix(COLUMNS, known=range(COLUMNS), on_host=True)}
RECOMPUTE_S, OTHER_S = 3e-6, 4e-4


def simulated_step(recomputed, link_bytes_per_s):
    """The timeline of a step: the link is two staging slots ahead of the device."""
    timed, layer_ends = [], []
    link = device = 0.0
    for layer in range(LAYERS):
        start = max(link, layer_ends[layer - 2] if layer > 1 else 0.0)
        x_end = start + recomputed * X_BYTES / link_bytes_per_s
        link = x_end + (TOKENS - recomputed) * KV_BYTES / link_bytes_per_s
        timed += [
            Timed(X_IN, layer, recomputed, recomputed * X_BYTES, start, x_end),
            Timed(KV_IN, layer, TOKENS - recomputed, (TOKENS - recomputed) * KV_BYTES, x_end, link),
        ]
        started = max(device, x_end)
        ready = max(started + recomputed * RECOMPUTE_S, link)
        layer_ends.append(ready + OTHER_S / 2)
        device = layer_ends[-1] + OTHER_S / 2
        timed += [
            Timed(PROJECT, layer, recomputed, 0, started, started + recomputed * RECOMPUTE_S),
            Timed(ATTEND, layer, TOKENS, 0, ready, layer_ends[-1]),
            Timed(LAYER, layer, 1, 0, layer_ends[-1], device),
        ]
    return timed


def make_splits(copy_call_s=0.0, **limits):
    prior = {COPY: (copy_call_s, 5e-8), PROJECT: (0.0, RECOMPUTE_S), HOST_ATTEND: (0.0, 5e-6)}
    return PrefixSplits(
        MeasuredRates(prior, kv_bytes=KV_BYTES, x_bytes=X_BYTES),
        page_tokens=PAGE,
        num_layers=LAYERS,
        requested=SplitLimits(**{"max_recomputed": TOKENS} | limits),
    )


def best(link_bytes_per_s):
    return pipelined_split(
        OffloadRates(
            kv_s=KV_BYTES / link_bytes_per_s,
            x_s=X_BYTES / link_bytes_per_s,
            recompute_s=RECOMPUTE_S,
            other_s=OTHER_S,
        ),
        TOKENS,
    )


@pytest.mark.parametrize(("before", "after"), [(40e6, 20e6), (20e6, 40e6)])
def test_split_follows_a_link_speed_change_within_ten_steps(before, after):
    splits = make_splits()
    found = []
    for step in range(40):
        splits.divide(PREFIXES, rows=1)
        found.append(splits.recomputed_tokens)
        splits.learn(simulated_step(splits.recomputed_tokens, before if step < 30 else after))

    assert abs(best(before) - best(after)) > 0.1 * TOKENS
    assert abs(found[29] - best(before)) <= 0.05 * TOKENS
    assert abs(found[39] - best(after)) <= 0.05 * TOKENS


@pytest.mark.parametrize("recomputed", [0.0, 0.25, 1.0])
def test_requested_fraction_is_recomputed(recomputed):
    splits = make_splits(recomputed=recomputed)
    splits.divide(PREFIXES, rows=1)

    assert recomputed * TOKENS - PAGE < splits.recomputed_tokens <= recomputed * TOKENS


def test_recomputed_tokens_are_limited():
    splits = make_splits(recomputed=1.0, max_recomputed=100)
    splits.divide(PREFIXES, rows=1)

    assert splits.recomputed_tokens == 100


def test_cpu_attention_fraction_follows_rates_and_is_kept():
    """x = k: T = S / (1 / k + 1 / u), so a = S k / (k + u) with k = u = 5 us."""
    splits = make_splits(recomputed=0.0, max_recomputed=0, host=None)
    shares = splits.divide(PREFIXES, rows=1)

    assert splits.host_tokens == TOKENS / 2
    assert shares[0].host == range(COLUMNS // 2, COLUMNS)
    splits.divide({0: OffloadedPrefix(COLUMNS + 1, on_host=True)}, rows=1)
    assert splits.host_tokens == TOKENS / 2


def test_a_split_does_not_move_for_a_small_gain_and_grows_with_the_length():
    splits = make_splits()
    splits.divide(PREFIXES, rows=1)
    first = splits.recomputed_tokens
    splits.rates = MeasuredRates(
        {COPY: (0.0, 5e-8), PROJECT: (0.0, RECOMPUTE_S * 1.01)}, kv_bytes=KV_BYTES, x_bytes=X_BYTES
    )
    splits.divide(PREFIXES, rows=1)

    assert splits.recomputed_tokens == first
    splits.divide({0: OffloadedPrefix(COLUMNS // 2, known=range(COLUMNS // 2))}, rows=1)
    assert splits.recomputed_tokens == pytest.approx(first / 2, abs=PAGE)


def test_kv_is_transferred_if_the_fixed_times_of_more_copies_cost_more_than_the_split_gains():
    splits = make_splits(copy_call_s=1e-3)
    splits.divide(PREFIXES, rows=1)

    assert splits.recomputed_tokens == 0
