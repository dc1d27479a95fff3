"""Results as text: tables for a terminal, Markdown and CSV, and pages from Jinja2 templates."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.common.result import Cell, Table

SHARED_TEMPLATES = Path(__file__).resolve().parent / "templates"


def shown(cell: Cell) -> str:
    """A cell as people read it."""
    if cell is None:
        return ""
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"


def environment(folder: Path = SHARED_TEMPLATES, *, autoescape: bool = False) -> Environment:
    """Templates of a folder, and the shared ones; an undefined name is an error.

    Args:
        folder: searched first.
        autoescape: whether values are escaped for HTML.
    """
    templates = Environment(
        loader=FileSystemLoader([folder, SHARED_TEMPLATES]),
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    templates.filters["shown"] = shown
    return templates


def report(bench: str, tables: Sequence[Table]) -> str:
    """The Markdown page of one run: tables, each under its caption."""
    return environment().get_template("report.md.j2").render(bench=bench, found=tables)


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


def as_csv(table: Table) -> str:
    """As CSV, with every digit."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return file.getvalue()
