"""Parameters of commands, made from the fields of config dataclasses."""

import inspect
from typing import Annotated, Any

import typer

from quire.cli.completion import completer_of
from quire.cli.options import OptionField


def keyword(name: str, annotation: Any, default: object) -> inspect.Parameter:
    """A keyword parameter of a command."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def option_parameter(found: OptionField) -> inspect.Parameter:
    """The parameter of an option."""
    declaration = f"--{found.flag}"
    if found.kind is bool and found.default is not False:
        declaration += f"/--no-{found.flag}"
    default = list(found.default) if isinstance(found.default, tuple) else found.default
    shown = typer.Option(
        declaration,
        *(f"-{synonym}" if len(synonym) == 2 else f"--{synonym}" for synonym in found.synonyms),
        help=_sentence(found),
        metavar=found.metavar,
        show_default=default not in (None, [], ""),
        rich_help_panel=found.group,
        hidden=not found.common,
        autocompletion=completer_of(found.flag, found.choices),
    )
    kind: Any = found.kind if default is not None else found.kind | None
    return keyword(found.parameter, Annotated[kind, shown], default)


def _sentence(found: OptionField) -> str:
    text = found.help[:1].upper() + found.help[1:].rstrip(".") + "."
    return text + " Can be repeated." if found.kind == list[str] else text
