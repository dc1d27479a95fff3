"""`--config` of commands that take some options of an engine: its values become defaults."""

from pathlib import Path
from typing import Annotated, Any, no_type_check

import typer

from quire.cli.options import MODEL_KEY, SECTIONS, options_of, read_config_file


@no_type_check  # the argument is click's Context; typer.Context is only a marker
def _use_file(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of the file the defaults of the parameters with the same flags."""
    if path is None:
        return None
    model, values = read_config_file(path)
    flags = {f"--{found.flag}": found.parameter for found in options_of(SECTIONS)}
    defaults: dict[str, Any] = {} if model is None else {MODEL_KEY: model}
    for parameter in ctx.command.params:
        for flag in parameter.opts:
            value = values.get(flags.get(flag, ""))
            if value is not None:
                defaults[parameter.name] = str(value)
    ctx.default_map = defaults
    return path


ConfigDefaults = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="Read options from a file; flags take precedence. Options of other commands are "
        "ignored.",
        is_eager=True,
        callback=_use_file,
    ),
]


def is_from_file(path: Path | None, flag: str, value: object) -> bool:
    """Whether a file contains this value of an option.

    Args:
        path: the file; None for none.
        flag: flag of the option, without dashes.
        value: value that the command got.
    """
    if path is None:
        return False
    parameters = {found.flag: found.parameter for found in options_of(SECTIONS)}
    return str(read_config_file(path)[1].get(parameters[flag])) == value
