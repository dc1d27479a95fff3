"""`quire board`: a leaderboard of eviction rules, budgets, schedules and KV codecs."""

from collections.abc import Iterator, Sequence
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
from quire.cli.settings import Settings, refuse_ignored, with_settings
from quire.cli.tables import show_table
from quire.cli.tune import NO_AUTO, SEARCHED_KV, refuse_settings, time_limit_option
from quire.errors import ConfigError, QuireError
from quire.evals.board.grid import FULL, Grid, entries_of, read_grids
from quire.evals.pace import Pace
from quire.layout.eviction import PREFILL_END
from quire.layout.extras import has_extra
from quire.layout.options import option
from quire.layout.sizes import parse_size

if TYPE_CHECKING:
    from quire.evals.board.result import BoardResult
    from quire.evals.board.run import BoardConfig, BoardRunner

RESULT_FILE = "board.json"
_GRID, _GRID_OPTIONS = Grid(), ("rules", "budgets", "schedules", "codecs", "sparse")
_SHOWN = 20
_PROMPTS, _QUICK_PROMPTS, _QUICK_MEMORY = 30, 6, "1GiB"
_QUICK = (
    Grid(rules=("recent:sinks=4", "snapkv", "keydiff"), budgets=("50%",), codecs=("none",)),
    Grid(rules=("snapkv", "keydiff"), budgets=("50%",), schedules=(PREFILL_END,), codecs=("int8",)),
)


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
    sparse: str = option(
        ";".join(_GRID.sparse),
        help="Pages that decode steps read: values of --sparse of quire serve, separated by "
        "semicolons.",
    )
    grids: Path | None = option(
        None,
        help="TOML file of several grids: tables [[grid]] with rules, budgets, schedules, codecs "
        "and sparse. It replaces these five options.",
        metavar="FILE",
    )
    quick: bool = option(
        False,
        help=f"Run 10 entries with few prompts, not the grid, with --kv-memory {_QUICK_MEMORY} "
        "unless another size is given.",
        common=True,
    )
    tasks: str = option(
        "niah,facts,quote,repeats,labels,summary,perplexity",
        help="Tasks; quire eval tasks lists them.",
        common=True,
    )
    tokens: int = option(1024, help="Length of the prompts.", common=True)
    num_prompts: int | None = option(
        None,
        help=f"Prompts of each task and seed. Default: {_PROMPTS}, or {_QUICK_PROMPTS} with "
        "--quick.",
        common=True,
    )
    seeds: str = option("1", help="Seeds of the prompts.")
    share_prefill: bool = option(
        True,
        help="Compute a prompt once for all rules with equal statistics, up to its first eviction. "
        "There are no tokens/s then.",
    )
    confirm: int = option(
        0,
        help="Run the best N entries of each class of KV bytes (at most 0.30, 0.55 and 0.80 of "
        "full KV) again with more prompts.",
        metavar="N",
        min_value=0,
    )
    confirm_prompts: str = option(
        "500",
        help="Prompts of all tasks together for --confirm: one number, or one for each length.",
    )
    confirm_tokens: str = option(
        "1024", help="Lengths of the prompts for --confirm, separated by commas."
    )
    evict_before_question: bool | None = question_option()
    sanity_check: bool = option(True, help="Check that the model may judge a rule.")
    time_limit: float | None = time_limit_option()
    out: Path = option(
        Path("board"),
        help="Folder for the pages and the cells; a later run continues there.",
        common=True,
    )
    as_json: bool = json_option()


@with_settings(MODEL, SEARCHED_KV.without("sparse"), SCHEDULE, defaults=NO_AUTO)
def board(settings: Settings, *, flags: BoardFlags) -> None:
    """Compare eviction rules, budgets, schedules and KV codecs on equal prompts.

    Writes a table and a chart of quality against KV bytes. Finished cells are stored in the folder
    of --out, where a later run continues. --time-limit ends a run after the result that exceeds it;
    the pages have all entries whose results are stored. Ends with exit code 1 if no rule could run.
    """
    from quire.evals.board.result import BoardResult, best_of_classes
    from quire.evals.board.run import BoardConfig
    from quire.evals.suite.registry import task_of

    grid = Grid(
        rules=split_texts(flags.rules, ";"),
        budgets=split_texts(flags.budgets, ","),
        schedules=split_texts(flags.schedules, ","),
        codecs=split_texts(flags.codecs, ","),
        sparse=split_texts(flags.sparse, ";"),
    )
    if flags.quick:
        refuse_ignored(flags, "grids", *_GRID_OPTIONS, because="with --quick")
    if flags.grids is not None:
        refuse_ignored(flags, *_GRID_OPTIONS, because="with --grids")
    if not flags.confirm:
        refuse_ignored(flags, "confirm_prompts", "confirm_tokens", because="without --confirm")
    count = flags.num_prompts
    if count is None:
        count = _QUICK_PROMPTS if flags.quick else _PROMPTS
    grids = (grid,) if flags.grids is None else read_grids(flags.grids)
    config = BoardConfig(
        entries=entries_of(*(_QUICK if flags.quick else grids)),
        tasks=tuple(map(task_of, split_texts(flags.tasks, ","))),
        tokens=flags.tokens,
        count=count,
        seeds=split_numbers("--seeds", flags.seeds),
        shares_prefill=flags.share_prefill,
        sanity=flags.sanity_check,
        evict_before_question=flags.evict_before_question,
    )
    counts = _confirm_counts(flags, config)
    settings = _with_memory(settings, flags)
    prepare_folder(flags.out)
    pace = Pace(flags.time_limit, partial(typer.echo, err=True))
    with board_runner(settings, config, flags.out, pace) as runner:
        runner.refuse_long("--confirm-tokens", counts)
        found = BoardResult.of(runner.run())
    result, confirmed = _result(found, settings, ()), list[BoardResult]()
    write_pages(found, settings.model, flags.out, json_bytes(result))
    best = best_of_classes(found.rows, flags.confirm)
    again = replace(
        config,
        entries=(config.reference, *best),
        tasks=tuple(map(task_of, found.judged)) or config.tasks,
        seeds=(max(config.seeds) + 1,),  # not the prompts by which the entries were chosen
        sanity=False,
    )
    for tokens, count in counts.items():
        if pace.is_over or found.entries_left or not best:
            late = pace.is_over or found.entries_left
            why = "the time limit is over" if late else "no entry has a quality"
            pace.report(f"--confirm at {tokens} tokens: left out, {why}")
            continue
        one = replace(again, tokens=tokens, count=count // len(again.tasks))
        try:
            with board_runner(settings, one, flags.out / f"confirm-{tokens}", pace) as runner:
                confirmed.append(BoardResult.of(runner.run()))
        except QuireError as error:  # the leaderboard and the other lengths remain
            pace.report(f"--confirm at {tokens} tokens: {error}")
            continue
        result = _result(found, settings, confirmed)
        write_pages(found, settings.model, flags.out, json_bytes(result), confirmed)
    _show(found, flags.out)
    if flags.as_json:
        print_json(result)
    complete = not found.entries_left and any(each.rule != FULL for each in config.entries)
    if complete and all(row.entry.rule == FULL for row in found.rows):
        raise typer.Exit(1)


def _with_memory(settings: Settings, flags: BoardFlags) -> Settings:
    if flags.quick and settings.kv.memory is None:
        return replace(settings, kv=replace(settings.kv, memory=parse_size(_QUICK_MEMORY)))
    refuse_settings(settings, "board")
    return settings


def _confirm_counts(flags: BoardFlags, config: "BoardConfig") -> dict[int, int]:
    """Prompts of all tasks together, by the lengths of --confirm-tokens."""
    if not flags.confirm:
        return {}
    lengths = split_numbers("--confirm-tokens", flags.confirm_tokens)
    texts = flags.confirm_prompts.split(",")  # may be equal
    counts = [count for text in texts for count in split_numbers("--confirm-prompts", text)]
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"expected --confirm-tokens of 1 or more, got {flags.confirm_tokens!r}")
    least = len(config.tasks)
    if len(counts) not in (1, len(lengths)) or min(counts) < least:
        raise ConfigError(
            f"expected --confirm-prompts of at least {least}, one for each task: one number, or "
            f"one for each length of --confirm-tokens, got {flags.confirm_prompts!r}"
        )
    return dict(zip(lengths, counts * len(lengths) if len(counts) == 1 else counts, strict=True))


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


def write_pages(
    found: "BoardResult",
    model: str,
    out: Path,
    result: bytes,
    confirmed: "Sequence[BoardResult]" = (),
) -> None:
    """Write the result, the page and, if there is a quality and matplotlib, the chart."""
    from quire.evals.board import pages

    files = {RESULT_FILE: result}
    has_chart = has_extra("report") and bool(found.judged)
    page = pages.page(found, model, has_chart=has_chart, confirmed=confirmed)
    files[pages.PAGE_FILE] = page.encode()
    if has_chart:
        files[pages.CHART_FILE] = pages.chart(found)
    write_files(out, files)


def _show(found: "BoardResult", out: Path) -> None:
    from quire.evals.board.pages import PAGE_FILE

    rows = found.rows
    shown = [
        (
            row.entry.name,
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


def _result(
    found: "BoardResult", settings: Settings, confirmed: "Sequence[BoardResult]"
) -> dict[str, object]:
    from quire.evals.board.pages import WANTED
    from quire.evals.board.result import best_rules

    claims: dict[str, int | float] = {
        "entries": len(found.rows),
        "refused": len(found.refused),
        "sanity_check_passed": int(found.sanity.passed),
    }
    for budget, kept in best_rules(found.rows, WANTED).items() if found.judged else ():
        claims[f"entries_of_quality_0_975_at_{budget.rstrip('%').replace('.', '_')}"] = len(kept)
    arms = found.arms()
    if confirmed:
        arms["confirmed"] = [{"arms": each.arms(), "config": each.options()} for each in confirmed]
    return envelope("board", claims, arms, settings.as_dict() | found.options())
