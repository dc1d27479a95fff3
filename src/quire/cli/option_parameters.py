"""Parameters of commands, made from the fields of config dataclasses."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from quire.cli.command import Command
from quire.cli.completion import completer_of
from quire.cli.options import OptionField, Section


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


def with_config(section: Section) -> Callable[[Command], Command]:
    """Add the options of one section to a command without a model.

    The command declares a parameter `config` for the dataclass of the section, followed by its own
    options.

    Args:
        section: the section.
    """
    options = tuple(section.options())

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "config"
        ]

        def run(**given: Any) -> None:
            values = {found.path: given[found.parameter] for found in options}
            command(section.build(values), **{p.name: given[p.name] for p in own})

        parameters = [*map(option_parameter, options), *own]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate
