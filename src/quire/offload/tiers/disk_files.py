"""The files of a disk tier: blocks of 1 MiB past the page cache, and the journal that indexes them.

Reading a cached file copies on the processor and fills memory that the host pool wants; with
O_DIRECT the disk writes into the buffer itself. It needs aligned buffers, so blocks go through one.
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

# A file of blocks of 1 MiB, read and written whole, past the system's page cache where it lets us.

BLOCK_BYTES = 1 << 20


class BlockFile:
    """Blocks of one file, all of whose room is taken when it is made.

    Args:
        path: of the file; what it holds stays.
        num_blocks: it shall have.
        direct: past the page cache where the file system allows it.

    Attributes:
        direct: whether it is so.

    Raises:
        ConfigError: it cannot be written, or the disk has less room.
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
                f"cannot keep {num_blocks * BLOCK_BYTES:,} B in {path}: {error.strerror}; name "
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
        """Write a block; what is behind its data becomes zeros.

        Raises:
            StorageError: the disk does not take it.
        """
        self._view[: data.nbytes] = data
        self._view[data.nbytes :] = bytes(BLOCK_BYTES - data.nbytes)
        try:
            done = os.pwrite(self._file, self._view, block * BLOCK_BYTES)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error
        if done != BLOCK_BYTES:
            raise StorageError(f"the disk of {self._path} took {done:,} of {BLOCK_BYTES:,} B")

    def read(self, block: int) -> memoryview:
        """A block, until the next call; shorter where the file has been cut.

        Raises:
            StorageError: the disk does not give it.
        """
        try:
            done = os.preadv(self._file, [self._view], block * BLOCK_BYTES)
        except OSError as error:
            raise StorageError(f"cannot read {self._path}: {error.strerror}") from error
        return self._view[:done]

    def flush(self) -> None:
        """Return when what was written would survive a loss of power.

        Raises:
            StorageError: the disk has lost some of it.
        """
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)


def _take_room(file: int, num_bytes: int) -> None:
    """Have the disk set room aside, so that it cannot be full later."""
    if os.fstat(file).st_size > num_bytes:
        os.ftruncate(file, num_bytes)
    if num_bytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    elif num_bytes:
        os.ftruncate(file, num_bytes)


# ---- journal -------------------------------------------------------------------------------------

# The index of a disk tier: a line for everything that was kept or let go, the newest last.
#
#     crc32 of the rest in hexadecimal, a space, a JSON object
#
# A line is written behind the data it speaks of. A crash leaves a torn last line or none: reading
# ends at the first line whose sum is wrong, so nothing is found that was not whole.

FORMAT = 1


class Journal:
    """Lines of one file.

    Args:
        path: of the file; made anew by `rewrite`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self.num_lines = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was noted, up to the first torn line; nothing where there is no such file."""
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
        """Replace the file by one with these lines; a crash leaves the old one or the new.

        Where that fails before, lines go on behind the old ones.

        Raises:
            ConfigError: it cannot be written.
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
        """Append a line; it would survive a loss of power when this returns.

        Raises:
            StorageError: the disk does not take it; the line counts as not written.
        """
        data = _line(line)
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):  # lines behind a torn one would not be read
                os.ftruncate(self._file, before)
            raise StorageError(f"cannot write {self._path}: {error.strerror}") from error
        self.num_lines += 1

    def close(self) -> None:
        """Let the file go."""
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
