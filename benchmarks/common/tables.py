"""Tables as text: for a terminal, Markdown, CSV."""

import csv
import io
from collections.abc import Sequence

from benchmarks.common.result import Cell, Table


def shown(cell: Cell) -> str:
    """A cell as people read it."""
    if cell is None:
        return ""
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"


def plain(table: Table) -> str:
    """In columns, for a terminal."""
    lines = [table.columns, *([shown(cell) for cell in row] for row in table.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.columns))]
    made = ("  ".join(_aligned(line, widths)).rstrip() for line in lines)
    return "\n".join((table.caption, *made))


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = (
        text.rjust(width) if i else text.ljust(width)
        for i, (text, width) in enumerate(zip(line, widths, strict=True))
    )
    return [first, *others]


def markdown(table: Table) -> str:
    """As Markdown, under its caption."""
    marks = ("---",) + ("---:",) * (len(table.columns) - 1)
    rows = [[shown(cell) for cell in row] for row in table.rows]
    lines = ("| " + " | ".join(line) + " |\n" for line in (table.columns, marks, *rows))
    return f"{table.caption}\n\n" + "".join(lines)


def as_csv(table: Table) -> str:
    """As CSV, with every digit."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return file.getvalue()
