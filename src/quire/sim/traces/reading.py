"""Readers of trace rows, with errors that name the line and the expected content."""

import csv
import gzip
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from quire.errors import TraceError


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One record of a file."""

    path: Path
    line: int  # from 1
    values: Mapping[str, object]  # by column or key

    def error(self, expected: str, got: object) -> TraceError:
        return TraceError(f"{self.path.name}, line {self.line}: expected {expected}, got {got!r}")

    def count(self, name: str, *, least: int) -> int:
        value = self._number(name)
        if value != int(value) or value < least:
            raise self.error(f"{name} to be a whole number of {least} or more", self.values[name])
        return int(value)

    def number(self, name: str) -> float:
        return self._number(name)

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"a text {name}", value)
        return value.strip()

    def _number(self, name: str) -> float:
        value = self.values.get(name)
        try:
            if isinstance(value, bool) or not isinstance(value, int | float | str):
                raise ValueError
            number = float(value)
        except (ValueError, OverflowError):
            raise self.error(f"a number {name}", value) from None
        if not math.isfinite(number):
            raise self.error(f"a finite number {name}", value)
        return number


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a trace as text; a file whose name ends in .gz is decompressed."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name} is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or error  # errors of gzip have no strerror
        raise TraceError(f"cannot read the trace {path}: {why}") from error


def csv_rows(path: Path, *needed: str) -> Iterator[TraceRow]:
    """Rows of a CSV file with a header."""
    with opened(path) as file:
        reader = csv.reader(file)
        try:
            header = [name.strip() for name in next(reader, [])]
            missing = [name for name in needed if name not in header]
            if missing:
                raise TraceError(
                    f"{path.name}, line 1: expected the columns {', '.join(needed)}; "
                    f"{', '.join(missing)} missing in {','.join(header)!r}"
                )
            for fields in reader:
                if not fields:
                    continue  # an empty line
                row = TraceRow(path, reader.line_num, dict(zip(header, fields, strict=False)))
                if len(fields) != len(header):
                    raise row.error(f"{len(header)} fields", ",".join(fields))
                yield row
        except csv.Error as error:
            raise TraceError(f"{path.name}, line {reader.line_num}: {error}") from error


def json_rows(path: Path) -> Iterator[TraceRow]:
    """Rows of a file with one JSON object on each line."""
    with opened(path) as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                values = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise TraceError(f"{path.name}, line {line}: not JSON ({error})") from error
            if not isinstance(values, dict):
                raise TraceError(
                    f"{path.name}, line {line}: expected a JSON object, got {text.strip()[:40]!r}"
                )
            yield TraceRow(path, line, values)
