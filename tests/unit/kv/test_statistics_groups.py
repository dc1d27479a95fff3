"""Rows with statistics: the private groups they use, and the number of records."""

import pytest

from quire.errors import ConfigError, InvariantError
from quire.kv.ledger import extents_of, prove_extents
from quire.kv.memory import KVMemory
from quire.kv.sharing import (
    reference_pages,
    reference_statistics,
    release_reference,
    start_from_references,
)
from quire.kv.swap import append_tail, can_split, split_border, swap_out
from quire.layout.pages import CacheLayout, LaneGroup
from support.host_bytes import HostBytes
from support.small_memory import grow, keys, plain_class, with_groups
from support.statistics_rows import GROUPS, KV, NAMES, RING, SUMS, WINDOW, expected, started


@pytest.fixture
def memory():
    return KVMemory(CacheLayout(GROUPS), 64 * 1024, 4, store=HostBytes(64 * 1024))


def test_row_uses_all_statistics_by_default(memory):
    assert memory.statistics_of(memory.start()) == NAMES


def test_unknown_statistics_name_is_rejected(memory):
    with pytest.raises(ConfigError, match=r"of \['kv.ring', 'kv.sums'\], got \['kv'\]"):
        memory.start({"kv"})

    assert memory.num_free_rows == 4


def test_bytes_of_a_row_include_only_its_own_statistics():
    memory = with_groups(*GROUPS)
    kv_bytes = 2 * (2 * KV.page_class.page_bytes + WINDOW.page_class.page_bytes)
    sums_bytes, ring_bytes = 4 * SUMS.page_class.page_bytes, 4 * RING.page_class.page_bytes
    sizes = {(): 0, ("kv.sums",): sums_bytes, ("kv.ring",): ring_bytes}

    for used, more in sizes.items():
        row = started(memory, 5, used)
        assert memory.row_bytes(row) == memory.peak_bytes[row] == kv_bytes + more
    prove_extents(memory, extents_of(memory))


# ---- cached references ---------------------------------------------------------------------------


def test_row_without_statistics_has_none_to_reference():
    memory = with_groups(*GROUPS[:3])

    assert reference_statistics(memory, started(memory, 8, ())) is None


def test_statistics_of_another_length_than_the_prefix_are_rejected():
    memory = with_groups(*GROUPS[:3])
    row = started(memory, 8)
    cached_reference, statistics = (
        reference_pages(memory, row, 0, 4),
        reference_statistics(memory, row),
    )

    with pytest.raises(InvariantError, match="statistics at 8 for a prefix of 4"):
        start_from_references(memory, [cached_reference], statistics)

    assert memory.live_rows.tolist() == [row]
    memory.check()


# ---- tails ---------------------------------------------------------------------------------------


def ordered_memory():
    kv = LaneGroup(name="kv", page_class=plain_class(), layers=(0, 1))
    return with_groups(kv, SUMS, RING)


def test_row_can_be_split_at_a_page_border():
    memory = ordered_memory()
    row, other = started(memory, 10, ()), started(memory, 10)
    assert (split_border(memory, row), split_border(memory, other)) == (4, 4)
    assert can_split(memory, other, 4)

    swapped = swap_out(memory, [row], keep_from=4)
    row = started(memory, 4, ())
    append_tail(memory, row, swapped)

    assert keys(memory, row) == expected(10)
    memory.check()


def test_statistics_of_the_whole_row_replace_those_of_the_head():
    memory = ordered_memory()
    row = started(memory, 10)
    before = {name: keys(memory, row, 1, name=name) for name in ("kv.sums", "kv.ring")}

    swapped = swap_out(memory, [row], keep_from=4)
    row = started(memory, 4)
    append_tail(memory, row, swapped)

    assert len(before["kv.sums"]) == 10
    assert {name: keys(memory, row, 1, name=name) for name in before} == before
    assert keys(memory, row) == expected(10)
    memory.check()


def test_tail_is_not_appended_to_a_head_with_other_statistics():
    memory = ordered_memory()
    swapped = swap_out(memory, [started(memory, 10, ())], keep_from=4)
    row = started(memory, 4)

    with pytest.raises(ConfigError, match="no statistics of the stored tail"):
        append_tail(memory, row, swapped)


# ---- check ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [("kv.sums", -1, "slot counts differ from group 'kv'"), ("kv.ring", 1, "expected 3 records")],
)
def test_check_detects_wrong_record_counts(name, change, message):
    memory = with_groups(*GROUPS)
    row = started(memory, 6)
    memory.tables[name].num_slots[row, 1] += change

    with pytest.raises(InvariantError, match=message):
        memory.check()


def test_check_detects_records_of_a_row_without_statistics():
    memory = with_groups(*GROUPS)
    row = started(memory, 6)
    memory.tables["kv.ring"].active[row] = False

    with pytest.raises(InvariantError, match="slots of a row that does not use it"):
        memory.check()


@pytest.mark.parametrize("used", [NAMES, {"kv.sums"}, {"kv.ring"}])
def test_row_from_references_starts_with_copies_of_referenced_statistics(used):
    memory = with_groups(*GROUPS[:3])
    row = started(memory, 8, used)
    cached_reference, statistics = (
        reference_pages(memory, row, 0, 8),
        reference_statistics(memory, row),
    )
    assert statistics.pages.keys() == used
    memory.release([row])
    memory.store.poison_free(memory)

    child = start_from_references(memory, [cached_reference], statistics)

    assert memory.statistics_of(child) == NAMES
    for name, count in (("kv.sums", 8), ("kv.ring", 3)):
        zeros = [0] * count
        assert keys(memory, child, name=name) == (expected(count) if name in used else zeros)
    release_reference(memory, statistics)
    grow(memory, child, 3)
    memory.check()
