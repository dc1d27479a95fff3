"""Page tables on the host and on devices, and flat batches."""

import numpy as np
import pytest
import torch

from quire.errors import ConfigError, InvariantError
from quire.kv.flat_batch import DeviceTable, FlatBatch
from quire.kv.sharing import fork
from quire.kv.tables import INITIAL_PAGES_PER_LANE, NO_PAGE, LaneTable
from quire.layout.pages import LaneGroup
from support.small_memory import drop_pages, grow, one_group, plain_class, started, used_pages

ONE_LAYER = LaneGroup(name="kv", page_class=plain_class(), layers=(0,))
GROUP = LaneGroup(name="kv", page_class=plain_class(), layers=(0, 1))  # 4 tokens per page


def counts(*rows):
    return np.array(rows, dtype=np.int32)


def test_pages_are_appended_to_lanes_in_row_major_order_and_those_without_slots_detected():
    table = LaneTable(GROUP, 3)
    table.append(np.array([2]), counts([1, 1]), np.array([40, 41], dtype=np.int32))

    entries = table.append(np.array([2, 0]), counts([2, 0], [1, 3]), np.arange(6, dtype=np.int32))

    assert table.pages[2, 0, :4].tolist() == [40, 0, 1, NO_PAGE]
    assert table.pages[2, 1, :2].tolist() == [41, NO_PAGE]
    assert table.pages[0, :, :3].tolist() == [[2, NO_PAGE, NO_PAGE], [3, 4, 5]]
    assert table.num_pages.tolist() == [[1, 3], [0, 0], [3, 1]]
    assert table.pages[entries].tolist() == [0, 1, 2, 3, 4, 5]
    assert not len(table.drain_changes())  # it does not track them
    table.num_slots[2] = 4
    with pytest.raises(InvariantError, match="pages do not match slots"):
        table.check()


def test_growth_of_a_table_increments_its_version():
    memory = one_group(num_lanes=2)
    row, other = started(memory, 5), started(memory, 3)
    table = memory.tables["kv"]
    before = table.pages[other].copy()

    grow(memory, row, 4 * INITIAL_PAGES_PER_LANE - 5)
    assert table.version == 0
    grow(memory, row, 1)

    assert table.version == 1
    assert table.capacity == 2 * INITIAL_PAGES_PER_LANE
    assert (table.pages[other, :, :INITIAL_PAGES_PER_LANE] == before).all()
    assert (table.slot_positions(row, 1) == np.arange(4 * INITIAL_PAGES_PER_LANE + 1)).all()
    first = row * 2 * table.capacity + INITIAL_PAGES_PER_LANE
    new_pages = [first, first + table.capacity]  # changes from before the growth are discarded
    assert table.drain_changes().tolist() == new_pages
    memory.check()
    memory = one_group()
    started(memory, 4 * 100)  # grows once for a long prompt
    assert (memory.tables["kv"].capacity, memory.tables["kv"].version) == (100, 1)


def test_drained_changes_are_exactly_the_changed_entries():
    memory = one_group(num_lanes=2)
    table = memory.tables["kv"]
    row, previous = memory.start(), table.pages.copy()

    def changed_by(act):
        act()
        different = np.flatnonzero(table.pages != previous)
        previous[...] = table.pages
        assert table.drain_changes().tolist() == different.tolist()
        return len(different)

    assert changed_by(lambda: grow(memory, row, 9)) == 6
    assert changed_by(lambda: grow(memory, row, 1)) == 0
    assert changed_by(lambda: fork(memory, row)) == 6
    assert changed_by(lambda: grow(memory, row, 1)) == 2  # the shared last pages
    assert changed_by(lambda: drop_pages(memory, row, [1], lane=1)) == 2
    assert changed_by(lambda: memory.truncate(row, 3)) == 3
    assert changed_by(lambda: memory.release([row])) == 2


def test_sliding_window_uses_constant_memory():
    memory = one_group(window=16, num_lanes=2)
    row, pages, first_seen = memory.start(), [], []

    for _ in range(160):
        grow(memory, row, 1)
        pages.append(used_pages(memory))
        first_seen.append(int(memory.tables["kv"].slot_positions(row, 0)[0]))

    group = memory.tables["kv"].group
    assert pages[20:24] * 35 == pages[20:]
    assert max(pages) == 2 * group.page_class.pages_for(group.slots_at_most(160, 1)) == 2 * 5
    assert all(first <= max(0, i + 1 - 16) for i, first in enumerate(first_seen))
    assert memory.tables["kv"].version == 0
    assert memory.lengths[row] == 160


def append_to_both(table, first_page):
    pages = np.array([first_page, first_page + 1], dtype=np.int32)
    table.append(np.array([0, 1]), np.ones((2, 1), dtype=np.int32), pages)


def test_device_tables_share_memory_or_are_updated_also_outside_of_inference_mode():
    table = LaneTable(ONE_LAYER, 2)
    device_table = DeviceTable(table, torch.device("cpu"))
    append_to_both(table, 5)
    assert device_table.current().data_ptr() == table.pages.ctypes.data
    assert device_table.current()[:, 0, 0].tolist() == [5, 6]

    # steps run in inference mode, evictions between them do not; both update the table
    table = LaneTable(ONE_LAYER, 2, track_changes=True)
    device_table = DeviceTable(table, torch.device("meta"))  # any device but the CPU
    append_to_both(table, 5)
    with torch.inference_mode():
        made = device_table.current()
    append_to_both(table, 7)

    assert device_table.current() is made
    assert not len(table.drain_changes())


def batch(rows, tokens):
    return FlatBatch.of(np.array(rows), np.array(tokens, dtype=np.int32), torch.device("cpu"))


BATCHES = [
    ([7, 2], [1, 1], True),
    ([2, 7], [1, 1], False),
    ([7, 2], [1, 2], False),
    ([7, 2, 3], [1, 1, 1], False),
]


def test_tokens_have_their_row_and_offset_and_a_batch_is_reused_for_equal_ones_only():
    flat = batch([7, 2, 5], [1, 1, 3])
    assert flat.token_row.tolist() == [0, 1, 2, 2, 2]
    assert flat.token_offset.tolist() == [0, 0, 0, 1, 2]
    assert flat.shape.num_decode == 2
    assert flat.row_index.tolist() == [7, 2, 5]
    for rows, tokens, is_reused in BATCHES:
        flat = batch([7, 2], [1, 1])
        assert flat.is_for(np.array(rows), np.array(tokens, dtype=np.int32)) == is_reused


def test_truncation_into_a_dropped_page_continues_at_the_new_length():
    memory = one_group()
    row = started(memory, 12)
    drop_pages(memory, row, [1])

    memory.truncate(row, 6)
    grow(memory, row, 3)

    assert memory.tables["kv"].slot_positions(row, 0).tolist() == [0, 1, 2, 3, 6, 7, 8]


def test_truncation_to_an_invalid_length_or_a_freed_window_page_is_rejected():
    memory = one_group(window=8)
    row = started(memory, 16)
    grow(memory, row, 1)  # position 16 sees positions from 9: pages 0 and 1 are freed

    memory.truncate(row, 15)
    with pytest.raises(ConfigError, match="dropped positions below 8 that a row of 14 needs"):
        memory.truncate(row, 14)
    for length in (-1, 16):
        with pytest.raises(ConfigError, match="cannot truncate a row of 15 tokens"):
            memory.truncate(row, length)

    assert memory.lengths[row] == 15
