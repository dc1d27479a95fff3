"""The arena: slab sizes, and page classes of different sizes that share slabs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, InvariantError
from quire.kv.memory import KVMemory
from quire.kv.pages import Arena
from quire.layout.pages import CacheLayout, LaneGroup, choose_slab_bytes
from quire.layout.sizes import HUGE_PAGE_BYTES
from support.small_memory import plain_class

MIB = 1024 * 1024


def test_slab_of_a_large_arena_is_a_common_multiple_below_a_huge_page():
    slab_bytes = choose_slab_bytes(1024 * MIB, [65_536, 3 * 1024])

    assert slab_bytes == 1_966_080  # 10 times the least common multiple, 196,608
    assert HUGE_PAGE_BYTES - slab_bytes < math.lcm(65_536, 3 * 1024)


def test_slab_of_a_small_arena_is_at_max_a_64th():
    assert choose_slab_bytes(1 * MIB, [64, 192]) == 16_320  # 85 * 192, below 16,384


def test_single_page_size_wastes_no_byte_at_slab_borders():
    slab_bytes = choose_slab_bytes(100_000, [33_280])

    assert slab_bytes == 33_280


def test_page_sizes_without_a_small_common_multiple_get_slabs_of_four_pages():
    assert choose_slab_bytes(64 * 1024, [64 * 31, 64 * 29]) == 4 * 64 * 31


@given(
    total_bytes=st.integers(1, 64 * MIB),
    units=st.lists(st.integers(1, 2_000), min_size=1, max_size=5),
)
def test_every_slab_holds_pages_of_every_class(total_bytes, units):
    page_bytes = [64 * unit for unit in units]

    slab_bytes = choose_slab_bytes(total_bytes, page_bytes)

    assert slab_bytes % 64 == 0
    for size in page_bytes:
        whole_pages = slab_bytes // size - (1 if slab_bytes % size else 0)
        assert whole_pages >= 1


def test_arena_below_one_slab_is_rejected_with_needed_and_given_bytes():
    with pytest.raises(ConfigError, match=r"memory of 65,536 B or more, got 60,000 B"):
        Arena(60_000, [65_536])


def test_arena_below_one_token_is_rejected_with_needed_and_given_bytes():
    group = LaneGroup(name="kv", page_class=plain_class(), layers=(0, 1, 2))  # 128 B pages

    with pytest.raises(
        ConfigError,
        match=r"256 B cannot hold one token .*: 384 B are needed; raise --kv-memory to 1KiB",
    ):
        KVMemory(CacheLayout((group,)), 256, 1)
    assert KVMemory(CacheLayout((group,)), 384, 1).total_bytes == 384


def test_arena_size_is_rounded_down_to_whole_slabs():
    arena = Arena(1000, [128])

    assert (arena.num_slabs, arena.total_bytes) == (7, 896)


def test_check_detects_a_slab_freed_twice():
    arena = Arena(1024, [128])
    slab = arena.allocate_slab()
    arena.free_slab(slab)
    arena.free_slab(slab)

    with pytest.raises(InvariantError, match="twice"):
        arena.check()
