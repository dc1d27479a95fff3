import errno
import fcntl
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire.errors import ConfigError, CorruptData, StorageError, TierFull, TierUnreachable
from quire.offload.tiers.base import LateTier, StoredEntry
from quire.offload.tiers.file import FileTier
from quire.offload.tiers.file_index import CHUNK_BYTES, SECTOR_BYTES, FileIndex
from unit.offload.test_tiers import data_of, read

MIB = 1 << 20


def rows(folder, query="SELECT name, file FROM entries", file="index.sqlite3"):
    with closing(sqlite3.connect(folder / file)) as database, database:
        return database.execute(query).fetchall()


def file_of(folder, key):
    return folder / "entries" / dict(rows(folder))[key]


def test_entries_are_found_after_a_restart_unless_the_tier_is_smaller(tmp_path):
    with closing(FileTier(tmp_path, 8 * MIB)) as first:
        first.write("a", data_of(2 * MIB + 5), {"tokens": 3})
        first.write("b", data_of(MIB))
        first.drop("b")

    with closing(FileTier(tmp_path, 8 * MIB)) as second:
        assert second.stored()["a"].facts == {"tokens": 3}
        assert second.names() == {"a"} == set(second.added())
        assert read(second, "a", 2 * MIB + 5) == data_of(2 * MIB + 5)
        assert second.used_bytes == 2 * MIB + SECTOR_BYTES
        second.check()

    with closing(FileTier(tmp_path, 8 * MIB)) as first:
        for name in "abcd":
            first.write(name, data_of(2 * MIB, ord(name)))
        read(first, "a", 1)

    with closing(FileTier(tmp_path, 5 * MIB)) as second:
        assert second.names() == {"a", "d"}
        assert read(second, "a", 2 * MIB) == data_of(2 * MIB, ord("a"))
        second.check()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted"])
def test_damaged_files_are_named_and_never_returned(tmp_path, damage):
    tier = FileTier(tmp_path, 8 * MIB)
    tier.write("a", data_of(3 * MIB, 1))
    tier.write("b", data_of(MIB, 2))
    path = file_of(tmp_path, "a")
    content = bytearray(path.read_bytes())
    content[MIB + 17] ^= 1
    if damage == "deleted":
        path.unlink()
        with pytest.raises(StorageError, match="nothing is stored under 'a' any more"):
            read(tier, "a", 3 * MIB)
    else:
        path.write_bytes(content if damage == "flipped" else content[: MIB + 17])
        assert read(tier, "a", MIB) == data_of(3 * MIB, 1)[:MIB]  # this chunk is whole
        with pytest.raises(CorruptData, match="chunk 1 of 'a'"):
            read(tier, "a", 3 * MIB)

    assert tier.names() == {"b"}
    assert read(tier, "b", MIB) == data_of(MIB, 2)
    tier.check()
    tier.close()


def test_a_changed_row_of_the_index_is_not_read(tmp_path):
    with closing(FileTier(tmp_path, 8 * MIB)) as tier:
        tier.write("a", b"123", {"keys": ["00"]})
    rows(tmp_path, """UPDATE entries SET facts = '{"keys": ["01"]}'""")
    with closing(FileTier(tmp_path, 8 * MIB)) as reopened:
        assert reopened.stored() == {}
        assert "the row of 'a'" in str(reopened.added()["a"])
        with pytest.raises(StorageError, match="nothing is stored"):
            read(reopened, "a", 3)


@pytest.mark.parametrize("how", ["no database", "zeros inside"])
def test_a_damaged_index_is_replaced_if_no_other_process_uses_it(tmp_path, how):
    with closing(FileTier(tmp_path, 8 * MIB)) as tier:
        tier.write("a", b"123")
    path = tmp_path / "index.sqlite3"
    data = bytearray(path.read_bytes())
    data = b"not a database" * 1000 if how == "no database" else data[:100] + bytes(len(data) - 100)
    path.write_bytes(data)

    with closing(FileTier(tmp_path, 8 * MIB)) as reopened:
        assert "all stored prefixes are lost" in str(reopened.added()["index.sqlite3"])
        assert reopened.names() == set()
        assert list((tmp_path / "entries").iterdir()) == []
        reopened.write("b", b"123")
        reopened.check()
    path.write_bytes(data)
    with open(tmp_path / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as another process does
        with pytest.raises(StorageError, match="end all engines"):
            FileTier(tmp_path, 8 * MIB)


def replaced_by_folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def replaced_by_database(path):
    path.unlink(missing_ok=True)
    rows(path.parent, "CREATE TABLE entries (name TEXT)", path.name)


FILE_DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.exists() and os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(10_000)),
    "text": lambda path: path.write_text("of another program" * 1000),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe" * 5000),
    "longer": lambda path: path.exists() and path.write_bytes(path.read_bytes() + b"\xff" * 9),
    "deleted": lambda path: path.unlink(missing_ok=True),
    "a folder": replaced_by_folder,
    "a database": replaced_by_database,
}
FILES = ("entry", "index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "lock", "secret")
COLUMNS = ("name", "file", "num_bytes", "disk_bytes", "facts", "sums", "row_sum", "used_s")
VALUES = {
    "text": "'text'",
    "not UTF-8": "CAST(x'fffe00' AS TEXT)",
    "bytes": "x'fffe00'",
    "negative": "-7",
    "too large": str(10**15),
    "a fraction": "1.5",
    "a path": "'../../b'",
}
INDEX_DAMAGES = {
    f"{column} is {name}": f"UPDATE entries SET {column} = {value} WHERE name = 'a'"
    for column in COLUMNS
    for name, value in VALUES.items()
} | {
    "another version": "PRAGMA user_version = 2",
    "another program": "PRAGMA application_id = 7",
    "no rows": "DELETE FROM entries",
    "no totals": "DROP TABLE totals",
    "no table": "DROP TABLE entries",
    "no trigger": "DROP TRIGGER entry_added",
    "another column": "ALTER TABLE entries RENAME COLUMN facts TO fact",
    "totals are empty": "DELETE FROM totals",
    "totals are two": "INSERT INTO totals VALUES (1)",
    "totals are text": "UPDATE totals SET disk_bytes = 'text'",
    "totals are too large": f"UPDATE totals SET disk_bytes = {10**15}",
    "totals are too small": "UPDATE totals SET disk_bytes = -1",
}
DAMAGES = {f"{file}: {name}": (file, FILE_DAMAGES[name]) for file in FILES for name in FILE_DAMAGES}
DAMAGES |= {name: ("", query) for name, query in INDEX_DAMAGES.items()}
"""Every file of a folder with every damage, and every damage inside the index."""
LOSSES = {
    *(f"index.sqlite3: {name}" for name in FILE_DAMAGES if name != "longer"),
    *("another version", "another program", "another column"),
    *("no rows", "no totals", "no table", "no trigger"),
    *("index.sqlite3-wal: a folder", "index.sqlite3-shm: a folder", "lock: a folder"),
}
"""Damages after which a new index begins, or the folder cannot be used."""


def damage_folder(folder, damage, entry="a"):
    """Damage a file of a folder, or its index; `entry` stands for any entry."""
    file, action = DAMAGES[damage]
    if not file:
        rows(folder, action.replace("'a'", f"'{entry}'"))
    else:
        action(file_of(folder, entry) if file == "entry" else folder / file)


def use_tier(tier, data):
    """Use a damaged tier: entry "a" is never wrong, and other calls succeed or fail as a tier's."""
    for call in (
        tier.added,
        lambda: "a" not in tier.names() or read(tier, "a", len(data)),
        lambda: tier.write("c", data_of(500, 3)),
        lambda: read(tier, "c", 500),
        lambda: tier.used_bytes,
        lambda: tier.min_recent(8 * MIB),
        lambda: tier.drop("a"),
    ):
        try:
            found = call()
        except (StorageError, CorruptData):
            continue
        assert not isinstance(found, bytes) or found in (data, data_of(500, 3))


@pytest.mark.parametrize("at", ["start", "runtime"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_returns_only_what_was_written(tmp_path, damage, at):
    if at == "runtime" and "-shm" in damage:
        pytest.skip("SQLite maps this file: a process ends if another one truncates it")
    folder, outside = tmp_path / "x" / "kv", tmp_path / "b"
    outside.write_text("not to be deleted")
    data = data_of(MIB + 5)
    tier = FileTier(folder, 8 * MIB)
    tier.write("a", data, {"keys": ["a"]})
    tier.write("b", data_of(1000, 1))
    if at == "start":
        tier.close()
    damage_folder(folder, damage)
    if at == "start":
        tier = LateTier(lambda: FileTier(folder, 8 * MIB), 8 * MIB)
        if damage not in LOSSES:
            assert isinstance(tier.added()["b"], StoredEntry)
            assert tier.used_bytes <= MIB + 3 * SECTOR_BYTES
            assert read(tier, "b", 1000) == data_of(1000, 1)

    use_tier(tier, data)

    tier.close()
    assert outside.exists()
    reopened = LateTier(lambda: FileTier(folder, 8 * MIB), 8 * MIB)
    use_tier(reopened, data)
    reopened.close()


def test_a_tier_opens_as_soon_as_its_folder_can_be_used(tmp_path):
    (tmp_path / "kv").write_text("")
    tier = LateTier(lambda: FileTier(tmp_path / "kv", 8 * MIB), 8 * MIB)
    assert tier.used_bytes == 0
    for call in (tier.added, tier.names, lambda: tier.write("a", b"1")):
        with pytest.raises(TierUnreachable, match="name another folder"):
            call()
    tier.drop("a")
    (tmp_path / "kv").unlink()

    tier.write("a", b"1")

    assert read(tier, "a", 1) == b"1"
    assert set(tier.added()) == set(tier.stored()) == {"a"}
    tier.close()
    with pytest.raises(ConfigError, match="65,536 B or more"):
        LateTier(lambda: FileTier(tmp_path / "kv", 1000), 1000)


def test_full_disk_fails_only_the_write(tmp_path, monkeypatch):
    tier = FileTier(tmp_path, 8 * MIB)
    tier.write("a", data_of(MIB, 1))

    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for call in ("pwrite", "fdatasync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(StorageError, match="No space left on device"):
                tier.write("b", data_of(MIB, 2))
        assert tier.names() == {"a"}
        assert len(list((tmp_path / "entries").iterdir())) == 1
    tier.write("b", data_of(MIB, 2))
    tier.check()
    tier.close()


def test_unwritable_folder_and_a_tier_larger_than_the_disk_are_rejected(tmp_path):
    for name in ("file", "kv/entries"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    for folder in (tmp_path / "file" / "kv", tmp_path / "kv"):
        with pytest.raises(StorageError, match="name another folder"):
            FileTier(folder, 8 * MIB)
    (tmp_path / "kv" / "entries").unlink()
    FileTier(tmp_path / "kv", 8 * MIB).close()
    for size, message in ((1 << 50, "lower --disk-kv-memory"), (1000, "65,536 B or more")):
        with pytest.raises(ConfigError, match=message):
            FileTier(tmp_path, size)


def test_a_folder_of_an_earlier_version_is_refused(tmp_path):
    for name in ("blocks", "index"):
        (tmp_path / name).write_text("")

    with pytest.raises(StorageError, match="delete its files blocks and index, or name another"):
        FileTier(tmp_path, 2 * MIB)
    (tmp_path / "blocks").unlink()
    (tmp_path / "index").unlink()
    FileTier(tmp_path, 2 * MIB).close()
    rows(tmp_path, "PRAGMA user_version = 99")
    with pytest.raises(StorageError, match="index of format 1, got 99"):
        FileTier(tmp_path, 2 * MIB)


def test_a_network_file_system_has_no_write_ahead_log(tmp_path):
    FileIndex(tmp_path / "a", on_network=True).close()
    FileIndex(tmp_path / "b", on_network=False).close()
    modes = [rows(tmp_path, "PRAGMA journal_mode", name) for name in "ab"]
    assert modes == [[("delete",)], [("wal",)]]


def test_files_without_a_row_are_deleted_by_a_process_that_is_alone(tmp_path):
    first = FileTier(tmp_path, 2 * MIB)
    first.write("a", b"1")
    orphan = tmp_path / "entries" / "0123.part"
    orphan.write_text("")
    second = FileTier(tmp_path, 2 * MIB)
    assert orphan.exists()  # the first process may be writing it
    first.close()
    second.close()

    third = FileTier(tmp_path, 2 * MIB)

    assert not orphan.exists()
    assert read(third, "a", 1) == b"1"
    third.close()


_WRITER = """
import random, sys
from pathlib import Path
from quire.errors import StorageError
from quire.offload.tiers.file import FileTier
folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
rng, tier = random.Random(seed), FileTier(folder, 6 << 20)
for i in range(count):
    key, size = f"k{rng.randrange(8)}", rng.randrange(1_500_000)
    data = bytes([size % 251]) * size
    try:
        while True:
            try:
                tier.write(key, data, {"size": size})
                break
            except StorageError:
                for old in tier.min_recent(size):
                    tier.drop(old)
        assert tier.used_bytes <= tier.total_bytes
        other = f"k{rng.randrange(8)}"
        stored = tier.stored().get(other)
        if stored is not None:
            into = bytearray(stored.num_bytes)
            tier.read(other, memoryview(into))
            assert into == bytes([stored.num_bytes % 251]) * stored.num_bytes
    except StorageError:
        pass  # replaced or dropped by the other process
    print(i, flush=True)
tier.close()
"""


def start_writer(folder, seed, count):
    command = [sys.executable, "-c", _WRITER, str(folder), str(seed), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_written(folder):
    with closing(FileTier(folder, 6 * MIB)) as tier:
        assert tier.names()
        tier.check()
        for key, stored in tier.stored().items():
            size = stored.num_bytes
            assert stored.facts["size"] == size
            assert read(tier, key, size) == bytes([size % 251]) * size
        assert len(list((folder / "entries").iterdir())) == len(tier.names())


@pytest.mark.slow
def test_two_processes_share_a_folder_within_its_size(tmp_path):
    writers = [start_writer(tmp_path, seed, 60) for seed in (1, 2)]
    for writer in writers:
        assert len(writer.communicate()[0].splitlines()) == 60
        assert writer.returncode == 0
    check_written(tmp_path)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_process_leaves_only_complete_entries(tmp_path, seed):
    process = start_writer(tmp_path, seed, 100_000)
    for _ in range(12):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    check_written(tmp_path)


class FileMachine(RuleBasedStateMachine):
    """Writes, drops, restarts and damage by two users: reads return the written bytes."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.expected = {}
        self.tiers = [self.open(), self.open()]

    def open(self):
        return FileTier(self.path, 6 * MIB, direct=False)

    @rule(who=st.booleans(), key=st.sampled_from("abc"), size=st.integers(0, 2 * MIB + 9))
    def write(self, who, key, size):
        data, tier = data_of(size, size), self.tiers[who]
        try:
            tier.write(key, data)
            self.expected[key] = data
        except TierFull:
            assert tier.used_bytes + size + SECTOR_BYTES > tier.total_bytes

    @rule(who=st.booleans(), size=st.integers(1, 6 * MIB))
    def make_room(self, who, size):
        for key in self.tiers[who].min_recent(size):
            self.tiers[who].drop(key)
            del self.expected[key]
        assert self.tiers[who].used_bytes + size <= self.tiers[who].total_bytes + SECTOR_BYTES

    @rule(who=st.booleans(), key=st.sampled_from("abc"))
    def drop(self, who, key):
        self.tiers[who].drop(key)
        self.expected.pop(key, None)

    @rule(who=st.booleans())
    def restart(self, who):
        self.tiers[who].close()
        self.tiers[who] = self.open()
        assert set(self.tiers[who].added()) == set(self.expected)

    @rule(key=st.sampled_from("abc"), fraction=st.floats(0, 1))
    def damage(self, key, fraction):
        if not self.expected.get(key):
            return
        place = int(fraction * (len(self.expected[key]) - 1))
        with open(file_of(self.path, key), "r+b") as file:
            file.seek(place)
            was = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([was ^ 0x55]))
        with pytest.raises(CorruptData, match=f"chunk {place // CHUNK_BYTES}"):
            read(random.choice(self.tiers), key, len(self.expected.pop(key)))

    @invariant()
    def check_entries(self):
        for tier in self.tiers:
            tier.check()
            assert tier.names() == set(self.expected)
            for key, data in self.expected.items():
                assert read(tier, key, len(data)) == data

    def teardown(self):
        for tier in self.tiers:
            tier.close()
        self.folder.cleanup()


FileMachine.TestCase.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
TestFiles = FileMachine.TestCase
