"""KV events as a file: one JSON object a line, written whole, at the moment the event happens."""

import json
import os
from pathlib import Path
from types import TracebackType

from quire.engine.events import KVEvent
from quire.errors import ConfigError


class EventFile:
    """A listener that appends every event to a file, each with one write.

    Lines are whole whenever the process is killed, and whoever reads the file sees each at once.
    Use as a context manager, or call `close`.

    Args:
        path: appended to, made where it is not there.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"KV events cannot be written to {path}: {error.strerror}; choose another file "
                "for --kv-events"
            ) from error

    def __call__(self, event: KVEvent) -> None:
        """Append one event.

        Raises:
            OSError: the file system refuses; the event log then drops this listener.
        """
        left = json.dumps(event.as_dict(), allow_nan=False).encode() + b"\n"
        while left:  # the rest of a write that a full disk or a signal cut short
            left = left[os.write(self._descriptor, left) :]

    def close(self) -> None:
        """Take no more events. Events that come later raise."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "EventFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
