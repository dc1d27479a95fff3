"""Records of a file: JSON lines (may be compressed by gzip), or one JSON list or object."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from quire.errors import ConfigError
from quire.sim.traces.reading import Row, json_rows, opened


def records(path: Path, count: int | None = None) -> list[Row]:
    """The first records of a file.

    Args:
        path: the file. `.json` has one list of objects, or one object whose values are the
            records; any other suffix has one object on each line.
        count: most records; None: all.

    Raises:
        ConfigError: the file cannot be read, or has no records.
    """
    rows = _whole(path) if path.suffix == ".json" else json_rows(path)
    found = list(islice(rows, count))
    if not found:
        raise ConfigError(f"{path} has no records: expected JSON objects, one on each line")
    return found


def _whole(path: Path) -> Iterator[Row]:
    with opened(path) as file:
        try:
            value = json.load(file)
        except ValueError as error:
            raise ConfigError(f"{path.name} is not JSON: {error}") from error
    listed = value.values() if isinstance(value, Mapping) else value
    if not isinstance(listed, list) and not isinstance(value, Mapping):
        raise ConfigError(f"{path.name}: expected a list of objects, got {type(value).__name__}")
    for number, one in enumerate(listed, start=1):
        row = Row(path, number, one if isinstance(one, Mapping) else {})
        if not isinstance(one, Mapping):
            raise row.error("an object", one)
        yield row


def texts(row: Row, name: str) -> tuple[str, ...]:
    """A field with one text or a list of texts; of objects their `text`.

    Raises:
        TraceError: the field is missing or empty.
    """
    value = row.values.get(name)
    listed = value if isinstance(value, list) else [value]
    plain = [one.get("text") if isinstance(one, Mapping) else one for one in listed]
    found = tuple(one for one in plain if isinstance(one, str) and one)
    if not found or len(found) != len(plain):
        raise row.error(f"a text {name} or a list of texts", value)
    return found


def first_text(row: Row, *names: str) -> str:
    """The first of several fields that the record has; of an object its `text`.

    Raises:
        TraceError: the record has none of them.
    """
    for name in names:
        value = row.values.get(name)
        value = value.get("text") if isinstance(value, Mapping) else value
        if isinstance(value, str) and value.strip():
            return value
    raise row.error(f"a text {' or '.join(names)}", sorted(row.values)[:6])
