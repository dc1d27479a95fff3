"""The KV memory of an engine: what is refused before it is taken, and what taking it costs."""

import psutil
import pytest
import torch

import engines
from quire.engine.pool import build_pool
from quire.engine.schedule_config import ScheduleConfig
from quire.errors import ConfigError
from quire.kv.config import KVConfig
from quire.kv.store import PageStore

GIB = 2**30


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("asked", ["4000000GiB", psutil.virtual_memory().total + GIB])
def test_more_memory_than_is_free_is_refused_before_any_is_taken(model, asked):
    before = resident_bytes()
    with pytest.raises(ConfigError, match=r"more than the [\d,]+ B that are free on cpu; lower"):
        build_pool(model, KVConfig(memory=asked), ScheduleConfig())
    assert resident_bytes() - before < GIB // 16


def test_an_arena_starts_as_zeros_and_takes_memory_only_where_it_is_written():
    before = resident_bytes()
    store = PageStore(GIB, torch.device("cpu"))
    store.arena[-64:] = 1
    assert resident_bytes() - before < GIB // 16
    assert not store.arena[:4096].any()
    assert store.arena[-64:].sum() == 64


def test_pages_of_an_arena_are_aligned():
    assert all(PageStore(n, torch.device("cpu")).arena.data_ptr() % 64 == 0 for n in (64, 2**16))


def test_auto_leaves_a_tenth_of_what_is_free(model):
    free_bytes = psutil.virtual_memory().available
    total_bytes = build_pool(model, KVConfig(), ScheduleConfig()).kv.memory.total_bytes
    assert 0 < total_bytes < 0.95 * free_bytes
