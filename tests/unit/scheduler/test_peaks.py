"""Peak pages of sequences, compared with lanes that grow and are evicted from token by token."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.memory import KVMemory
from quire.layout.eviction import (
    DECODE,
    PREFILL_AND_DECODE,
    PREFILL_END,
    SCHEDULES,
    UNLIMITED,
    EvictionSpec,
)
from quire.layout.layout import layout_for
from quire.layout.statistics import AttentionMax, AttentionSum, QueryRing, ScoringPass
from quire.scheduler.peaks import Need, Peaks
from support.model_specs import small_spec

PAGE_TOKENS, WINDOW, CHUNK = 4, 10, 8
SUMS, RING = AttentionSum(), QueryRing(window=6)


def model_of(*windows):
    return small_spec(*windows)


def peaks_of(*windows, heads_apart=True, statistics=(), chunk_tokens=CHUNK):
    layout = layout_for(
        model_of(*windows),
        codec="float32",
        page_tokens=PAGE_TOKENS,
        evicting=True,
        heads_apart=heads_apart,
        statistics=statistics,
    )
    return Peaks(KVMemory(layout, 1 << 26, 4), chunk_tokens)


def pages(peaks, need):
    """Peak pages by page class, in the order of the layout."""
    return peaks.counts([need])[0].tolist()


def lane_totals(need):
    """Yield the pages of two lanes together after each step of a schedule."""
    eviction, prompt = need.eviction, need.prompt_tokens
    caps = eviction.lane_capacities or (eviction.cap, eviction.cap)
    held, done = [0, 0], 0
    while done < need.tokens:
        in_prefill = done < prompt
        step = 1
        if in_prefill:
            blocks = eviction.when == PREFILL_AND_DECODE
            block = eviction.every if done >= eviction.min_cap else eviction.min_cap - done
            step = min(block if blocks else prompt, prompt - done)
        for lane, cap in enumerate(caps):
            if eviction.when == PREFILL_END:
                held[lane] = min(held[lane], cap) if done == prompt else held[lane]
            elif not (in_prefill and eviction.when == DECODE) and held[lane] + step > cap:
                held[lane] = cap - eviction.every
            held[lane] += step
        done += step
        yield sum(-(-slots // PAGE_TOKENS) for slots in held)


@given(
    lengths=st.tuples(st.integers(1, 60), st.integers(0, 60)),
    every=st.integers(1, 6),
    retained=st.tuples(st.integers(1, 34), st.integers(1, 34)),
    when=st.sampled_from([PREFILL_AND_DECODE, PREFILL_END, DECODE]),
)
def test_counted_peak_is_a_tight_upper_bound(lengths, every, retained, when):
    peaks, caps = peaks_of(None), (every + retained[0], every + retained[1])
    eviction = EvictionSpec(cap=sum(caps) // 2, every=every, when=when, lane_capacities=caps)
    need = Need(sum(lengths), lengths[0], eviction)

    [counted] = pages(peaks, need)
    most = max(lane_totals(need))

    assert most <= counted
    assert counted - most <= 2 * -(-need.eviction.every // PAGE_TOKENS)


@pytest.mark.parametrize("when", SCHEDULES)
@pytest.mark.parametrize("cap", [8, 13])
def test_lanes_with_one_cap_reach_the_counted_peak(when, cap):
    need = Need(90, 50, EvictionSpec(cap=cap, every=3, when=when))
    expected = {
        PREFILL_END: max(50, cap + 40),
        DECODE: 50,
    }.get(when, cap)

    assert pages(peaks_of(None), need) == [2 * -(-expected // PAGE_TOKENS)]


def test_short_sequence_needs_only_its_tokens_below_any_cap():
    for when in SCHEDULES:
        need = Need(9, 5, EvictionSpec(cap=500, every=3, when=when, ragged=True))
        assert pages(peaks_of(None), need) == [2 * 3]


def test_peak_of_layer_pages_is_that_of_the_min_head_capacity():
    eviction = EvictionSpec(cap=10, every=2, lane_capacities=(4, 16, 8, 12))
    need = Need(100, 90, eviction)

    assert pages(peaks_of(None, None), need) == [1 + 4 + 2 + 3]
    assert pages(peaks_of(None, None, heads_apart=False), need) == [1 + 2]


def test_lane_without_cap_is_counted_with_all_tokens():
    need = Need(100, 90, EvictionSpec(cap=10, every=2, lane_capacities=(8, 1 << 40)))

    assert pages(peaks_of(None), need) == [2 + 25]


def test_ragged_caps_need_one_more_page_per_lane():
    even, ragged = (EvictionSpec(cap=8, every=2, ragged=ragged) for ragged in (False, True))

    assert pages(peaks_of(None), Need(100, 90, even)) == [4]
    assert pages(peaks_of(None), Need(100, 90, ragged)) == [6]


def test_scoring_pass_needs_its_slots_in_one_layer_or_in_all():
    """A prompt of 40 tokens, a cap of 8, a pass of 16 + 2 + 4 + 1 + 8 slots; pages of 4 tokens.

    By layer: 71 / 4 = 18 pages in each of two heads of a layer, and 2 in those of the other layer.
    """
    scores = AttentionMax(of=ScoringPass("", "AAA", "BB", "C", chunk_tokens=16, overlap=4))
    eviction = EvictionSpec(cap=8, when=PREFILL_END, statistics=(scores,))
    need, slots = Need(43, 40, eviction), 16 + 2 + 4 + 1 + 8
    whole = -(-(40 + slots) // PAGE_TOKENS)
    peaks = peaks_of(None, None, statistics=(scores,))

    assert eviction.scoring_slots(40) == slots
    assert pages(peaks, need) == [2 * whole + 2 * 2] * 2  # keys and values, and the statistic
    assert pages(peaks, replace(need, by_layer=False)) == [4 * whole] * 2
    # a lane of the last 10 tokens also holds the chunk of 8 and the pass
    windows = peaks_of(None, WINDOW, statistics=(scores,))
    held = WINDOW - 1 + CHUNK + slots + PAGE_TOKENS - 1
    assert pages(windows, need) == [2 * whole, 2 * whole, -(-held // PAGE_TOKENS)]
    # decoding: the cap and three tokens
    assert pages(peaks, replace(need, decodes=True)) == [4 * 3] * 2


def test_each_request_is_counted_with_its_own_statistics():
    peaks = peaks_of(None, WINDOW, statistics=(SUMS, RING))
    requested = [(), (SUMS,), (RING,), (SUMS, RING)]
    specs = [EvictionSpec(cap=8, every=2, statistics=statistics) for statistics in requested]

    counts = peaks.counts([Need(100, 90, spec) for spec in specs])

    full, window = 2 * 2, -(-(WINDOW - 1 + CHUNK + PAGE_TOKENS - 1) // PAGE_TOKENS)
    assert [group.name for group in peaks.memory.layout.groups] == [
        "full",
        "full.attention_sum.mean",
        "full.query_ring.6",
        "window_10",
    ]
    assert counts.tolist() == [
        [full, 0, 0, window],
        [full, full, 0, window],
        [full, 0, 2, window],
        [full, full, 2, window],
    ]
    assert peaks.counts([Need(0)]).tolist() == [[0, 0, 0, 0]]


def test_counts_are_in_the_order_of_requests_with_different_caps():
    peaks = peaks_of(None)
    capped = EvictionSpec(cap=8, every=2)

    assert peaks.counts([Need(40), Need(40, 40, capped), Need(4), Need(12, 9, capped)])[
        :, 0
    ].tolist() == [20, 4, 2, 4]


# ---- sharing -------------------------------------------------------------------------------------


def test_pages_that_will_be_written_are_not_counted_as_shared():
    peaks = peaks_of(None, WINDOW, statistics=(SUMS,))
    capped = EvictionSpec(cap=20, every=4, statistics=(SUMS,))

    assert peaks.shared_counts(Need(18, 18, capped), 16).tolist() == [8, 0, 4]
    assert peaks.shared_counts(Need(30, 18, capped), 16).tolist() == [0, 0, 4]
    assert peaks.shared_counts(Need(30, 18), 16).tolist() == [8, 0, 4]
    assert peaks.shared_counts(Need(30, 18), 0).tolist() == [0, 0, 0]


def test_forks_share_whole_pages_until_they_evict_and_never_statistics():
    peaks = peaks_of(None, statistics=(SUMS,))
    eviction = EvictionSpec(cap=20, every=4, statistics=(SUMS,))

    within, over = ([Need(tokens, 10, eviction)] * 3 for tokens in (16, 24))

    assert peaks.forked_counts(10, within).tolist() == [2 * (2 + 3 * 2), 2 * 3 * 4]
    assert peaks.forked_counts(10, over).tolist() == [2 * 3 * 5, 2 * 3 * 5]


def test_forks_share_nothing_if_the_prompt_may_give_a_lane_a_lower_cap():
    """Until the prompt is computed, the maximum of each lane is reserved: here all tokens."""
    peaks = peaks_of(None)
    unknown = EvictionSpec(
        cap=20, every=4, when=PREFILL_END, lane_capacities=(UNLIMITED,) * 2, from_prompt=True
    )

    assert peaks.forked_counts(36, [Need(40, 36, unknown)] * 3).tolist() == [3 * 2 * 10]
    assert peaks.forked_counts(16, [Need(20, 16, unknown)] * 3).tolist() == [2 * (4 + 3)]
    assert peaks.shared_counts(Need(40, 36, unknown), 16).tolist() == [0]


def test_forks_share_no_window_pages_for_any_chunk_length():
    """While decoding, a window of 10 occupies 13 slots in 4 whole pages per lane."""
    peaks = peaks_of(WINDOW, chunk_tokens=64)
    [group] = peaks.memory.layout.groups

    assert peaks.forked_counts(48, [Need(52, 48)] * 4).tolist() == [4 * 4 * group.num_lanes]
    assert peaks.forked_counts(8, [Need(12, 8)] * 4).tolist() == [(2 + 4) * group.num_lanes]
