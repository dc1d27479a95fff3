"""Output of `quire policies` and `quire codecs`: one line for each entry, or one entry in full."""

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
