"""Page pools: allocation, reference counts and slabs."""

import sys

import numpy as np
import pytest

import quire.kv.pages as pages_module
from quire.errors import InvariantError, OutOfPages
from quire.kv.pages import Arena, PagePool
from support.small_memory import plain_class
from support.type_checks import is_check

PAGE = plain_class(tokens=4, head_dim=8)  # 128 B


def pool_of(num_slabs, pages_per_slab):
    """A pool over slabs of `pages_per_slab` pages: a second page size sets the slab size."""
    slab_bytes = pages_per_slab * PAGE.page_bytes
    arena = Arena(num_slabs * slab_bytes, [PAGE.page_bytes, slab_bytes])
    assert (arena.slab_bytes, arena.num_slabs) == (slab_bytes, num_slabs)
    return arena, PagePool(arena, PAGE)


def count_calls(function, *arguments):
    """The number of calls of functions of `quire.kv.pages` that a call of `function` makes."""
    num_calls = 0

    def profile(frame, event, _argument):
        nonlocal num_calls
        code = frame.f_code
        is_of_pages = code.co_filename == pages_module.__file__ and not is_check(code)
        num_calls += event == "call" and is_of_pages

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return num_calls


def test_pool_allocates_a_slab_only_if_its_slabs_are_full():
    arena, pool = pool_of(4, 8)

    pool.allocate(8)
    assert arena.num_free_slabs == 3
    pool.allocate(1)

    assert arena.num_free_slabs == 2


def test_pages_of_one_allocation_are_contiguous_and_distinct():
    _, pool = pool_of(4, 8)

    pages = pool.allocate(20)

    assert pages.tolist() == list(range(20))
    assert (pool.ref_counts[pages] == 1).all()


def test_slab_is_freed_with_its_last_page():
    arena, pool = pool_of(2, 8)
    pages = pool.allocate(8)

    pool.release(pages[:7])
    assert arena.num_free_slabs == 1
    pool.release(pages[7:])

    assert arena.num_free_slabs == 2
    assert pool.held_slabs == frozenset()
    assert pool.free_bytes == 0


def test_freed_slab_serves_another_page_class():
    arena, pool = pool_of(1, 8)
    wide = PagePool(arena, plain_class(head_dim=16))
    pages = pool.allocate(3)

    with pytest.raises(OutOfPages):
        wide.allocate(1)
    pool.release(pages)

    assert len(wide.allocate(4)) == 4


def test_failed_allocation_changes_nothing():
    arena, pool = pool_of(2, 8)
    pool.allocate(5)
    counts, free, slabs = pool.ref_counts.copy(), pool.free_bytes, arena.free_slabs

    with pytest.raises(
        OutOfPages, match=r"12 free pages of 128 B, got 3 in held slabs and 1 free slabs"
    ):
        pool.allocate(12)

    assert (pool.ref_counts == counts).all()
    assert (pool.free_bytes, arena.free_slabs) == (free, slabs)
    assert len(pool.allocate(11)) == 11


def test_duplicate_page_in_release_drops_two_references():
    _, pool = pool_of(2, 8)
    pages = pool.allocate(2)
    pool.retain(pages[:1])

    pool.release(np.array([pages[0], pages[0]]))

    assert pool.num_used == 1
    assert pool.num_shared == 0
    pool.check()


def test_released_pages_are_allocated_before_a_new_slab():
    arena, pool = pool_of(3, 8)
    pages = pool.allocate(12)

    pool.release(pages[[1, 5, 9]])
    pages_after = pool.allocate(7)

    assert arena.num_free_slabs == 1
    assert set(pages[[1, 5, 9]].tolist()) <= set(pages_after.tolist())


def test_allocation_cost_depends_on_slabs_not_on_pages():
    """300 pages in slabs of 64, and 38 pages in slabs of 8, are both 5 slabs."""
    many, few = pool_of(8, 64)[1], pool_of(8, 8)[1]

    assert count_calls(many.allocate, 300) == count_calls(few.allocate, 38) > 5


def test_release_cost_depends_on_slabs_not_on_pages():
    rng = np.random.default_rng(0)
    calls = []
    for pages_per_slab, num_pages in ((64, 300), (8, 38)):
        _, pool = pool_of(8, pages_per_slab)
        calls.append(count_calls(pool.release, rng.permutation(pool.allocate(num_pages))))

    assert calls[0] == calls[1] > 5


def test_check_detects_a_page_released_too_often():
    _, pool = pool_of(2, 8)
    pages = pool.allocate(2)
    pool.release(pages[:1])
    pool.release(pages[:1])

    with pytest.raises(InvariantError):
        pool.check()
