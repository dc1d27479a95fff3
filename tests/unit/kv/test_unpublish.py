"""Cached blocks whose pages a compaction will write: copied while there is room, else taken."""

import numpy as np
import pytest

from quire.errors import OutOfPages
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.prefix import PrefixIndex
from unit.kv.small_memory import keys, mask, one_group, used_pages
from unit.kv.test_prefix import EVERYBODY, TOKENS, Listener, read

PAGE_BYTES = 192


def cached_row(pages, tokens=12):
    """A row whose tokens are cached, used by nobody else, in a memory of so many pages."""
    memory = one_group(ordered=False, total_bytes=pages * PAGE_BYTES)
    index = PrefixIndex(memory, Listener())
    row, lease = read(index, TOKENS[:tokens])
    index.release(lease)
    assert index.num_idle == tokens // 4
    return index, row


def compact(index, row, text, kind=Kind.FILL_HOLES):
    plan = plan_compaction(index.memory, "kv", row, mask(text), kind)
    commit_compaction(index.memory, plan)
    index.memory.check()
    return plan


def test_while_there_is_room_pages_are_copied_and_stay_cached():
    index, row = cached_row(pages=4)

    plan = compact(index, row, "oooooxooooox")

    assert sum(plan.needed_pages.values()) == 1
    assert index.match(EVERYBODY, TOKENS).tokens == 12
    assert keys(index.memory, row) == [0, 1, 2, 3, 4, 10, 6, 7, 8, 9]


def test_without_room_pages_only_the_cache_holds_are_written_in_place():
    index, row = cached_row(pages=3)
    table = index.memory.tables["kv"]
    page = int(table.pages[row, 0, 1])

    plan = compact(index, row, "oooooxooooox")

    assert sum(plan.needed_pages.values()) == 0
    assert index.memory.store.copied_pages == 0
    assert int(table.pages[row, 0, 1]) == page
    assert keys(index.memory, row) == [0, 1, 2, 3, 4, 10, 6, 7, 8, 9]
    assert used_pages(index.memory) == 3


def test_what_follows_a_block_goes_with_it_and_what_precedes_it_stays():
    index, row = cached_row(pages=3)

    compact(index, row, "oooooxooooox")

    assert index.match(EVERYBODY, TOKENS).tokens == 4
    assert len(index) == len(index._listener.known) == 1


def test_blocks_that_somebody_uses_are_not_taken():
    index, row = cached_row(pages=3)
    lease = index.match(EVERYBODY, TOKENS)

    with pytest.raises(OutOfPages, match="1 private pages"):
        compact(index, row, "oooooxooooox")

    assert lease.tokens == 12
    assert keys(index.memory, row) == list(range(12))
    index.release(lease)
    compact(index, row, "oooooxooooox")


def test_a_block_can_be_published_again_where_one_was_taken():
    index, row = cached_row(pages=6)
    other, lease = read(index, TOKENS[:14])
    index.memory.release([other])
    index.release(lease)
    [pool] = index.memory.pools.values()
    blocker = pool.allocate(3)
    plan = plan_compaction(index.memory, "kv", row, mask("xooooooooooo"))
    pool.release(blocker)
    commit_compaction(index.memory, plan)
    assert len(index) == 0
    index.memory.release([row])

    row, lease = read(index, TOKENS[:12])

    assert lease.tokens == 12
    assert keys(index.memory, row) == list(range(12))
    index.memory.check()


def test_the_answer_says_which_pages_are_the_rows_alone_now():
    index, row = cached_row(pages=3)
    memory = index.memory
    [page_class] = memory.layout.page_classes
    pages = memory.tables["kv"].pages[row, 0, :3].copy()

    assert memory.listeners.unpublish(page_class, pages[1:2]).tolist() == [True]
    assert memory.pools[page_class].ref_counts[pages].tolist() == [2, 1, 1]
    assert np.array_equal(memory.listeners.unpublish(page_class, pages), [True, True, True])
    assert len(index) == 0
