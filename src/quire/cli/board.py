"""`quire board`: a leaderboard of eviction rules, budgets, schedules and KV codecs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quire.cli.common import json_option, split_numbers, split_texts
from quire.cli.evaluate_run import json_bytes, opener, question_option
from quire.cli.options import MODEL, SCHEDULE
from quire.cli.report import envelope, prepare_folder, print_json, write_files
from quire.cli.settings import Settings, with_settings
from quire.cli.tables import show_table
from quire.cli.tune import NO_AUTO, SEARCHED_KV, refuse_settings, time_limit_option
from quire.evals.board.grid import FULL, Grid
from quire.evals.pace import Pace
from quire.layout.extras import has_extra
from quire.layout.options import option

if TYPE_CHECKING:
    from quire.evals.board.result import BoardResult
    from quire.evals.board.run import BoardConfig, BoardRunner

RESULT_FILE = "board.json"
_GRID = Grid()
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardFlags:
    """Options of `quire board`."""

    rules: str = option(
        ";".join(_GRID.rules),
        help="Eviction rules without cap, separated by semicolons.",
        common=True,
    )
    budgets: str = option(
        ",".join(_GRID.budgets),
        help="Caps as fractions of the prompt, separated by commas.",
        common=True,
    )
    schedules: str = option(
        ",".join(_GRID.schedules),
        help="When to evict: values of when= of an eviction rule.",
        common=True,
    )
    codecs: str = option(
        ",".join(_GRID.codecs),
        help="KV codecs; full KV with the first one is the reference.",
        common=True,
    )
    tasks: str = option(
        "repeats,retold,majority,lines", help="Tasks; quire eval tasks lists them.", common=True
    )
    tokens: int = option(256, help="Length of the prompts.", common=True)
    num_prompts: int = option(10, help="Prompts of each task and seed.", common=True)
    seeds: str = option("1,2", help="Seeds of the prompts.")
    evict_before_question: bool | None = question_option()
    sanity_check: bool = option(True, help="Check that the model may judge a rule.")
    time_limit: float | None = time_limit_option()
    out: Path = option(
        Path("board"),
        help="Folder for the pages and the cells; a later run continues there.",
        common=True,
    )
    as_json: bool = json_option()


@with_settings(MODEL, SEARCHED_KV, SCHEDULE, defaults=NO_AUTO)
def board(settings: Settings, *, flags: BoardFlags) -> None:
    """Compare eviction rules, budgets, schedules and KV codecs on equal prompts.

    Writes a table and a chart of quality against KV bytes. Finished cells are stored in the folder
    of --out, so that an interrupted run goes on. --time-limit ends a run after the entry that
    exceeds it; the pages have the entries so far. Ends with exit code 1 if no rule could run.
    """
    from quire.evals.board.result import BoardResult
    from quire.evals.board.run import BoardConfig
    from quire.evals.suite.registry import task_of

    grid = Grid(
        rules=split_texts(flags.rules, ";"),
        budgets=split_texts(flags.budgets, ","),
        schedules=split_texts(flags.schedules, ","),
        codecs=split_texts(flags.codecs, ","),
    )
    config = BoardConfig(
        grid=grid,
        tasks=tuple(map(task_of, split_texts(flags.tasks, ","))),
        tokens=flags.tokens,
        count=flags.num_prompts,
        seeds=split_numbers("--seeds", flags.seeds),
        sanity=flags.sanity_check,
        evict_before_question=flags.evict_before_question,
    )
    refuse_settings(settings, "board")
    prepare_folder(flags.out)
    pace = Pace(flags.time_limit, partial(typer.echo, err=True))
    with board_runner(settings, config, flags.out, pace) as runner:
        found = BoardResult.of(runner.run())
    result = _result(found, settings)
    write_pages(found, settings.model, flags.out, json_bytes(result))
    _show(found, flags.out)
    if flags.as_json:
        print_json(result)
    complete = not found.entries_left and set(grid.rules) != {FULL}
    if complete and all(row.entry.rule == FULL for row in found.rows):
        raise typer.Exit(1)


@contextmanager
def board_runner(
    settings: Settings, config: "BoardConfig", out: Path, pace: Pace
) -> "Iterator[BoardRunner]":
    """What runs all cells that are not stored; its engines are closed at the end."""
    from quire.evals.board.run import BoardRunner
    from quire.evals.suite.cells import CellFolder
    from quire.evals.suite.engines import Engines

    engines = Engines(opener(settings))
    identity = (settings.model, settings.loading, settings.schedule)
    kv = replace(settings.kv, prefix_cache=replace(settings.kv.prefix_cache, enabled=False))
    try:
        yield BoardRunner(
            engines,
            kv,
            config,
            identity=identity,
            stored=CellFolder(out),
            pace=pace,
        )
    finally:
        engines.close()


def write_pages(found: "BoardResult", model: str, out: Path, result: bytes) -> None:
    """Write the result, the page and, if there is a quality and matplotlib, the chart."""
    from quire.evals.board import pages

    files = {RESULT_FILE: result}
    has_chart = has_extra("report") and bool(found.judged)
    files[pages.PAGE_FILE] = pages.page(found, model, has_chart=has_chart).encode()
    if has_chart:
        files[pages.CHART_FILE] = pages.chart(found)
    write_files(out, files)


def _show(found: "BoardResult", out: Path) -> None:
    from quire.evals.board.pages import PAGE_FILE

    rows = found.rows
    shown = [
        (
            row.entry.rule,
            row.entry.budget or "100%",
            row.entry.schedule,
            row.entry.codec,
            f"{row.quality.mean:.3f}",
            f"{row.kv_share:.3f}",
        )
        for row in sorted(rows, key=lambda row: row.kv_share)
        if row.is_unbeaten
    ]
    heads = ("rule", "cap", "when", "codec", "quality", "KV over full KV")
    if found.judged:
        show_table(f"Pareto-optimal of {len(rows)} entries", heads, shown[:_SHOWN])
    else:
        typer.echo(found.why_no_quality)
    if found.refused:
        by_rule: dict[str, str] = {}
        for entry, why in found.refused.items():
            by_rule.setdefault(entry.partition("--evict ")[2].partition(":")[0], f"{entry}: {why}")
        first, *others = by_rule.values()
        typer.echo(f"Refused: {len(found.refused)}, such as {first}")
        for line in others:
            typer.echo(f"and {line}")
    typer.echo(f"All entries: {out / PAGE_FILE}")


def _result(found: "BoardResult", settings: Settings) -> dict[str, object]:
    from quire.evals.board.pages import WANTED
    from quire.evals.board.result import best_rules

    claims: dict[str, int | float] = {
        "entries": len(found.rows),
        "refused": len(found.refused),
        "sanity_check_passed": int(found.sanity.passed),
    }
    for budget, kept in best_rules(found.rows, WANTED).items() if found.judged else ():
        claims[f"entries_of_quality_0_975_at_{budget.rstrip('%').replace('.', '_')}"] = len(kept)
    return envelope("board", claims, found.arms(), settings.as_dict() | found.options())
