from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.errors import NeverFits, OutOfPages
from quire.kv.memory import KVMemory
from quire.layout.eviction import (
    DECODE,
    KEEP_ALL,
    PREFILL_AND_DECODE,
    PREFILL_END,
    SCHEDULES,
    UNLIMITED,
    EvictionSpec,
)
from quire.layout.layout import layout_for, statistics_used
from quire.layout.statistics import AttentionMax, AttentionSum, QueryMoments, QueryRing, ScoringPass
from quire.scheduler.peaks import Need, Peaks, rows_at_once
from quire.scheduler.schedule_config import ScheduleConfig
from support.engines import greedy, load
from support.kv_options import kv_config
from support.model_specs import small_spec

PAGE_TOKENS, WINDOW, CHUNK = 4, 10, 8
SUMS, RING = AttentionSum(), QueryRing(window=6)


def layout_of(windows, *, page_tokens=PAGE_TOKENS, head_dim=8, **options):
    spec = small_spec(*windows, head_dim=head_dim)
    return layout_for(spec, codec="float32", page_tokens=page_tokens, **options)


def peaks_of(*windows, heads_apart=True, statistics=(), chunk_tokens=CHUNK):
    options = {"evicting": True, "heads_apart": heads_apart, "statistics": statistics}
    return Peaks(KVMemory(layout_of(windows, **options), 1 << 26, 4), chunk_tokens)


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


def test_lanes_reach_peaks_of_one_or_their_own_caps():
    """A short sequence needs only its tokens, below any cap."""
    for when in SCHEDULES:
        for cap in (8, 13):
            need = Need(90, 50, EvictionSpec(cap=cap, every=3, when=when))
            expected = {PREFILL_END: max(50, cap + 40), DECODE: 50}.get(when, cap)
            assert pages(peaks_of(None), need) == [2 * -(-expected // PAGE_TOKENS)]
        need = Need(9, 5, EvictionSpec(cap=500, every=3, when=when, ragged=True))
        assert pages(peaks_of(None), need) == [2 * 3]

    # layer pages have the least cap of their heads; ragged caps need one more page per lane
    own = Need(100, 90, EvictionSpec(cap=10, every=2, lane_capacities=(4, 16, 8, 12)))
    no_cap = Need(100, 90, EvictionSpec(cap=10, every=2, lane_capacities=(8, 1 << 40)))
    even, ragged = (EvictionSpec(cap=8, every=2, ragged=ragged) for ragged in (False, True))
    assert pages(peaks_of(None, None), own) == [1 + 4 + 2 + 3]
    assert pages(peaks_of(None, None, heads_apart=False), own) == [1 + 2]
    assert pages(peaks_of(None), no_cap) == [2 + 25]  # all tokens of the second lane
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


def test_each_request_counts_its_own_statistics_and_pages_it_will_write():
    peaks = peaks_of(None, WINDOW, statistics=(SUMS, RING))
    requested = [(), (SUMS,), (RING,), (SUMS, RING)]
    specs = [EvictionSpec(cap=8, every=2, statistics=statistics) for statistics in requested]
    counts = peaks.counts([Need(100, 90, spec) for spec in specs])

    full, window = 2 * 2, -(-(WINDOW - 1 + CHUNK + PAGE_TOKENS - 1) // PAGE_TOKENS)
    groups = ["full", "full.attention_sum.mean", "full.query_ring.6", "window_10"]
    assert [group.name for group in peaks.memory.layout.groups] == groups
    sums, ring = [0, full, 0, full], [0, 0, 2, 2]
    assert counts.T.tolist() == [[full] * 4, sums, ring, [window] * 4]
    assert peaks.counts([Need(0)]).tolist() == [[0, 0, 0, 0]]
    capped, peaks = EvictionSpec(cap=8, every=2), peaks_of(None)
    needs = [Need(40), Need(40, 40, capped), Need(4), Need(12, 9, capped)]
    assert peaks.counts(needs)[:, 0].tolist() == [20, 4, 2, 4]  # in the order of the requests

    peaks = peaks_of(None, WINDOW, statistics=(SUMS,))
    capped = EvictionSpec(cap=20, every=4, statistics=(SUMS,))
    assert peaks.shared_counts(Need(18, 18, capped), 16).tolist() == [8, 0, 4]
    assert peaks.shared_counts(Need(30, 18, capped), 16).tolist() == [0, 0, 4]
    assert peaks.shared_counts(Need(30, 18), 16).tolist() == [8, 0, 4]
    assert peaks.shared_counts(Need(30, 18), 0).tolist() == [0, 0, 0]


# ---- sharing -------------------------------------------------------------------------------------


def test_forks_share_whole_pages_but_none_of_windows_statistics_or_unknown_caps():
    peaks = peaks_of(None, statistics=(SUMS,))
    eviction = EvictionSpec(cap=20, every=4, statistics=(SUMS,))

    within, over = ([Need(tokens, 10, eviction)] * 3 for tokens in (16, 24))

    assert peaks.forked_counts(10, within).tolist() == [2 * (2 + 3 * 2), 2 * 3 * 4]
    assert peaks.forked_counts(10, over).tolist() == [2 * 3 * 5, 2 * 3 * 5]
    # while decoding, a window of 10 occupies 13 slots in 4 whole pages per lane
    peaks = peaks_of(WINDOW, chunk_tokens=64)
    [group] = peaks.memory.layout.groups
    assert peaks.forked_counts(48, [Need(52, 48)] * 4).tolist() == [4 * 4 * group.num_lanes]
    assert peaks.forked_counts(8, [Need(12, 8)] * 4).tolist() == [(2 + 4) * group.num_lanes]

    # Until the prompt is computed, the maximum of each lane is reserved: here all tokens.
    peaks = peaks_of(None)
    unknown = EvictionSpec(
        cap=20, every=4, when=PREFILL_END, lane_capacities=(UNLIMITED,) * 2, from_prompt=True
    )
    assert peaks.forked_counts(36, [Need(40, 36, unknown)] * 3).tolist() == [3 * 2 * 10]
    assert peaks.forked_counts(16, [Need(20, 16, unknown)] * 3).tolist() == [2 * (4 + 3)]
    assert peaks.shared_counts(Need(40, 36, unknown), 16).tolist() == [0]


# ---- rows of a static batch ----------------------------------------------------------------------

MAX_ROWS = 64


def layout_of_rule(spec, windows=(None, None), **options):
    evicts = spec.cap is not None
    apart = {"evicting": evicts, "heads_apart": evicts, "statistics": spec.statistics}
    return layout_of(windows, **apart, **options)


def first_tokens(spec, prompt):
    return min(prompt, spec.min_cap) if spec.evicts_during_prefill else prompt


def found_rows(layout, kv_bytes, spec, prompt, new):
    need, first = Need(prompt + new - 1, prompt, spec), first_tokens(spec, prompt)
    memory = KVMemory(layout, kv_bytes, 1)
    return rows_at_once(memory, need, first_tokens=first, chunk_tokens=first)


def start(memory, spec, tokens):
    row = memory.start(statistics_used(memory.layout, spec.statistics))
    memory.grow(np.array([row]), np.array([tokens], dtype=np.int32))


def rows_that_grow(layout, kv_bytes, spec, tokens):
    """The number of rows of `tokens` tokens each that a memory holds before pages run out."""
    memory = KVMemory(layout, kv_bytes, MAX_ROWS)
    for rows in range(MAX_ROWS):
        try:
            start(memory, spec, tokens)
        except OutOfPages:
            memory.check()
            return rows
    return MAX_ROWS


def admitted_rows(layout, kv_bytes, spec, prompt, new):
    """The number of rows that reserved admission admits if each grows on admission."""
    first, memory = first_tokens(spec, prompt), KVMemory(layout, kv_bytes, MAX_ROWS)
    peaks = Peaks(memory, first)
    peak = peaks.counts([Need(prompt + new - 1, prompt, spec)])[0]
    if not peaks.fit_alone(peak):
        return 0
    owed = np.zeros_like(peak)
    for rows in range(MAX_ROWS):
        if rows and not memory.fits(peaks.by_class(peak + owed)):
            return rows
        before = {c: pool.num_used for c, pool in memory.pools.items()}
        start(memory, spec, first)
        held = [memory.pools[c].num_used - before[c] for c in peaks.page_classes]
        owed += np.maximum(peak - np.array(held), 0)
    return MAX_ROWS


RULES = [
    KEEP_ALL,
    EvictionSpec(cap=2, every=1, when=DECODE),
    EvictionSpec(cap=24, every=8, when=DECODE, statistics=(SUMS,)),
    EvictionSpec(cap=24, every=8, when=PREFILL_AND_DECODE),
    EvictionSpec(cap=21, every=8, when=PREFILL_AND_DECODE, statistics=(SUMS,)),
    EvictionSpec(cap=30, every=4, statistics=(SUMS, QueryRing(window=5), QueryMoments())),
]


def cuts_pages(layout, kv_bytes):
    slab_bytes = KVMemory(layout, kv_bytes, 1).arena.slab_bytes
    return any(slab_bytes % c.page_bytes for c in layout.page_classes)


@given(
    spec=st.sampled_from(RULES),
    kv_bytes=st.integers(200_000, 2_000_000),
    lengths=st.tuples(st.integers(1, 90), st.integers(1, 40)),
    page_tokens=st.sampled_from([1, 4, 16]),
    head_dim=st.sampled_from([8, 20]),
)
def test_rows_at_once_equals_reserved_admission(spec, kv_bytes, lengths, page_tokens, head_dim):
    """And rows that are grown to their peak; a cut page of each slab may remain unused."""
    layout = layout_of_rule(spec, page_tokens=page_tokens, head_dim=head_dim)
    prompt, new = lengths
    rows = min(found_rows(layout, kv_bytes, spec, prompt, new), MAX_ROWS)
    grown = rows_that_grow(layout, kv_bytes, spec, spec.peak_tokens(prompt + new - 1, prompt))
    assert rows == admitted_rows(layout, kv_bytes, spec, prompt, new)
    assert rows <= grown
    assert rows == grown or cuts_pages(layout, kv_bytes)


def test_slab_borders_cut_pages_in_some_layouts():
    spec = EvictionSpec(cap=30, every=4, statistics=(SUMS, QueryMoments()))
    assert cuts_pages(layout_of_rule(spec, head_dim=20), 400_000)
    assert not cuts_pages(layout_of_rule(KEEP_ALL), 400_000)


@pytest.mark.parametrize(
    ("evict", "held"),
    [
        *(("full", 59), ("recent:cap=2,every=1,when=decode", 50)),
        *(("average:cap=16,every=4,when=decode", 50), ("average:cap=16,every=4", 16)),
    ],
)
@pytest.mark.parametrize("kv_bytes", [66_000, 81_000, 131_072])
def test_rows_at_once_equals_rows_the_engine_runs(evict, held, kv_bytes):
    """Prompts of 50 tokens, 10 new tokens: all rows start in the first step and end together."""
    schedule = ScheduleConfig(max_num_batched_tokens=8_192, admission="reserved", low_watermark=1.0)
    kv = kv_config(memory=kv_bytes, evict=evict, enable_prefix_caching=False)
    engine = Engine(load("llama"), kv, schedule)
    spec = engine.pool.rules.resolve(engine.pool.rules.default, 50).spec
    expected = found_rows(engine.pool.kv.memory.layout, kv_bytes, spec, 50, 10)
    assert spec.peak_tokens(59, 50) == held

    try:
        for _ in range(expected + 1):
            engine.submit(GenerationRequest([1] * 50, greedy(10)))
    except NeverFits:
        assert expected == 0
        return
    engine.step()
    assert len(engine.scheduler.running) == expected
    while engine.scheduler.running:
        engine.step()
    assert engine.scheduler.num_preemptions == 0
