import numpy as np
import pytest

from quire.errors import InvariantError, OutOfPages
from quire.kv.arena import Arena
from quire.kv.pages import PagePool
from unit.kv.small_memory import plain_class

PAGE = plain_class(tokens=4, head_dim=8)  # 128 B


def pool_of(num_slabs, pages_per_slab):
    arena = Arena(num_slabs * pages_per_slab * 128, [128])
    arena.slab_bytes, arena.num_slabs = pages_per_slab * 128, num_slabs
    arena._free = list(range(num_slabs - 1, -1, -1))
    return arena, PagePool(arena, PAGE)


def test_a_pool_takes_a_slab_only_when_its_own_are_full():
    arena, pool = pool_of(4, 8)

    pool.allocate(8)
    assert arena.num_free_slabs == 3
    pool.allocate(1)

    assert arena.num_free_slabs == 2


def test_pages_of_one_request_are_neighbours_and_distinct():
    _, pool = pool_of(4, 8)

    pages = pool.allocate(20)

    assert pages.tolist() == list(range(20))
    assert (pool.ref_counts[pages] == 1).all()


def test_a_slab_returns_when_its_last_page_is_free():
    arena, pool = pool_of(2, 8)
    pages = pool.allocate(8)

    pool.release(pages[:7])
    assert arena.num_free_slabs == 1
    pool.release(pages[7:])

    assert arena.num_free_slabs == 2
    assert pool.held_slabs == frozenset()
    assert pool.free_bytes == 0


def test_a_returned_slab_serves_another_class():
    arena, pool = pool_of(1, 8)
    wide = PagePool(arena, plain_class(head_dim=16))
    pages = pool.allocate(3)

    with pytest.raises(OutOfPages):
        wide.allocate(1)
    pool.release(pages)

    assert len(wide.allocate(4)) == 4


def test_a_failed_allocation_changes_nothing():
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


def test_a_page_is_free_only_when_its_last_reference_goes():
    _, pool = pool_of(2, 8)
    pages = pool.allocate(3)
    pool.retain(pages[:2])

    pool.release(pages)
    assert (pool.num_used, pool.num_shared) == (2, 0)
    pool.release(pages[:2])

    assert pool.num_used == 0
    pool.check()


def test_a_page_named_twice_gives_up_two_references():
    _, pool = pool_of(2, 8)
    pages = pool.allocate(2)
    pool.retain(pages[:1])

    pool.release(np.array([pages[0], pages[0]]))

    assert pool.num_used == 1
    assert pool.num_shared == 0
    pool.check()


def test_released_pages_are_given_again_before_a_new_slab():
    arena, pool = pool_of(3, 8)
    pages = pool.allocate(12)

    pool.release(pages[[1, 5, 9]])
    again = pool.allocate(7)

    assert arena.num_free_slabs == 1
    assert set(pages[[1, 5, 9]].tolist()) <= set(again.tolist())


def test_allocation_touches_one_slice_per_slab_however_many_pages(monkeypatch):
    _, pool = pool_of(8, 64)
    slabs_visited = []
    pop = PagePool._pop
    monkeypatch.setattr(
        PagePool,
        "_pop",
        lambda self, slab, into: slabs_visited.append(slab) or pop(self, slab, into),
    )

    pool.allocate(1)
    pool.allocate(300)

    assert slabs_visited == [0, 0, 1, 2, 3, 4]


def test_release_touches_each_slab_once_however_many_pages(monkeypatch):
    _, pool = pool_of(8, 64)
    pages = np.random.default_rng(0).permutation(pool.allocate(300))
    slabs_visited = []
    push = PagePool._push_to_slab
    monkeypatch.setattr(
        PagePool,
        "_push_to_slab",
        lambda self, slab, part: slabs_visited.append(slab) or push(self, slab, part),
    )

    pool.release(pages)

    assert slabs_visited == [0, 1, 2, 3, 4]


def test_a_page_released_once_too_often_is_noticed():
    _, pool = pool_of(2, 8)
    pages = pool.allocate(2)
    pool.release(pages[:1])
    pool.release(pages[:1])

    with pytest.raises(InvariantError):
        pool.check()
