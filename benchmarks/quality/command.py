"""Options shared by the quality benchmarks, and the run of their parts."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import quick_option
from benchmarks.common.result import PartResult
from quire.cli.settings import Settings

Text = Annotated[
    Path | None, typer.Option(help="Text file to score; default: the books shipped with Quire.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for tables, pictures and the result. Finished cells of tasks are stored "
        "there, so that an interrupted run can continue."
    ),
]
Quick = Annotated[bool, quick_option("Small shapes, few short prompts and texts.")]
Prompts = Annotated[int | None, typer.Option(min=1, help="Prompts of each cell.")]


def run_parts(  # noqa: PLR0913 - one parameter per option
    bench: str,
    settings: Settings,
    made: Callable[[], Mapping[str, Callable[[Any], PartResult]]],
    parts: str,
    config: Any,
    out: Path | None,
    *,
    quick: bool,
    as_json: bool,
) -> None:
    """Run the selected parts and print their tables, claims and, with `as_json`, the result.

    Args:
        bench: name of the command.
        settings: settings that select the model.
        made: creates all parts by name.
        parts: comma-separated names; "": all.
        config: configuration of all parts, a dataclass.
        out: output folder; None: do not write files.
        quick: whether small shapes are run.
        as_json: whether the last line is the result as JSON.
    """
    settings.set_threads()
    used = settings.as_dict() | asdict(config)
    run_command(bench, made(), parts, config, used, out, quick=quick, as_json=as_json)
