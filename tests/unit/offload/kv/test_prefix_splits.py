"""Splits of fronts: what rates say, what is asked, and a link that becomes slower in mid-run.

No clock: a machine of link and device says what each step would have taken.
"""

import pytest

from quire.kv.step_log import ATTEND, KV_IN, LAYER, PROJECT, X_IN, Timed
from quire.offload.kv.prefix_splits import OffloadedPrefix, PrefixSplits, SplitLimits, timeline_of
from quire.offload.profiler import OffloadProfiler, Sizes, Speeds
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import pipelined_split
from quire.plan.rates import CopyRate

KV_BYTES, X_BYTES, PAGE, COLUMNS, LAYERS = 100, 50, 4, 250, 8
TOKENS = PAGE * COLUMNS
FRONTS = {0: OffloadedPrefix(COLUMNS, known=range(COLUMNS), on_host=True)}
MAKE_S, OTHER_S = 3e-6, 4e-4


def took(recomputed, link_bytes_per_s):
    """What a step does: the link ahead by two slots, the device layer after layer."""
    timed, left = [], []
    link = device = 0.0
    for layer in range(LAYERS):
        start = max(link, left[layer - 2] if layer > 1 else 0.0)
        x_end = start + recomputed * X_BYTES / link_bytes_per_s
        link = x_end + (TOKENS - recomputed) * KV_BYTES / link_bytes_per_s
        timed += [
            Timed(X_IN, layer, recomputed, recomputed * X_BYTES, start, x_end),
            Timed(KV_IN, layer, TOKENS - recomputed, (TOKENS - recomputed) * KV_BYTES, x_end, link),
        ]
        begun = max(device, x_end)
        ready = max(begun + recomputed * MAKE_S, link)
        left.append(ready + OTHER_S / 2)
        device = left[-1] + OTHER_S / 2
        timed += [
            Timed(PROJECT, layer, recomputed, 0, begun, begun + recomputed * MAKE_S),
            Timed(ATTEND, layer, TOKENS, 0, ready, left[-1]),
            Timed(LAYER, layer, 1, 0, left[-1], device),
        ]
    return timed


def splits(**requested):
    speeds = Speeds(
        inward=CopyRate(bytes_per_s=20e6),
        outward=CopyRate(bytes_per_s=20e6),
        project_token_s=MAKE_S,
        host_token_s=5e-6,
    )
    sizes = Sizes(kv_bytes=KV_BYTES, x_bytes=X_BYTES)
    requested = {"most_recomputed": TOKENS} | requested
    return PrefixSplits(
        OffloadProfiler(speeds), sizes, page_tokens=PAGE, requested=SplitLimits(**requested)
    )


def best(link_bytes_per_s):
    return pipelined_split(
        OffloadRates(
            kv_s=KV_BYTES / link_bytes_per_s,
            x_s=X_BYTES / link_bytes_per_s,
            recompute_s=MAKE_S,
            other_s=OTHER_S,
        ),
        TOKENS,
    )


@pytest.mark.parametrize(("before", "after"), [(40e6, 20e6), (20e6, 40e6)])
def test_a_link_that_changes_is_followed_within_ten_steps(before, after):
    of = splits()
    found = []
    for step in range(40):
        of.divide(FRONTS, rows=1)
        found.append(of.recomputed_tokens)
        of.learn(took(of.recomputed_tokens, before if step < 30 else after))

    assert abs(best(before) - best(after)) > 0.1 * TOKENS
    assert abs(found[29] - best(before)) <= 0.05 * TOKENS
    assert abs(found[39] - best(after)) <= 0.05 * TOKENS


@pytest.mark.parametrize("recomputed", [0.0, 0.25, 1.0])
def test_what_is_asked_is_taken(recomputed):
    of = splits(recomputed=recomputed)
    of.divide(FRONTS, rows=1)

    assert recomputed * TOKENS - PAGE < of.recomputed_tokens <= recomputed * TOKENS


def test_no_more_is_made_than_there_is_room_for():
    of = splits(recomputed=1.0, most_recomputed=100)
    of.divide(FRONTS, rows=1)

    assert of.recomputed_tokens == 100


def test_the_host_takes_what_rates_say_and_holds_it():
    """x = k: T = S / (1 / k + 1 / u), so a = S k / (k + u) of k = u = 5 us."""
    of = splits(recomputed=0.0, most_recomputed=0, host=None)
    shares = of.divide(FRONTS, rows=1)

    assert of.host_tokens == TOKENS / 2
    assert shares[0].host == range(COLUMNS // 2, COLUMNS)
    of.divide({0: OffloadedPrefix(COLUMNS + 1, on_host=True)}, rows=1)
    assert of.host_tokens == TOKENS / 2


def test_a_steps_log_is_a_timeline():
    timeline = timeline_of(took(400, 20e6))

    timeline.check()
    assert timeline.seconds == max(item.end_s for item in took(400, 20e6))
