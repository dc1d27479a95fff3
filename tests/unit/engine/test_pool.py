"""The KV memory of an engine: what is refused before it is taken, and what taking it costs."""

import mmap

import psutil
import pytest
import torch

import quire.engine.pool
import quire.plan.machine
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.engine.pool import build_pool
from quire.errors import ConfigError
from quire.kv.store import PageStore
from quire.scheduler.admission.need import Need
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("requested", ["4000000GiB", psutil.virtual_memory().total + GIB])
def test_more_memory_than_is_free_is_refused_before_any_is_taken(model, requested):
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"exceeds the [\d,]+ B that are free on cpu; lower"):
        build_pool(model, KVConfig(memory=requested), ScheduleConfig())
    assert resident_bytes() - before < GIB // 16


@pytest.mark.parametrize("requested", ["4000000GiB", psutil.virtual_memory().total + GIB])
def test_a_host_pool_larger_than_the_machine_is_refused_before_it_is_taken(model, requested):
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"of at most .* this machine .* lower --swap-space"):
        build_pool(model, KVConfig(memory="1MiB", swap_space=requested), ScheduleConfig())
    assert resident_bytes() - before < GIB // 16


@pytest.mark.parametrize("preempt", ["auto", "swap"])
def test_a_host_pool_that_holds_no_page_is_refused(model, preempt):
    config = KVConfig(memory="1MiB", swap_space=10)

    with pytest.raises(ConfigError, match=r"expected a host pool of .* got 10 B.*--swap-space"):
        build_pool(model, config, ScheduleConfig(preempt=preempt))


@pytest.mark.parametrize(
    ("host", "schedule", "says"),
    [
        ("1MiB", {"preempt": "recompute"}, "--preempt recompute swaps no requests: use"),
        (0, {"batcher": "baton_pd:hold=host"}, "set --swap-space SIZE, or use hold=device"),
        (0, {"batcher": "baton_pd_best_fit:hold=host"}, "set --swap-space SIZE"),
    ],
)
def test_a_host_pool_that_nothing_would_use_or_that_lacks_is_refused(model, host, schedule, says):
    config = KVConfig(memory="1MiB", swap_space=host)

    with pytest.raises(ConfigError, match=says):
        build_pool(model, config, ScheduleConfig(**schedule))


@pytest.mark.parametrize("schedule", [{"scale_down_at": 0.8}, {"batcher": "baton_pd:hold=host"}])
def test_without_swaps_a_host_pool_is_of_use_to_who_scales_down_or_holds_there(model, schedule):
    config = KVConfig(memory="1MiB", swap_space="1MiB")

    assert build_pool(model, config, ScheduleConfig(preempt="recompute", **schedule)).host


def test_a_host_pool_larger_than_the_container_is_refused(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: 3 * MIB)

    with pytest.raises(ConfigError, match=r"at most 3,145,728 B .CPU memory that is free"):
        build_pool(model, KVConfig(memory="1MiB", swap_space="4MiB"), ScheduleConfig())


def test_on_a_cpu_the_arena_and_the_host_pool_share_what_is_free(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: 3 * MIB)

    with pytest.raises(ConfigError, match=r"KV memory of 2,097,152 B exceeds the 1,048,576 B"):
        build_pool(model, KVConfig(memory="2MiB", swap_space="2MiB"), ScheduleConfig())
    pool = build_pool(model, KVConfig(memory="1MiB", swap_space="2MiB"), ScheduleConfig())
    assert pool.host.total_bytes == 2 * MIB


def test_a_host_pool_takes_memory_only_where_it_is_written(model):
    before = resident_bytes()
    pool = build_pool(model, KVConfig(memory="1MiB", swap_space="1GiB"), ScheduleConfig())

    assert pool.host.free_bytes == GIB
    assert resident_bytes() - before < GIB // 16


def test_without_host_memory_there_is_no_pool(model):
    assert build_pool(model, KVConfig(memory="1MiB"), ScheduleConfig()).host is None


@pytest.mark.parametrize("requested", ["-1", "much", -1])
def test_host_memory_is_a_size(model, requested):
    with pytest.raises(ConfigError, match="is not a size"):
        build_pool(model, KVConfig(memory="1MiB", swap_space=requested), ScheduleConfig())


def test_an_arena_starts_as_zeros_and_takes_memory_only_where_it_is_written():
    before = resident_bytes()
    store = PageStore(GIB, torch.device("cpu"))
    store.arena[-64:] = 1
    assert resident_bytes() - before < GIB // 16
    assert not store.arena[:4096].any()
    assert store.arena[-64:].sum() == 64


def test_pages_of_an_arena_are_aligned():
    assert all(PageStore(n, torch.device("cpu")).arena.data_ptr() % 64 == 0 for n in (64, 2**16))


@pytest.mark.parametrize("total_bytes", [64, 2 * MIB - 64, 3 * MIB, 10 * MIB + 64])
def test_a_full_arena_takes_no_more_than_its_size(total_bytes):
    """Huge pages end before the arena does; a machine without them takes small ones."""
    store = PageStore(total_bytes, torch.device("cpu"))
    before = resident_bytes()
    store.arena.fill_(1)

    assert store.arena.numel() == total_bytes
    assert resident_bytes() - before <= total_bytes + MIB // 4


def test_a_large_arena_lies_on_whole_huge_pages():
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("no huge pages on this platform")

    assert PageStore(10 * MIB, torch.device("cpu")).arena.data_ptr() % (2 * MIB) == 0


@pytest.mark.parametrize("held", ["store", "views"])
def test_an_arena_is_given_back_with_the_last_that_looks_at_it(held):
    store = PageStore(64 * MIB, torch.device("cpu"))
    part = store.arena[:1024]
    store.arena.fill_(1)
    full = resident_bytes()
    del store
    if held == "views":
        assert int(part.sum()) == 1024
        assert resident_bytes() > full - MIB
    del part

    assert resident_bytes() < full - 60 * MIB


def test_an_arena_needs_no_huge_pages(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    arena = PageStore(4 * MIB, torch.device("cpu")).arena

    assert not arena.any()
    assert arena.data_ptr() % 64 == 0


def test_auto_leaves_a_tenth_of_what_is_free(model):
    free_bytes = psutil.virtual_memory().available
    total_bytes = build_pool(model, KVConfig(), ScheduleConfig()).kv.memory.total_bytes
    assert 0 < total_bytes < 0.95 * free_bytes


def test_auto_leaves_what_a_container_does_not_give(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: 256 * MIB)
    pool = build_pool(
        model, KVConfig(), ScheduleConfig(max_num_seqs=4096, max_num_batched_tokens=64)
    )

    assert 0 < pool.kv.memory.total_bytes < 0.95 * 256 * MIB
    with pytest.raises(ConfigError, match="268,435,456 B that are free"):
        build_pool(model, KVConfig(memory="257MiB"), ScheduleConfig())


def test_a_container_that_is_full_already_leaves_nothing(model, monkeypatch):
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: -5)

    with pytest.raises(ConfigError, match=r"no memory is left for KV|of which 0 B are free"):
        build_pool(model, KVConfig(), ScheduleConfig(max_num_batched_tokens=64))


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("evict", ["full", "recent:cap=16,every=4"])
@pytest.mark.parametrize("page_tokens", [3, 16])
def test_auto_takes_what_all_requests_can_ever_use_and_no_more(name, evict, page_tokens):
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
