"""What a part of a bench hands back: claims, tables, pictures, and what was measured."""

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
    """One picture: lines over a number, or bars over names.

    Attributes:
        name: of its file.
        title, x_label, y_label: what is drawn, with units.
        lines: label to points (x, y); x is a text for bars.
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
class HeatMap:
    """One picture of shares from 0 (white) to 1: a panel for each of several matrices.

    Attributes:
        name: of its file.
        title, x_label, y_label: what is drawn, with units.
        panels: label to a matrix; rows from the top, columns from the left.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    panels: Mapping[str, tuple[tuple[float, ...], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """One picture of what ran when: a panel for each of several runs, a bar for each lane.

    Attributes:
        name: of its file.
        title, x_label: what is drawn, with the unit of time.
        panels: label to lanes; a lane to what ran on it: begin, end, kind.
    """

    name: str
    title: str
    x_label: str
    panels: Mapping[str, Mapping[str, tuple[tuple[int | float, int | float, str], ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """One part.

    Attributes:
        claims: flat numbers.
        tables: in the order of reading.
        charts: pictures of them.
        maps: pictures of matrices.
        spans: pictures of what ran when.
        raw: every repeat, JSON values.
        seconds: it took.
    """

    claims: Numbers
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...] = ()
    maps: tuple[HeatMap, ...] = ()
    spans: tuple[Spans, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)
    seconds: int | float = 0

    @property
    def pictures(self) -> "tuple[Chart | HeatMap | Spans, ...]":
        """Charts, then maps, then spans."""
        return (*self.charts, *self.maps, *self.spans)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "PartResult":
        """From what `to_json` made, once through JSON."""
        return cls(
            claims=stored["claims"],
            tables=tuple(_table(found) for found in stored["tables"]),
            charts=tuple(_chart(found) for found in stored["charts"]),
            maps=tuple(_map(found) for found in stored.get("maps", ())),
            spans=tuple(_spans(found) for found in stored.get("spans", ())),
            raw=stored.get("raw", {}),
            seconds=stored["seconds"],
        )


def _table(stored: Mapping[str, Any]) -> Table:
    rows = tuple(tuple(row) for row in stored["rows"])
    return Table(**{**stored, "columns": tuple(stored["columns"]), "rows": rows})


def _chart(stored: Mapping[str, Any]) -> Chart:
    lines = {label: _points(points) for label, points in stored["lines"].items()}
    return Chart(**{**stored, "lines": lines})


def _map(stored: Mapping[str, Any]) -> HeatMap:
    panels = {label: tuple(map(tuple, rows)) for label, rows in stored["panels"].items()}
    return HeatMap(**{**stored, "panels": panels})


def _spans(stored: Mapping[str, Any]) -> Spans:
    panels = {
        label: {
            lane: tuple((begin, end, kind) for begin, end, kind in found)
            for lane, found in lanes.items()
        }
        for label, lanes in stored["panels"].items()
    }
    return Spans(**{**stored, "panels": panels})


def _points(stored: Iterable[Any]) -> tuple[tuple[str | int | float, int | float], ...]:
    return tuple((x, y) for x, y in stored)
