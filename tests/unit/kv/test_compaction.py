"""Compaction: slot moves, kinds, shared and cached pages, statistics, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.prefix import PrefixIndex
from quire.kv.sharing import fork
from quire.kv.slot_moves import (
    SlotMoves,
    close_gaps,
    fill_holes,
    no_moves,
    prove_one_to_one,
    retained_pages,
)
from quire.layout.pages import LaneGroup
from support.prefix_index import DEFAULT_IDENTITY, TOKENS, Listener, prefill
from support.small_memory import (
    grow,
    keys,
    mask,
    one_group,
    plain_class,
    started,
    used_pages,
    with_groups,
)
from support.statistics_rows import KV, NAMES, RING, SUMS
from support.statistics_rows import started as row_of


@pytest.mark.parametrize("shape", [(1, 8), (2, 7), (3, 8)])
def test_mask_of_the_wrong_shape_and_plan_of_a_changed_row_are_rejected(shape):
    memory = unordered(num_lanes=2)
    row = started(memory, 8)
    with pytest.raises(ConfigError, match=r"expected keep \[2, 8\]"):
        plan_compaction(memory, "kv", row, np.ones(shape, dtype=bool))
    plan = plan_compaction(memory, "kv", row, mask("ooooxooo", "ooooxooo"))
    grow(memory, row, 1)
    with pytest.raises(InvariantError, match="has changed"):
        commit_compaction(memory, plan)

    assert keys(memory, row)[:8] == list(range(8))


def unordered(num_lanes=1, **options):
    return one_group(num_lanes=num_lanes, ordered=False, **options)


def test_only_written_pages_that_are_shared_also_after_planning_are_copied():
    memory = unordered()
    row = started(memory, 12)
    plan = plan_compaction(memory, "kv", row, mask("ooooxoooxxxo"))
    child = fork(memory, row)

    commit_compaction(memory, plan)

    assert plan.moves.target.tolist() == [4]
    assert keys(memory, child) == list(range(12))
    assert sorted(keys(memory, row)) == [0, 1, 2, 3, 5, 6, 7, 11]
    memory.check()

    memory = memory_of()
    row = row_of(memory, 12)
    child = fork(memory, row)
    texts = {
        Kind.FILL_HOLES: ("ooooxoooxxxo", 1),
        Kind.KEEP_ORDER: ("ooooxooooooo", 2),
        Kind.DROP_PAGES: ("ooooxxxxoooo", 0),
    }

    for kind, (text, pages) in texts.items():
        plan = plan_compaction(memory, "kv", row, np.repeat(mask(text), 2, axis=0), kind)
        assert plan.needed_pages == {KV.page_class: 2 * pages}
    copied = memory.store.copied_pages
    compact(memory, row, texts[Kind.KEEP_ORDER][0], Kind.KEEP_ORDER)

    assert memory.store.copied_pages - copied == 4
    assert keys(memory, child) == keys(memory, child, name="kv.sums") == list(range(12))
    assert keys(memory, row) == [0, 1, 2, 3, *range(5, 12)]


MORE = LaneGroup(name="more", page_class=plain_class(positions=True), layers=(2,), ordered=False)


def memory_of(*groups, **options):
    return with_groups(*(groups or (KV, SUMS, RING)), **options)


def compact(memory, row, text, kind):
    keep = np.repeat(mask(text), 2, axis=0)
    plan = plan_compaction(memory, "kv", row, keep, kind)
    commit_compaction(memory, plan)
    memory.check()
    return plan


def test_ordered_lanes_support_drop_pages_only_and_statistics_no_own_compaction():
    memory = memory_of(replace(KV, ordered=True), SUMS)
    row = row_of(memory, 10)

    for kind in (Kind.FILL_HOLES, Kind.KEEP_ORDER):
        with pytest.raises(ConfigError, match="drop whole pages"):
            compact(memory, row, "oooooooooo", kind)
    compact(memory, row, "ooooxxxxoo", Kind.DROP_PAGES)
    grow(memory, row, 4)

    expected = [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]
    assert memory.tables["kv"].slot_positions(row, 1).tolist() == expected
    assert keys(memory, row, name="kv.sums")[:6] == expected[:6]

    memory = memory_of()
    row = row_of(memory, 12)

    for name in NAMES:
        with pytest.raises(ConfigError, match="holds statistics"):
            plan_compaction(memory, name, row, np.ones((2, 12), dtype=bool))


def test_plans_of_several_groups_are_committed_together_and_wrong_moves_not_at_all():
    memory = memory_of(KV, MORE, total_bytes=9 * 192, max_rows=2)
    row = started(memory, 12)
    child = fork(memory, row)
    plans = [
        plan_compaction(memory, name, row, np.repeat(mask("ooooxxoooooo"), lanes, axis=0))
        for name, lanes in (("kv", 2), ("more", 1))
    ]
    before = memory.store.arena.tobytes()
    assert memory.free_bytes == 0

    with pytest.raises(OutOfPages, match="3 private pages"):
        commit_compaction(memory, *plans)
    assert memory.store.arena.tobytes() == before
    assert memory.tables["kv"].num_slots[row].tolist() == [12, 12]
    memory.release([child])
    commit_compaction(memory, *plans)

    assert memory.tables["more"].num_slots[row].tolist() == [10]
    memory.check()

    memory = memory_of()
    row = row_of(memory, 12)
    fork(memory, row)
    plan = plan_compaction(memory, "kv", row, np.repeat(mask("oxoooooooooo"), 2, axis=0))
    broken = replace(plan, moves=replace(plan.moves, target=plan.moves.target + 1))
    before = memory.store.arena.tobytes()

    with pytest.raises(InvariantError, match="overwrites a retained slot"):
        commit_compaction(memory, broken)

    assert memory.store.arena.tobytes() == before
    memory.check()


MASKS = hnp.arrays(bool, st.tuples(st.integers(1, 3), st.integers(0, 20)))


def counts(numbers):
    return np.array(numbers, dtype=np.int32)


def moved(keep, moves):
    """For each slot after the moves, the number of its source slot."""
    lanes = [list(range(keep.shape[1])) for _ in keep]
    for lane, source, target in zip(moves.lane, moves.source, moves.target, strict=True):
        lanes[lane][target] = int(source)
    return [lane[: int(count)] for lane, count in zip(lanes, keep.sum(axis=1), strict=True)]


def test_moves_of_both_kinds_for_an_example_mask():
    keep = mask("oxooxoxoox")

    assert moved(keep, fill_holes(keep)) == [[0, 7, 2, 3, 8, 5]]
    assert moved(keep, close_gaps(keep)) == [[0, 2, 3, 5, 7, 8]]


@given(keep=MASKS)
def test_moves_retain_exactly_the_mask_in_the_first_slots(keep):
    for move in (fill_holes, close_gaps):
        moves = move(keep)
        prove_one_to_one(keep, moves)
        assert [sorted(lane) for lane in moved(keep, moves)] == [
            np.flatnonzero(lane).tolist() for lane in keep
        ]
    assert all(lane == sorted(lane) for lane in moved(keep, close_gaps(keep)))
    assert len(fill_holes(keep)) <= len(close_gaps(keep))


SOUND = fill_holes(mask("oxoxo", "ooooo"))  # slot 4 into slot 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (no_moves(), "leaves a hole"),
        (replace(SOUND, source=np.array([3])), "an evicted slot"),
        (replace(SOUND, source=np.array([5])), "do not exist"),
        (replace(SOUND, target=np.array([-1])), "do not exist"),
        (replace(SOUND, target=np.array([2])), "overwrites a retained slot"),
        (replace(SOUND, target=np.array([3])), "leaves a hole"),
        (replace(SOUND, lane=np.array([1])), "overwrites a retained slot"),
        (SlotMoves(np.array([0, 0]), np.array([4, 4]), np.array([1, 1])), "moves a slot twice"),
        (SlotMoves(np.array([0, 0]), np.array([4, 2]), np.array([1, 1])), "two slots into one"),
    ],
)
def test_prove_one_to_one_rejects_moves_that_lose_a_slot(broken, message):
    with pytest.raises(InvariantError, match=message):
        prove_one_to_one(mask("oxoxo", "ooooo"), broken)


def test_pages_are_retained_whole_of_which_the_last_may_be_partly_filled():
    retained = retained_pages(mask("ooooxxxxoo", "xxxxooooxx"), counts([10, 10]), 4)
    assert retained.tolist() == [[True, False, True], [False, True, False]]
    keep = mask("oooooxx", "xxxxooo")
    assert retained_pages(keep, counts([5, 7]), 4).tolist() == [[True, True], [False, True]]
    with pytest.raises(ConfigError, match="page 1 of lane 0 with 1 of 2 slots retained"):
        retained_pages(keep, counts([6, 7]), 4)
    for text in ("xooooooo", "ooxooooo", "ooooooox"):
        with pytest.raises(ConfigError, match="3 of 4 slots retained"):
            retained_pages(mask(text), counts([8]), 4)


PAGE_BYTES = 192


def cached_row(pages, tokens=12):
    """A row with cached tokens that no other row uses, in a memory of `pages` pages."""
    memory = one_group(ordered=False, total_bytes=pages * PAGE_BYTES)
    listener = Listener()
    index = PrefixIndex(memory, listener)
    row, lease = prefill(index, TOKENS[:tokens])
    index.release(lease)
    assert index.num_idle == tokens // 4
    return index, row, listener


def compact_cached(index, row, text, kind=Kind.FILL_HOLES):
    plan = plan_compaction(index.memory, "kv", row, mask(text), kind)
    commit_compaction(index.memory, plan)
    index.memory.check()
    return plan


def test_cached_pages_are_copied_if_pages_are_free_and_else_written_in_place():
    index, row, _ = cached_row(pages=4)

    plan = compact_cached(index, row, "oooooxooooox")

    assert sum(plan.needed_pages.values()) == 1
    assert index.match(DEFAULT_IDENTITY, TOKENS).tokens == 12
    assert keys(index.memory, row) == [0, 1, 2, 3, 4, 10, 6, 7, 8, 9]

    index, row, listener = cached_row(pages=3)
    table = index.memory.tables["kv"]
    page = int(table.pages[row, 0, 1])

    plan = compact_cached(index, row, "oooooxooooox")

    assert sum(plan.needed_pages.values()) == 0
    assert index.memory.store.copied_pages == 0
    assert int(table.pages[row, 0, 1]) == page
    assert keys(index.memory, row) == [0, 1, 2, 3, 4, 10, 6, 7, 8, 9]
    assert used_pages(index.memory) == 3
    # blocks after the evicted one are evicted too
    assert index.match(DEFAULT_IDENTITY, TOKENS).tokens == 4
    assert len(index) == len(listener.known) == 1

    index, row, _ = cached_row(pages=3)
    memory = index.memory
    [page_class] = memory.layout.page_classes
    pages = memory.tables["kv"].pages[row, 0, :3].copy()

    assert memory.listeners.unpublish(page_class, pages[1:2]).tolist() == [True]
    assert memory.pools[page_class].ref_counts[pages].tolist() == [2, 1, 1]
    assert np.array_equal(memory.listeners.unpublish(page_class, pages), [True, True, True])
    assert len(index) == 0


def test_blocks_in_use_are_not_evicted_and_evicted_ones_can_be_published_again():
    index, row, _ = cached_row(pages=3)
    lease = index.match(DEFAULT_IDENTITY, TOKENS)

    with pytest.raises(OutOfPages, match="1 private pages"):
        compact_cached(index, row, "oooooxooooox")

    assert lease.tokens == 12
    assert keys(index.memory, row) == list(range(12))
    index.release(lease)
    compact_cached(index, row, "oooooxooooox")

    index, row, _ = cached_row(pages=6)
    other, lease = prefill(index, TOKENS[:14])
    index.memory.release([other])
    index.release(lease)
    [pool] = index.memory.pools.values()
    blocker = pool.allocate(3)
    plan = plan_compaction(index.memory, "kv", row, mask("xooooooooooo"))
    pool.release(blocker)
    commit_compaction(index.memory, plan)
    assert len(index) == 0
    index.memory.release([row])

    row, lease = prefill(index, TOKENS[:12])

    assert lease.tokens == 12
    assert keys(index.memory, row) == list(range(12))
    index.memory.check()
