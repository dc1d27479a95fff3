import mmap
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

import quire.engine.kv_memory
import quire.engine.pool
import quire.plan.machine
from benchmarks.common.models import SHAPES, random_model
from quire import LLM, KVConfig, ScheduleConfig
from quire.engine import kv_memory
from quire.engine.core import Engine
from quire.engine.kv_memory import measure_activation_peak
from quire.engine.pool import build_pool
from quire.errors import ConfigError, UnsoundCombination
from quire.kv.store import PageStore
from quire.kv.tables import LaneTable, refuse_too_many_rows, table_bytes
from quire.layout.layout import layout_for
from quire.sampling.device_sampling import (
    SCRATCH_BYTES,
    SCRATCH_BYTES_OF_TOKEN,
    sampling_scratch_bytes,
)
from quire.scheduler.peaks import Need
from support import engines
from support.kv_options import kv_config
from support.pairwise import every_pair

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("requested", ["4000000GiB", psutil.virtual_memory().total + GIB])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("memory", r"exceeds the [\d,]+ B that are free on cpu; lower"),
        ("swap_space", r"of at most .* this machine .* lower --swap-space"),
    ],
)
def test_memory_above_free_memory_is_rejected_before_allocation(model, option, message, requested):
    before = resident_bytes()
    with pytest.raises(ConfigError, match=message):
        build_pool(model, KVConfig(**{"memory": "1MiB", option: requested}), ScheduleConfig())
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


@pytest.mark.parametrize(
    ("host", "schedule", "message"),
    [
        ("1MiB", {"preempt": "recompute"}, "--preempt recompute swaps no requests: use"),
        (0, {"batcher": "baton_pd:hold=host"}, "set --swap-space SIZE, or use hold=device"),
        (0, {"batcher": "baton_pd_best_fit:hold=host"}, "set --swap-space SIZE"),
        (10, {"preempt": "auto"}, r"expected a host pool of .* got 10 B.*--swap-space"),
        (10, {"preempt": "swap"}, r"expected a host pool of .* got 10 B.*--swap-space"),
        *((size, {}, "is not a size") for size in ("-1", "much", -1)),
    ],
)
def test_unused_missing_or_impossible_swap_space_is_rejected(model, host, schedule, message):
    with pytest.raises(ConfigError, match=message):
        build_pool(model, KVConfig(memory="1MiB", swap_space=host), ScheduleConfig(**schedule))


@pytest.mark.parametrize("schedule", [{"scale_down_at": 0.8}, {"batcher": "baton_pd:hold=host"}])
def test_swap_space_is_accepted_for_scale_down_or_hold_on_host_without_swaps(model, schedule):
    config = KVConfig(memory="1MiB", swap_space="1MiB")
    assert build_pool(model, config, ScheduleConfig(preempt="recompute", **schedule)).host


def test_on_a_cpu_arena_and_swap_space_share_the_memory_of_a_container(model, monkeypatch):
    def pool(memory, swap_space):
        return build_pool(model, KVConfig(memory=memory, swap_space=swap_space), ScheduleConfig())

    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: 3 * MIB)
    with pytest.raises(ConfigError, match=r"at most 3,145,728 B .CPU memory that is free"):
        pool("1MiB", "4MiB")
    with pytest.raises(ConfigError, match=r"KV memory of 2,097,152 B exceeds the 1,048,576 B"):
        pool("2MiB", "2MiB")
    assert pool("1MiB", "2MiB").host.total_bytes == 2 * MIB
    without = pool("1MiB", 0)
    assert without.host is None
    assert "(KV of " in without.explanation
    assert "no swap space" in without.explanation


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
    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: MIB)
    with pytest.raises(UnsoundCombination, match="set --swap-space SIZE"):
        build_pool(model, KVConfig(memory="1MiB"), ScheduleConfig(batcher="baton_pd:hold=host"))


def test_default_swap_space_that_cannot_be_pinned_is_left_out(model, monkeypatch):
    refuse = Mock(side_effect=ConfigError("the system cannot pin"))
    monkeypatch.setattr("quire.offload.host_side.host_copies", refuse)
    assert build_pool(model, KVConfig(memory="1MiB"), ScheduleConfig()).host is None
    with pytest.raises(ConfigError, match="cannot pin"):
        build_pool(model, KVConfig(memory="1MiB", swap_space="1MiB"), ScheduleConfig())


def test_arena_and_swap_space_use_physical_memory_only_for_written_pages(model):
    before = resident_bytes()
    store = PageStore(GIB, torch.device("cpu"))
    store.arena[-64:] = 1
    pool = build_pool(model, KVConfig(memory="1MiB", swap_space="1GiB"), ScheduleConfig())
    assert pool.host.free_bytes == GIB
    assert resident_bytes() - before < GIB // 16
    assert not store.arena[:4096].any()
    assert store.arena[-64:].sum() == 64


@pytest.mark.parametrize("total_bytes", [64, 2 * MIB - 64, 3 * MIB, 10 * MIB + 64])
def test_full_arena_uses_at_max_its_size(total_bytes):
    """Huge pages end before the arena does; a machine without them uses small pages."""
    store = PageStore(total_bytes, torch.device("cpu"))
    before = resident_bytes()
    store.arena.fill_(1)
    assert store.arena.numel() == total_bytes
    assert resident_bytes() - before <= total_bytes + MIB // 4


def test_arena_is_aligned(monkeypatch):
    def address(num_bytes):
        arena = PageStore(num_bytes, torch.device("cpu")).arena
        assert not arena.any()
        return arena.data_ptr()

    assert all(address(num_bytes) % 64 == 0 for num_bytes in (64, 2**16))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert address(10 * MIB) % (2 * MIB) == 0
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert address(4 * MIB) % 64 == 0


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


def test_auto_size_is_limited_by_free_and_container_memory(model, monkeypatch):
    free_bytes = psutil.virtual_memory().available
    total_bytes = build_pool(model, KVConfig(), ScheduleConfig()).kv.memory.total_bytes
    assert 0 < total_bytes < 0.95 * free_bytes

    monkeypatch.setattr(quire.plan.machine, "container_free_bytes", lambda: 256 * MIB)
    schedule = ScheduleConfig(max_num_seqs=4096, max_num_batched_tokens=64)
    pool = build_pool(model, KVConfig(), schedule)
    assert 0 < pool.kv.memory.total_bytes < 0.95 * 256 * MIB
    with pytest.raises(ConfigError, match="268,435,456 B that are free"):
        build_pool(model, KVConfig(memory="257MiB"), ScheduleConfig())

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


def test_activations_on_a_device_include_the_bounded_scratch_memory_of_sampling(monkeypatch):
    few, many = (sampling_scratch_bytes(rows, 128_256) for rows in (2, 1_000))
    assert few == 2 * 128_256 * SCRATCH_BYTES_OF_TOKEN
    assert SCRATCH_BYTES - 128_256 * SCRATCH_BYTES_OF_TOKEN < many <= SCRATCH_BYTES
    one_row = SCRATCH_BYTES * SCRATCH_BYTES_OF_TOKEN
    assert sampling_scratch_bytes(4, SCRATCH_BYTES) == one_row  # of a huge vocabulary

    decoder, step_bytes = random_model(SHAPES["tiny"](), dtype=torch.float32).decoder, 5_000
    monkeypatch.setattr(decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(kv_memory, "run_largest_step", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1_000 + step_bytes)
    schedule = ScheduleConfig(max_num_seqs=3)

    found = measure_activation_peak(decoder, schedule)

    scratch_bytes = schedule.num_rows * decoder.spec.vocab_size * SCRATCH_BYTES_OF_TOKEN
    assert found == step_bytes + scratch_bytes
    assert measure_activation_peak(decoder, schedule, 2) == step_bytes + 2 * scratch_bytes


@pytest.mark.parametrize(
    ("kv", "schedule", "message"),
    [
        ({"scratch": "0"}, {}, "--scratch above 0, got 0: .* give a size such as 1MiB"),
        ({"constants": "/nonexistent"}, {}, "--kv-constants /nonexistent has no effect: .*'none'"),
        ({"constants": "/tmp", "codec": "int8"}, {}, "--kv-constants /tmp has no effect: .*'int8'"),
        ({"constants": "/nonexistent", "codec": "int8_channel"}, {}, "there is no /nonexistent/"),
        ({"state_checkpoint_interval": 16}, {}, "-interval has no effect: the model has no rec"),
        ({"state_checkpoint_memory": 1}, {}, "-checkpoint-memory has no effect: the model has no"),
        ({"codec": "int8+states=int8"}, {}, "states=int8 has no effect: the model has no r"),
        ({}, {"max_num_seqs": 10**11}, r"page tables of 100,000,000,000 .* lower --max-num-seqs"),
    ],
)
def test_option_without_effect_is_rejected(model, kv, schedule, message):
    with pytest.raises(ConfigError, match=message):
        LLM(model, kv=kv_config(memory="256KiB", **kv), schedule=ScheduleConfig(**schedule))
    accepted = LLM(model, kv=KVConfig(memory="256KiB", scratch=1))
    assert accepted.generate([[3, 4]], engines.greedy(2))[0].token_ids


def test_page_table_bytes_are_checked_before_allocation(model, monkeypatch):
    layout = layout_for(model.spec, codec="float32", page_tokens=16)
    for group in layout.groups:
        arrays = [a for a in vars(LaneTable(group, 7)).values() if isinstance(a, np.ndarray)]
        assert sum(array.nbytes for array in arrays) == table_bytes(group, 7)
    monkeypatch.setattr("quire.kv.tables.free_host_bytes", lambda: 1 << 20)

    refuse_too_many_rows(layout.groups, 100)
    with pytest.raises(ConfigError, match=r"of which 1\.00 MiB are free; lower --max-num-seqs"):
        refuse_too_many_rows(layout.groups, 100_000)
