"""Cached blocks whose pages a compaction writes: copied if pages are free, else evicted."""

import numpy as np
import pytest

from quire.errors import OutOfPages
from quire.kv.compaction import Kind, commit_compaction, plan_compaction
from quire.kv.prefix import PrefixIndex
from support.prefix_index import DEFAULT_IDENTITY, TOKENS, Listener, prefill
from support.small_memory import keys, mask, one_group, used_pages

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


def compact(index, row, text, kind=Kind.FILL_HOLES):
    plan = plan_compaction(index.memory, "kv", row, mask(text), kind)
    commit_compaction(index.memory, plan)
    index.memory.check()
    return plan


def test_cached_pages_are_copied_and_stay_cached_if_pages_are_free():
    index, row, _ = cached_row(pages=4)

    plan = compact(index, row, "oooooxooooox")

    assert sum(plan.needed_pages.values()) == 1
    assert index.match(DEFAULT_IDENTITY, TOKENS).tokens == 12
    assert keys(index.memory, row) == [0, 1, 2, 3, 4, 10, 6, 7, 8, 9]


def test_pages_shared_with_the_cache_only_are_written_in_place_if_memory_is_full():
    index, row, _ = cached_row(pages=3)
    table = index.memory.tables["kv"]
    page = int(table.pages[row, 0, 1])

    plan = compact(index, row, "oooooxooooox")

    assert sum(plan.needed_pages.values()) == 0
    assert index.memory.store.copied_pages == 0
    assert int(table.pages[row, 0, 1]) == page
    assert keys(index.memory, row) == [0, 1, 2, 3, 4, 10, 6, 7, 8, 9]
    assert used_pages(index.memory) == 3


def test_blocks_after_an_evicted_block_are_evicted_too():
    index, row, listener = cached_row(pages=3)

    compact(index, row, "oooooxooooox")

    assert index.match(DEFAULT_IDENTITY, TOKENS).tokens == 4
    assert len(index) == len(listener.known) == 1


def test_blocks_in_use_are_not_evicted():
    index, row, _ = cached_row(pages=3)
    lease = index.match(DEFAULT_IDENTITY, TOKENS)

    with pytest.raises(OutOfPages, match="1 private pages"):
        compact(index, row, "oooooxooooox")

    assert lease.tokens == 12
    assert keys(index.memory, row) == list(range(12))
    index.release(lease)
    compact(index, row, "oooooxooooox")


def test_evicted_block_can_be_published_again():
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


def test_unpublish_returns_which_pages_are_private_now():
    index, row, _ = cached_row(pages=3)
    memory = index.memory
    [page_class] = memory.layout.page_classes
    pages = memory.tables["kv"].pages[row, 0, :3].copy()

    assert memory.listeners.unpublish(page_class, pages[1:2]).tolist() == [True]
    assert memory.pools[page_class].ref_counts[pages].tolist() == [2, 1, 1]
    assert np.array_equal(memory.listeners.unpublish(page_class, pages), [True, True, True])
    assert len(index) == 0
