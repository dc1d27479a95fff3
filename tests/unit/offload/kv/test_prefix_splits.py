"""Splits of offloaded prefixes: by rates, by limits, and with a link that changes its speed.

Times come from a simulated link and device.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.offload.kv.prefix_splits import (
    OffloadedPrefix,
    PrefixSplits,
    Share,
    SplitLimits,
    divide_prefixes,
)
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
        started = max(device, x_end)
        ready = max(started + recomputed * RECOMPUTE_S, link)
        layer_ends.append(ready + OTHER_S / 2)
        device = layer_ends[-1] + OTHER_S / 2
        timed += [
            Timed(X_IN, layer, recomputed, recomputed * X_BYTES, start, x_end),
            Timed(KV_IN, layer, TOKENS - recomputed, (TOKENS - recomputed) * KV_BYTES, x_end, link),
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
    kv_s, x_s = KV_BYTES / link_bytes_per_s, X_BYTES / link_bytes_per_s
    rates = OffloadRates(kv_s=kv_s, x_s=x_s, recompute_s=RECOMPUTE_S, other_s=OTHER_S)
    return pipelined_split(rates, TOKENS)


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


@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [
        *(({"recomputed": x}, x * TOKENS - PAGE, x * TOKENS) for x in (0.0, 0.25, 1.0)),
        ({"recomputed": 1.0, "max_recomputed": 100}, 99, 100),
        ({"copy_call_s": 1e-3}, -1, 0),  # the fixed times of more copies cost more than it gains
    ],
)
def test_requested_fraction_is_recomputed_within_its_limits(limits, least, most):
    splits = make_splits(**limits)
    splits.divide(PREFIXES, rows=1)
    assert least < splits.recomputed_tokens <= most


def test_splits_follow_rates_and_lengths_and_are_kept_for_small_gains():
    """x = k: T = S / (1 / k + 1 / u), so a = S k / (k + u) with k = u = 5 us."""
    splits = make_splits(recomputed=0.0, max_recomputed=0, host=None)
    shares = splits.divide(PREFIXES, rows=1)

    assert splits.host_tokens == TOKENS / 2
    assert shares[0].host == range(COLUMNS // 2, COLUMNS)
    splits.divide({0: OffloadedPrefix(COLUMNS + 1, on_host=True)}, rows=1)
    assert splits.host_tokens == TOKENS / 2

    splits = make_splits()
    splits.divide(PREFIXES, rows=1)
    first = splits.recomputed_tokens
    prior = {COPY: (0.0, 5e-8), PROJECT: (0.0, RECOMPUTE_S * 1.01)}
    splits.rates = MeasuredRates(prior, kv_bytes=KV_BYTES, x_bytes=X_BYTES)
    splits.divide(PREFIXES, rows=1)

    assert splits.recomputed_tokens == first
    splits.divide({0: OffloadedPrefix(COLUMNS // 2, known=range(COLUMNS // 2))}, rows=1)
    assert splits.recomputed_tokens == pytest.approx(first / 2, abs=PAGE)


@st.composite
def offloaded_prefixes(draw):
    prefixes = {}
    for row in range(draw(st.integers(1, 4))):
        columns = draw(st.integers(1, 9))
        first = draw(st.integers(0, columns))
        known = range(first, draw(st.integers(first, columns)))
        prefixes[row] = OffloadedPrefix(columns, known=known, on_host=draw(st.booleans()))
    return prefixes


@given(prefixes=offloaded_prefixes(), recomputed=st.integers(0, 200), host=st.integers(0, 200))
def test_every_page_is_in_exactly_one_share(prefixes, recomputed, host):
    share = Share(recomputed=range(2, 5), host=range(7, 9))  # runs are clipped to the range
    runs = [list(share.transferred(*span)) for span in ((0, 9), (3, 6), (2, 5))]
    assert runs == [[range(2), range(5, 7)], [range(5, 6)], []]
    shares = divide_prefixes(prefixes, recomputed, host, PAGE)

    known = sum(len(prefix.known) for prefix in prefixes.values()) * PAGE
    found = sum(len(share.recomputed) for share in shares.values()) * PAGE
    assert min(recomputed, known) - PAGE < found <= min(recomputed, known)
    assert sum(len(share.host) for share in shares.values()) * PAGE <= host
    for row, prefix in prefixes.items():
        share = shares[row]
        columns = [*share.recomputed, *share.host]
        columns += [c for run in share.transferred(0, prefix.columns) for c in run]
        assert sorted(columns) == list(range(prefix.columns))
        assert set(share.recomputed) <= set(prefix.known)
        assert prefix.on_host or not share.host
