"""Rows that share pages, are swapped whole or as tails, and have statistics of their own."""

import numpy as np
import pytest

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.ledger import extents_of, prove_extents
from quire.kv.memory import KVMemory
from quire.kv.repacking import repack
from quire.kv.sharing import (
    fork,
    reference_pages,
    reference_statistics,
    release_reference,
    start_from_references,
)
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
from support.statistics_rows import GROUPS, NAMES, RING, WINDOW, expected
from support.statistics_rows import KV as TWO_LAYERS
from support.statistics_rows import SUMS as TWO_SUMS
from support.statistics_rows import started as row_of

KV = LaneGroup(name="kv", page_class=plain_class(), layers=(0,))
SUMS_CLASS = plain_class(tokens=8, head_dim=32, value=False)
MORE_SUMS = LaneGroup(name="more sums", page_class=SUMS_CLASS, layers=(0,), private=True)
SUMS = LaneGroup(name="sums", page_class=SUMS_CLASS, layers=(0,), private=True)


@pytest.mark.parametrize(
    ("tokens", "steps", "copied", "pages"),
    [
        (10, [(0, 1), (2, 1)], 1, 4),  # then each last page is private
        (8, [(0, 3), (3, 0)], 0, 4),  # a page border
        (10, [(2, 2)], 1, 4),  # the last writer of a shared page keeps it
    ],
)
def test_copy_on_write_copies_one_page_only(tokens, steps, copied, pages):
    """New tokens of a row and of its fork, in a memory of just enough pages."""
    memory = one_group(total_bytes=pages * 128)
    row = started(memory, tokens)
    child = fork(memory, row)
    for step in steps:
        memory.grow(np.array([row, child]), np.array(step, dtype=np.int32))
        assert (memory.store.num_copies, memory.store.copied_pages) == (copied, copied)

    assert used_pages(memory) == pages
    assert keys(memory, child)[:tokens] == keys(memory, row)[:tokens] == list(range(tokens))
    memory.check()


def test_growth_without_pages_for_copy_on_write_says_what_is_missing():
    memory = one_group(total_bytes=4 * 128)
    child = fork(memory, started(memory, 10))
    with pytest.raises(OutOfPages, match=r"256 B more .* needed, 128 of 512 B are free"):
        grow(memory, child, 3)


def test_references_and_rows_are_released_once_and_unaccounted_ones_detected():
    memory = one_group()
    row = started(memory, 8)
    cached_reference = reference_pages(memory, row, 0, 4)
    release_reference(memory, cached_reference)
    other = reference_pages(memory, row, 0, 8)

    assert other.key != cached_reference.key
    with pytest.raises(InvariantError, match="was released before"):
        release_reference(memory, cached_reference)
    with pytest.raises(InvariantError, match="was released before"):
        start_from_references(memory, [cached_reference])
    memory.check()

    memory = one_group()
    assert started(memory, 8) == 0
    for rows in ([0, 0], [1]):
        with pytest.raises(InvariantError, match="expected distinct rows in use"):
            memory.release(rows)
        assert memory.live_rows.tolist() == [0]
        memory.check()
    memory.pools[KV.page_class].retain(memory.tables["kv"].row_pages(0))
    with pytest.raises(InvariantError, match="differ from the references"):
        memory.check()


def test_peaks_include_statistics_of_forks_and_prefixes_and_are_kept_across_a_swap():
    memory = with_groups(KV, SUMS)
    row = started(memory, 12)
    assert memory.arena_peak_bytes == 3 * 128 + 2 * 512

    fork(memory, row)
    assert memory.arena_peak_bytes == 3 * 128 + 4 * 512
    start_from_references(memory, [reference_pages(memory, row, 0, 12)])

    assert memory.arena_peak_bytes == 3 * 128 + 6 * 512

    for memory in (one_group(), KVMemory(one_group().layout, 64 * 1024, 2)):
        row = memory.start()
        grow(memory, row, 20)
        memory.truncate(row, 10)

        [row] = swap_in(memory, swap_out(memory, [row]))

        assert memory.lengths[row] == 10
        assert used_pages(memory) == 3
        assert memory.row_bytes(row) == 3 * 128
        assert memory.peak_bytes[row] == 5 * 128
        memory.check()


def test_tail_is_swapped_and_appended_to_a_head_that_matches_if_it_fits():
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

    memory = one_group(total_bytes=6 * 128)
    swapped = swap_out(memory, [started(memory, 20)], keep_from=8)
    row = started(memory, 4)

    expected = f"expected 8 tokens in every lane of row {row} .* got a row of 4"
    with pytest.raises(ConfigError, match=expected):
        append_tail(memory, row, swapped)
    with pytest.raises(ConfigError, match="append_tail"):
        swap_in(memory, swapped)
    grow(memory, row, 4)
    write_lane(memory, row, 0)
    blocker = started(memory, 8)
    with pytest.raises(OutOfPages, match="3 pages needed"):
        append_tail(memory, row, swapped)
    memory.release([blocker])
    append_tail(memory, row, swapped)

    assert keys(memory, row) == list(range(20))


@pytest.mark.parametrize("keep_from", [0, 3, 20, 24])
def test_split_must_be_at_a_page_border_inside_the_sequence(keep_from):
    memory = one_group()
    row = started(memory, 20)

    assert not can_split(memory, row, keep_from)
    assert can_split(memory, row, 16)
    with pytest.raises(ConfigError, match="expected one row"):
        swap_out(memory, [row, started(memory, 12)], keep_from=8)


def test_split_border_is_common_to_all_groups_and_evicted_pages_have_none():
    """Pages of 4 and of 6 tokens have a common border every 12."""
    groups = [LaneGroup(name=f"{n}", page_class=plain_class(tokens=n), layers=(n,)) for n in (4, 6)]
    memory = with_groups(*groups)
    short, long = memory.start(), memory.start()
    grow(memory, short, 12)
    grow(memory, long, 13)

    assert (split_border(memory, short), split_border(memory, long)) == (0, 12)
    assert [n for n in range(13) if can_split(memory, long, n)] == [12]

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


@pytest.mark.parametrize("both", [False, True])
def test_repack_moves_private_pages_and_those_shared_by_its_rows_only(both):
    memory = one_group(total_bytes=32 * 128)
    gap, row = started(memory, 12), started(memory, 10)
    child, table = fork(memory, row), memory.tables["kv"]
    grow(memory, child, 5)
    write_lane(memory, child, 0)
    before, used_bytes = table.row_pages(row).tolist(), memory.used_bytes - 3 * 128
    memory.release([gap])

    repack(memory, *([row, child] if both else [child]))

    assert (table.row_pages(row).tolist() == before) == (not both)
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


def test_row_uses_all_statistics_by_default_and_its_bytes_only_its_own():
    memory = with_groups(*GROUPS)
    assert memory.statistics_of(memory.start()) == NAMES
    with pytest.raises(ConfigError, match=r"of \['kv.ring', 'kv.sums'\], got \['kv'\]"):
        memory.start({"kv"})

    assert memory.num_free_rows == 3
    assert reference_statistics(memory, row_of(memory, 8, ())) is None

    memory = with_groups(*GROUPS)
    kv_bytes = 2 * (2 * TWO_LAYERS.page_class.page_bytes + WINDOW.page_class.page_bytes)
    sums_bytes, ring_bytes = 4 * TWO_SUMS.page_class.page_bytes, 4 * RING.page_class.page_bytes
    sizes = {(): 0, ("kv.sums",): sums_bytes, ("kv.ring",): ring_bytes}

    for used, more in sizes.items():
        row = row_of(memory, 5, used)
        assert memory.row_bytes(row) == memory.peak_bytes[row] == kv_bytes + more
    prove_extents(memory, extents_of(memory))


def ordered_memory():
    kv = LaneGroup(name="kv", page_class=plain_class(), layers=(0, 1))
    return with_groups(kv, TWO_SUMS, RING)


def test_statistics_of_the_whole_row_replace_those_of_a_head_that_has_them():
    memory = ordered_memory()
    row = row_of(memory, 10)
    assert split_border(memory, row) == 4
    assert can_split(memory, row, 4)
    before = {name: keys(memory, row, 1, name=name) for name in ("kv.sums", "kv.ring")}

    swapped = swap_out(memory, [row], keep_from=4)
    row = row_of(memory, 4)
    append_tail(memory, row, swapped)

    assert len(before["kv.sums"]) == 10
    assert {name: keys(memory, row, 1, name=name) for name in before} == before
    assert keys(memory, row) == expected(10)
    memory.check()

    memory = ordered_memory()
    swapped = swap_out(memory, [row_of(memory, 10, ())], keep_from=4)
    row = row_of(memory, 4)

    with pytest.raises(ConfigError, match="no statistics of the stored tail"):
        append_tail(memory, row, swapped)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kv.sums", -1, "slot counts differ from group 'kv'"),
        ("kv.ring", 1, "expected 3 records"),
        ("kv.ring", 0, "slots of a row that does not use it"),
    ],
)
def test_check_detects_wrong_record_counts(name, change, message):
    memory = with_groups(*GROUPS)
    row = row_of(memory, 6)
    memory.tables[name].num_slots[row, 1] += change
    memory.tables[name].active[row] = bool(change)

    with pytest.raises(InvariantError, match=message):
        memory.check()


def test_pages_for_all_statistics_are_checked_before_a_start_from_references():
    memory = with_groups(KV, SUMS, MORE_SUMS, total_bytes=6 * 1024)
    row = started(memory, 32)
    cached_reference = reference_pages(memory, row, 0, 32)
    memory.release([row])
    blocker = memory.pools[SUMS_CLASS].allocate(6)
    free_pages = memory.free_bytes // SUMS_CLASS.page_bytes
    assert 4 <= free_pages < 8  # one group would fit

    with pytest.raises(OutOfPages, match="statistics"):
        start_from_references(memory, [cached_reference])

    assert memory.num_free_rows == 4
    memory.pools[SUMS_CLASS].release(blocker)
    memory.check()


def test_only_whole_pages_that_hold_every_token_of_the_sequence_can_be_referenced():
    memory = one_group()
    row = started(memory, 10)
    for tokens in (0, 3, 12, -4):
        with pytest.raises(ConfigError, match="whole pages of 4 tokens up to 10"):
            reference_pages(memory, row, 0, tokens)
    assert memory.cached_references == {}
    dropped, window = one_group(), one_group(window=4)
    drop_pages(dropped, started(dropped, 12), [1])
    grow(window, started(window, 12), 1)
    for memory in (dropped, window):
        with pytest.raises(ConfigError, match="no longer holds every token"):
            reference_pages(memory, 0, 0, 4)


def test_forks_and_prefixes_without_fitting_statistics_change_nothing():
    memory = with_groups(KV, SUMS, total_bytes=4 * 1024)
    row = started(memory, 40)  # 10 pages of 128 B, 5 of 512 B
    assert memory.arena.num_free_slabs * memory.arena.slab_bytes < 5 * 512

    with pytest.raises(OutOfPages, match="statistics"):
        fork(memory, row)

    assert memory.live_rows.tolist() == [row]
    memory.check()

    memory = with_groups(*GROUPS[:3])
    row = row_of(memory, 8)
    cached_reference = reference_pages(memory, row, 0, 4)
    statistics = reference_statistics(memory, row)

    with pytest.raises(InvariantError, match="statistics at 8 for a prefix of 4"):
        start_from_references(memory, [cached_reference], statistics)

    assert memory.live_rows.tolist() == [row]
    memory.check()


def test_swaps_without_free_pages_or_rows_or_of_duplicate_rows_change_nothing():
    memory = one_group(total_bytes=4 * 128)
    swapped = swap_out(memory, [started(memory, 10)])
    blocker = started(memory, 8)

    with pytest.raises(OutOfPages, match="3 pages needed"):
        swap_in(memory, swapped)
    assert memory.live_rows.tolist() == [blocker]
    memory.release([blocker])
    [row] = swap_in(memory, swapped)
    assert keys(memory, row) == list(range(10))

    memory = one_group(max_rows=1)
    swapped = swap_out(memory, [started(memory, 10)])
    started(memory, 1)

    with pytest.raises(OutOfPages, match="0 rows are free, 1 needed"):
        swap_in(memory, swapped)

    assert used_pages(memory) == 1

    memory, pool = one_group(), HostPool(1024)
    row = started(memory, 4)

    with pytest.raises(InvariantError, match="distinct rows in use"):
        swap_out(memory, [row, row], pool)

    assert pool.used_bytes == 0
    assert keys(memory, row) == list(range(4))


def test_shared_pages_are_swapped_once_and_stay_for_other_rows():
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


@pytest.mark.parametrize("used", [NAMES, {"kv.sums"}, {"kv.ring"}])
def test_row_from_references_starts_with_copies_of_referenced_statistics(used):
    memory = with_groups(*GROUPS[:3])
    row = row_of(memory, 8, used)
    cached_reference = reference_pages(memory, row, 0, 8)
    statistics = reference_statistics(memory, row)
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
