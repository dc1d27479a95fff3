"""Registration of commands: help texts, `--help-all`, and checks of positional arguments.

Rare options are declared with `hidden=True`: only `--help-all` shows them.
"""

import inspect
import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args, no_type_check

import typer
from typer.core import TyperCommand

from quire.cli.common import PACKAGED_MODEL
from quire.cli.foreign_flags import instead_of, short_flag
from quire.cli.json_output import json_only
from quire.errors import ConfigError, nearest

Command = Callable[..., None]
UsageError: Any = typer.BadParameter.__base__
"""Click's exception for an invalid command line, which typer does not export."""
_OLD_MODEL_OPTIONS = ("--model", "-m")


class QuireCommand(TyperCommand):
    """A command that explains missing or misplaced arguments with an example."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line.

        Raises:
            ConfigError: the model is passed as an option, or an argument is missing.
        """
        self._refuse_model_option(ctx, args)
        written = [*args]  # click removes what it has parsed
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            if error.param not in self._arguments() or error.message:
                raise
            raise ConfigError(self._missing(ctx)) from error
        except UsageError as error:
            if hasattr(error, "option_name"):
                error.option_name = short_flag(error.option_name, written)
            error.ctx, error.cmd = ctx, self  # not set in the error of an option without its value
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; the formatter of click is not used."""
        from quire.cli.help_view import show_help  # imports rich

        show_help(self, ctx)

    def _refuse_model_option(self, ctx: Any, args: list[str]) -> None:
        declared = {name for parameter in self.params for name in parameter.opts}
        if not any(parameter.name == "model" for parameter in self._arguments()):
            return
        options = args[: args.index("--")] if "--" in args else args
        for text in options:
            name = text.partition("=")[0]
            if name in _OLD_MODEL_OPTIONS and name not in declared:
                raise ConfigError(
                    f"{name} is not an option: the model is the first argument, as in "
                    f"{self._usage(ctx)}"
                )

    def _missing(self, ctx: Any) -> str:
        """Error text for a missing argument; in most cases the model is missing."""
        values = [ctx.params.get(parameter.name) for parameter in self._arguments()]
        given = shlex.join(str(value) for value in values if value is not None)
        if len(given) == 0 or values.count(None) > 1:
            return f"expected {self._usage(ctx)}, got {given or 'no arguments'}"
        if _names_a_model(values[0]):
            missing = self._arguments()[values.index(None)].metavar
            return f"expected {self._usage(ctx)}, got {given}: {missing} is missing"
        return (
            f"expected {self._usage(ctx)}, got {given}: name the model first, as in "
            f"{ctx.command_path} {PACKAGED_MODEL} {given}"
        )

    def _usage(self, ctx: Any) -> str:
        return " ".join([ctx.command_path, *(str(p.metavar) for p in self._arguments())])

    def _arguments(self) -> list[Any]:
        return [p for p in self.params if p.param_type_name == "argument"]


def _names_a_model(value: object) -> bool:
    return value == PACKAGED_MODEL or Path(str(value)).is_dir()


def usage_error_text(error: Any) -> str:
    """One-line description of an invalid command line.

    Args:
        error: click's `UsageError`.
    """
    parameter = getattr(error, "param", None)
    if parameter is not None:
        return _parameter_error(error, parameter)
    flag = "--help-all" if isinstance(error.cmd, QuireCommand) else "--help"
    see = f"see {error.ctx.command_path} {flag}"
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        known = [name for parameter in error.cmd.params for name in parameter.opts]
        instead = instead_of(error.option_name)
        if instead is not None:
            return f"unknown option {error.option_name!r}: {instead}; {see}"
        near = nearest(error.option_name, known)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        return f"unknown option {error.option_name!r}{hint}; {see}"
    usage = " ".join(error.ctx.get_usage().split()[1:])  # the first word is "Usage:"
    message = _one_line(error.format_message())
    closed = f"{message}? Expected" if "Did you mean" in message else f"{message}; expected"
    return f"{closed} {usage}, {see}"


def _parameter_error(error: Any, parameter: Any) -> str:
    """Describe a missing option or argument, or an invalid value."""
    name = next((flag for flag in parameter.opts if flag.startswith("--")), parameter.metavar)
    if not error.message:
        command = error.ctx.command_path
        return f"expected {name}, which {command} requires; see {command} --help"
    # errors of pydantic, which parses the values
    wrong: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    got = f", got {wrong[0]['input']!r}" if wrong else ""
    expected = error.message.removeprefix("Input should be ").partition(",")[0]
    if got and error.message.startswith("Input should be "):
        return f"expected {name} to be {expected}{got}"
    return f"{name}: {_one_line(error.message)}{got}"


def _one_line(text: str) -> str:
    text = " ".join(text.split()).rstrip(".?")
    return text[:1].lower() + text[1:]


def register(app: typer.Typer, command: Command, name: str | None = None) -> None:
    """Add a command to a program or a group.

    Args:
        app: the program or the group.
        command: function of the command; its docstring is the help text.
        name: name of the command; default: the name of the function.
    """
    signature = inspect.signature(command)
    hidden = sum(_is_hidden(parameter) for parameter in signature.parameters.values())

    @wraps(command)
    def run(**given: Any) -> None:
        given.pop(_HELP_ALL.name)
        with json_only(enabled=bool(given.get("as_json"))):
            command(**given)

    parameters = [*signature.parameters.values(), _HELP_ALL]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    add = app.command(
        name,
        cls=QuireCommand,
        help=reflowed(command.__doc__ or ""),
        epilog=f"--help-all shows {hidden} more options." if hidden else None,
    )
    add(run)


def _is_hidden(parameter: inspect.Parameter) -> bool:
    return any(getattr(info, "hidden", False) for info in get_args(parameter.annotation)[1:])


@no_type_check  # the argument is click's Context; typer.Context is only a marker
def _show_all(ctx: typer.Context, value: bool) -> None:  # noqa: FBT001 - click calls it
    if not value:
        return
    for parameter in ctx.command.params:
        parameter.hidden = False
    ctx.command.epilog = None
    typer.echo(ctx.get_help())
    raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all", help="Show all options and exit.", is_eager=True, callback=_show_all
        ),
    ],
    default=False,
)


def reflowed(docstring: str) -> str:
    """Join the lines of each paragraph of a docstring, so that `--help` can wrap them."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
