"""The index of a folder of entries: an SQLite database that several processes use at once.

    entries   number | name | file | bytes | bytes on disk | facts | checksums | last use

A row is added in one transaction after its file is complete. A process that is killed leaves no row
or a whole one. On a local file system the database uses a write-ahead log, so readers and a writer
do not wait for each other. That log needs shared memory, which a network file system lacks: there
the database uses a rollback journal.

Files of entries: written whole under a new name, read in chunks of 1 MiB past the page cache.

Reads through the page cache copy on the CPU and fill memory that the host pool needs. With O_DIRECT
the disk writes into the buffer itself. It needs aligned buffers, so all chunks pass through one.
"""

import contextlib
import json
import mmap
import os
import secrets
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Collection, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import CorruptData, StorageError, TierFull
from quire.offload.tiers.base import StoredEntry

CHUNK_BYTES = 1 << 20
"""Bytes that share a checksum."""
SECTOR_BYTES = 4096
"""Files are padded to a multiple of it, as O_DIRECT needs."""
SUFFIX, PART = ".kv", ".part"


def padded(num_bytes: int) -> int:
    """Bytes of a file that holds an entry."""
    return -(-num_bytes // SECTOR_BYTES) * SECTOR_BYTES


class EntryFiles:
    """Files of one folder, each with one entry. Thread-safe.

    A file is written under a temporary name, flushed and renamed. It never changes afterwards: a
    second write of an entry creates another file.

    Args:
        folder: created if missing.
        direct: whether to bypass the page cache where the file system allows it.

    Attributes:
        direct: whether the page cache is bypassed.

    Raises:
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, direct: bool = True) -> None:
        self._folder = folder
        self._turn = threading.Lock()
        self._buffer = mmap.mmap(-1, CHUNK_BYTES)  # aligned to a page
        self._view = memoryview(self._buffer)
        self.direct = direct and hasattr(os, "O_DIRECT")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.direct = self.direct and self._allows_direct()
        except OSError as error:
            raise StorageError(
                f"cannot write {folder}: {error.strerror}; name another folder"
            ) from error

    def _allows_direct(self) -> bool:
        path = self._new_path()
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
                return True
        finally:
            path.unlink(missing_ok=True)
        return False

    def _new_path(self) -> Path:
        return self._folder / f"{secrets.token_hex(16)}{PART}"

    def names(self) -> set[str]:
        """Names of all files of entries, the unfinished ones included."""
        return {path.name for path in self._folder.iterdir() if path.suffix in (SUFFIX, PART)}

    def write(self, data: memoryview) -> tuple[str, tuple[int, ...]]:
        """Write an entry; return the name of its file and the checksums of its chunks.

        Raises:
            StorageError: the write failed; nothing is left of the file.
        """
        part = self._new_path()
        try:
            sums = self._write(part, data)
            path = part.with_suffix(SUFFIX)
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise StorageError(f"cannot write {part}: {error.strerror}") from error
        return path.name, sums

    def _write(self, path: Path, data: memoryview) -> tuple[int, ...]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if self.direct else 0)
        file = os.open(path, flags, 0o600)
        sums = []
        try:
            with self._turn:
                for start in range(0, data.nbytes, CHUNK_BYTES):
                    chunk = data[start : start + CHUNK_BYTES]
                    size = padded(chunk.nbytes)
                    self._view[: chunk.nbytes] = chunk
                    self._view[chunk.nbytes : size] = bytes(size - chunk.nbytes)
                    done = os.pwrite(file, self._view[:size], start)
                    if done != size:
                        raise OSError(None, f"the disk wrote {done:,} of {size:,} B")
                    sums.append(zlib.crc32(chunk))
            os.fdatasync(file)
        finally:
            os.close(file)
        return tuple(sums)

    def read(self, name: str, chunks: range) -> Generator[tuple[int, memoryview]]:
        """Yield the number and the bytes of chunks; each is valid until the next one.

        A chunk of a truncated file is shorter. Padding is not removed. The generator must be
        closed: it holds the buffer.

        Raises:
            FileNotFoundError: there is no such file.
            StorageError: the disk read failed.
        """
        path = self._path(name)
        try:
            file = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        try:
            with self._turn:
                for number in chunks:
                    done = os.preadv(file, [self._view], number * CHUNK_BYTES)
                    yield number, self._view[:done]
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        finally:
            os.close(file)

    def remove(self, name: str) -> None:
        """Delete a file if it exists. A file that cannot be deleted is left for the next start."""
        with contextlib.suppress(OSError, ValueError):  # the latter: a damaged name
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        """Path of a file; the name in a damaged index must not lead out of the folder."""
        return self._folder / Path(name).name


FORMAT = 1
_OBJECTS = frozenset({"entries", "entries_by_use", "totals", "entry_added", "entry_removed"})
_TOTAL = "SELECT coalesce(sum(CAST(disk_bytes AS INTEGER)), 0) FROM totals"
_APPLICATION = 0x51756972  # "Quir"
_BUSY_S = 5.0
_COLUMNS = "number, name, file, num_bytes, facts, sums, row_sum"
_SCHEMA = """
CREATE TABLE entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    file TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    disk_bytes INTEGER NOT NULL,
    facts TEXT NOT NULL,
    sums BLOB NOT NULL,
    row_sum INTEGER NOT NULL,
    used_s REAL NOT NULL
);
CREATE INDEX entries_by_use ON entries (used_s, number);
CREATE TABLE totals (disk_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0);
CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN
    UPDATE totals SET disk_bytes = disk_bytes + NEW.disk_bytes;
END;
CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN
    UPDATE totals SET disk_bytes = disk_bytes - OLD.disk_bytes;
END;
"""


@dataclass(frozen=True, slots=True)
class IndexedEntry:
    """A row of the index.

    Attributes:
        number: grows with every write of any process.
        name: key of the entry.
        file: name of its file.
        stored: size and facts.
        sums: checksum of each chunk of the file.
    """

    number: int
    name: str
    file: str
    stored: StoredEntry
    sums: tuple[int, ...]


class FileIndex:
    """The database of a folder. Thread-safe.

    Args:
        path: path of the database, created if missing.
        on_network: whether hosts share the file system.

    Attributes:
        is_new: whether the database was created.
        damaged: errors of damaged rows, which were deleted, and of totals, which were rebuilt.

    Raises:
        StorageError: the database cannot be written, or has another format.
        CorruptData: the database is damaged.
    """

    def __init__(self, path: Path, *, on_network: bool) -> None:
        self._turn = threading.RLock()
        self._path = path
        self.is_new, self.damaged = False, dict[str, CorruptData]()
        try:
            self._database = sqlite3.connect(
                path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise StorageError(f"cannot open {path}: {error}; name another folder") from error
        # text that is not UTF-8 differs from its checksum and raises no error
        self._database.text_factory = lambda data: data.decode(errors="replace")
        with contextlib.ExitStack() as undo:
            undo.callback(self._database.close)
            try:
                self._prepare(on_network=on_network)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and not _lacks_schema(error):
                    text = f"cannot write {path}: {error}; name another folder"
                    raise StorageError(text) from error
                raise CorruptData(f"{path} is damaged: {error}") from error
            undo.pop_all()

    def _prepare(self, *, on_network: bool) -> None:
        self._database.execute(f"PRAGMA journal_mode = {'DELETE' if on_network else 'WAL'}")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("BEGIN IMMEDIATE")
        try:
            [(version,)] = self._database.execute("PRAGMA user_version")
            [(application,)] = self._database.execute("PRAGMA application_id")
            objects = {name for (name,) in self._database.execute("SELECT name FROM sqlite_master")}
            self.is_new = not objects
            if self.is_new:
                for statement in _statements(_SCHEMA):
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA user_version = {FORMAT}")
                self._database.execute(f"PRAGMA application_id = {_APPLICATION}")
            elif (application, version) != (_APPLICATION, FORMAT):
                raise StorageError(
                    f"expected an index of format {FORMAT}, got {version} in {self._path}; empty "
                    "the folder, or name another one"
                )
            else:
                self._repair(objects)
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    def _repair(self, objects: set[str]) -> None:
        """Delete damaged rows, and correct sizes that do not match.

        Raises:
            CorruptData: the database lacks a table or trigger, or a page of it is damaged.
            sqlite3.DatabaseError: also.
        """
        [(found,), *_] = self._database.execute("PRAGMA quick_check(1)")
        if found != "ok" or not objects >= _OBJECTS:
            raise CorruptData(
                f"{self._path} is damaged: {found}, with {', '.join(sorted(objects))}"
            )
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM entries")
        damaged = [(row[0], f"{row[1]}") for row in rows if _entry(row) is None]
        for number, name in damaged:
            self._database.execute("DELETE FROM entries WHERE number = ?", [number])
            self.damaged[name] = CorruptData(f"the row of {name!r} in {self._path} is damaged")
        padded = f"(num_bytes + {SECTOR_BYTES - 1}) / {SECTOR_BYTES} * {SECTOR_BYTES}"
        resized = self._database.execute(
            f"UPDATE entries SET disk_bytes = {padded} WHERE disk_bytes IS NOT {padded}"
        ).rowcount
        [(total,)] = self._database.execute("SELECT coalesce(sum(disk_bytes), 0) FROM entries")
        if self._database.execute("SELECT disk_bytes FROM totals").fetchall() != [(total,)]:
            self._database.execute("DELETE FROM totals")
            self._database.execute("INSERT INTO totals VALUES (?)", [total])
            resized = 1
        if resized and not damaged:
            self.damaged["totals"] = CorruptData(f"the sizes in {self._path} do not match")

    @contextlib.contextmanager
    def _statement(self, *, writes: bool) -> Iterator[sqlite3.Connection]:
        """Run statements; those that write are one transaction.

        Raises:
            StorageError: the database is locked, damaged or cannot be written; nothing changed.
        """
        with self._turn:
            try:
                if writes:
                    self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                if writes:
                    self._database.execute("COMMIT")
            except sqlite3.Error as error:
                raise StorageError(f"cannot use {self._path}: {error}") from error
            finally:
                if self._database.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        self._database.execute("ROLLBACK")

    # ---- read ----------------------------------------------------------------------------------

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files."""
        with self._statement(writes=False) as database:
            [(total,)] = database.execute(_TOTAL)
        return int(total)

    def get(self, name: str) -> IndexedEntry | None:
        """Return an entry; None if it is missing or its row is damaged."""
        with self._statement(writes=False) as database:
            rows = database.execute(f"SELECT {_COLUMNS} FROM entries WHERE name = ?", [name])
            found = [_entry(row) for row in rows]
        return found[0] if found else None

    def after(self, number: int) -> list[IndexedEntry]:
        """The entries that were written after the one of this number, in order."""
        with self._statement(writes=False) as database:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM entries WHERE number > ? ORDER BY number", [number]
            ).fetchall()
        return [entry for entry in map(_entry, rows) if entry is not None]

    def names(self) -> set[str]:
        """Names of all entries."""
        with self._statement(writes=False) as database:
            # damage while the engine runs can leave a name of another type
            rows = database.execute("SELECT name FROM entries WHERE typeof(name) = 'text'")
            return {name for (name,) in rows}

    def files(self) -> set[str]:
        """Files of all entries."""
        with self._statement(writes=False) as database:
            return {file for (file,) in database.execute("SELECT file FROM entries")}

    def min_recent(self, num_bytes: int) -> list[str]:
        """The least recently used entries that together have this many bytes on disk."""
        found: list[str] = []
        with self._statement(writes=False) as database:
            rows = database.execute(
                "SELECT name, CAST(disk_bytes AS INTEGER) FROM entries "
                "WHERE typeof(name) = 'text' ORDER BY used_s, number"  # as in `names`
            )
            for name, disk_bytes in rows:
                if num_bytes <= 0:
                    break
                found.append(name)
                num_bytes -= disk_bytes
        return found

    # ---- write ---------------------------------------------------------------------------------

    def add(self, entry: IndexedEntry, disk_bytes: int, total_bytes: int) -> str | None:
        """Add an entry and replace the one of its name; return the file of the latter.

        Args:
            entry: its number is ignored.
            disk_bytes: bytes of its file.
            total_bytes: most bytes of all files.

        Raises:
            TierFull: the file does not fit beside the others; nothing changed.
        """
        facts, sums = json.dumps(dict(entry.stored.facts)), _packed(entry.sums)
        row_sum = _row_sum(entry.name, entry.file, entry.stored.num_bytes, facts, sums)
        with self._statement(writes=True) as database:
            old = database.execute("SELECT file FROM entries WHERE name = ?", [entry.name])
            replaced = [str(file) for (file,) in old]
            database.execute("DELETE FROM entries WHERE name = ?", [entry.name])
            [(used_bytes,)] = database.execute(_TOTAL)
            if used_bytes + disk_bytes > total_bytes:
                raise TierFull(f"{entry.name!r} does not fit beside other entries")
            database.execute(
                "INSERT INTO entries (name, file, num_bytes, disk_bytes, facts, sums, row_sum, "
                "used_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(entry.name, entry.file, entry.stored.num_bytes, disk_bytes),
                    *(facts, sums, row_sum, time.time()),
                ),
            )
        return replaced[0] if replaced else None

    def remove(self, name: str, file: str | None = None) -> str | None:
        """Remove an entry, unless it has another file by now; return the file to delete."""
        with self._statement(writes=True) as database:
            found = database.execute("SELECT file FROM entries WHERE name = ?", [name]).fetchall()
            if not found or file not in (None, found[0][0]):
                return None
            database.execute("DELETE FROM entries WHERE name = ?", [name])
        return str(found[0][0])

    def touch(self, used_s: Mapping[str, float]) -> None:
        """Set when entries were last used, in Unix time."""
        with self._statement(writes=True) as database:
            database.executemany(
                "UPDATE entries SET used_s = ? WHERE name = ?",
                [(at, name) for name, at in used_s.items()],
            )

    def close(self) -> None:
        """Close the database."""
        with self._turn, contextlib.suppress(sqlite3.Error):
            self._database.close()


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; `executescript` would commit the open transaction."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _entry(row: tuple[Any, ...]) -> IndexedEntry | None:
    """An entry of its row; None if the row is damaged."""
    number, name, file, num_bytes, facts, sums, row_sum = row
    values = (name, file, num_bytes, facts, sums)
    if not all(map(isinstance, values, (str, str, int, str, bytes))):
        return None
    if _row_sum(*values) != row_sum or len(sums) != -(-num_bytes // CHUNK_BYTES) * 4:
        return None
    try:
        read = json.loads(facts)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or file != Path(file).name:
        return None
    stored = StoredEntry(num_bytes, read)
    return IndexedEntry(number, name, file, stored, struct.unpack(f"<{len(sums) // 4}I", sums))


def _lacks_schema(error: sqlite3.Error) -> bool:
    """Whether an error states that a table or column is missing."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _row_sum(name: str, file: str, num_bytes: int, facts: str, sums: bytes) -> int:
    return zlib.crc32(f"{name}\0{file}\0{num_bytes}\0{facts}\0".encode() + sums)


def _packed(sums: Collection[int]) -> bytes:
    return struct.pack(f"<{len(sums)}I", *sums)
