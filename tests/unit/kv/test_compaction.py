"""Compaction that fills holes: moved slots, freed pages, shared pages and refusals."""

import numpy as np
import pytest

from quire.errors import ConfigError, InvariantError
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.sharing import fork
from support.small_memory import grow, keys, mask, one_group, started, used_pages


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
