import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import quire.offload.tiers.host as host_module
from quire.config.store_url import parse_store_url
from quire.errors import ConfigError, StorageError, TierFull
from quire.offload.prefix_store.store import CircuitBreaker
from quire.offload.tiers.base import Tier
from quire.offload.tiers.file import FileTier
from quire.offload.tiers.host import HostTier
from quire.offload.tiers.redis_tier import RedisOptions, RedisTier
from support.redis_servers import start_redis

MIB = 1 << 20


def data_of(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def read(tier, key, num_bytes, first=0) -> bytes:
    into = bytearray(num_bytes)
    tier.read(key, memoryview(into), first)
    return bytes(into)


@pytest.fixture(scope="module")
def redis_url():
    server = start_redis()
    yield server.url
    server.close()


def make_tier(kind, folder, request):
    if kind == "redis":
        url = parse_store_url(request.getfixturevalue("redis_url"))
        opened = RedisTier(url, "n", RedisOptions(max_bytes=8 * MIB, ttl_s=60))
        for key in opened.names():  # of an earlier test
            opened.drop(key)
        return opened
    if kind == "host":
        return HostTier(8 * MIB)
    return FileTier(folder / "kv", 8 * MIB, direct=kind == "file")


@pytest.fixture(params=["host", "file", "file cached", "redis"])
def tier(request, tmp_path):
    opened = make_tier(request.param, tmp_path, request)
    yield opened
    if isinstance(opened, HostTier | FileTier):
        opened.check()
    opened.close()


def test_written_bytes_and_tensors_are_read_whole_and_in_ranges(tier):
    assert isinstance(tier, Tier)
    assert (tier.total_bytes, tier.used_bytes, tier.stored()) == (8 * MIB, 0, {})
    data = data_of(2 * MIB + 12_345)
    tier.write("a/0", data, {"tokens": 7, "codec": "int8"})
    tier.write("a/1", b"")

    assert read(tier, "a/0", len(data)) == data
    for first, count in ((0, 1), (MIB - 3, 7), (5, MIB), (2 * MIB, 12_345), (len(data), 0)):
        assert read(tier, "a/0", count, first) == data[first : first + count]
    assert read(tier, "a/1", 0) == b""
    stored = tier.stored()
    assert stored["a/0"].num_bytes == len(data)
    assert stored["a/0"].facts == {"tokens": 7, "codec": "int8"}
    assert set(stored) == {"a/0", "a/1"} == tier.names()

    tensor = torch.randn(300, 70)
    tier.write("x", memoryview(tensor.numpy()))
    restored = torch.empty_like(tensor)
    tier.read("x", memoryview(restored.numpy()))
    assert torch.equal(restored, tensor)


def test_second_write_replaces_drop_frees_and_too_large_reads_or_entries_are_refused(tier):
    tier.write("a", data_of(MIB, 1))
    tier.write("a", data_of(3 * MIB, 2))
    assert read(tier, "a", 3 * MIB) == data_of(3 * MIB, 2)

    tier.drop("a")
    tier.drop("a")

    assert tier.used_bytes == 0
    with pytest.raises(StorageError, match="nothing is stored under 'a'"):
        read(tier, "a", 1)

    tier.write("a", data_of(100))
    for first, count in ((0, 101), (50, 51), (101, 0)):
        with pytest.raises(StorageError, match="100 B"):
            read(tier, "a", count, first)
    with pytest.raises(TierFull, match="'b' needs"):
        tier.write("b", data_of(9 * MIB))
    assert tier.names() == {"a"}


def test_full_tier_names_what_to_drop_or_evicts_by_itself(tier):
    tier.write("a", data_of(3 * MIB))
    tier.write("b", data_of(3 * MIB, 1))
    read(tier, "a", 10)
    if isinstance(tier, RedisTier):
        tier.write("c", data_of(3 * MIB, 2))
        assert tier.names() == {"a", "c"}
        assert tier.used_bytes == 6 * MIB
        return
    with pytest.raises(TierFull, match=r"'c' needs .*raise --(cpu|disk)-kv-memory"):
        tier.write("c", data_of(3 * MIB))

    assert read(tier, "b", 3 * MIB) == data_of(3 * MIB, 1)
    read(tier, "a", 10)
    assert tier.names() == {"a", "b"}
    assert tier.min_recent(3 * MIB) == ["b"]


def test_what_other_objects_write_is_added(tmp_path, request, redis_url):
    for kind in ("file", "redis"):
        first, second = (make_tier(kind, tmp_path, request) for _ in range(2))
        first.write("a", b"1", {"x": 1})
        assert set(second.added()) == {"a"}
        assert second.added() == {}
        first.write("b", b"2")
        first.write("a", b"3")
        assert set(second.added()) == {"a", "b"}
        assert read(second, "a", 1) == b"3"
        second.drop("b")
        assert first.names() == {"a"}
        first.close()
        second.close()


def test_threads_can_share_a_tier(tier):
    def fill(name):
        for i in range(4):
            tier.write(name, data_of(300_000, i))
            assert read(tier, name, 300_000) == data_of(300_000, i)

    with ThreadPoolExecutor(3) as threads:
        assert len(list(threads.map(fill, "abc"))) == 3

    assert set(tier.stored()) == {"a", "b", "c"}


def test_host_tier_has_its_exact_size_and_contiguous_entries(monkeypatch):
    tier = HostTier(5 * MIB + 64)

    assert tier.total_bytes == 5 * MIB + 64  # not a power of two
    tier.write("a", data_of(3 * MIB))
    tier.write("b", data_of(MIB))
    tier.drop("a")
    tier.write("c", data_of(2 * MIB))
    with pytest.raises(StorageError, match="contiguous B"):
        tier.write("d", data_of(2 * MIB))  # 2 MiB are free, but not contiguous
    tier.check()
    monkeypatch.setattr(host_module, "free_host_bytes", lambda: 3 * MIB)
    with pytest.raises(ConfigError, match=r"at most 3,145,728 B .*got 4,194,304 B; lower"):
        HostTier(4 * MIB)


def test_wait_doubles_up_to_its_limit_and_an_outage_is_logged_once(caplog):
    now_s, waits = [0.0], []
    breaker = CircuitBreaker("remote", lambda: now_s[0])
    for _ in range(9):
        assert not breaker.is_open
        breaker.failed("no response")
        breaker.failed("no response")  # of a call that was under way: counts as the same failure
        assert breaker.is_open
        before = now_s[0]
        while breaker.is_open:
            now_s[0] += 0.5
        waits.append(now_s[0] - before)

    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    [record] = caplog.records
    assert record.getMessage().startswith("the remote tier of cached prefixes i")
    assert "no response; its prefixes are recomputed" in caplog.text
    breaker.succeeded()
    breaker.succeeded()
    assert caplog.text.count("is used again") == 1
    breaker.failed("again")
    assert breaker.num_outages == 2
    now_s[0] += 1
    assert not breaker.is_open
