"""The host pool of swapped pages, their copies, and what waits for copies next to steps."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, HostMemoryFull, InvariantError
from quire.kv.memory import KVMemory
from quire.kv.pages import CopyFences
from quire.kv.shared_arena import SharedArena
from quire.kv.sharing import fork
from quire.kv.store import PageStore
from quire.kv.swap import swap_in, swap_out
from quire.layout.pages import CacheLayout, LaneGroup
from quire.offload.host_side import swap_pool, swap_worker
from quire.offload.swap import host_store
from quire.offload.swap.host_pool import HostPool, NoCopies
from quire.offload.swap.host_store import DirectCopies, StagedCopies, batches_of, host_copies
from quire.offload.swap.transfer import StreamedCopies
from support.host_array import CopyFailed, HostArray
from support.lazy_copies import LazyWorker
from support.small_memory import grow, keys, one_group, plain_class, started, with_groups

HOST_BYTES = 16 * 1024


def opened(**options):
    """A memory, its swap space, and the worker that runs the swap copies late."""
    memory, worker = one_group(**options), LazyWorker()
    host = HostArray(memory.store, HOST_BYTES)
    pool = HostPool(HOST_BYTES, StreamedCopies(host, worker, memory.arena.fences))
    return memory, pool, worker


def row_bytes(memory, row):
    table = memory.tables["kv"]
    return memory.store.read_pages(table.group.page_class, table.row_pages(row)).tobytes()


def test_computation_waits_for_pages_in_use_only_and_swap_out_for_none():
    memory, pool, worker = opened()
    row = started(memory, 10)

    swap_out(memory, [row], pool)

    assert (worker.num_run, worker.num_waiting) == (0, 1)
    assert memory.used_bytes == 0
    memory.check()

    memory, pool, worker = opened(total_bytes=64 * 1024)
    rows = [started(memory, 400), started(memory, 12)]  # the pages of a slab are allocated in order
    swap_out(memory, [rows[1]], pool)
    fences = memory.arena.fences

    used = memory.tables["kv"].row_pages(rows[0])
    fences.before_use(used, memory.tables["kv"].group.page_class.page_bytes)

    assert (len(fences), worker.num_waiting) == (1, 1)

    memory, pool, worker = opened()
    row = started(memory, 10)
    other = fork(memory, row)

    swapped = swap_out(memory, [row], pool)

    assert worker.num_waiting == 0  # the fork can write its last page now
    grow(memory, other, 1)
    assert swap_in(memory, swapped)
    memory.check()


class FailsToStart(LazyWorker):
    """A worker that cannot start copies while `fails`."""

    fails = False

    def submit(self, copy, num_bytes):
        if self.fails and num_bytes:
            raise CopyFailed
        return super().submit(copy, num_bytes)


@pytest.mark.parametrize("direction", ["out", "in"])
def test_failed_start_of_a_copy_frees_its_space(direction):
    memory, worker = one_group(), FailsToStart()
    host = HostArray(memory.store, HOST_BYTES)
    pool = HostPool(HOST_BYTES, StreamedCopies(host, worker, memory.arena.fences))
    row = started(memory, 10)
    before = row_bytes(memory, row)
    swapped = swap_out(memory, [row], pool) if direction == "in" else None
    used = memory.used_bytes, pool.used_bytes

    worker.fails = True
    with pytest.raises(CopyFailed):
        swap_out(memory, [row], pool) if swapped is None else swap_in(memory, swapped)
    worker.fails = False

    assert (memory.used_bytes, pool.used_bytes) == used
    assert worker.num_waiting == 0  # parts of a failed copy do not write pages later
    rows = [row] if swapped is None else swap_in(memory, swapped)
    assert row_bytes(memory, rows[0]) == before
    memory.check()


def test_copies_are_timed_once_they_have_ended():
    memory, pool, worker = opened()
    row = started(memory, 10)
    swapped = swap_out(memory, [row], pool)
    assert pool.timed_copies() == []

    worker.run_until(0)
    [out] = pool.timed_copies()
    swap_in(memory, swapped)
    [back] = pool.timed_copies()

    assert (out.back, out.num_bytes) == (False, swapped.num_bytes)
    assert (back.back, back.num_bytes) == (True, swapped.num_bytes)
    assert min(out.seconds, back.seconds) > 0
    assert pool.timed_copies() == []


def test_a_cpu_has_copies_that_block():
    cpu = torch.device("cpu")
    group = LaneGroup(name="kv", page_class=plain_class(), layers=(0,))
    memory = KVMemory(CacheLayout((group,)), 1 << 14, 1, store=partial(PageStore, device=cpu))

    assert swap_worker(cpu) is None
    assert HostPool(256).timed_copies() is None  # they are timed by the caller
    arena = SharedArena(64 * 1024)
    first, second = (arena.join(name, 1024, None, (256,)) for name in "ab")
    assert first.fences is second.fences
    assert isinstance(swap_pool(memory, 1 << 12, None).copies, DirectCopies)
    assert isinstance(swap_pool(memory, 1 << 12, LazyWorker()).copies, StreamedCopies)


def add_copy(fences, page, worker):
    fences.add(np.array([page], dtype=np.int32), 64, worker.submit(lambda: None, 64))


def test_fences_cover_pages_of_other_sizes_and_streams_and_end_with_their_copies():
    fences, worker = CopyFences(), LazyWorker()
    add_copy(fences, 3, worker)

    for page in (2, 4):  # adjacent bytes
        fences.before_use(np.array([page], dtype=np.int32), 64)
    assert worker.num_waiting == 1
    fences.before_use(np.array([0, 2], dtype=np.int32), 96)  # bytes 0-95 and 192-287
    assert worker.num_waiting == 0
    assert len(fences) == 0

    fences, worker = CopyFences(), LazyWorker()
    for page in range(3):
        add_copy(fences, page, worker)
    worker.run_until(1)

    add_copy(fences, 9, worker)

    assert len(fences) == 2
    worker.run_until(worker.num_run + worker.num_waiting - 1)
    fences.before_use(np.array([50], dtype=np.int32), 64)  # at the next use of pages, too
    assert len(fences) == 0

    fences, first, second = CopyFences(), LazyWorker(), LazyWorker()
    for page, worker in enumerate((first, second)):
        add_copy(fences, page, worker)

    fences.before_use(np.array([1], dtype=np.int32), 64)
    assert (first.num_waiting, second.num_waiting) == (1, 0)
    fences.before_use(np.array([0], dtype=np.int32), 64)

    assert first.num_waiting == 0


@pytest.mark.parametrize("failed", [False, True])
def test_copies_have_ended_when_their_host_memory_is_freed(failed):
    """A swap that failed between two of its copies did not wait for the first one."""
    memory, worker = one_group(), LazyWorker()
    copies = StreamedCopies(NoCopies(), worker, memory.arena.fences)
    if failed:
        [page_class] = memory.pools
        copies.save(page_class, np.arange(2, dtype=np.int32), 0)
    else:
        swap_out(memory, [started(memory, 10)], HostPool(HOST_BYTES, copies))
    worker.queued[:] = [lambda: None]  # the copies refer to their owner
    assert worker.num_waiting == 1

    del copies
    gc.collect()

    assert worker.num_waiting == 0


PAGE_BYTES = 128


def pooled(memory, total_bytes=64 * PAGE_BYTES):
    host = HostArray(memory.store, total_bytes)
    return HostPool(total_bytes, host), host


def test_extents_are_contiguous_by_layer_or_split_over_the_largest_holes():
    memory = one_group(num_lanes=2)
    row = started(memory, 4)
    other = started(memory, 4)
    for _ in range(2):  # pages of both rows and both lanes alternate
        grow(memory, row, 4)
        grow(memory, other, 4)
    pool, host = pooled(memory)
    pages = memory.tables["kv"].row_pages(row)
    before = memory.store.pages_of(memory.layout.page_classes[0])[pages].tobytes()

    swapped = swap_out(memory, [row], pool)

    assert host.copy_sizes == [6 * PAGE_BYTES]
    assert host.bytes[: 6 * PAGE_BYTES].tobytes() == before
    assert swapped.stored.space.num_extents == 1

    sums = LaneGroup(name="sums", page_class=plain_class(value=False), layers=(0,), private=True)
    memory = with_groups(LaneGroup(name="kv", page_class=plain_class(), layers=(0,)), sums)
    pool, host = pooled(memory)

    swap_out(memory, [started(memory, 8)], pool)

    assert host.copy_sizes == [2 * 128, 2 * 64]
    assert (pool.used_bytes, pool.peak_bytes) == (384, 384)

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


def test_swap_out_to_a_full_pool_raises_keeps_the_sequence_and_starts_no_copy():
    memory = one_group()
    pool, _ = pooled(memory, 3 * PAGE_BYTES)
    row = started(memory, 13)

    with pytest.raises(HostMemoryFull, match=r"512 B are to be swapped out, and 384 of 384 B.*r"):
        swap_out(memory, [row], pool)
    with pytest.raises(HostMemoryFull, match="0 of 0 B"):
        swap_out(memory, [row], HostPool(0))

    assert keys(memory, row) == list(range(13))
    assert (pool.used_bytes, pool.peak_bytes) == (0, 0)
    HostPool(0).check()
    assert HostPool(1000).total_bytes == 960  # rounded down to page alignment

    memory, worker = one_group(), LazyWorker()
    pool = HostPool(256, StreamedCopies(HostArray(memory.store, 256), worker, memory.arena.fences))
    row = started(memory, 40)

    with pytest.raises(HostMemoryFull):
        swap_out(memory, [row], pool)

    assert (worker.queued, len(memory.arena.fences)) == ([], 0)


def test_discarded_sequence_frees_its_bytes_once():
    memory = one_group()
    pool, _ = pooled(memory)
    swapped = swap_out(memory, [started(memory, 10)], pool)

    swapped.discard()

    assert (pool.used_bytes, pool.peak_bytes) == (0, 3 * PAGE_BYTES)
    with pytest.raises(InvariantError, match="is free already"):
        swapped.discard()
    for tokens in (4, 9):
        swap_out(memory, [started(memory, tokens)], pool)
    pool.clear()
    assert (pool.used_bytes, pool.spaces) == (0, ())
    pool.check()


# ---- copies of pages -----------------------------------------------------------------------------


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


def bytes_of_row(memory, row):
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
    before = [bytes_of_row(memory, row) for row in rows]

    swapped = swap_out(memory, rows, pool)
    memory.store.arena.fill_(0x5A)  # all restored bytes come from CPU memory
    restored = swap_in(memory, swapped)

    assert [bytes_of_row(memory, row) for row in restored] == before
    assert (pool.used_bytes, pool.peak_bytes) == (0, swapped.num_bytes)
    memory.check()


def test_batches_are_counted_and_packed_in_separate_memory():
    memory, pool, rows = filled(CPU, staged_in_tiny_batches)
    num_bytes = memory.row_bytes(rows[0])
    swap_out(memory, [rows[0]], pool)
    assert pool.copies.num_bytes == num_bytes
    assert pool.copies.num_batches >= num_bytes / LARGE.page_bytes

    # A prefetch on its own stream may be in flight while the compute stream saves pages
    stream = [7]
    memory, pool, rows = filled(
        CPU, lambda store: StagedCopies(store, HOST, 1 << 12, stream_of=lambda _: stream[0])
    )
    before = bytes_of_row(memory, rows[0])

    swapped = swap_out(memory, [rows[0]], pool)
    stream[0] = 9
    [row] = swap_in(memory, swapped)

    assert bytes_of_row(memory, row) == before
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
    before = bytes_of_row(memory, row)

    swapped = swap_out(memory, [row], pool)
    memory.store.arena.fill_(0x5A)  # all restored bytes come from CPU memory
    [row] = swap_in(memory, swapped)

    assert copies.host.is_pinned()
    assert copies.num_bytes / copies.num_batches >= 1 << 20
    assert copies.num_bytes == 2 * swapped.num_bytes
    assert bytes_of_row(memory, row) == before
