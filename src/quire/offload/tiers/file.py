"""File tier: a folder with a file for each entry and an SQLite index; several processes share it.

    write    file -> flush -> rename -> row of the index        crash before the end: no entry
    read     row -> chunks of the range -> checksums -> bytes   wrong checksum: entry dropped

The folder may be on a shared file system. Every process keeps the bytes of all entries below its
own limit. Files without a row, left by processes that were killed, are deleted at the next start
of a process that is alone in the folder.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, CorruptData, StorageError, TierFull
from quire.offload.tiers.base import SECRET_BYTES, Bytes, StoredEntry, check_range, flat
from quire.offload.tiers.file_index import CHUNK_BYTES, EntryFiles, FileIndex, IndexedEntry, padded

_LOCAL_FILE_SYSTEMS = frozenset(
    {
        *("apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "overlay"),
        *("ramfs", "reiserfs", "tmpfs", "xfs", "zfs"),
    }
)
_MOUNTS = Path("/proc/self/mounts")


class FolderLock:
    """A lock that every process holds while it uses a folder.

    Args:
        folder: created if missing.

    Attributes:
        is_alone: whether no other process uses the folder; then none can start until `share`.

    Raises:
        StorageError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(
                f"cannot write {folder}: {error.strerror}; name another folder"
            ) from error
        self.is_alone = False
        with contextlib.suppress(OSError):  # in use, or a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_alone = True
        if not self.is_alone:
            self.share()

    def share(self) -> None:
        """Let other processes start."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._file)


def is_on_network(folder: Path) -> bool:
    """Whether other hosts may use the file system of a folder; True if that is unknown."""
    return _file_system(folder) not in _LOCAL_FILE_SYSTEMS


def _file_system(folder: Path) -> str:
    """Type of the file system of a folder; "" if it is unknown, as outside of Linux."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "apfs" if os.uname().sysname == "Darwin" else ""
    path, best, found = folder.resolve(), -1, ""
    for line in lines:
        _, mount, kind, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if path.is_relative_to(mount) and len(mount) >= best:
            best, found = len(mount), kind
    return found


MIN_BYTES = 64 << 10
INDEX = "index.sqlite3"
_INDEX_FILES = (INDEX, f"{INDEX}-wal", f"{INDEX}-shm", f"{INDEX}-journal")
_OLD_FILES = ("blocks", "index")
_MAX_TOUCHED = 64  # reads whose time is not in the index yet


class FileTier:
    """`Tier` in a folder.

    Args:
        folder: created if missing; entries of earlier and of other processes are found.
        total_bytes: most bytes of all files.
        direct: whether to bypass the page cache where the file system allows it.
        flag: option that sets the size, for errors.

    Raises:
        ConfigError: the size is too small, or exceeds the disk.
        StorageError: the folder cannot be written, has another format, or has a damaged index
            while other processes use it.
    """

    def __init__(
        self,
        folder: Path,
        total_bytes: int,
        *,
        direct: bool = True,
        flag: str = "--disk-kv-memory",
    ) -> None:
        if total_bytes < MIN_BYTES:
            raise ConfigError(
                f"expected a disk tier of {MIN_BYTES:,} B or more, got {total_bytes:,} B; raise "
                f"{flag}"
            )
        self.total_bytes, self._folder, self._flag = total_bytes, folder, flag
        self._turn = threading.RLock()
        self._newest, self._touched = 0, dict[str, float]()
        self._damaged = dict[str, CorruptData]()
        with contextlib.ExitStack() as undo:
            lock = FolderLock(folder)
            undo.callback(lock.close)
            self._lock = lock
            _refuse_old_format(folder)
            self._files = EntryFiles(folder / "entries", direct=direct)
            try:
                self._index = self._opened_index(folder, alone=lock.is_alone)
                undo.callback(self._index.close)
                self._damaged |= self._index.damaged
                if lock.is_alone:
                    self._remove_orphans(folder)
                # drop the oldest entries of a folder that was larger
                for key in self._index.min_recent(self.used_bytes - self.total_bytes):
                    self.drop(key)
                self._require_space(folder)
            except OSError as error:
                raise StorageError(f"cannot use {folder}: {error}; name another folder") from error
            lock.share()
            undo.pop_all()

    def _opened_index(self, folder: Path, *, alone: bool) -> FileIndex:
        """Open the index; start a new one if it is damaged and no other process uses it."""
        on_network = is_on_network(folder)
        try:
            return FileIndex(folder / INDEX, on_network=on_network)
        except CorruptData as error:
            if not alone:
                raise StorageError(
                    f"{error}: end all engines that use {folder}, then start one again; it begins "
                    "a new index"
                ) from error
            self._damaged[INDEX] = CorruptData(f"{error}; all stored prefixes are lost")
        for name in _INDEX_FILES:
            (folder / name).unlink(missing_ok=True)
        return FileIndex(folder / INDEX, on_network=on_network)

    def _remove_orphans(self, folder: Path) -> None:
        orphans = self._files.names() - self._index.files()
        if orphans and self._index.is_new:
            lost = CorruptData(f"{folder / INDEX} was missing; all stored prefixes are lost")
            self._damaged.setdefault(INDEX, lost)
        for name in orphans:
            self._files.remove(name)

    def _require_space(self, folder: Path) -> None:
        usable_bytes = shutil.disk_usage(folder).free + self.used_bytes
        if self.total_bytes > usable_bytes:
            raise ConfigError(
                f"expected a disk tier of at most {usable_bytes:,} B (free space of {folder}), got "
                f"{self.total_bytes:,} B; name another folder, or lower {self._flag}"
            )

    @property
    def used_bytes(self) -> int:
        return self._index.disk_bytes

    @property
    def direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._files.direct

    def stored(self) -> dict[str, StoredEntry]:
        return {entry.name: entry.stored for entry in self._index.after(0)}

    def names(self) -> set[str]:
        return self._index.names()

    def added(self) -> dict[str, StoredEntry | CorruptData]:
        with self._turn:
            found = self._index.after(self._newest)
            self._newest = max((entry.number for entry in found), default=self._newest)
            damaged, self._damaged = self._damaged, {}
        return {entry.name: entry.stored for entry in found} | damaged

    def write(self, key: str, data: Bytes, facts: Mapping[str, Any] | None = None) -> None:
        """See `Tier`. The entry is complete for other processes once this returns."""
        source = flat(data)
        disk_bytes = padded(source.nbytes)
        if self.used_bytes + disk_bytes > self.total_bytes:
            self._refuse(key, disk_bytes)
        file, sums = self._files.write(source)
        entry = IndexedEntry(0, key, file, StoredEntry(source.nbytes, dict(facts or {})), sums)
        try:
            replaced = self._index.add(entry, disk_bytes, self.total_bytes)
        except BaseException as error:
            self._files.remove(file)
            if isinstance(error, TierFull):  # another process was faster
                self._refuse(key, disk_bytes)
            raise
        if replaced is not None:
            self._files.remove(replaced)

    def _refuse(self, key: str, disk_bytes: int) -> None:
        raise TierFull(
            f"{key!r} needs {disk_bytes:,} B, and {self.total_bytes - self.used_bytes:,} of "
            f"{self.total_bytes:,} B of the disk tier are free; raise {self._flag}"
        )

    def read(self, key: str, into: memoryview, first: int = 0) -> None:
        entry = self._index.get(key)
        stored = check_range(key, entry.stored if entry else None, into, first)
        assert entry is not None, "a stored entry has a row"
        try:
            self._copy(entry, stored.num_bytes, flat(into), first)
        except FileNotFoundError as error:  # deleted by hand, or evicted since its row was read
            self._index.remove(key, entry.file)
            raise StorageError(f"nothing is stored under {key!r} any more") from error
        except CorruptData:
            self._forget(key, entry.file)
            raise
        # note the use of an entry; the index is updated once for many reads
        with self._turn:
            self._touched[key] = time.time()
            if len(self._touched) >= _MAX_TOUCHED:
                self._write_touched()

    def _copy(self, entry: IndexedEntry, num_bytes: int, target: memoryview, first: int) -> None:
        end = first + target.nbytes
        chunks = range(first // CHUNK_BYTES, -(-end // CHUNK_BYTES))
        with contextlib.closing(self._files.read(entry.file, chunks)) as read:
            for number, chunk in read:
                start = number * CHUNK_BYTES
                length = min(CHUNK_BYTES, num_bytes - start)
                found = chunk[:length]
                if len(found) != length or zlib.crc32(found) != entry.sums[number]:
                    raise CorruptData(
                        f"chunk {number} of {entry.name!r} differs from what was written; the "
                        "entry is dropped"
                    )
                low, high = max(first, start), min(end, start + length)
                target[low - first : high - first] = found[low - start : high - start]

    def _write_touched(self) -> None:
        with self._turn, contextlib.suppress(StorageError):
            touched, self._touched = self._touched, {}
            if touched:
                self._index.touch(touched)

    def min_recent(self, num_bytes: int) -> list[str]:
        self._write_touched()
        return self._index.min_recent(self.used_bytes + padded(num_bytes) - self.total_bytes)

    def drop(self, key: str) -> None:
        """See `Tier`. If the disk fails, the entry may still be there after a restart."""
        with contextlib.suppress(StorageError):
            self._forget(key)

    def _forget(self, key: str, file: str | None = None) -> None:
        removed = self._index.remove(key, file)
        if removed is not None:
            self._files.remove(removed)

    def secret(self) -> bytes:
        """See `Tier`. A damaged one is renamed and replaced."""
        path = self._folder / "secret"
        try:
            if (found := self._read_secret(path)) is not None:
                return found
            part = path.with_suffix(f".{secrets.token_hex(8)}")
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_bytes(SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())
            # give a complete file its name, unless another engine was faster
            try:
                os.link(part, path)
            except FileExistsError:
                part.unlink()
            except OSError:  # a file system without hard links
                os.replace(part, path)
            else:
                part.unlink()
            return path.read_bytes()
        except OSError as error:
            text = f"cannot write {path}: {error.strerror}; name another folder"
            raise StorageError(text) from error

    def _read_secret(self, path: Path) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            found = b"" if path.is_dir() else path.read_bytes()
            if len(found) == SECRET_BYTES:
                return found
            path.rename(path.with_suffix(f".damaged-{secrets.token_hex(8)}"))
            self._damaged["secret"] = CorruptData(f"{path} was damaged and is replaced")
        return None

    def close(self) -> None:
        self._write_touched()
        self._index.close()
        self._lock.close()

    def check(self) -> None:
        """Check that the bytes of all files are those of the index.

        Raises:
            CorruptData: an entry has no file, or the total is wrong.
        """
        entries = self._index.after(0)
        missing = {entry.file for entry in entries} - self._files.names()
        total_bytes = sum(padded(entry.stored.num_bytes) for entry in entries)
        if missing or total_bytes != self.used_bytes:
            raise CorruptData(
                f"{len(missing)} files are missing; the entries have {total_bytes:,} B, and the "
                f"index counts {self.used_bytes:,} B"
            )


def _refuse_old_format(folder: Path) -> None:
    if all((folder / name).is_file() for name in _OLD_FILES):
        raise StorageError(
            f"expected a folder of this version of Quire, got {folder} with the prefixes of an "
            f"earlier one, which cannot be read: delete its files {' and '.join(_OLD_FILES)}, or "
            "name another folder"
        )
