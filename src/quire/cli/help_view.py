"""`--help` of a command: no name or value is cut, at any width of the terminal.

A wide terminal shows names and help side by side, a narrow one the help below the names.
"""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_SIDE_BY_SIDE = 120  # columns of the terminal
_INDENT = 4
_WITHOUT_BRACES = str.maketrans("", "", "{}")  # typer marks required arguments with them
_FRAME = 4  # columns of the border and its padding


def show_help(command: Any, ctx: Any) -> None:
    """Print the help of a command on standard output.

    Args:
        command: a command of typer.
        ctx: its context.
    """
    console = Console(highlight=False)
    usage = " ".join(command.get_usage(ctx).split()[1:]).translate(_WITHOUT_BRACES)
    console.print(Padding(Text.assemble(("Usage: ", "bold yellow"), (usage, "bold")), (1, 1)))
    for paragraph in (command.help or "").split("\n\n"):
        console.print(Padding(Text(paragraph.strip()), (0, 1, 1, 1)))
    for title, parameters in _groups(command.get_params(ctx)).items():
        rows = [(_names(p, ctx), _help(p)) for p in parameters]
        body = _side_by_side(rows) if console.width >= _SIDE_BY_SIDE else _stacked(rows, console)
        console.print(Panel(body, title=title, title_align="left", border_style="dim"))
    if command.epilog:
        console.print(Padding(Text(command.epilog), (1, 1)))


def _groups(parameters: list[Any]) -> dict[str, list[Any]]:
    """Parameters that are shown, by heading; arguments first."""
    groups: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for parameter in parameters:
        if not getattr(parameter, "hidden", False):
            argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None)
            title = panel or ("Arguments" if argument else "Options")
            groups.setdefault(title, []).append(parameter)
    return {title: shown for title, shown in groups.items() if shown}


def _names(parameter: Any, ctx: Any) -> Text:
    """Names of an option and its value, or the name of an argument."""
    if parameter.param_type_name == "argument":
        required = " (required)" if parameter.required else ""
        return Text.assemble((str(parameter.metavar), "bold cyan"), required)
    # long names first: click keeps the names of --help in a set
    names = ", ".join(sorted(parameter.opts, key=lambda name: not name.startswith("--")))
    if parameter.secondary_opts:
        names += " / " + ", ".join(parameter.secondary_opts)
    required = " (required)" if parameter.required else ""
    value = _value(parameter, ctx)
    return Text.assemble((names, "bold cyan"), (f" {value}" if value else "", "yellow"), required)


def _value(parameter: Any, ctx: Any) -> str:
    """Placeholder of the value; empty for a flag."""
    if parameter.is_flag:
        return ""
    if parameter.metavar:
        return str(parameter.metavar)
    described = getattr(parameter, "display_type_rich", None)
    return str(described(ctx)) if described else f"<{parameter.type.name}>"


def _help(parameter: Any) -> Text:
    """Help with the default, unless it is unset or a flag that is off."""
    text = Text(" ".join((parameter.help or "").split()))
    default = parameter.default
    if not parameter.show_default or default in (None, False, "", [], ()) or callable(default):
        return text
    shown = parameter.opts[0] if default is True else default
    return text.append(f" [default: {shown}]", "dim")


def _side_by_side(rows: list[tuple[Text, Text]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for names, text in rows:
        grid.add_row(names, text)
    return grid


def _stacked(rows: list[tuple[Text, Text]], console: Console) -> Group:
    return Group(*_lines(rows, console.width - _FRAME))


def _lines(rows: list[tuple[Text, Text]], width: int) -> Iterator[RenderableType]:
    for names, text in rows:
        if names.cell_len > width:  # choices wrap between, not in, their names
            yield Text(names.plain.replace("|", " | "), "bold cyan", overflow="fold")
        else:
            yield names
        yield Padding(text, (0, 0, 0, _INDENT))
