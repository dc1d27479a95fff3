"""Tiers: contract tests for all, then failures of each."""

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import quire.offload.tiers.disk as disk_module
import quire.offload.tiers.host as host_module
from quire.errors import ConfigError, CorruptData, StorageError
from quire.offload.tiers.base import Tier
from quire.offload.tiers.disk import DiskTier
from quire.offload.tiers.disk_files import BLOCK_BYTES
from quire.offload.tiers.host import HostTier
from quire.offload.tiers.network import MAGIC, NetworkTier
from quire.offload.tiers.server import StoreServer
from support.disk_blocks import disk_blocks

MIB = 1 << 20


def data_of(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def read(tier, key, num_bytes, first=0) -> bytes:
    into = bytearray(num_bytes)
    tier.read(key, memoryview(into), first)
    return bytes(into)


@pytest.fixture(params=["host", "disk", "disk cached", "network"])
def tier(request, tmp_path):
    if request.param == "network":
        server = StoreServer(HostTier(8 * MIB))
        opened = NetworkTier(*server.address)
        yield opened
        opened.close()
        server.close()
        return
    if request.param == "host":
        opened = HostTier(8 * MIB)
    else:
        opened = DiskTier(tmp_path / "kv", 8 * MIB, direct=request.param == "disk")
    yield opened
    opened.check()
    opened.close()


def test_new_tier_is_empty(tier):
    assert isinstance(tier, Tier)
    assert tier.total_bytes == 8 * MIB
    assert tier.used_bytes == 0
    assert tier.stored() == {}


def test_written_bytes_are_read_whole_and_in_ranges(tier):
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
    assert set(stored) == {"a/0", "a/1"}


def test_tensors_are_written_and_read_as_bytes(tier):
    tensor = torch.randn(300, 70)
    tier.write("x", memoryview(tensor.numpy()))
    restored = torch.empty_like(tensor)

    tier.read("x", memoryview(restored.numpy()))

    assert torch.equal(restored, tensor)


def test_second_write_replaces_and_drop_frees(tier):
    tier.write("a", data_of(MIB, 1))
    tier.write("a", data_of(3 * MIB, 2))
    assert read(tier, "a", 3 * MIB) == data_of(3 * MIB, 2)

    tier.drop("a")
    tier.drop("a")

    assert tier.used_bytes == 0
    with pytest.raises(StorageError, match="nothing is stored under 'a'"):
        read(tier, "a", 1)


def test_full_tier_raises_and_keeps_its_entries(tier):
    tier.write("a", data_of(6 * MIB))

    with pytest.raises(StorageError, match=r"'b' needs .*raise --(swap-space|disk-kv-memory)"):
        tier.write("b", data_of(3 * MIB))
    with pytest.raises(StorageError, match="'a' needs"):
        tier.write("a", data_of(3 * MIB))

    assert read(tier, "a", 6 * MIB) == data_of(6 * MIB)
    assert set(tier.stored()) == {"a"}


def test_read_beyond_an_entry_raises(tier):
    tier.write("a", data_of(100))

    for first, count in ((0, 101), (50, 51), (101, 0)):
        with pytest.raises(StorageError, match="100 B"):
            read(tier, "a", count, first)


def test_threads_can_share_a_tier(tier):
    def fill(name):
        for i in range(4):
            tier.write(name, data_of(300_000, i))
            assert read(tier, name, 300_000) == data_of(300_000, i)

    threads = [threading.Thread(target=fill, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(tier.stored()) == {"a", "b", "c"}


# ---- host --------------------------------------------------------------------------------------


def test_host_tier_has_its_exact_size_and_contiguous_entries():
    tier = HostTier(5 * MIB + 64)

    assert tier.total_bytes == 5 * MIB + 64  # not a power of two
    view = tier.reserve("a", 3 * MIB)
    view.fill_(7)
    assert read(tier, "a", 3) == b"\7\7\7"
    assert tier.tensor("a").data_ptr() == view.data_ptr()
    tier.write("b", data_of(MIB))
    tier.drop("a")
    tier.write("c", data_of(2 * MIB))
    with pytest.raises(StorageError, match="contiguous B"):
        tier.write("d", data_of(2 * MIB))  # 2 MiB are free, but not contiguous
    tier.check()


def test_host_tier_above_free_memory_is_rejected(monkeypatch):
    monkeypatch.setattr(host_module, "free_host_bytes", lambda: 3 * MIB)

    with pytest.raises(ConfigError, match=r"at most 3,145,728 B .*got 4,194,304 B; lower"):
        HostTier(4 * MIB)


# ---- disk --------------------------------------------------------------------------------------


def test_entries_are_found_after_a_restart(tmp_path):
    first = DiskTier(tmp_path, 8 * MIB)
    first.write("a", data_of(2 * MIB + 5), {"tokens": 3})
    first.write("b", data_of(MIB))
    first.drop("b")
    first.close()

    second = DiskTier(tmp_path, 8 * MIB)

    assert second.num_discarded == 0
    assert second.stored()["a"].facts == {"tokens": 3}
    assert set(second.stored()) == {"a"}
    assert read(second, "a", 2 * MIB + 5) == data_of(2 * MIB + 5)
    assert second.used_bytes == 3 * MIB
    second.check()
    second.close()


def test_smaller_tier_discards_entries_beyond_its_size(tmp_path):
    first = DiskTier(tmp_path, 8 * MIB)
    for name in "abcd":
        first.write(name, data_of(2 * MIB, ord(name)))
    first.close()

    second = DiskTier(tmp_path, 5 * MIB)

    assert set(second.stored()) == {"a", "b"}
    assert second.num_discarded == 2
    assert read(second, "b", 2 * MIB) == data_of(2 * MIB, ord("b"))
    second.close()


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_torn_index_line_is_ignored(tmp_path, cut):
    tier = DiskTier(tmp_path, 8 * MIB)
    tier.write("a", data_of(MIB, 1))
    tier.write("b", data_of(MIB, 2))
    tier.close()
    index = tmp_path / "index"
    index.write_bytes(index.read_bytes()[:-cut])

    reopened = DiskTier(tmp_path, 8 * MIB)

    assert set(reopened.stored()) == {"a"}
    assert read(reopened, "a", MIB) == data_of(MIB, 1)
    reopened.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damaged_blocks_are_named_and_never_returned(tmp_path, damage):
    tier = DiskTier(tmp_path, 8 * MIB)
    tier.write("a", data_of(3 * MIB, 1))
    tier.write("b", data_of(MIB, 2))
    tier.close()
    blocks = tmp_path / "blocks"
    content = bytearray(blocks.read_bytes())
    content[MIB + 17] ^= 1
    blocks.write_bytes(content if damage == "flipped" else content[: MIB + 17])

    reopened = DiskTier(tmp_path, 8 * MIB)

    assert read(reopened, "a", MIB) == data_of(3 * MIB, 1)[:MIB]  # this block is whole
    with pytest.raises(CorruptData, match="block 1 of 'a'"):
        read(reopened, "a", 3 * MIB)
    assert "a" not in reopened.stored()
    if damage == "flipped":
        assert read(reopened, "b", MIB) == data_of(MIB, 2)
    reopened.check()
    reopened.close()


def test_full_disk_fails_only_the_write(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 8 * MIB)
    tier.write("a", data_of(MIB, 1))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for call in ("pwrite", "write", "fdatasync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(StorageError, match="No space left on device"):
                tier.write("b", data_of(MIB, 2))
        assert set(tier.stored()) == {"a"}
        assert tier.used_bytes == MIB
    tier.write("b", data_of(MIB, 2))
    tier.close()
    reopened = DiskTier(tmp_path, 8 * MIB)
    assert set(reopened.stored()) == {"a", "b"}
    reopened.close()


def test_unwritable_folder_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another folder"):
        DiskTier(tmp_path / "file" / "kv", 8 * MIB)

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "posix_fallocate", read_only)
    with pytest.raises(ConfigError, match="Read-only file system"):
        DiskTier(tmp_path / "kv", 8 * MIB)
    monkeypatch.undo()
    DiskTier(tmp_path / "kv", 8 * MIB).close()  # the failed tier has released its lock


def test_tier_larger_than_the_disk_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"lower --disk-kv-memory"):
        DiskTier(tmp_path, 1 << 50)
    with pytest.raises(ConfigError, match="1,048,576 B or more"):
        DiskTier(tmp_path, 1000)


def test_folder_in_use_by_another_engine_is_rejected(tmp_path):
    first = DiskTier(tmp_path, 2 * MIB)

    with pytest.raises(ConfigError, match="in use by another engine"):
        DiskTier(tmp_path, 2 * MIB)
    first.close()


def test_size_of_the_index_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_module, "MOST_STALE_LINES", 10)
    tier = DiskTier(tmp_path, 2 * MIB)
    tier.write("other", b"1")
    for _ in range(20):
        tier.write("a", b"2")
        tier.drop("a")

    assert len((tmp_path / "index").read_text().splitlines()) < 20
    tier.close()
    reopened = DiskTier(tmp_path, 2 * MIB)
    assert set(reopened.stored()) == {"other"}
    reopened.close()


_WRITER = """
import sys
from pathlib import Path
from quire.offload.tiers.disk import DiskTier
tier = DiskTier(Path(sys.argv[1]), 16 << 20)
for i in range(100_000):
    key = f"k{i % 5}"
    tier.write(key, bytes([i % 251]) * (1_500_000 + i % 7), {"i": i})
    print(i, flush=True)
"""


def test_failed_rewrite_of_the_index_keeps_the_old_index(tmp_path, monkeypatch):
    """The disk is full while an entry is dropped: no call fails, and new lines are appended."""
    tier = DiskTier(tmp_path, 4 * BLOCK_BYTES)
    tier.write("a", b"a")
    monkeypatch.setattr("quire.offload.tiers.disk.MOST_STALE_LINES", -4)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("quire.offload.tiers.disk_files.os.fsync", full)
        tier.drop("a")
    tier.write("b", b"b")
    tier.close()

    reopened = DiskTier(tmp_path, 4 * BLOCK_BYTES)
    assert set(reopened.stored()) == {"b"}
    reopened.close()


def test_killed_engine_leaves_only_complete_entries(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    for _ in range(12):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    tier = DiskTier(tmp_path, 16 * MIB)

    found = {key: stored.facts["i"] for key, stored in tier.stored().items()}
    assert set(found) == {f"k{i}" for i in range(5)}
    assert all(i >= last - 5 for i in found.values())
    for key, i in found.items():
        length = 1_500_000 + i % 7
        assert read(tier, key, length) == bytes([i % 251]) * length
    tier.check()
    tier.close()


class DiskMachine(RuleBasedStateMachine):
    """Writes, drops, restarts and damage in any order: reads return the written bytes."""

    def __init__(self):
        super().__init__()
        import tempfile
        from pathlib import Path

        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.expected = {}
        self.tier = DiskTier(self.path, 6 * MIB, direct=False)

    @rule(key=st.sampled_from("abc"), size=st.integers(0, 2 * MIB + 9), seed=st.integers(0, 99))
    def write(self, key, size, seed):
        data = data_of(size, seed)
        try:
            self.tier.write(key, data)
            self.expected[key] = data
        except StorageError:
            assert self.tier.total_bytes - self.tier.used_bytes < -(-size // MIB) * MIB

    @rule(key=st.sampled_from("abc"))
    def drop(self, key):
        self.tier.drop(key)
        self.expected.pop(key, None)

    @rule()
    def restart(self):
        self.tier.close()
        self.tier = DiskTier(self.path, 6 * MIB, direct=False)
        assert self.tier.num_discarded == 0

    @rule(key=st.sampled_from("abc"), fraction=st.floats(0, 1))
    def damage(self, key, fraction):
        if not self.expected.get(key):
            return
        blocks = disk_blocks(self.path, key)
        place = int(fraction * (len(self.expected[key]) - 1))
        with open(self.path / "blocks", "r+b") as file:
            file.seek(blocks[place // BLOCK_BYTES] * BLOCK_BYTES + place % BLOCK_BYTES)
            was = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([was ^ 0x55]))
        with pytest.raises(CorruptData):
            read(self.tier, key, len(self.expected.pop(key)))

    @invariant()
    def check_entries(self):
        self.tier.check()
        assert set(self.tier.stored()) == set(self.expected)
        for key, data in self.expected.items():
            assert read(self.tier, key, len(data)) == data

    def teardown(self):
        self.tier.close()
        self.folder.cleanup()


DiskMachine.TestCase.settings = settings(max_examples=8, stateful_step_count=12)
TestDisk = DiskMachine.TestCase


# ---- network -----------------------------------------------------------------------------------


def test_store_over_a_disk_tier_survives_its_server(tmp_path):
    for attempt in range(2):
        disk = DiskTier(tmp_path, 4 * MIB)
        server = StoreServer(disk)
        tier = NetworkTier(*server.address)
        if attempt == 0:
            tier.write("a", data_of(MIB + 1), {"tokens": 5})
        assert read(tier, "a", MIB + 1) == data_of(MIB + 1)
        tier.close()
        server.close()
        disk.close()


def test_corrupt_data_error_is_passed_over_the_network(tmp_path):
    disk = DiskTier(tmp_path, 4 * MIB, direct=False)
    server = StoreServer(disk)
    tier = NetworkTier(*server.address)
    tier.write("a", data_of(MIB))
    with open(tmp_path / "blocks", "r+b") as file:
        file.write(b"other")

    with pytest.raises(CorruptData, match="block 0 of 'a'"):
        read(tier, "a", MIB)
    tier.close()
    server.close()
    disk.close()


def test_request_to_a_stalled_store_is_retried():
    waits = iter([0.4, 0, 0])
    server = StoreServer(HostTier(MIB), delay=lambda _: next(waits, 0))
    tier = NetworkTier(*server.address, timeout_s=0.2)

    tier.write("a", b"123")

    assert tier.num_retries >= 1
    assert read(tier, "a", 3) == b"123"
    tier.close()
    server.close()


def test_unreachable_store_is_named():
    server = StoreServer(HostTier(MIB))
    tier = NetworkTier(*server.address, timeout_s=0.2, tries=2)
    tier.write("a", b"123")
    tier.close()
    server.close()

    with pytest.raises(StorageError, match=r"127\.0\.0\.1:\d+ did not respond to 2 attempts"):
        read(tier, "a", 3)


@settings(max_examples=20)
@given(st.binary(max_size=200), st.booleans())
def test_invalid_message_ends_only_its_connection(noise, with_magic):
    server = StoreServer(HostTier(MIB))
    tier = NetworkTier(*server.address)
    tier.write("a", b"123")
    with socket.create_connection(server.address) as other:
        other.sendall((MAGIC if with_magic else b"") + noise)

    assert read(tier, "a", 3) == b"123"
    tier.close()
    server.close()


def test_throttled_store_sends_all_bytes():
    server = StoreServer(HostTier(4 * MIB), bytes_per_s=200e6)
    tier = NetworkTier(*server.address)
    tier.write("a", data_of(3 * MIB))

    assert read(tier, "a", 3 * MIB) == data_of(3 * MIB)
    tier.close()
    server.close()


def test_invalid_listen_address_is_rejected():
    server = StoreServer(HostTier(MIB))

    with pytest.raises(StorageError, match="cannot listen at"):
        StoreServer(HostTier(MIB), "256.0.0.1", 1)
    server.close()
