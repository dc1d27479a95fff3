"""Code shared by the quality benchmarks: budgets, prompts, texts, and progress of cells."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from benchmarks.common.graded_prompts import load, prompt_maker_for
from quire.cli.report import commit
from quire.cli.settings import Settings
from quire.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.quality.cells import Cell, Material
    from benchmarks.quality.texts import RunningText
    from quire.models.loader import LoadedModel


def parts_of_budgets(text: str) -> tuple[float, ...]:
    """Parse comma-separated budgets, each a percentage.

    Raises:
        ConfigError: a budget is not a number above 0 and up to 100.
    """
    try:
        found = tuple(float(part) / 100 for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < part <= 1 for part in found):
        raise ConfigError(
            f"expected percentages above 0 and up to 100, such as 50,25; got {text!r}"
        )
    return found


def material_of(settings: Settings, text: Path | None, out: Path | None) -> "Material":
    """Input of the parts: the model and its prompts, loaded on first use, and a store for cells.

    Args:
        settings: settings that select the model.
        text: a text file; None: the shipped books.
        out: folder of the stored cells; None: do not store cells.
    """
    from benchmarks.quality.cells import CellFile, Material

    return Material(
        load=lambda: load(settings),
        prompt_maker_for=prompt_maker_for,
        running_for=lambda model: running_text(model, text),
        stored=CellFile(None if out is None else out / "cells.jsonl"),
        commit=commit(),
        show=show_cell,
    )


def running_text(model: "LoadedModel", path: Path | None) -> "RunningText":
    """A text file, or the shipped books.

    The text starts with quire-tiny's document token if the model's tokenizer has that token.
    """
    from benchmarks.quality.texts import RunningText
    from quire.evals.gate import DOCUMENT_START
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
