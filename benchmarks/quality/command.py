"""Options shared by the quality benchmarks, and the run of their parts."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.common.command import run_command
from benchmarks.common.flags import quick_option
from benchmarks.common.graded_prompts import load, prompt_maker_for
from benchmarks.common.result import PartResult
from quire.cli.report import commit
from quire.cli.settings import Settings
from quire.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.quality.cells import Cell, Material
    from benchmarks.quality.texts import RunningText
    from quire.models.loader import LoadedModel

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
    make_parts: Callable[["Material"], Mapping[str, Callable[[Any], PartResult]]],
    parts: str,
    config: Any,
    text: Path | None,
    out: Path | None,
    *,
    quick: bool,
    as_json: bool,
) -> None:
    """Run the selected parts and print their tables, claims and, with `as_json`, the result.

    Args:
        bench: name of the command.
        settings: settings that select the model, which is loaded on first use.
        make_parts: creates all parts by name.
        parts: comma-separated names; "": all.
        config: configuration of all parts, a dataclass.
        text: a text file to score; None: the shipped books.
        out: output folder, also of the stored cells; None: do not write files.
        quick: whether small shapes are run.
        as_json: whether the last line is the result as JSON.
    """
    from benchmarks.quality.cells import CellFile, Material

    material = Material(
        load=lambda: load(settings),
        prompt_maker_for=prompt_maker_for,
        running_for=lambda model: running_text(model, text),
        stored=CellFile(None if out is None else out / "cells.jsonl"),
        commit=commit(),
        show=show_cell,
    )
    settings.set_threads()
    used = settings.as_dict() | asdict(config)
    made = make_parts(material)
    run_command(bench, made, parts, config, used, out, quick=quick, as_json=as_json)


def running_text(model: "LoadedModel", path: Path | None) -> "RunningText":
    """A text file, or the shipped books.

    The text starts with quire-tiny's document token if the model's tokenizer has that token.
    """
    from benchmarks.quality.texts import RunningText
    from quire.evals.questions import DOCUMENT_START
    from quire.evals.tasks.words import book_text
    from quire.models.tokenizer import encode_prompt

    assert model.tokenizer is not None, "a graded model has a tokenizer"
    known = len(encode_prompt(model.tokenizer, DOCUMENT_START)) == 1
    start = DOCUMENT_START if known else ""
    if path is None:
        return RunningText(text=book_text(), start=start, name="books outside the training data")
    try:
        return RunningText(text=path.read_text(encoding="utf-8"), start=start, name=path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; expected a text file in UTF-8") from error


def show_cell(cell: "Cell") -> None:
    """Print a finished cell."""
    key = cell.key
    where = f"{key.when}, {100 * key.budget:g} %" if key.when else "no eviction"
    low, high = cell.interval
    typer.echo(
        f"{key.task}, {key.rule} ({where}): {cell.share:.3f} [{low:.3f}, {high:.3f}], "
        f"{cell.request_bytes / 1024:,.0f} KiB per request, {cell.seconds:.1f} s"
    )
