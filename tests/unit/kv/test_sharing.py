"""Shared pages: forks, copy on write and cached references."""

import numpy as np
import pytest

from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.sharing import fork, reference_pages, release_reference, start_from_references
from quire.layout.pages import LaneGroup
from support.small_memory import (
    drop_pages,
    grow,
    keys,
    one_group,
    plain_class,
    started,
    used_pages,
    with_groups,
)

KV = LaneGroup(name="kv", page_class=plain_class(), layers=(0,))
SUMS_CLASS = plain_class(tokens=8, head_dim=32, value=False)
SUMS = LaneGroup(name="sums", page_class=SUMS_CLASS, layers=(0,), private=True)
MORE_SUMS = LaneGroup(name="more sums", page_class=SUMS_CLASS, layers=(0,), private=True)


def test_copy_on_write_copies_one_page_only():
    memory = one_group()
    row = started(memory, 10)
    child = fork(memory, row)

    grow(memory, child, 1)

    assert (memory.store.num_copies, memory.store.copied_pages) == (1, 1)
    assert used_pages(memory) == 4
    assert keys(memory, child)[:10] == keys(memory, row) == list(range(10))
    grow(memory, child, 1)
    grow(memory, row, 2)
    assert memory.store.copied_pages == 1  # each last page is private now
    memory.check()


def test_fork_at_a_page_border_needs_no_copy():
    memory = one_group()
    row = started(memory, 8)
    child = fork(memory, row)

    grow(memory, child, 3)
    grow(memory, row, 3)

    assert memory.store.copied_pages == 0
    assert used_pages(memory) == 4


def test_row_without_new_tokens_copies_no_page():
    memory = one_group()
    row = started(memory, 10)
    child = fork(memory, row)

    memory.grow(np.array([row, child]), np.array([0, 1], dtype=np.int32))

    assert memory.store.copied_pages == 1
    assert keys(memory, row) == list(range(10))


def test_last_writer_of_a_shared_page_keeps_it():
    memory = one_group(total_bytes=4 * 128)  # four pages
    row = started(memory, 10)
    child = fork(memory, row)

    memory.grow(np.array([row, child]), np.array([2, 2], dtype=np.int32))

    assert memory.store.copied_pages == 1
    assert keys(memory, child)[:10] == keys(memory, row)[:10] == list(range(10))
    memory.check()


def test_growth_without_pages_for_copy_on_write_changes_nothing():
    memory = one_group(total_bytes=4 * 128)
    row = started(memory, 10)
    child = fork(memory, row)

    with pytest.raises(OutOfPages, match=r"256 B more .* needed, 128 of 512 B are free"):
        grow(memory, child, 3)
    assert memory.lengths[[row, child]].tolist() == [10, 10]
    assert (used_pages(memory), memory.store.copied_pages) == (3, 0)
    grow(memory, child, 2)

    assert keys(memory, row) == keys(memory, child)[:10]


def test_cached_reference_is_released_once_and_not_used_after():
    memory = one_group()
    row = started(memory, 8)
    cached_reference = reference_pages(memory, row, 0, 4)
    release_reference(memory, cached_reference)
    other = reference_pages(memory, row, 0, 8)

    assert other.key != cached_reference.key
    for act in (
        release_reference,
        lambda memory, cached_reference: start_from_references(memory, [cached_reference]),
    ):
        with pytest.raises(InvariantError, match="was released before"):
            act(memory, cached_reference)
    memory.check()


@pytest.mark.parametrize("rows", [[0, 0], [1]])
def test_row_is_released_once(rows):
    memory = one_group()
    assert started(memory, 8) == 0

    with pytest.raises(InvariantError, match="expected distinct rows in use"):
        memory.release(rows)

    assert memory.live_rows.tolist() == [0]
    memory.check()


def test_arena_peak_includes_statistics_of_forks_and_shared_prefixes():
    memory = with_groups(KV, SUMS)
    row = started(memory, 12)
    assert memory.arena_peak_bytes == 3 * 128 + 2 * 512

    fork(memory, row)
    assert memory.arena_peak_bytes == 3 * 128 + 4 * 512
    start_from_references(memory, [reference_pages(memory, row, 0, 12)])

    assert memory.arena_peak_bytes == 3 * 128 + 6 * 512


def test_check_detects_an_unaccounted_reference():
    memory = one_group()
    row = started(memory, 8)
    memory.pools[KV.page_class].retain(memory.tables["kv"].row_pages(row))

    with pytest.raises(InvariantError, match="differ from the references"):
        memory.check()


def test_fork_without_pages_for_its_statistics_changes_nothing():
    memory = with_groups(KV, SUMS, total_bytes=4 * 1024)
    row = started(memory, 40)  # 10 pages of 128 B, 5 of 512 B
    assert memory.arena.num_free_slabs * memory.arena.slab_bytes < 5 * 512

    with pytest.raises(OutOfPages, match="statistics"):
        fork(memory, row)

    assert memory.live_rows.tolist() == [row]
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


@pytest.mark.parametrize("tokens", [0, 3, 12, -4])
def test_cached_reference_must_be_whole_pages_of_the_sequence(tokens):
    memory = one_group()
    row = started(memory, 10)

    with pytest.raises(ConfigError, match="whole pages of 4 tokens up to 10"):
        reference_pages(memory, row, 0, tokens)

    assert memory.cached_references == {}


def test_lane_with_dropped_pages_cannot_be_referenced():
    memory = one_group()
    row = started(memory, 12)
    drop_pages(memory, row, [1])

    with pytest.raises(ConfigError, match="no longer holds every token"):
        reference_pages(memory, row, 0, 4)


def test_lane_with_freed_window_pages_cannot_be_referenced():
    memory = one_group(window=4)
    row = started(memory, 12)
    grow(memory, row, 1)

    with pytest.raises(ConfigError, match="no longer holds every token"):
        reference_pages(memory, row, 0, 4)
