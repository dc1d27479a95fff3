"""`python -m benchmarks kvpress`: presses of kvpress on the prompts of a leaderboard."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.flags import AsJson
from benchmarks.kvpress.run import KVPRESS, SAME_METHOD, chosen_presses
from quire.cli.board import board_runner
from quire.cli.common import split_numbers, split_texts
from quire.cli.evaluate_run import json_bytes
from quire.cli.options import KV, MODEL, SCHEDULE
from quire.cli.report import envelope, prepare_folder, print_json, write_files
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError
from quire.evals.board.grid import NO_CODEC, Grid
from quire.evals.pace import Pace
from quire.layout.eviction import PREFILL_END

RESULT_FILE = "kvpress.json"
_GRID = Grid()


@with_settings(MODEL, KV, SCHEDULE)
def kvpress(  # noqa: PLR0913 - one parameter per option
    *,
    settings: Settings,
    python: Annotated[Path, typer.Option(help="Python of an environment with kvpress.")],
    rules: Annotated[
        str, typer.Option(help="Rules of Quire without cap, separated by semicolons.")
    ] = ";".join(SAME_METHOD),
    presses: Annotated[
        str, typer.Option(help="Presses with their options, separated by semicolons.")
    ] = ";".join(SAME_METHOD.values()),
    budgets: Annotated[
        str, typer.Option(help="Caps as fractions of the prompt, separated by commas.")
    ] = ",".join(_GRID.budgets),
    schedules: Annotated[str, typer.Option(help="When to evict.")] = PREFILL_END,
    tasks: Annotated[
        str, typer.Option(help="Tasks with generated prompts.")
    ] = "niah,facts,quote,repeats,labels",
    tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 1024,
    num_prompts: Annotated[int, typer.Option(help="Prompts of each task and seed.")] = 30,
    seeds: Annotated[str, typer.Option(help="Seeds of the prompts.")] = "1",
    out: Annotated[
        Path, typer.Option(help="Folder for the result and the cells; a later run continues there.")
    ] = Path("out/kvpress"),
    as_json: AsJson = False,
) -> None:
    """Run presses of kvpress, and the rules of Quire of the same methods on the same prompts.

    `python -m docs.board_page` adds a section to the page of the leaderboard.
    """
    from benchmarks.kvpress.run import PressProcess, PressRunner, model_message, result_of
    from quire.evals.board.run import BoardConfig
    from quire.evals.suite.registry import task_of

    grid = Grid(
        rules=split_texts(rules, ";"),
        budgets=split_texts(budgets, ","),
        schedules=split_texts(schedules, ","),
        codecs=(NO_CODEC,),
    )
    config = BoardConfig(
        entries=grid.entries(),
        tasks=tuple(map(task_of, split_texts(tasks, ","))),
        tokens=tokens,
        count=num_prompts,
        seeds=split_numbers("--seeds", seeds),
        shares_prefill=True,
        sanity=False,
    )
    for task in config.tasks:
        if task.follows_full or not task.needs_full:
            raise ConfigError(
                f"task {task.name!r} scores forced tokens, which kvpress cannot: use tasks with "
                "generated prompts, such as repeats"
            )
    chosen = chosen_presses(presses, grid.budgets)
    prepare_folder(out)
    pace = Pace(report=lambda line: typer.echo(line, err=True))
    with board_runner(settings, config, out, pace) as runner:
        llm = runner.reference()
        message = model_message(llm.model, settings.loading.dtype)
        with PressProcess(python, message) as process:
            press_runner = PressRunner(
                process,
                llm,
                config,
                chosen,
                grid=grid,
                samples=runner.samples,
                identity=(settings.model, settings.loading, settings.schedule),
                stored=runner.stored,
                report=pace.report,
            )
            board = press_runner.run(runner.run())
            found, about = result_of(board), press_runner.about(board)
    count = sum(row.entry.source == KVPRESS for row in found.rows)
    arms = found.arms() | {"presses": asdict(about)}
    options = settings.as_dict() | found.options()
    result = envelope(
        "kvpress", {"kvpress_entries": count, "pairs": len(about.pairs)}, arms, options
    )
    write_files(out, {RESULT_FILE: json_bytes(result)})
    if as_json:
        print_json(result)
