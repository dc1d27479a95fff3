"""The files of a disk tier: blocks of 1 MiB that bypass the page cache, and the index journal.

Reads through the page cache copy on the CPU and fill memory that the host pool needs. With O_DIRECT
the disk writes into the buffer itself. It needs aligned buffers, so all blocks pass through one.
"""

import contextlib
import errno
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, StorageError

# A file of blocks of 1 MiB, read and written whole, bypassing the page cache where possible.

BLOCK_BYTES = 1 << 20


class BlockFile:
    """Blocks of one file, allocated on disk at creation.

    Args:
        path: path of the file; existing contents are retained.
        num_blocks: size of the file.
        direct: whether to bypass the page cache where the file system allows it.

    Attributes:
        direct: whether the page cache is bypassed.

    Raises:
        ConfigError: the file cannot be written, or the disk is too small.
    """

    def __init__(self, path: Path, num_blocks: int, *, direct: bool = True) -> None:
        self._path, self._num_blocks = path, num_blocks
        self._buffer = mmap.mmap(-1, BLOCK_BYTES)  # aligned to a page
        self._view = memoryview(self._buffer)
        self.direct = direct and hasattr(os, "O_DIRECT")
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"cannot allocate {num_blocks * BLOCK_BYTES:,} B in {path}: {error.strerror}; name "
                "another folder, or lower --disk-kv-memory"
            ) from error

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        file = -1
        if self.direct:
            with contextlib.suppress(OSError):
                file = os.open(self._path, flags | os.O_DIRECT, 0o600)
        self.direct = file >= 0
        if file < 0:
            file = os.open(self._path, flags, 0o600)
        try:
            _take_room(file, self._num_blocks * BLOCK_BYTES)
        except OSError:
            os.close(file)
            raise
        return file

    def write(self, block: int, data: memoryview) -> None:
        """Write a block, padded with zeros.

        Raises:
            StorageError: the disk write failed.
        """
        self._view[: data.nbytes] = data
        self._view[data.nbytes :] = bytes(BLOCK_BYTES - data.nbytes)
        try:
            done = os.pwrite(self._file, self._view, block * BLOCK_BYTES)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error
        if done != BLOCK_BYTES:
            raise StorageError(f"the disk of {self._path} wrote {done:,} of {BLOCK_BYTES:,} B")

    def read(self, block: int) -> memoryview:
        """Read a block, valid until the next call; shorter if the file is truncated.

        Raises:
            StorageError: the disk read failed.
        """
        try:
            done = os.preadv(self._file, [self._view], block * BLOCK_BYTES)
        except OSError as error:
            raise StorageError(f"cannot read {self._path}: {error.strerror}") from error
        return self._view[:done]

    def flush(self) -> None:
        """Flush all written blocks to the disk (fsync).

        Raises:
            StorageError: the disk has lost data.
        """
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _take_room(file: int, num_bytes: int) -> None:
    """Allocate the file's blocks on disk, so that later writes cannot run out of space."""
    if os.fstat(file).st_size > num_bytes:
        os.ftruncate(file, num_bytes)
    if num_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    elif num_bytes:
        os.ftruncate(file, num_bytes)


# ---- journal -------------------------------------------------------------------------------------

# The index of a disk tier: a line for each entry written or dropped, the newest last.
#
#     crc32 of the rest in hexadecimal, a space, a JSON object
#
# A line is written after the data it describes. A crash leaves at most one torn last line. Reading
# ends at the first line with a wrong checksum, so every entry found is complete.

FORMAT = 1


class Journal:
    """Lines of one file.

    Args:
        path: path of the file; `rewrite` replaces it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self.num_lines = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """Lines up to the first torn one; none if the file does not exist."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error.strerror}") from error
        for line in text.split(b"\n")[:-1]:
            total, _, rest = line.partition(b" ")
            if total != _total(rest):
                return
            yield json.loads(rest)

    def rewrite(self, lines: Sequence[dict[str, Any]]) -> None:
        """Replace the file by these lines, atomically with respect to crashes.

        On failure before the replacement the old file stays in use.

        Raises:
            ConfigError: the file cannot be written.
        """
        part = self._path.with_suffix(".part")
        try:
            with open(part, "wb") as file:
                file.writelines(map(_line, lines))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._path)
            _flush_folder(self._path.parent)
            self.close()
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._path}: {error.strerror}; name another folder"
            ) from error
        self.num_lines = len(lines)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line; it survives a power loss once this returns.

        Raises:
            StorageError: the write failed; the line counts as not written.
        """
        data = _line(line)
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # lines after a torn one would not be read
                os.ftruncate(self._file, before)
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error
        self.num_lines += 1

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _line(values: dict[str, Any]) -> bytes:
    rest = json.dumps(values, separators=(",", ":")).encode()
    return _total(rest) + b" " + rest + b"\n"


def _total(rest: bytes) -> bytes:
    return b"%08x" % zlib.crc32(rest)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
