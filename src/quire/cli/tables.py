"""Tables of measured values: columns wrap at the width of the terminal, values have units."""

import os
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE_COLUMNS = 160  # of a file or a pipe, which do not wrap
_MIN_WHOLE_S = 1.0


def table_console() -> Console:
    """Console on standard output, as wide as the terminal."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE_COLUMNS
    return console


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; the first column names a row, the others are aligned at the right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.show_lines |= any("\n" in cell for cell in row)
        table.add_row(*(Text(cell) for cell in row))
    table_console().print(table)


def seconds(value: int | float) -> str:
    """Format a time: milliseconds below one second."""
    return f"{value:,.2f} s" if value >= _MIN_WHOLE_S else f"{1e3 * value:,.1f} ms"


_NAME_STYLE = "bold"


def show_summaries(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print names with one sentence each; long sentences wrap and names are never cut."""
    console = _console()
    console.print(Text(title))
    console.print(_grid(rows))


def show_entry(name: str, summary: str, facts: Mapping[str, str]) -> None:
    """Print one entry: its sentence, then facts by name; empty facts are left out."""
    console = _console()
    console.print(Text(name, style=_NAME_STYLE))
    console.print(Text(summary))
    console.print(_grid((fact, value) for fact, value in facts.items() if value))


def show_text(text: str) -> None:
    """Print a paragraph."""
    _console().print(Text(text))


def _console() -> Console:
    return Console(highlight=False)


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, overflow="fold", style=_NAME_STYLE)
    grid.add_column(overflow="fold")
    for name, text in rows:
        grid.add_row(Text(f"  {name}"), Text(text))
    return grid
