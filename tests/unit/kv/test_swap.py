"""Swapped sequences: whole, together with shared pages, and as tails; and repacking."""

import numpy as np
import pytest

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.memory import KVMemory
from quire.kv.repacking import repack
from quire.kv.sharing import fork
from quire.kv.swap import append_tail, can_split, split_border, swap_in, swap_out
from quire.layout.pages import LaneGroup
from quire.offload.swap.host_pool import HostPool
from support.small_memory import (
    drop_pages,
    grow,
    keys,
    one_group,
    plain_class,
    started,
    used_pages,
    with_groups,
    write_lane,
)


def test_peak_bytes_are_kept_across_a_swap():
    memory = one_group()
    row = started(memory, 20)
    memory.truncate(row, 4)

    [row] = swap_in(memory, swap_out(memory, [row]))

    assert memory.row_bytes(row) == 128
    assert memory.peak_bytes[row] == 5 * 128


def test_memory_without_bytes_can_swap():
    memory = KVMemory(one_group().layout, 64 * 1024, 2)
    row = memory.start()
    grow(memory, row, 10)

    [row] = swap_in(memory, swap_out(memory, [row]))

    assert memory.lengths[row] == 10
    assert used_pages(memory) == 3
    memory.check()


def test_tail_is_swapped_and_appended_to_its_head():
    """The last 10 of 22 tokens are swapped, 3 pages of 4; the head of 12 is recomputed."""
    memory = one_group(num_lanes=2)
    row = started(memory, 22)

    swapped = swap_out(memory, [row], keep_from=12)
    assert (used_pages(memory), swapped.num_bytes) == (0, 2 * 3 * 128)
    memory.store.poison_free(memory)
    row = started(memory, 12)
    append_tail(memory, row, swapped)
    grow(memory, row, 3)

    assert memory.lengths[row] == 25
    assert keys(memory, row, 0)[:22] == list(range(22))
    assert keys(memory, row, 1)[:22] == list(range(100, 122))
    assert memory.tables["kv"].slot_positions(row, 1).tolist() == list(range(25))
    memory.check()


def test_append_tail_that_does_not_fit_or_match_changes_nothing():
    memory = one_group(total_bytes=6 * 128)
    swapped = swap_out(memory, [started(memory, 20)], keep_from=8)
    row = started(memory, 4)

    with pytest.raises(
        ConfigError, match=f"expected 8 tokens in every lane of row {row} .* got a row of 4"
    ):
        append_tail(memory, row, swapped)
    with pytest.raises(ConfigError, match="append_tail"):
        swap_in(memory, swapped)
    write_after(memory, row, 4)
    blocker = started(memory, 8)
    with pytest.raises(OutOfPages, match="3 pages needed"):
        append_tail(memory, row, swapped)
    memory.release([blocker])
    append_tail(memory, row, swapped)

    assert keys(memory, row) == list(range(20))


def write_after(memory, row, tokens):
    grow(memory, row, tokens)
    write_lane(memory, row, 0)


@pytest.mark.parametrize("keep_from", [0, 3, 20, 24])
def test_split_must_be_at_a_page_border_inside_the_sequence(keep_from):
    memory = one_group()
    row = started(memory, 20)

    assert not can_split(memory, row, keep_from)
    assert can_split(memory, row, 16)


def test_split_border_is_common_to_all_groups():
    """Pages of 4 and of 6 tokens have a common border every 12."""
    groups = [LaneGroup(name=f"{n}", page_class=plain_class(tokens=n), layers=(n,)) for n in (4, 6)]
    memory = with_groups(*groups)
    short, long = memory.start(), memory.start()
    grow(memory, short, 12)
    grow(memory, long, 13)

    assert (split_border(memory, short), split_border(memory, long)) == (0, 12)
    assert [n for n in range(13) if can_split(memory, long, n)] == [12]


def test_lanes_with_evicted_pages_cannot_be_split():
    window = one_group(window=4)
    dropped = one_group(num_lanes=2)
    for memory in (window, dropped):
        row = started(memory, 12)
        memory.drop_behind_windows(np.array([row]))
        if memory is dropped:
            drop_pages(memory, row, [0], lane=1)

        assert not can_split(memory, row, 8)
        with pytest.raises(ConfigError, match="cannot be split at token 8"):
            swap_out(memory, [row], keep_from=8)
        assert memory.live_rows.tolist() == [row]


def test_split_of_several_sequences_is_rejected():
    memory = one_group()
    rows = [started(memory, 12), started(memory, 12)]

    with pytest.raises(ConfigError, match="expected one row"):
        swap_out(memory, rows, keep_from=8)


def test_swap_out_of_duplicate_rows_is_rejected_without_changes():
    memory, pool = one_group(), HostPool(1024)
    row = started(memory, 4)

    with pytest.raises(InvariantError, match="distinct rows in use"):
        swap_out(memory, [row, row], pool)

    assert pool.used_bytes == 0
    assert keys(memory, row) == list(range(4))


def test_repack_moves_private_pages_and_keeps_shared_ones():
    memory = one_group(total_bytes=32 * 128)
    gap, row = started(memory, 12), started(memory, 10)
    child = fork(memory, row)
    grow(memory, child, 5)
    write_lane(memory, child, 0)
    before = memory.tables["kv"].row_pages(child).tolist()
    memory.release([gap])

    repack(memory, child)

    after = memory.tables["kv"].row_pages(child).tolist()
    assert after[:2] == before[:2]
    assert keys(memory, child) == list(range(15))
    assert keys(memory, row) == list(range(10))
    memory.check()


def test_repack_of_both_rows_moves_their_shared_pages():
    memory = one_group(total_bytes=32 * 128)
    gap, row = started(memory, 12), started(memory, 10)
    child = fork(memory, row)
    grow(memory, child, 5)
    write_lane(memory, child, 0)
    before = memory.tables["kv"].row_pages(row).tolist()
    memory.release([gap])
    used_bytes = memory.used_bytes

    repack(memory, row, child)

    table = memory.tables["kv"]
    assert table.row_pages(row).tolist() != before
    assert table.row_pages(row).tolist()[:2] == table.row_pages(child).tolist()[:2]
    assert keys(memory, child) == list(range(15))
    assert keys(memory, row) == list(range(10))
    assert memory.used_bytes == used_bytes
    memory.check()


def test_pages_that_fill_slabs_of_different_sizes_are_not_repacked():
    """Slabs that begin between two pages hold one page less, so packed pages might not fit."""
    small, large = plain_class(head_dim=5), plain_class(head_dim=18)
    memory = with_groups(
        LaneGroup(name="kv", page_class=small, layers=(0,)),
        LaneGroup(name="other", page_class=large, layers=(1,), private=True),
    )
    pool = memory.pools[memory.tables["kv"].group.page_class]
    assert memory.arena.slab_bytes % pool.page_class.page_bytes, "a page crosses a border of slabs"
    row = memory.start(())
    while memory.can_grow(np.array([row]), np.array([4], dtype=np.int32)):
        grow(memory, row, 4)
    write_lane(memory, row, 0)
    assert pool.num_used > memory.arena.num_slabs * pool.pages_per_slab

    repack(memory, row)

    assert keys(memory, row)[:5] == [0, 1, 2, 3, 4]
    memory.check()


def test_swap_in_without_free_pages_changes_nothing():
    memory = one_group(total_bytes=4 * 128)
    swapped = swap_out(memory, [started(memory, 10)])
    blocker = started(memory, 8)

    with pytest.raises(OutOfPages, match="3 pages needed"):
        swap_in(memory, swapped)
    assert memory.live_rows.tolist() == [blocker]
    memory.release([blocker])
    [row] = swap_in(memory, swapped)

    assert keys(memory, row) == list(range(10))


def test_swap_in_without_a_free_row_raises():
    memory = one_group(max_rows=1)
    swapped = swap_out(memory, [started(memory, 10)])
    started(memory, 1)

    with pytest.raises(OutOfPages, match="0 rows are free, 1 needed"):
        swap_in(memory, swapped)

    assert used_pages(memory) == 1


def test_shared_pages_are_swapped_once_and_shared_again():
    """10 tokens are 3 pages; two forks each copy the last page: 2 shared and 3 private pages."""
    memory = one_group()
    row = started(memory, 10)
    family = [row, fork(memory, row), fork(memory, row)]
    for member in family[1:]:
        grow(memory, member, 1)
    assert used_pages(memory) == 5

    swapped = swap_out(memory, family)
    assert (used_pages(memory), swapped.num_bytes) == (0, 5 * 128)
    memory.store.poison_free(memory)
    family = swap_in(memory, swapped)

    assert used_pages(memory) == 5
    assert [keys(memory, member)[:10] for member in family] == [list(range(10))] * 3
    assert memory.lengths[family].tolist() == [10, 11, 11]
    grow(memory, family[1], 5)  # the memory still copies a shared page before it is written
    memory.check()


def test_swap_out_keeps_shared_pages_for_other_rows():
    memory = one_group()
    row = started(memory, 10)
    child = fork(memory, row)

    swapped = swap_out(memory, [row])
    assert used_pages(memory) == 3
    grow(memory, child, 2)
    write_lane(memory, child, 0)
    [row] = swap_in(memory, swapped)

    assert keys(memory, row) == list(range(10))
    assert used_pages(memory) == 6
    memory.check()
