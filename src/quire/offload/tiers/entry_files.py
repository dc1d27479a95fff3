"""Files of entries: written whole under a new name, read in chunks of 1 MiB past the page cache.

Reads through the page cache copy on the CPU and fill memory that the host pool needs. With O_DIRECT
the disk writes into the buffer itself. It needs aligned buffers, so all chunks pass through one.
"""

import contextlib
import mmap
import os
import secrets
import threading
import zlib
from collections.abc import Generator
from pathlib import Path

from quire.errors import StorageError

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
                    self._write_chunk(file, start, chunk)
                    sums.append(zlib.crc32(chunk))
            os.fdatasync(file)
        finally:
            os.close(file)
        return tuple(sums)

    def _write_chunk(self, file: int, start: int, chunk: memoryview) -> None:
        size = padded(chunk.nbytes)
        self._view[: chunk.nbytes] = chunk
        self._view[chunk.nbytes : size] = bytes(size - chunk.nbytes)
        done = os.pwrite(file, self._view[:size], start)
        if done != size:
            raise OSError(None, f"the disk wrote {done:,} of {size:,} B")

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
