"""Rows of a static batch, compared with a memory that is filled row by row and with the engine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits, OutOfPages
from quire.kv.memory import KVMemory
from quire.layout.eviction import DECODE, KEEP_ALL, PREFILL_AND_DECODE, EvictionSpec
from quire.layout.layout import layout_for, statistics_used
from quire.layout.statistics import AttentionSum, QueryMoments, QueryRing
from quire.scheduler.peaks import Need, Peaks, rows_at_once
from quire.scheduler.schedule_config import ScheduleConfig
from support.engines import load
from support.kv_options import kv_config
from support.model_specs import small_spec

MAX_ROWS = 64


def model_of(*windows, kv_heads=2, head_dim=8):
    return small_spec(*windows, num_kv_heads=kv_heads, head_dim=head_dim)


def layout_of(spec, *, page_tokens=4, windows=(None, None), **shape):
    return layout_for(
        model_of(*windows, **shape),
        codec="float32",
        page_tokens=page_tokens,
        evicting=spec.cap is not None,
        heads_apart=spec.cap is not None,
        statistics=spec.statistics,
    )


def found_rows(layout, kv_bytes, spec, prompt, new):
    first = min(prompt, spec.min_cap) if spec.evicts_during_prefill else prompt
    return rows_at_once(
        KVMemory(layout, kv_bytes, 1),
        Need(prompt + new - 1, prompt, spec),
        first_tokens=first,
        chunk_tokens=first,
    )


def rows_that_grow(layout, kv_bytes, spec, tokens):
    """The number of rows of `tokens` tokens each that a memory holds before pages run out."""
    memory = KVMemory(layout, kv_bytes, MAX_ROWS)
    names = statistics_used(layout, spec.statistics)
    for rows in range(MAX_ROWS):
        row = memory.start(names)
        try:
            memory.grow(np.array([row]), np.array([tokens], dtype=np.int32))
        except OutOfPages:
            memory.check()
            return rows
    return MAX_ROWS


def admitted_rows(layout, kv_bytes, spec, prompt, new):
    """The number of rows that reserved admission admits if each grows on admission."""
    first = min(prompt, spec.min_cap) if spec.evicts_during_prefill else prompt
    memory = KVMemory(layout, kv_bytes, MAX_ROWS)
    peaks = Peaks(memory, first)
    peak = peaks.counts([Need(prompt + new - 1, prompt, spec)])[0]
    if not peaks.fit_alone(peak):
        return 0
    owed = np.zeros_like(peak)
    for rows in range(MAX_ROWS):
        if rows and not memory.fits(peaks.by_class(peak + owed)):
            return rows
        before = {c: pool.num_used for c, pool in memory.pools.items()}
        row = memory.start(statistics_used(layout, spec.statistics))
        memory.grow(np.array([row]), np.array([first], dtype=np.int32))
        held = [memory.pools[c].num_used - before[c] for c in peaks.page_classes]
        owed += np.maximum(peak - np.array(held), 0)
    return MAX_ROWS


SPECS = st.sampled_from(
    [
        KEEP_ALL,
        EvictionSpec(cap=2, every=1, when=DECODE),
        EvictionSpec(cap=24, every=8, when=DECODE, statistics=(AttentionSum(),)),
        EvictionSpec(cap=24, every=8, when=PREFILL_AND_DECODE),
        EvictionSpec(cap=21, every=8, when=PREFILL_AND_DECODE, statistics=(AttentionSum(),)),
        EvictionSpec(
            cap=30,
            every=4,
            when=PREFILL_AND_DECODE,
            statistics=(AttentionSum(), QueryRing(window=5), QueryMoments()),
        ),
    ]
)


def cuts_pages(layout, kv_bytes):
    slab_bytes = KVMemory(layout, kv_bytes, 1).arena.slab_bytes
    return any(slab_bytes % c.page_bytes for c in layout.page_classes)


@given(
    spec=SPECS,
    kv_bytes=st.integers(200_000, 2_000_000),
    lengths=st.tuples(st.integers(1, 90), st.integers(1, 40)),
    page_tokens=st.sampled_from([1, 4, 16]),
    head_dim=st.sampled_from([8, 20]),
)
def test_rows_at_once_equals_reserved_admission(spec, kv_bytes, lengths, page_tokens, head_dim):
    layout = layout_of(spec, page_tokens=page_tokens, head_dim=head_dim)
    expected = admitted_rows(layout, kv_bytes, spec, *lengths)

    assert min(found_rows(layout, kv_bytes, spec, *lengths), MAX_ROWS) == expected


@given(
    spec=SPECS,
    kv_bytes=st.integers(200_000, 2_000_000),
    lengths=st.tuples(st.integers(1, 90), st.integers(1, 40)),
    page_tokens=st.sampled_from([1, 4, 16]),
)
def test_rows_at_once_equals_rows_grown_to_their_peak(spec, kv_bytes, lengths, page_tokens):
    """If slab borders cut pages, one page of each slab may remain unused."""
    prompt, new = lengths
    layout = layout_of(spec, page_tokens=page_tokens)
    rows = min(found_rows(layout, kv_bytes, spec, prompt, new), MAX_ROWS)
    grown = rows_that_grow(layout, kv_bytes, spec, spec.peak_tokens(prompt + new - 1, prompt))

    assert rows <= grown
    if not cuts_pages(layout, kv_bytes):
        assert rows == grown


def test_slab_borders_cut_pages_in_some_layouts():
    spec = EvictionSpec(cap=30, every=4, statistics=(AttentionSum(), QueryMoments()))

    assert cuts_pages(layout_of(spec, head_dim=20), 400_000)
    assert not cuts_pages(layout_of(KEEP_ALL), 400_000)


@pytest.mark.parametrize(
    ("evict", "held"),
    [
        ("full", 59),
        ("recent:cap=2,every=1,when=decode", 50),
        ("average:cap=16,every=4,when=decode", 50),
        ("average:cap=16,every=4", 16),
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

    options = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    try:
        for _ in range(expected + 1):
            engine.submit(GenerationRequest([1] * 50, options))
    except NeverFits:
        assert expected == 0
        return
    engine.step()
    assert len(engine.scheduler.running) == expected
    while engine.scheduler.running:
        engine.step()
    assert engine.scheduler.num_preemptions == 0
