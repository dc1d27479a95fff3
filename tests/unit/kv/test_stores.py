"""Behaviour of single stores beyond the contract of all stores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, OutOfPages, UnsoundCombination
from quire.kv.arena import Arena
from quire.kv.sharing import fork, reference_pages
from quire.kv.stores.registry import (
    PRE_ROPE,
    PREFIX_CACHE,
    STORES,
    UNSOUND,
    UNSOUND_TOGETHER,
    features_of,
    refuse_unsound,
)
from quire.kv.stores.ring import ring_pages
from quire.kv.stores.runs import LaneLimits, RunPool, offsets, spans
from quire.kv.waste import measure_waste, sequences_that_fit
from quire.layout.codec_names import codec_spec
from quire.layout.eviction import DECODE, PREFILL_END, PRESSURE, EvictionSpec
from quire.layout.pages import CacheLayout, LaneGroup, PageClass
from support.small_memory import drop_pages, grow, plain_class
from support.stored_tokens import (
    EVICTING,
    FULL,
    LAYOUT,
    RING,
    SLOT_SUMS,
    WINDOWED,
    StoredTokens,
    memory_of,
)

RUNS = ("contiguous_max", "contiguous_growing")
PAGE = plain_class()  # 4 tokens, 128 B
NO_LIMIT = 1 << 40


def traffic(memory):
    """Count the pages that pools allocate and release from now on."""
    counts = {"allocated": 0, "released": 0}
    for pool in memory.pools.values():

        def allocate(num_pages, *, original=pool.allocate):
            counts["allocated"] += num_pages
            return original(num_pages)

        def release(pages, *, original=pool.release):
            counts["released"] += len(pages)
            original(pages)

        pool.allocate, pool.release = allocate, release
    return counts


# ---- ring --------------------------------------------------------------------------------------


def test_full_ring_allocates_and_frees_no_page():
    memory = memory_of("ring", groups=[WINDOWED])
    row = memory.start()
    grow(memory, row, 14)
    for _ in range(4):
        grow(memory, row, 1)
    own = {*memory.tables["window"].row_pages(row).tolist()}
    own |= {*memory.placement.reserved_pages(memory.tables["window"], np.array([row])).tolist()}
    held_bytes, counts = memory.row_bytes(row), traffic(memory)

    for _ in range(500):
        grow(memory, row, 1)
        assert {*memory.tables["window"].row_pages(row).tolist()} <= own
        assert memory.row_bytes(row) == held_bytes

    assert counts == {"allocated": 0, "released": 0}
    assert len(own) == ring_pages(WINDOWED) * WINDOWED.num_lanes


def test_positions_continue_after_a_ring_page_is_reused():
    memory = memory_of("ring", groups=[WINDOWED])
    row = memory.start()
    grow(memory, row, 14)
    first_page = memory.tables["window"].pages[row, 0, 0]

    for _ in range(5):
        grow(memory, row, 1)

    table = memory.tables["window"]
    assert table.pages[row, 0, : table.num_pages[row, 0]].tolist()[-1] == first_page
    assert table.slot_positions(row, 0).tolist() == list(range(8, 19))


def test_long_chunk_uses_more_pages_than_the_ring_and_frees_them():
    memory = memory_of("ring", groups=[WINDOWED])
    row = memory.start()

    grow(memory, row, 90)
    assert memory.tables["window"].num_pages[row, 0] == 23
    grow(memory, row, 1)

    assert memory.row_bytes(row) <= ring_pages(WINDOWED) * WINDOWED.num_lanes * PAGE.page_bytes
    memory.check()


def test_ring_page_shared_with_a_fork_is_not_reused():
    stored = StoredTokens(memory_of("ring", groups=[WINDOWED]))
    row = stored.start(14)
    child = fork(stored.memory, row)
    stored.rows[child] = stored.copy(row)

    stored.grow({row: 6})

    stored.check()
    assert stored.memory.lengths.tolist()[child] == 14


# ---- runs --------------------------------------------------------------------------------------


def test_maximum_run_is_reserved_with_the_first_token():
    memory = memory_of("contiguous_max", groups=[FULL], max_tokens=40)
    row = memory.start()
    grow(memory, row, 1)
    first = memory.tables["full"].pages[row, :, 0].copy()
    held_bytes = memory.row_bytes(row)

    grow(memory, row, 39)

    assert held_bytes == memory.row_bytes(row) == 10 * FULL.num_lanes * PAGE.page_bytes
    expected = first[:, None] + np.arange(10)
    assert (memory.tables["full"].pages[row, :, :10] == expected).all()
    assert memory.placement.num_copies == 0
    with pytest.raises(OutOfPages, match="longer than the longest run of this store"):
        grow(memory, row, 1)


def test_growing_run_doubles_and_counts_its_copies():
    memory = memory_of("contiguous_growing", groups=[FULL])
    row = memory.start()

    for _ in range(33):  # 9 pages: runs of 1, 2, 4, 8, 16
        grow(memory, row, 1)

    placement = memory.placement
    assert placement.num_copies == 4 * FULL.num_lanes
    assert placement.copied_bytes == (1 + 2 + 4 + 8) * FULL.num_lanes * PAGE.page_bytes
    assert memory.store.copied_pages == 15 * FULL.num_lanes
    assert memory.row_bytes(row) == 16 * FULL.num_lanes * PAGE.page_bytes
    assert memory.arena_peak_bytes == 24 * FULL.num_lanes * PAGE.page_bytes  # while it is copied


def test_released_runs_leave_gaps_too_small_for_longer_runs():
    memory = memory_of(
        "contiguous_growing", groups=[FULL], total_bytes=64 * 128, max_rows=9, max_tokens=128
    )
    rows = [memory.start() for _ in range(8)]  # two runs of four pages each
    for row in rows:
        grow(memory, row, 16)
    memory.release(rows[::2])
    waste = measure_waste(memory)

    assert waste.free_bytes == 32 * 128
    assert waste.largest_free_bytes == 8 * 128
    assert waste.external_fragmentation == 0.75
    assert sequences_that_fit(memory, 16) == 4
    assert sequences_that_fit(memory, 17) == 2  # runs of 8: one per gap, two per sequence
    assert (
        sequences_that_fit(memory, 33) == 0
    )  # runs of 16: no gap fits, although 32 pages are free


def test_paged_store_has_no_external_fragmentation():
    memory = memory_of("paged", groups=[FULL], total_bytes=64 * 128, max_rows=9)
    rows = [memory.start() for _ in range(8)]
    for row in rows:
        grow(memory, row, 16)
    memory.release(rows[::2])

    assert measure_waste(memory).external_fragmentation == 0
    assert sequences_that_fit(memory, 33) == 1
    assert sequences_that_fit(memory, 64) == 1


def test_waste_of_each_store_equals_values_by_hand():
    kinds = {}
    for store in STORES:
        memory = memory_of(store, groups=[WINDOWED], max_tokens=64)
        row = memory.start()
        grow(memory, row, 22)
        memory.drop_behind_windows(np.array([row]))
        waste = measure_waste(memory)
        slot_bytes = 2 * PAGE.slot_bytes  # two lanes
        kinds[store] = [
            bytes_ // slot_bytes
            for bytes_ in (
                waste.live_bytes,
                waste.hidden_bytes,
                waste.empty_bytes,
                waste.reserved_bytes,
            )
        ]

    # the next query, at 22, sees 13 .. 21; page 3 holds 12 too, page 5 has two slots left
    assert kinds == {
        "paged": [9, 1, 2, 0],
        "ring": [9, 1, 2, 4],
        "contiguous_max": [9, 13, 2, 40],
        "contiguous_growing": [9, 13, 2, 8],
    }


def test_waste_counts_shared_pages_once():
    stored = StoredTokens(memory_of("paged", groups=[FULL]))
    row = stored.start(16)
    alone = measure_waste(stored.memory)
    fork(stored.memory, row)

    assert measure_waste(stored.memory).live_bytes == alone.live_bytes
    assert measure_waste(stored.memory).table_bytes == 2 * alone.table_bytes


@pytest.mark.parametrize("store", RUNS)
def test_pages_of_a_run_are_neither_shared_nor_dropped(store):
    memory = memory_of(store, groups=[FULL])
    row = memory.start()
    grow(memory, row, 12)

    with pytest.raises(UnsoundCombination, match="use the store 'paged'"):
        reference_pages(memory, row, 0, 8)
    with pytest.raises(ConfigError, match=r"are ordered and cannot be moved.*'paged'"):
        drop_pages(memory, row, [0], name="full")
    with pytest.raises(
        UnsoundCombination, match=r"a cached prefix would keep .* use the store 'paged'"
    ):
        refuse_unsound(store, {PREFIX_CACHE: True})


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_features_of_a_layout_include_pre_rope_keys(codec):
    numbers = codec_spec(codec)
    page = PageClass(key=numbers, value=numbers, head_dim=8, heads=1, tokens=4, rotated=False)
    layout = CacheLayout((LaneGroup(name="full", page_class=page, layers=(0,)),))
    features = features_of(layout, enable_prefix_caching=False)

    assert features[PRE_ROPE]


def test_every_refusal_has_a_store_a_reason_and_an_alternative():
    assert {store for store, _ in UNSOUND} <= set(STORES)
    assert all(
        why.reason and why.instead for why in (*UNSOUND.values(), *UNSOUND_TOGETHER.values())
    )


@pytest.mark.parametrize("store", STORES)
@settings(max_examples=20)
@given(prompt=st.integers(1, 60), steps=st.integers(0, 30), chunk=st.integers(1, 20))
def test_lane_never_exceeds_its_peak_pages(store, prompt, steps, chunk):
    memory = memory_of(store)
    row, left = memory.start(), prompt
    while left:
        grow(memory, row, min(chunk, left))
        left -= min(chunk, left)
    for _ in range(steps):
        grow(memory, row, 1)

    peak_bytes = 0
    for group in LAYOUT.groups:
        most = group.slots_at_most(NO_LIMIT, chunk) if group.ordered else NO_LIMIT
        slots = np.array([group.slots_of(prompt + steps)])
        pages = memory.placement.peak_pages(group, slots, most)
        peak_bytes += int(pages[0]) * group.num_lanes * group.page_class.page_bytes
        assert memory.placement.peak_pages(group, np.array([0]), most) == 0
    assert memory.peak_bytes[row] <= memory.arena_peak_bytes <= peak_bytes


# ---- the pool of runs --------------------------------------------------------------------------


def reference_first_fit(free, lengths):
    """First fit, page by page."""
    free, starts = list(free), []
    for length in lengths:
        places = [p for p in range(len(free) - length + 1) if all(free[p : p + length])]
        if not places:
            return None
        starts.append(places[0])
        free[places[0] : places[0] + length] = [False] * length
    return starts


@given(
    used=st.lists(st.booleans(), min_size=24, max_size=24),
    lengths=st.lists(st.integers(1, 9), max_size=6),
)
def test_runs_are_allocated_first_fit(used, lengths):
    arena = Arena(24 * 128, [128], whole_pages=True)
    pool = RunPool(arena, PAGE)
    taken = np.flatnonzero(used).astype(np.int32)
    pool.take_runs(taken, np.ones(len(taken), dtype=np.int64))

    found = pool.find(np.array(lengths, dtype=np.int64))

    expected = reference_first_fit([not page for page in used], lengths)
    assert (None if found is None else found.tolist()) == expected
    pool.check()


def test_runs_of_two_page_classes_use_separate_slabs():
    memory = memory_of("contiguous_growing", groups=[FULL, EVICTING], total_bytes=16 * 1024)
    row = memory.start()
    grow(memory, row, 9)

    held = [pool.held_slabs for pool in memory.pools.values()]
    assert all(held)
    assert not held[0] & held[1]
    memory.check()
    assert CacheLayout((FULL, EVICTING)).page_classes == tuple(memory.pools)


@given(counts=st.lists(st.integers(0, 5), max_size=8))
def test_spans_are_concatenated_ranges(counts):
    starts = np.arange(len(counts)) * 10
    lengths = np.array(counts, dtype=np.int64)

    expected = [start + i for start, n in zip(starts, counts, strict=True) for i in range(n)]
    assert spans(starts, lengths).tolist() == expected
    assert offsets(lengths).tolist() == [i for n in counts for i in range(n)]


@pytest.mark.parametrize(
    ("eviction", "slots"),
    [
        (EvictionSpec(), 90),
        (EvictionSpec(cap=20, every=4), 20),
        (EvictionSpec(cap=200, every=4), 90),
        (EvictionSpec(cap=20, every=4, lane_capacities=(10, 30)), 30),
        (EvictionSpec(cap=20, every=4, lane_capacities=(10, 1 << 40)), 90),
        (EvictionSpec(cap=20, every=4, ragged=True), 40),
        (EvictionSpec(cap=60, every=4, ragged=True), 90),
        (EvictionSpec(cap=20, every=4, when=PREFILL_END), 90),
        (EvictionSpec(cap=20, every=4, when=DECODE), 90),
        (EvictionSpec(cap=20, every=4, when=PRESSURE), 90),
    ],
)
def test_longest_lane_is_limited_by_the_eviction_rule(eviction, slots):
    limits = LaneLimits.of(90, eviction)

    assert limits.most_pages(EVICTING) == limits.most_pages(SLOT_SUMS) == slots // 2
    assert limits.most_pages(RING) == 3
    assert limits.most_pages(FULL) == limits.most_pages(WINDOWED) == 23
