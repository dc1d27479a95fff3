"""Results of a benchmark part: claims, tables, charts and raw measurements."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Cell = str | int | float | None
Numbers = dict[str, int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table.

    Attributes:
        name: name of its files.
        caption: contents of the table and conditions of the measurement.
        columns: column titles, with units.
        rows: cells; None: no value.
    """

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture with lines over a numeric axis, or bars over names.

    Attributes:
        name: name of its file.
        title, x_label, y_label: texts with units.
        lines: points (x, y) by label; a text as x draws bars.
        log_x, log_y: logarithmic scales.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[tuple[str | int | float, int | float], ...]]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """Result of one part.

    Attributes:
        claims: claim values by name.
        tables: tables in page order.
        charts: charts of the results.
        raw: values of every repeat, as JSON values.
        seconds: duration of the part.
    """

    claims: Numbers
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    seconds: int | float = 0

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "PartResult":
        """Convert from the JSON values of `to_json`."""
        return cls(
            claims=stored["claims"],
            tables=tuple(_table(found) for found in stored["tables"]),
            charts=tuple(_chart(found) for found in stored["charts"]),
            raw=stored.get("raw", {}),
            seconds=stored["seconds"],
        )


def _table(stored: Mapping[str, Any]) -> Table:
    rows = tuple(tuple(row) for row in stored["rows"])
    return Table(**{**stored, "columns": tuple(stored["columns"]), "rows": rows})


def _chart(stored: Mapping[str, Any]) -> Chart:
    lines = {label: _points(points) for label, points in stored["lines"].items()}
    return Chart(**{**stored, "lines": lines})


def _points(stored: Iterable[Any]) -> tuple[tuple[str | int | float, int | float], ...]:
    return tuple((x, y) for x, y in stored)
