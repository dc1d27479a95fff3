"""Copies of pages between an arena and CPU memory: direct, packed in batches, and on a device."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.kv.swap import swap_in, swap_out
from quire.layout.pages import CacheLayout, LaneGroup
from quire.offload.swap import host_store
from quire.offload.swap.host_pool import HostPool
from quire.offload.swap.host_store import StagedCopies, batches_of, host_copies
from support.small_memory import grow, plain_class

SMALL, LARGE = plain_class(), plain_class(tokens=8, heads=2, head_dim=16, positions=True)
LAYOUT = CacheLayout(
    (
        LaneGroup(name="small", page_class=SMALL, layers=(0, 1)),
        LaneGroup(name="large", page_class=LARGE, layers=(2,)),
    )
)
CPU = torch.device("cpu")
HOST = torch.zeros(1 << 20, dtype=torch.uint8)


@given(st.integers(0, 5_000), st.integers(1, 5_000), st.integers(5_000, 100_000))
def test_batches_cover_all_pages_and_are_at_min_half_full(num_pages, page_bytes, staging_bytes):
    batches = list(batches_of(num_pages, page_bytes, staging_bytes))

    assert [first for first, _ in batches] == [0, *(end for _, end in batches)][: len(batches)]
    assert sum(end - first for first, end in batches) == num_pages
    assert all(0 < (end - first) * page_bytes <= staging_bytes for first, end in batches)
    if len(batches) > 1:
        half = staging_bytes // page_bytes // 2
        assert min(end - first for first, end in batches) >= half
    of_16_kib = list(batches_of(1_025, 16 << 10, host_store.STAGING_BYTES))
    assert of_16_kib == [(0, 512), (512, 1_025)]


def filled(device, copies, *, tokens=(37, 5, 64), total_bytes=1 << 20):
    """A memory of random bytes; rows grow token by token, so their pages alternate."""
    memory = KVMemory(LAYOUT, total_bytes, len(tokens), store=partial(PageStore, device=device))
    store = memory.store
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, store.arena.shape, dtype=torch.uint8, generator=generator)
    store.arena.copy_(noise)
    pool = HostPool(1 << 20, copies(store))
    rows = [memory.start() for _ in tokens]
    for position in range(max(tokens)):
        for row, count in zip(rows, tokens, strict=True):
            if position < count:
                grow(memory, row, 1)
    return memory, pool, rows


def row_bytes(memory, row):
    found = {}
    for name, table in memory.tables.items():
        pages = torch.from_numpy(table.row_pages(row).astype(np.int64))
        whole = memory.store.views(table.group.page_class).whole
        found[name] = whole.cpu()[pages].numpy().tobytes()
    return found


def direct(store):
    return host_copies(store, 1 << 20, LARGE.page_bytes)


def staged_in_tiny_batches(store):
    return StagedCopies(store, torch.zeros(1 << 20, dtype=torch.uint8), LARGE.page_bytes)


@pytest.mark.parametrize("copies", [direct, staged_in_tiny_batches])
def test_swap_restores_identical_bytes(copies):
    check_round_trip(CPU, copies)


def check_round_trip(device, copies):
    memory, pool, rows = filled(device, copies)
    before = [row_bytes(memory, row) for row in rows]

    swapped = swap_out(memory, rows, pool)
    memory.store.arena.fill_(0x5A)  # all restored bytes come from CPU memory
    restored = swap_in(memory, swapped)

    assert [row_bytes(memory, row) for row in restored] == before
    assert (pool.used_bytes, pool.peak_bytes) == (0, swapped.num_bytes)
    memory.check()


def test_copied_batches_are_counted():
    memory, pool, rows = filled(CPU, staged_in_tiny_batches)
    num_bytes = memory.row_bytes(rows[0])
    swap_out(memory, [rows[0]], pool)
    assert pool.copies.num_bytes == num_bytes
    assert pool.copies.num_batches >= num_bytes / LARGE.page_bytes


def test_streams_pack_their_batches_in_separate_memory():
    """A prefetch on its own stream may be in flight while the compute stream saves pages."""
    stream = [7]
    memory, pool, rows = filled(
        CPU, lambda store: StagedCopies(store, HOST, 1 << 12, stream_of=lambda _: stream[0])
    )
    before = row_bytes(memory, rows[0])

    swapped = swap_out(memory, [rows[0]], pool)
    stream[0] = 9
    [row] = swap_in(memory, swapped)

    assert row_bytes(memory, row) == before
    assert set(pool.copies.stagings) == {7, 9}
    first, second = pool.copies.stagings.values()
    assert first.data_ptr() != second.data_ptr()


def test_host_memory_is_pinned_until_its_holder_is_freed(monkeypatch):
    runtime = Runtime(code=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host = torch.zeros(256, dtype=torch.uint8)
    holder = StagedCopies(PageStore(1 << 16, CPU), host, 128)

    host_store.pin_memory(host, holder)
    assert runtime.pinned == {host.data_ptr(): 256}
    del holder
    assert runtime.pinned == {}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(code=2))
    with pytest.raises(ConfigError, match=r"256 B .* \(CUDA error 2\); lower --swap-space"):
        host_store.pin_memory(host, StagedCopies(PageStore(1 << 16, CPU), host, 128))


class Runtime:
    """A stand-in for the functions of the CUDA runtime that pin memory."""

    def __init__(self, code):
        self.code, self.pinned = code, {}

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        if not self.code:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.pinned[address]


@pytest.mark.gpu
def test_swap_restores_identical_bytes_from_pinned_memory():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check_round_trip(torch.device("cuda"), direct)


@pytest.mark.gpu
def test_device_copies_are_batches_of_a_mebibyte_or_more():
    """64 MiB of 16 KiB pages: four batches of the staging buffer in each direction."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    page_class = plain_class(tokens=16, heads=4, head_dim=64)
    layout = CacheLayout((LaneGroup(name="kv", page_class=page_class, layers=tuple(range(32))),))
    make_store = partial(PageStore, device=torch.device("cuda"))
    memory = KVMemory(layout, 256 << 20, 2, store=make_store)
    store = memory.store
    copies = host_copies(store, 64 << 20, page_class.page_bytes)
    pool = HostPool(64 << 20, copies)
    store.arena.copy_(torch.randint(0, 256, store.arena.shape, dtype=torch.uint8, device="cuda"))
    row = memory.start()
    grow(memory, row, 2048)
    before = row_bytes(memory, row)

    swapped = swap_out(memory, [row], pool)
    memory.store.arena.fill_(0x5A)  # all restored bytes come from CPU memory
    [row] = swap_in(memory, swapped)

    assert copies.host.is_pinned()
    assert copies.num_bytes / copies.num_batches >= 1 << 20
    assert copies.num_bytes == 2 * swapped.num_bytes
    assert row_bytes(memory, row) == before
