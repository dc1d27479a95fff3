"""The host pool: location of pages, refusals, and failing copies."""

import pytest

from quire.errors import HostMemoryFull, InvariantError
from quire.kv.swap import swap_in, swap_out
from quire.layout.pages import LaneGroup
from quire.offload.swap.host_pool import HostPool
from support.host_array import HostArray
from support.small_memory import (
    grow,
    keys,
    one_group,
    plain_class,
    started,
    with_groups,
)

PAGE_BYTES = 128


def pooled(memory, total_bytes=64 * PAGE_BYTES):
    host = HostArray(memory.store, total_bytes)
    return HostPool(total_bytes, host), host


def test_pages_of_a_layer_are_contiguous_in_the_pool():
    memory = one_group(num_lanes=2)
    row = started(memory, 4)
    other = started(memory, 4)
    for _ in range(2):  # pages of both rows and both lanes alternate
        grow(memory, row, 4)
        grow(memory, other, 4)
    pool, host = pooled(memory)
    before = [
        memory.store.pages_of(memory.layout.page_classes[0])[pages].tobytes()
        for pages in [memory.tables["kv"].row_pages(row)]
    ]

    swapped = swap_out(memory, [row], pool)

    assert host.copy_sizes == [6 * PAGE_BYTES]
    assert host.bytes[: 6 * PAGE_BYTES].tobytes() == before[0]
    assert swapped.stored.space.num_extents == 1


def test_each_page_class_has_a_separate_extent():
    sums = LaneGroup(name="sums", page_class=plain_class(value=False), layers=(0,), private=True)
    memory = with_groups(LaneGroup(name="kv", page_class=plain_class(), layers=(0,)), sums)
    pool, host = pooled(memory)

    swap_out(memory, [started(memory, 8)], pool)

    assert host.copy_sizes == [2 * 128, 2 * 64]
    assert (pool.used_bytes, pool.peak_bytes) == (384, 384)


def test_sequence_without_a_large_enough_hole_is_split_over_the_largest_holes():
    memory = one_group(max_rows=6)
    pool, host = pooled(memory, 10 * PAGE_BYTES)
    swapped_out = [swap_out(memory, [started(memory, 4 * n)], pool) for n in (2, 1, 3, 1, 2)]
    for index in (0, 2, 4):  # leaves holes of 2, 3 and 2 + 1 pages
        swapped_out[index].discard()
    host.copy_sizes.clear()

    swapped = swap_out(memory, [started(memory, 28)], pool)
    memory.store.poison_free(memory)
    [row] = swap_in(memory, swapped)

    assert host.copy_sizes == [3 * PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES] * 2
    assert keys(memory, row) == list(range(28))
    pool.check()


def test_swap_out_to_a_full_pool_raises_and_keeps_the_sequence():
    memory = one_group()
    pool, _ = pooled(memory, 3 * PAGE_BYTES)
    row = started(memory, 13)

    with pytest.raises(
        HostMemoryFull, match=r"512 B are to be swapped out, and 384 of 384 B.*raise --"
    ):
        swap_out(memory, [row], pool)

    assert keys(memory, row) == list(range(13))
    assert (pool.used_bytes, pool.peak_bytes) == (0, 0)


def test_discarded_sequence_frees_its_bytes_once():
    memory = one_group()
    pool, _ = pooled(memory)
    swapped = swap_out(memory, [started(memory, 10)], pool)

    swapped.discard()

    assert (pool.used_bytes, pool.peak_bytes) == (0, 3 * PAGE_BYTES)
    with pytest.raises(InvariantError, match="is free already"):
        swapped.discard()


def test_clear_frees_all_bytes():
    memory = one_group()
    pool, _ = pooled(memory)
    for tokens in (4, 9):
        swap_out(memory, [started(memory, tokens)], pool)

    pool.clear()

    assert (pool.used_bytes, pool.spaces) == (0, ())
    pool.check()


def test_pool_of_zero_bytes_is_always_full():
    with pytest.raises(HostMemoryFull, match="0 of 0 B"):
        swap_out(memory := one_group(), [started(memory, 1)], HostPool(0))
    HostPool(0).check()


def test_pool_size_is_rounded_down_to_page_alignment():
    assert HostPool(1000).total_bytes == 960
