"""Pages that sequences come to hold, against lanes that are grown and cut token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kv.memory import KVMemory
from quire.kv.stores.registry import placement_maker
from quire.kv.stores.runs import LaneLimits
from quire.layout.eviction import DECODE, PREFILL_AND_DECODE, PREFILL_END, SCHEDULES, EvictionSpec
from quire.layout.layout import layout_for
from quire.layout.model import LayerSpec, ModelSpec
from quire.layout.statistics import AttentionSum, QueryRing
from quire.scheduler.admission.need import Need
from quire.scheduler.admission.peaks import Peaks

PAGE_TOKENS, WINDOW, CHUNK = 4, 10, 8
SUMS, RING = AttentionSum(), QueryRing(window=6)


def model_of(*windows):
    return ModelSpec(
        architecture="x",
        num_layers=len(windows),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=32,
        intermediate_size=32,
        vocab_size=100,
        max_positions=1000,
        tied_embeddings=True,
        gated_mlp=True,
        layers=tuple(LayerSpec(window=window) for window in windows),
    )


def peaks_of(*windows, heads_apart=True, statistics=(), store="paged", chunk_tokens=CHUNK):
    layout = layout_for(
        model_of(*windows),
        codec="float32",
        page_tokens=PAGE_TOKENS,
        evicting=True,
        heads_apart=heads_apart,
        statistics=statistics,
    )
    limits = LaneLimits(max_tokens=1000, evicting_slots=1000)
    return Peaks(
        KVMemory(layout, 1 << 26, 4, placement=placement_maker(store, limits)), chunk_tokens
    )


def pages(peaks, need):
    """Pages of each class, in the order of the layout."""
    return peaks.counts([need])[0].tolist()


def lane_totals(need):
    """Pages of two lanes together behind each step of a schedule."""
    eviction, prompt = need.eviction, need.prompt_tokens
    caps = eviction.lane_caps or (eviction.cap, eviction.cap)
    held, done = [0, 0], 0
    while done < need.tokens:
        reading = done < prompt
        step = 1
        if reading:
            blocks = eviction.when == PREFILL_AND_DECODE
            block = eviction.every if done >= eviction.least_cap else eviction.least_cap - done
            step = min(block if blocks else prompt, prompt - done)
        for lane, cap in enumerate(caps):
            if eviction.when == PREFILL_END:
                held[lane] = min(held[lane], cap) if done == prompt else held[lane]
            elif not (reading and eviction.when == DECODE) and held[lane] + step > cap:
                held[lane] = cap - eviction.every
            held[lane] += step
        done += step
        yield sum(-(-slots // PAGE_TOKENS) for slots in held)


@given(
    lengths=st.tuples(st.integers(1, 60), st.integers(0, 60)),
    every=st.integers(1, 6),
    above=st.tuples(st.integers(1, 34), st.integers(1, 34)),
    when=st.sampled_from([PREFILL_AND_DECODE, PREFILL_END, DECODE]),
)
def test_no_moment_holds_more_than_is_counted_and_some_come_near(lengths, every, above, when):
    peaks, caps = peaks_of(None), (every + above[0], every + above[1])
    eviction = EvictionSpec(cap=sum(caps) // 2, every=every, when=when, lane_caps=caps)
    need = Need(sum(lengths), lengths[0], eviction)

    [counted] = pages(peaks, need)
    most = max(lane_totals(need))

    assert most <= counted
    assert counted - most <= 2 * -(-need.eviction.every // PAGE_TOKENS)


@pytest.mark.parametrize("when", SCHEDULES)
@pytest.mark.parametrize("cap", [8, 13])
def test_lanes_of_one_cap_touch_what_is_counted(when, cap):
    need = Need(90, 50, EvictionSpec(cap=cap, every=3, when=when))
    expected = {
        PREFILL_END: max(50, cap + 40),
        DECODE: 50,
    }.get(when, cap)

    assert pages(peaks_of(None), need) == [2 * -(-expected // PAGE_TOKENS)]


def test_a_short_sequence_holds_its_tokens_whatever_the_cap():
    for when in SCHEDULES:
        need = Need(9, 5, EvictionSpec(cap=500, every=3, when=when, ragged=True))
        assert pages(peaks_of(None), need) == [2 * 3]


def test_layer_pages_are_as_many_as_the_least_head_of_the_layer_may_have():
    eviction = EvictionSpec(cap=10, every=2, lane_caps=(4, 16, 8, 12))
    need = Need(100, 90, eviction)

    assert pages(peaks_of(None, None), need) == [1 + 4 + 2 + 3]
    assert pages(peaks_of(None, None, heads_apart=False), need) == [1 + 2]


def test_a_lane_that_keeps_everything_is_counted_whole():
    need = Need(100, 90, EvictionSpec(cap=10, every=2, lane_caps=(8, 1 << 40)))

    assert pages(peaks_of(None), need) == [2 + 25]


def test_slots_that_move_between_heads_cost_a_page_a_lane():
    even, ragged = (EvictionSpec(cap=8, every=2, ragged=ragged) for ragged in (False, True))

    assert pages(peaks_of(None), Need(100, 90, even)) == [4]
    assert pages(peaks_of(None), Need(100, 90, ragged)) == [6]


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


@pytest.mark.parametrize("store", ["paged", "contiguous_max", "contiguous_growing"])
def test_a_row_holds_no_more_than_was_counted_for_it(store):
    peaks = peaks_of(None, statistics=(SUMS, RING), store=store)
    need = Need(70, 70, EvictionSpec(statistics=(RING,)))
    counted = peaks.counts([need])[0]
    memory = peaks.memory
    row = memory.start({"full.query_ring.6"})

    for tokens in (1, 20, 9, 40):
        memory.grow(np.array([row]), np.array([tokens], dtype=np.int32))

    used = [memory.pools[c].num_used for c in peaks.page_classes]
    assert (np.array(used) <= counted).all()
    assert used[1] == 0


def test_requests_that_evict_differently_are_counted_in_their_order():
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


def test_forks_share_whole_pages_until_they_evict_and_never_what_they_remember():
    peaks = peaks_of(None, statistics=(SUMS,))
    eviction = EvictionSpec(cap=20, every=4, statistics=(SUMS,))

    within, over = ([Need(tokens, 10, eviction)] * 3 for tokens in (16, 24))

    assert peaks.forked_counts(10, within).tolist() == [2 * (2 + 3 * 2), 2 * 3 * 4]
    assert peaks.forked_counts(10, over).tolist() == [2 * 3 * 5, 2 * 3 * 5]


def test_forks_share_no_pages_behind_a_window_whatever_the_chunk():
    """A window of 10 keeps 13 slots of whole pages while decoding, in 4 pages of each lane."""
    peaks = peaks_of(WINDOW, chunk_tokens=64)
    [group] = peaks.memory.layout.groups

    assert peaks.forked_counts(48, [Need(52, 48)] * 4).tolist() == [4 * 4 * group.num_lanes]
    assert peaks.forked_counts(8, [Need(12, 8)] * 4).tolist() == [(2 + 4) * group.num_lanes]
