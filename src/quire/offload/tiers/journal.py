"""The index of a disk tier: a line for everything that was kept or let go, the newest last.

    crc32 of the rest in hexadecimal, a space, a JSON object

A line is written behind the data it speaks of. A crash leaves a torn last line or none: reading
ends at the first line whose sum is wrong, so nothing is found that was not whole.
"""

import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, StorageError

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
