"""Tables whose columns are functions of the measured objects."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from benchmarks.common.result import Cell, Table

Row = TypeVar("Row")


def table_of(
    name: str, caption: str, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], Cell]]
) -> Table:
    """One row for each object; columns are given by their titles."""
    return Table(
        name=name,
        caption=caption,
        columns=tuple(columns),
        rows=tuple(tuple(value(row) for value in columns.values()) for row in rows),
    )
