"""`python -m benchmarks eviction`: eviction rules compared by quality, bytes and time."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.common.cells import material_of, parts_of_budgets
from benchmarks.common.command import finish, show_parts
from benchmarks.common.flags import AsJson
from quire.cli.options import MODEL
from quire.cli.report import prepare_folder, print_json
from quire.cli.settings import Settings, with_settings
from quire.layout.extras import require_extra

if TYPE_CHECKING:
    from benchmarks.eviction.config import CellsConfig, EvictionBenchConfig


@with_settings(MODEL)
def eviction(  # noqa: PLR0913 - one parameter per option
    settings: Settings,
    *,
    parts: Annotated[
        str,
        typer.Option(
            help="Comma-separated parts: quality, perplexity, kept, cost, ready; default: all."
        ),
    ] = "",
    rules: Annotated[
        str,
        typer.Option(
            help="Comma-separated names, or rules with options separated by semicolons: "
            "'h2o; snapkv:window=16'. Default: the common rules; full always runs too."
        ),
    ] = "",
    tasks: Annotated[
        str, typer.Option(help="Comma-separated tasks of the part quality; default: six.")
    ] = "",
    budgets: Annotated[
        str,
        typer.Option(
            help="Comma-separated caps, in percent of the longest prompt; default: 50,25."
        ),
    ] = "",
    when: Annotated[
        str,
        typer.Option(
            help="Comma-separated schedules of the part quality; default: "
            "prefill_end,prefill_and_decode."
        ),
    ] = "",
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each cell; default: 200.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file to score; default: the books shipped with Quire.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for tables, pictures and the result. Finished cells of the part quality "
            "are stored there, so that an interrupted run can continue."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Few short prompts and texts, a small model for cost. No claims."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare eviction rules: correct answers, perplexity, retained positions and cost."""
    from benchmarks.common.command import names_of, run_named
    from benchmarks.eviction.parts import make_parts

    config = _config(settings.model, quick=quick)
    quality = _cells(config.quality, tasks, budgets, when, prompts)
    config = replace(config, quality=quality)
    config = _with_rules(config, rules)
    if out is not None:
        require_extra("report", "--out")
        prepare_folder(out)
    settings.set_threads()
    made = make_parts(material_of(settings, text, out))
    results, claims = show_parts(run_named(names_of(parts, made), made, config))
    run = finish("eviction", results, claims, _used(config, settings), out, quick=quick)
    if as_json:
        print_json(run)


def _config(model: str, *, quick: bool) -> "EvictionBenchConfig":
    from benchmarks.eviction.config import QUICK_EVICTION, EvictionBenchConfig

    return replace(QUICK_EVICTION if quick else EvictionBenchConfig(), model=model)


def _cells(
    config: "CellsConfig", tasks: str, budgets: str, when: str, prompts: int | None
) -> "CellsConfig":
    """Apply the given options to the cells; unset options keep their defaults.

    Raises:
        UnknownName: no such task or schedule.
        ConfigError: an invalid budget.
    """
    from benchmarks.common.command import names_of
    from quire.evals.tasks import FAMILIES
    from quire.layout.eviction import SCHEDULES

    if tasks.strip():
        config = replace(config, tasks=names_of(tasks, FAMILIES, "task"))
    if when.strip():
        schedules = names_of(when, dict.fromkeys(SCHEDULES), "eviction schedule")
        config = replace(config, schedules=schedules)
    if budgets.strip():
        config = replace(config, budgets=parts_of_budgets(budgets))
    return replace(config, prompts=prompts or config.prompts)


def _with_rules(config: "EvictionBenchConfig", rules: str) -> "EvictionBenchConfig":
    """Set the same rules in all parts that compare rules; "" leaves each part's own rules."""
    from benchmarks.eviction.rules import rules_of

    if not rules.strip():
        return config
    selected = rules_of(rules)
    return replace(
        config,
        quality=replace(config.quality, rules=selected),
        perplexity=replace(config.perplexity, rules=selected),
        kept=replace(config.kept, rules=selected),
    )


def _used(config: "EvictionBenchConfig", settings: Settings) -> dict[str, object]:
    import torch

    return settings.as_dict() | asdict(config) | {"threads": torch.get_num_threads()}
