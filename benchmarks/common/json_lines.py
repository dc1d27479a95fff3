"""A file with one JSON object per line, to which an interrupted run can append."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class JsonLines:
    """Objects stored one per line.

    Args:
        path: path of the file, created with the first object; None: store nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the stored objects; an incomplete last line is ignored."""
        if self._path is None or not self._path.is_file():
            return
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue

    def add(self, stored: dict[str, Any]) -> None:
        """Append an object."""
        if self._path is None:
            return
        with self._path.open("a+b") as file:
            if file.tell():  # an interrupted run may have left an incomplete line
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(json.dumps(stored).encode() + b"\n")
