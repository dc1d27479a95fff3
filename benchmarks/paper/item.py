"""A table or figure of a paper: its printed rows, and Quire's values of the same rows.

Every row gets one of three marks:

    reproduced       in the paper's setting, with all values within the item's tolerance
    scaled           another model, other lengths, another machine or a simulator; the reason lists
                     the differences
    not comparable   no value here, or a value that contradicts the printed one; the reason says why

The mark follows from the differences that the measuring function states, never from its own claim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.common.result import Cell, Chart, PartResult, Table
from quire.errors import InvariantError

if TYPE_CHECKING:
    from benchmarks.paper.material import Material

Status = Literal["reproduced", "scaled", "not comparable"]
REPRODUCED: Status = "reproduced"
SCALED: Status = "scaled"
NOT_COMPARABLE: Status = "not comparable"
STATUSES = (REPRODUCED, SCALED, NOT_COMPARABLE)
Values = tuple[Cell, ...]

_ZERO_ROUNDING = 0.005  # zeros are printed with one to three decimals


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Quire's values of one row.

    Attributes:
        values: one value for each column of the item; None: no values here.
        differences: differences from the paper's setting; none: the same setting.
        note: what a reader should know about the row; the reason of a row without values.
    """

    values: Values | None
    differences: tuple[str, ...] = ()
    note: str = ""


def no_values(reason: str) -> Ours:
    """A row that is not measured."""
    return Ours(values=None, note=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of a measuring function.

    Attributes:
        rows: Quire's values by row label; labels without a printed row are appended.
        tables: further tables of the benchmark that measured them.
        charts: pictures, for figures.
    """

    rows: Mapping[str, Ours]
    tables: tuple[Table, ...] = ()
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One table or figure.

    Attributes:
        id: name for `--items`, such as `table-1`.
        title: number and title in the paper.
        setting: the paper's model, machine and lengths.
        columns: column titles, with units.
        printed: the paper's values by row label; a figure has the values that the text states.
        measure: measures Quire's values.
        status: best mark that a full run on the paper's model can reach.
        reason: why it is not `reproduced`, or what is reproduced.
        tolerance: largest relative difference of a reproduced value.
    """

    id: str
    title: str
    setting: str
    columns: tuple[str, ...]
    printed: Mapping[str, Values]
    measure: Callable[["Material"], Measured]
    status: Status
    reason: str
    tolerance: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A printed row beside Quire's.

    Attributes:
        label: row label.
        paper: printed values; None: the paper has no such row.
        ours: Quire's values; None: not measured.
        status: mark of the row.
        reason: reason of the mark.
    """

    label: str
    paper: Values | None
    ours: Values | None
    status: Status
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """Result of one item.

    Attributes:
        id, title, setting, columns: values of the item.
        rows: all rows.
        more: further tables, and pictures.
        seconds: duration.
    """

    id: str
    title: str
    setting: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    more: PartResult
    seconds: float = 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Number of rows by mark."""
        return {status: sum(row.status == status for row in self.rows) for status in STATUSES}

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "ItemResult":
        """Convert from the JSON values of `to_json`."""
        rows = tuple(
            Row(**{**row, "paper": _values(row["paper"]), "ours": _values(row["ours"])})
            for row in stored["rows"]
        )
        more = PartResult.from_json(stored["more"])
        return cls(**{**stored, "columns": tuple(stored["columns"]), "rows": rows, "more": more})


def _values(stored: list[Cell] | None) -> Values | None:
    return None if stored is None else tuple(stored)


def compare(item: Item, measured: Measured, seconds: float) -> ItemResult:
    """Put Quire's values beside the printed ones and mark every row.

    Raises:
        InvariantError: a printed row has no entry, or a row does not have one value per column.
    """
    missing = [label for label in item.printed if label not in measured.rows]
    if missing:
        raise InvariantError(
            f"expected an entry for every printed row of {item.id}, got none for {missing}"
        )
    return ItemResult(
        id=item.id,
        title=item.title,
        setting=item.setting,
        columns=item.columns,
        rows=tuple(_rows(item, measured)),
        more=PartResult(claims={}, tables=measured.tables, charts=measured.charts),
        seconds=seconds,
    )


def _rows(item: Item, measured: Measured) -> Iterator[Row]:
    others = [label for label in measured.rows if label not in item.printed]
    for label in (*item.printed, *others):
        ours = measured.rows[label]
        if ours.values is not None and len(ours.values) != len(item.columns):
            raise InvariantError(
                f"expected {len(item.columns)} values in row {label!r} of {item.id}, got "
                f"{len(ours.values)}"
            )
        paper = item.printed.get(label)
        status, reason = mark(paper, ours, item.tolerance)
        yield Row(label=label, paper=paper, ours=ours.values, status=status, reason=reason)


def mark(paper: Values | None, ours: Ours, tolerance: float) -> tuple[Status, str]:
    """Mark of a row, and its reason.

    Args:
        paper: printed values; None: no such row.
        ours: Quire's values.
        tolerance: largest relative difference of a reproduced value.

    Raises:
        InvariantError: a row without values has no reason.
    """
    if ours.values is None:
        if not ours.note:
            raise InvariantError("expected a reason for a row without values, got none")
        return NOT_COMPARABLE, ours.note
    if paper is None:
        return NOT_COMPARABLE, _joined("the paper has no such row", *ours.differences, ours.note)
    if ours.differences:
        return SCALED, _joined(*ours.differences, ours.note)
    pairs = list(zip(paper, ours.values, strict=True))
    compared = [(p, o) for p, o in pairs if p is not None and o is not None]
    if not compared:
        return NOT_COMPARABLE, _joined("the paper prints no value", ours.note)
    if all(_is_near(p, o, tolerance) for p, o in compared):
        return REPRODUCED, _joined("same setting", ours.note)
    return NOT_COMPARABLE, _joined(
        f"same setting, but values differ by over {tolerance:.0%}", ours.note
    )


def _is_near(paper: str | float, ours: str | float, tolerance: float) -> bool:
    if isinstance(paper, str) or isinstance(ours, str):
        return paper == ours
    return abs(ours - paper) <= max(tolerance * abs(paper), _rounding(paper))


def _rounding(printed: float) -> float:
    """Half a unit of the last printed digit."""
    if printed == 0:
        return _ZERO_ROUNDING
    _, _, decimals = str(printed).partition(".")
    return 0.5 * 10.0 ** -len(decimals)


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)
