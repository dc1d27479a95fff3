import numpy as np
import pytest

from quire.errors import OutOfPages
from quire.kv.compaction import commit_compaction, plan_compaction
from quire.kv.memory import KVMemory
from quire.kv.sharing import fork
from quire.kv.swap import swap_in, swap_out
from quire.spec.pages import LaneGroup
from unit.kv.small_memory import (
    grow,
    keys,
    one_group,
    plain_class,
    started,
    used_pages,
    with_groups,
    write_lane,
)


def test_a_sequence_comes_back_byte_for_byte_in_other_pages():
    memory = one_group(num_lanes=2)
    row = started(memory, 10)
    old_pages = memory.tables["kv"].row_pages(row).copy()

    swapped = swap_out(memory, row)
    assert used_pages(memory) == 0
    memory.store.poison_free(memory)
    started(memory, 7)
    row = swap_in(memory, swapped)

    assert keys(memory, row, 0) == list(range(10))
    assert keys(memory, row, 1) == list(range(100, 110))
    assert memory.lengths[row] == 10
    assert memory.tables["kv"].row_pages(row).tolist() != old_pages.tolist()
    memory.check()


def test_a_swapped_sequence_grows_on_as_if_nothing_had_happened():
    memory = one_group(window=8)
    row = started(memory, 21)
    memory.drop_behind_windows(np.array([row]))

    row = swap_in(memory, swap_out(memory, row))
    grow(memory, row, 2)

    assert memory.tables["kv"].slot_positions(row, 0).tolist() == list(range(12, 23))


def test_lanes_of_unequal_counts_come_back_unequal():
    memory = one_group(num_lanes=2, ordered=False)
    row = started(memory, 9)
    keep = np.array([[True] * 9, [False, True] * 4 + [False]])
    commit_compaction(memory, plan_compaction(memory, "kv", row, keep))
    before = [keys(memory, row, lane) for lane in range(2)]

    row = swap_in(memory, swap_out(memory, row))

    assert memory.tables["kv"].num_slots[row].tolist() == [9, 4]
    assert [keys(memory, row, lane) for lane in range(2)] == before


def test_statistics_move_with_their_sequence():
    sums = LaneGroup(name="sums", page_class=plain_class(value=False), layers=(0,), private=True)
    memory = with_groups(LaneGroup(name="kv", page_class=plain_class(), layers=(0,)), sums)
    row = started(memory, 6, name="sums")

    swapped = swap_out(memory, row)
    memory.store.poison_free(memory)
    row = swap_in(memory, swapped)

    assert keys(memory, row, name="sums") == list(range(6))


def test_swapping_out_leaves_shared_pages_to_the_others():
    memory = one_group()
    row = started(memory, 10)
    child = fork(memory, row)

    swapped = swap_out(memory, row)
    assert used_pages(memory) == 3
    grow(memory, child, 2)
    write_lane(memory, child, 0)
    row = swap_in(memory, swapped)

    assert keys(memory, row) == list(range(10))
    assert used_pages(memory) == 6
    memory.check()


def test_a_sequence_that_does_not_fit_stays_out_and_changes_nothing():
    memory = one_group(total_bytes=4 * 128)
    swapped = swap_out(memory, started(memory, 10))
    blocker = started(memory, 8)

    with pytest.raises(OutOfPages, match="3 pages needed"):
        swap_in(memory, swapped)
    assert memory.live_rows.tolist() == [blocker]
    memory.release([blocker])
    row = swap_in(memory, swapped)

    assert keys(memory, row) == list(range(10))


def test_a_sequence_without_a_free_row_stays_out():
    memory = one_group(max_rows=1)
    swapped = swap_out(memory, started(memory, 10))
    started(memory, 1)

    with pytest.raises(OutOfPages, match="rows are taken"):
        swap_in(memory, swapped)

    assert used_pages(memory) == 1


def test_peaks_are_remembered_across_a_swap():
    memory = one_group()
    row = started(memory, 20)
    memory.truncate(row, 4)

    row = swap_in(memory, swap_out(memory, row))

    assert memory.row_bytes(row) == 128
    assert memory.peak_bytes[row] == 5 * 128


def test_bookkeeping_alone_swaps_without_bytes():
    memory = KVMemory(one_group().layout, 64 * 1024, 2)
    row = memory.start()
    grow(memory, row, 10)

    row = swap_in(memory, swap_out(memory, row))

    assert memory.lengths[row] == 10
    assert used_pages(memory) == 3
    memory.check()
