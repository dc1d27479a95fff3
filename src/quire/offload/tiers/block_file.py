"""A file of blocks of 1 MiB, read and written whole, past the system's page cache where it lets us.

Reading a cached file copies on the processor and fills memory that the host pool wants; with
O_DIRECT the disk writes into the buffer itself. It needs aligned buffers, so blocks go through one.
"""

import contextlib
import mmap
import os
from pathlib import Path

from quire.errors import ConfigError, StorageError

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
