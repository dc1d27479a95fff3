"""Compaction that fills holes: moved slots, freed pages, shared pages and refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.sharing import fork
from support.small_memory import (
    grow,
    keys,
    mask,
    one_group,
    places,
    plain_class,
    started,
    used_pages,
)


def unordered(num_lanes=1, **options):
    return one_group(num_lanes=num_lanes, ordered=False, **options)


def sizes(memory, plan):
    """Freed pages, needed pages and their difference, in a memory of one page class."""
    [page_class] = memory.pools
    assert plan.gain_bytes % page_class.page_bytes == 0
    return (
        plan.freed_pages[page_class],
        plan.needed_pages[page_class],
        plan.gain_bytes // page_class.page_bytes,
    )


def test_last_retained_slots_fill_the_holes():
    memory = unordered()
    row = started(memory, 10)

    plan = plan_compaction(memory, "kv", row, mask("oxooxoxoox"))
    commit_compaction(memory, plan)

    assert plan.moves.source.tolist() == [7, 8]
    assert plan.moves.target.tolist() == [1, 4]
    assert keys(memory, row) == [0, 7, 2, 3, 8, 5]
    assert sizes(memory, plan) == (1, 0, 1)
    assert used_pages(memory) == 2


def test_positions_move_with_their_slots():
    memory = unordered()
    row = started(memory, 10)

    commit_compaction(memory, plan_compaction(memory, "kv", row, mask("xooooooxxo")))

    table = memory.tables["kv"]
    _, _, positions = memory.store.read_slots(table.group.page_class, places(table, row, 0))
    assert positions.tolist() == keys(memory, row) == [9, 1, 2, 3, 4, 5, 6]


@given(keep=hnp.arrays(bool, st.tuples(st.just(3), st.integers(1, 40))))
def test_compaction_retains_the_mask_with_the_fewest_moves(keep):
    memory = unordered(num_lanes=3)
    tokens = keep.shape[1]
    row = started(memory, tokens)

    plan = plan_compaction(memory, "kv", row, keep)
    commit_compaction(memory, plan)

    retained = keep.sum(axis=1)
    moves = np.bincount(plan.moves.lane, minlength=3)
    assert (moves <= np.minimum(retained, tokens - retained)).all()
    assert memory.store.moved_slots == moves.sum()
    for lane in range(3):
        assert sorted(keys(memory, row, lane)) == (np.flatnonzero(keep[lane]) + 100 * lane).tolist()
    assert used_pages(memory) == (-(-retained // 4)).sum()
    memory.check()


@given(keep=hnp.arrays(bool, (3, 30)))
def test_slot_map_is_one_to_one_and_sources_are_not_targets(keep):
    memory = unordered(num_lanes=3)

    plan = plan_compaction(memory, "kv", started(memory, 30), keep)

    sources = set(zip(plan.moves.lane.tolist(), plan.moves.source.tolist(), strict=True))
    targets = set(zip(plan.moves.lane.tolist(), plan.moves.target.tolist(), strict=True))
    assert len(sources) == len(targets) == len(plan.moves.lane)
    assert not sources & targets
    assert all(keep[lane, slot] for lane, slot in sources)
    assert not any(keep[lane, slot] for lane, slot in targets)


def test_retaining_all_moves_no_slot_and_retaining_none_frees_all_pages():
    memory = unordered()
    row = started(memory, 10)

    commit_compaction(memory, plan_compaction(memory, "kv", row, mask("o" * 10)))
    assert (memory.store.moved_slots, used_pages(memory)) == (0, 3)
    commit_compaction(memory, plan_compaction(memory, "kv", row, mask("x" * 10)))

    assert (memory.store.moved_slots, used_pages(memory)) == (0, 0)
    assert memory.lengths[row] == 10
    grow(memory, row, 1)
    assert memory.tables["kv"].num_slots[row].tolist() == [1]


def test_mask_columns_beyond_a_lanes_slots_are_ignored():
    memory = unordered()
    row = started(memory, 3)

    plan = plan_compaction(memory, "kv", row, mask("oxooooo"))

    assert plan.keep_slots.tolist() == [2]


def test_freed_slots_store_the_next_tokens_without_new_pages():
    memory = unordered()
    row = started(memory, 12)
    used = used_pages(memory)

    for _ in range(20):
        commit_compaction(memory, plan_compaction(memory, "kv", row, mask("oxooxxoooxox")))
        grow(memory, row, 5)

    assert used_pages(memory) == used
    assert memory.arena_peak_bytes == used * 192
    assert memory.lengths[row] == 112


def test_shared_pages_are_copied_before_slots_move_into_them():
    memory = unordered()
    row = started(memory, 12)
    child = fork(memory, row)

    plan = plan_compaction(memory, "kv", row, mask("ooooxoooxxxo"))
    commit_compaction(memory, plan)

    assert sizes(memory, plan) == (0, 1, -1)
    assert memory.store.copied_pages == 1
    assert sorted(keys(memory, row)) == [0, 1, 2, 3, 5, 6, 7, 11]
    assert keys(memory, child) == list(range(12))
    assert memory.arena_peak_bytes == 4 * 192
    memory.check()


def test_pages_shared_after_planning_are_copied_too():
    memory = unordered()
    row = started(memory, 12)
    plan = plan_compaction(memory, "kv", row, mask("ooooxoooxxxo"))
    child = fork(memory, row)

    commit_compaction(memory, plan)

    assert keys(memory, child) == list(range(12))
    assert sorted(keys(memory, row)) == [0, 1, 2, 3, 5, 6, 7, 11]
    memory.check()


def test_plan_of_a_changed_row_is_rejected():
    memory = unordered()
    row = started(memory, 12)
    plan = plan_compaction(memory, "kv", row, mask("ooooxoooxxxo"))
    grow(memory, row, 1)

    with pytest.raises(InvariantError, match="has changed"):
        commit_compaction(memory, plan)

    assert keys(memory, row)[:12] == list(range(12))


def test_only_unshared_pages_count_as_freed():
    memory = unordered()
    row = started(memory, 12)
    child = fork(memory, row)
    grow(memory, row, 4)  # a fourth, private page

    plan = plan_compaction(memory, "kv", row, mask("oooo" + "x" * 12))
    used = used_pages(memory)
    commit_compaction(memory, plan)

    assert sizes(memory, plan) == (1, 0, 1)
    assert used_pages(memory) == used - 1
    assert keys(memory, child) == list(range(12))


def test_shared_pages_without_writes_stay_shared():
    memory = unordered()
    row = started(memory, 12)
    fork(memory, row)

    commit_compaction(memory, plan_compaction(memory, "kv", row, mask("ooooooooxxxx")))

    assert memory.store.copied_pages == 0
    assert used_pages(memory) == 3


def test_shared_page_cut_by_an_eviction_is_copied_before_the_next_token():
    memory = unordered()
    row = started(memory, 8)
    child = fork(memory, row)
    commit_compaction(memory, plan_compaction(memory, "kv", row, mask("ooooooxx")))

    grow(memory, row, 1)

    assert memory.store.copied_pages == 1
    assert keys(memory, child) == list(range(8))


def test_compaction_without_free_pages_for_private_copies_changes_nothing():
    memory = unordered(total_bytes=3 * 192)  # three pages
    row = started(memory, 12)
    child = fork(memory, row)
    plan = plan_compaction(memory, "kv", row, mask("xooooooooooo"))

    with pytest.raises(OutOfPages, match="1 private pages"):
        commit_compaction(memory, plan)

    assert keys(memory, row) == keys(memory, child) == list(range(12))
    memory.check()


def test_ordered_lanes_cannot_be_compacted():
    memory = one_group()
    row = started(memory, 8)

    with pytest.raises(ConfigError, match="drop whole pages instead"):
        plan_compaction(memory, "kv", row, mask("oooooooo"))


@pytest.mark.parametrize("shape", [(1, 8), (2, 7), (3, 8)])
def test_mask_of_the_wrong_shape_is_rejected(shape):
    memory = unordered(num_lanes=2)
    row = started(memory, 8)

    with pytest.raises(ConfigError, match=r"expected keep \[2, 8\]"):
        plan_compaction(memory, "kv", row, np.ones(shape, dtype=bool))


def test_row_with_evicted_tokens_cannot_be_truncated():
    memory = unordered()
    row = started(memory, 8)
    commit_compaction(memory, plan_compaction(memory, "kv", row, mask("oxoooooo")))

    with pytest.raises(ConfigError, match="cannot be truncated"):
        memory.truncate(row, 4)


def test_lanes_can_retain_different_counts():
    memory = unordered(num_lanes=2, page_class=plain_class(positions=True))
    row = started(memory, 8)
    keep = np.array([[True] * 8, [False] * 7 + [True]])

    commit_compaction(memory, plan_compaction(memory, "kv", row, keep))
    grow(memory, row, 1)

    assert memory.tables["kv"].num_slots[row].tolist() == [9, 2]
    assert memory.tables["kv"].num_pages[row].tolist() == [3, 1]
    assert keys(memory, row, 1)[:1] == [107]
    memory.check()
