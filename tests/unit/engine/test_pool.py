"""The KV memory of an engine: sizes rejected before allocation, and the cost of allocation."""

import mmap

import psutil
import pytest
import torch

import quire.engine.kv_memory
import quire.engine.pool
import quire.plan.machine
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.engine.pool import build_pool
from quire.errors import ConfigError, UnsoundCombination
from quire.kv.store import PageStore
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines
from support.pairwise import every_pair

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("requested", ["4000000GiB", psutil.virtual_memory().total + GIB])
def test_kv_memory_above_free_memory_is_rejected_before_allocation(model, requested):
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"exceeds the [\d,]+ B that are free on cpu; lower"):
        build_pool(model, KVConfig(memory=requested), ScheduleConfig())
    assert resident_bytes() - before < GIB // 16


@pytest.mark.parametrize(("free", "measured"), [(GIB, 0), (MIB, 1)])
def test_automatic_memory_for_few_requests_measures_no_activations(
    model, free, measured, monkeypatch
):
    peaks = []
    monkeypatch.setattr(quire.engine.kv_memory, "free_device_bytes", lambda device: free)
    monkeypatch.setattr(
        quire.engine.kv_memory, "measure_activation_peak", lambda *_: peaks.append(0) or 0
    )

    pool = build_pool(model, KVConfig(swap_space=0), ScheduleConfig(max_num_seqs=1))

    assert len(peaks) == measured
    assert pool.kv.memory.total_bytes <= 2 * MIB  # one sequence of the model's context


@pytest.mark.parametrize("requested", ["4000000GiB", psutil.virtual_memory().total + GIB])
def test_swap_space_above_machine_memory_is_rejected_before_allocation(model, requested):
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"of at most .* this machine .* lower --swap-space"):
        build_pool(model, KVConfig(memory="1MiB", swap_space=requested), ScheduleConfig())
    assert resident_bytes() - before < GIB // 16


@pytest.mark.parametrize("preempt", ["auto", "swap"])
def test_swap_space_below_one_page_is_rejected(model, preempt):
    config = KVConfig(memory="1MiB", swap_space=10)

    with pytest.raises(ConfigError, match=r"expected a host pool of .* got 10 B.*--swap-space"):
        build_pool(model, config, ScheduleConfig(preempt=preempt))


@pytest.mark.parametrize(
    ("host", "schedule", "message"),
    [
        ("1MiB", {"preempt": "recompute"}, "--preempt recompute swaps no requests: use"),
        (0, {"batcher": "baton_pd:hold=host"}, "set --swap-space SIZE, or use hold=device"),
        (0, {"batcher": "baton_pd_best_fit:hold=host"}, "set --swap-space SIZE"),
    ],
)
def test_unused_or_missing_swap_space_is_rejected(model, host, schedule, message):
    config = KVConfig(memory="1MiB", swap_space=host)

    with pytest.raises(ConfigError, match=message):
        build_pool(model, config, ScheduleConfig(**schedule))


@pytest.mark.parametrize("schedule", [{"scale_down_at": 0.8}, {"batcher": "baton_pd:hold=host"}])
def test_swap_space_is_accepted_for_scale_down_or_hold_on_host_without_swaps(model, schedule):
    config = KVConfig(memory="1MiB", swap_space="1MiB")

    assert build_pool(model, config, ScheduleConfig(preempt="recompute", **schedule)).host


def test_swap_space_above_container_memory_is_rejected(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: 3 * MIB)

    with pytest.raises(ConfigError, match=r"at most 3,145,728 B .CPU memory that is free"):
        build_pool(model, KVConfig(memory="1MiB", swap_space="4MiB"), ScheduleConfig())


def test_on_a_cpu_arena_and_swap_space_share_free_memory(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: 3 * MIB)

    with pytest.raises(ConfigError, match=r"KV memory of 2,097,152 B exceeds the 1,048,576 B"):
        build_pool(model, KVConfig(memory="2MiB", swap_space="2MiB"), ScheduleConfig())
    pool = build_pool(model, KVConfig(memory="1MiB", swap_space="2MiB"), ScheduleConfig())
    assert pool.host.total_bytes == 2 * MIB


def test_swap_space_uses_physical_memory_only_for_written_pages(model):
    before = resident_bytes()
    pool = build_pool(model, KVConfig(memory="1MiB", swap_space="1GiB"), ScheduleConfig())

    assert pool.host.free_bytes == GIB
    assert resident_bytes() - before < GIB // 16


def test_pool_has_no_host_pool_without_swap_space(model):
    pool = build_pool(model, KVConfig(memory="1MiB", swap_space=0), ScheduleConfig())

    assert pool.host is None
    assert "(KV of " in pool.explanation
    assert "no swap space" in pool.explanation


@pytest.mark.parametrize(
    ("free_bytes", "schedule", "swap_bytes"),
    [
        (100 * MIB, {}, MIB),  # as large as the KV memory
        (5 * MIB, {}, MIB // 2),  # an eighth of what the KV memory leaves
        (MIB, {}, None),  # nothing is left
        (100 * MIB, {"preempt": "recompute"}, None),
        (100 * MIB, {"preempt": "recompute", "scale_down_at": 0.5}, MIB),
        (100 * MIB, {"batcher": "baton_pd:hold=host"}, MIB),
    ],
)
def test_default_swap_space(model, monkeypatch, free_bytes, schedule, swap_bytes):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: free_bytes)

    pool = build_pool(model, KVConfig(memory="1MiB"), ScheduleConfig(**schedule))

    assert (None if pool.host is None else pool.host.total_bytes) == swap_bytes
    if swap_bytes:
        assert f"swap space: {swap_bytes:,} B" in pool.explanation


def test_missing_memory_for_a_batcher_that_swaps_is_rejected(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: MIB)

    with pytest.raises(UnsoundCombination, match="set --swap-space SIZE"):
        build_pool(model, KVConfig(memory="1MiB"), ScheduleConfig(batcher="baton_pd:hold=host"))


def test_default_swap_space_that_cannot_be_pinned_is_left_out(model, monkeypatch):
    def refuse(*args):
        raise ConfigError("the system cannot pin")

    monkeypatch.setattr("quire.offload.host_side.host_copies", refuse)

    assert build_pool(model, KVConfig(memory="1MiB"), ScheduleConfig()).host is None
    with pytest.raises(ConfigError, match="cannot pin"):
        build_pool(model, KVConfig(memory="1MiB", swap_space="1MiB"), ScheduleConfig())


@pytest.mark.parametrize("requested", ["-1", "much", -1])
def test_swap_space_that_is_no_size_is_rejected(model, requested):
    with pytest.raises(ConfigError, match="is not a size"):
        build_pool(model, KVConfig(memory="1MiB", swap_space=requested), ScheduleConfig())


def test_arena_is_zero_and_uses_physical_memory_only_for_written_pages():
    before = resident_bytes()
    store = PageStore(GIB, torch.device("cpu"))
    store.arena[-64:] = 1
    assert resident_bytes() - before < GIB // 16
    assert not store.arena[:4096].any()
    assert store.arena[-64:].sum() == 64


def test_arena_is_aligned():
    assert all(PageStore(n, torch.device("cpu")).arena.data_ptr() % 64 == 0 for n in (64, 2**16))


@pytest.mark.parametrize("total_bytes", [64, 2 * MIB - 64, 3 * MIB, 10 * MIB + 64])
def test_full_arena_uses_at_max_its_size(total_bytes):
    """Huge pages end before the arena does; a machine without them uses small pages."""
    store = PageStore(total_bytes, torch.device("cpu"))
    before = resident_bytes()
    store.arena.fill_(1)

    assert store.arena.numel() == total_bytes
    assert resident_bytes() - before <= total_bytes + MIB // 4


def test_large_arena_is_aligned_to_huge_pages():
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("no huge pages on this platform")

    assert PageStore(10 * MIB, torch.device("cpu")).arena.data_ptr() % (2 * MIB) == 0


@pytest.mark.parametrize("held", ["store", "views"])
def test_arena_is_freed_with_its_last_view(held):
    store = PageStore(64 * MIB, torch.device("cpu"))
    view = store.arena[:1024]
    store.arena.fill_(1)
    full = resident_bytes()
    del store
    if held == "views":
        assert int(view.sum()) == 1024
        assert resident_bytes() > full - MIB
    del view

    assert resident_bytes() < full - 60 * MIB


def test_arena_works_without_huge_pages(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    arena = PageStore(4 * MIB, torch.device("cpu")).arena

    assert not arena.any()
    assert arena.data_ptr() % 64 == 0


def test_auto_size_leaves_a_fraction_of_free_memory(model):
    free_bytes = psutil.virtual_memory().available
    total_bytes = build_pool(model, KVConfig(), ScheduleConfig()).kv.memory.total_bytes
    assert 0 < total_bytes < 0.95 * free_bytes


def test_auto_size_is_limited_by_container_memory(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: 256 * MIB)
    pool = build_pool(
        model, KVConfig(), ScheduleConfig(max_num_seqs=4096, max_num_batched_tokens=64)
    )

    assert 0 < pool.kv.memory.total_bytes < 0.95 * 256 * MIB
    with pytest.raises(ConfigError, match="268,435,456 B that are free"):
        build_pool(model, KVConfig(memory="257MiB"), ScheduleConfig())


def test_auto_size_in_a_full_container_is_rejected(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: -5)

    with pytest.raises(ConfigError, match=r"no memory is left for KV|of which 0 B are free"):
        build_pool(model, KVConfig(), ScheduleConfig(max_num_batched_tokens=64))


@every_pair(name=["llama", "mistral"], evict=["full", "recent:cap=16,every=4"], page_tokens=[3, 16])
def test_auto_size_is_the_peak_of_all_requests(name, evict, page_tokens):
    model, schedule = engines.load(name), ScheduleConfig(max_num_seqs=3, max_num_batched_tokens=64)
    if evict != "full" and all(layer.window for layer in model.spec.layers):
        pytest.skip("every layer has a window already")
    engine = Engine(model, KVConfig(evict=evict, page_tokens=page_tokens), schedule)
    memory, admission = engine.pool.kv.memory, engine.scheduler.peaks
    need = Need(model.spec.max_positions, eviction=engine.pool.eviction.spec)
    pages = admission.peak_pages(need)
    slabs = [-(-3 * n // memory.pools[c].pages_per_slab) for c, n in pages.items()]

    assert sum(slabs) <= memory.arena.num_slabs
    assert memory.total_bytes <= 3 * admission.peak_bytes(need) + 4 * MIB
