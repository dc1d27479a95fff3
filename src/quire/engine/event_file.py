"""KV events as a file: one JSON object a line, written whole, at the moment the event happens."""

import json
import logging
import os
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from quire.engine.events import KVEvent
from quire.errors import ConfigError

MOST_HELD_BYTES = 16 << 20
"""Lines held in memory at most while the disk is full."""

logger = logging.getLogger(__name__)


class EventFile:
    """A listener that appends every event to a file, each with one write.

    Lines are whole whenever the process is killed, and whoever reads the file sees each at once.
    While the disk is full, lines are held in memory and written with the next event that finds
    room; the log says so once. Use as a context manager, or call `close`.

    Args:
        path: appended to, made where it is not there.

    Attributes:
        num_lost: events that found no room in the file nor in memory.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.num_lost = 0
        self._path = path
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._has_warned = False
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._refusal(error) from error

    def __call__(self, event: KVEvent) -> None:
        """Append one event, behind those that are held.

        Raises:
            ValueError: the file is closed; the event log then drops this listener.
        """
        if self._descriptor < 0:
            raise ValueError(f"{self._path} is closed")
        line = json.dumps(event.as_dict(), allow_nan=False).encode() + b"\n"
        if self._held_bytes + len(line) > MOST_HELD_BYTES:
            self.num_lost += 1
        else:
            self._held.append(line)
            self._held_bytes += len(line)
        try:
            self._write_held()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s; events are held in memory", self._refusal(error))

    def close(self) -> None:
        """Write what is held and take no more events. Events that come later raise.

        Raises:
            ConfigError: the file still cannot be written; says how many events it lacks.
        """
        if self._descriptor < 0:
            return
        try:
            self._write_held()
        except OSError as error:
            self.num_lost += len(self._held)
            raise self._refusal(error) from error
        finally:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
        if self.num_lost:
            raise ConfigError(self._lacking("the disk was full"))

    def _write_held(self) -> None:
        while self._held:
            self._write(self._held[0])
            self._held_bytes -= len(self._held.popleft())

    def _write(self, line: bytes) -> None:
        left = line
        try:
            while left:  # the rest of a write that a full disk or a signal cut short
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            self._cut(len(line) - len(left))
            raise

    def _cut(self, num_bytes: int) -> None:
        """Take the first part of a line that found no room for the rest off the file again."""
        found = os.fstat(self._descriptor)
        if num_bytes and stat.S_ISREG(found.st_mode):
            with suppress(OSError):
                os.ftruncate(self._descriptor, found.st_size - num_bytes)

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(self._lacking(error.strerror or str(error)))

    def _lacking(self, reason: str) -> str:
        lacking = f"; the file lacks {self.num_lost:,} events" if self.num_lost else ""
        return (
            f"KV events cannot be written to {self._path}: {reason}{lacking}; choose another file "
            "for --kv-events, or make room"
        )

    def __enter__(self) -> "EventFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except ConfigError as refusal:
            if error is None:
                raise
            logger.warning("%s", refusal)  # the error that ends the command is told by itself
