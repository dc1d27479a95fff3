"""`python -m benchmarks kvcrush`: rules with and without KVCrush: quality, bytes and time."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.cells import parts_of_budgets, running_text, show_cell
from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson
from benchmarks.common.graded_prompts import load, prompt_maker_for
from benchmarks.kvcrush.recorded import files_of_tasks, recorded
from quire.cli.options import MODEL
from quire.cli.report import commit, prepare_folder, print_json
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from benchmarks.kvcrush.config import KVCrushBenchConfig, QualityConfig


@with_settings(MODEL)
def kvcrush(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    parts: Annotated[
        str,
        typer.Option(
            help="Comma-separated parts: quality, heads, sweeps, fidelity, long, prompts, "
            "overhead, bytes. Default: all parts that have data."
        ),
    ] = "",
    bases: Annotated[
        str,
        typer.Option(
            help="Base rules: comma-separated names, or rules with options and semicolons: "
            "'h2o; snapkv:window=16'. Sweeps and the overhead use the first rule."
        ),
    ] = "",
    tasks: Annotated[
        str, typer.Option(help="Comma-separated tasks of the parts quality and sweeps.")
    ] = "",
    tokens: Annotated[
        int | None,
        typer.Option(
            min=64,
            help="Tokens of the longest prompt of quality and sweeps; default: 512. For fewer than "
            "2,048 tokens, the paper's caps and pages are divided.",
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Cap in percent of the longest prompt; default: 25.")
    ] = "",
    prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts of each cell; default: 100, and 50 for the part sweeps."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Examples for the part prompts, as TASK=FILE, JSON or JSON lines: gsm8k, "
            "xsum. Can be repeated."
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file to score; default: the books shipped with Quire.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables, pictures and the result. Finished cells of quality and sweeps "
            "are stored there, so that an interrupted run can continue."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Few short prompts and texts, a small model for time. No claims."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare rules with and without KVCrush: outputs, fidelity, time and signature bytes."""
    from benchmarks.common.command import names_of, run_named
    from benchmarks.common.rouge import rouge_l
    from benchmarks.eviction.cells import CellFile
    from benchmarks.kvcrush.parts import Material, make_parts

    files = files_of_tasks(data or ())
    config = _config(settings.model, quick=quick)
    quality, heads, sweeps = (
        _quality(part, tasks, budget, tokens, prompts)
        for part in (config.quality, config.heads, config.sweeps)
    )
    config = replace(config, quality=quality, heads=heads, sweeps=sweeps)
    config = _with_bases(config, bases)
    if settings.loading.dtype != "auto":
        overhead = replace(config.overhead, dtype=settings.loading.dtype)
        config = replace(config, overhead=overhead)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    settings.set_threads()
    material = Material(
        load=lambda: load(settings),
        prompt_maker_for=prompt_maker_for,
        running_for=lambda model: running_text(model, text),
        recorded_for=partial(recorded, files),
        rouge_l=rouge_l,
        stored=CellFile(None if out is None else out / "cells.jsonl"),
        commit=commit(),
        show=show_cell,
    )
    made = make_parts(material)
    names = names_of(parts, made)
    if not parts.strip() and not files:
        names = tuple(name for name in names if name != "prompts")
    results, claims = show_parts(run_named(names, made, config))
    run = finish("kvcrush", results, claims, _used(config, settings), out, quick=quick)
    if as_json:
        print_json(run)


def _config(model: str, *, quick: bool) -> "KVCrushBenchConfig":
    from benchmarks.kvcrush.config import QUICK_KVCRUSH, KVCrushBenchConfig

    return replace(QUICK_KVCRUSH if quick else KVCrushBenchConfig(), model=model)


def _quality(
    config: "QualityConfig", tasks: str, budget: str, tokens: int | None, prompts: int | None
) -> "QualityConfig":
    """Apply the given options; unset options keep their defaults.

    Raises:
        UnknownName: no such task.
        ConfigError: an invalid budget, or a budget above 1.
    """
    from benchmarks.common.command import names_of
    from benchmarks.kvcrush.config import PaperConfig
    from quire.evals.tasks import FAMILIES

    if tokens is not None:
        config = replace(config, tokens=tokens, paper=PaperConfig.for_prompts(tokens))
    if tasks.strip():
        config = replace(config, tasks=names_of(tasks, FAMILIES, "task"))
    if budget.strip():
        found = parts_of_budgets(budget)
        if len(found) != 1:
            raise ConfigError(f"expected one budget such as 25, got {budget!r}")
        config = replace(config, budget=found[0])
    return replace(config, prompts=prompts or config.prompts)


def _with_bases(config: "KVCrushBenchConfig", bases: str) -> "KVCrushBenchConfig":
    """Set the same base rules in all parts; "" leaves each part's own rules."""
    from benchmarks.eviction.rules import rules_of

    if not bases.strip():
        return config
    selected = rules_of(bases)
    first = selected[0]
    return replace(
        config,
        quality=replace(config.quality, bases=selected, swept=(first,), pyramid=first),
        heads=replace(config.heads, bases=selected, swept=(first,), pyramid=first),
        sweeps=replace(config.sweeps, bases=selected, swept=(first,), pyramid=first),
        fidelity=replace(config.fidelity, bases=selected),
        long=replace(config.long, bases=selected, pyramid=first),
        overhead=replace(config.overhead, base=first),
    )


def _used(config: "KVCrushBenchConfig", settings: Settings) -> dict[str, object]:
    import torch

    return settings.as_dict() | asdict(config) | {"threads": torch.get_num_threads()}
