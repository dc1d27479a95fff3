"""`quire eval run`: scores of tasks with intervals, KV bytes and tokens/s, and verdicts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.common import AsJson
from quire.cli.json_output import print_json
from quire.cli.lists import split_numbers, split_texts
from quire.cli.options import KV, MODEL, SCHEDULE
from quire.cli.out_folder import prepare_folder, write_files
from quire.cli.report import envelope
from quire.cli.settings import Settings, with_settings
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.config.kv_config import KVConfig
    from quire.evals.suite.base import EvalTask
    from quire.evals.suite.registry import Suite
    from quire.evals.suite.runner import EvalConfig, Evaluation

RESULT_FILE = "result.json"
_QUICK = "quick"


@with_settings(MODEL, KV, SCHEDULE)
def run(  # noqa: PLR0913 - one parameter per option
    *,
    settings: Settings,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Tasks that run together: quick, recall, redundant, ruler, few-shot or all. "
            "Default: quick, unless --tasks is given.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Tasks, separated by commas; quire eval tasks lists them.")
    ] = "",
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Local file of a task; TASK=FILE if several tasks read files. Can be repeated.",
        ),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(help="Lengths of generated prompts, separated by commas. Default: the suite."),
    ] = "",
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Prompts of each task. Default: the suite.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated prompts.", hidden=True)] = 1,
    shots: Annotated[
        int | None,
        typer.Option(help="Worked examples in prompts of gsm8k, xsum and cnn_dm.", hidden=True),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Leave out the middle of longer prompts that are read from a file. Default: the "
            "model's context.",
            hidden=True,
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template",
            help="Send prompts that are read from a file as messages of a user.",
            hidden=True,
        ),
    ] = False,
    sanity_check: Annotated[
        bool,
        typer.Option(
            "--sanity-check/--no-sanity-check",
            help="Check that the model may judge a rule; without it there are no verdicts.",
            hidden=True,
        ),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the result and its cells; a later run continues there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on tasks, and compare an eviction rule or KV codec with full KV.

    Every score has a 95 % interval, KV bytes and tokens/s. With --evict or --kv-codec the same
    prompts also run with full KV. A verdict is given only if the model passes the sanity check.
    """
    from quire.evals.suite.runner import EvalConfig, PromptOptions

    chosen, base = selected(suite, tasks)
    config = EvalConfig(
        tasks=chosen,
        tokens=split_numbers("--tokens", tokens) or base.tokens,
        count=base.count if num_prompts is None else num_prompts,
        seed=seed,
        shots=shots,
        data={},
        prompts=PromptOptions(most_tokens=max_prompt_tokens, chat=apply_chat_template),
        sanity=sanity_check,
    )
    config = replace(config, data=data_by_task(data or [], config))
    refuse_ranks(settings, config)
    if out is not None:
        prepare_folder(out)
    found = evaluation(settings, config, out)
    show(found)
    result = as_envelope(found, settings, config)
    if out is not None:
        write_files(out, {RESULT_FILE: json_bytes(result)})
    if as_json:
        print_json(result)


def selected(suite: str | None, tasks: str) -> "tuple[tuple[EvalTask, ...], Suite]":
    """Tasks of the options, and the suite whose lengths and number of prompts are used.

    Raises:
        ConfigError: an unknown suite or task.
    """
    from quire.evals.suite.registry import suite_of, task_of

    listed = split_texts(tasks)
    base = suite_of(suite if suite is not None else _QUICK)
    names = listed if suite is None and listed else [*base.tasks, *listed]
    return tuple(map(task_of, dict.fromkeys(names))), base


def data_by_task(given: Sequence[str], config: "EvalConfig") -> dict[str, Path]:
    """Files by task: `TASK=FILE`, or `FILE` for the only task that reads one.

    Raises:
        ConfigError: it is not clear which task reads a file, or a file does not exist.
    """
    names = [task.name for task in config.tasks]
    reading = [task.name for task in config.tasks if task.source]
    if not reading and "perplexity" in names:
        reading = ["perplexity"]
    found: dict[str, Path] = {}
    for text in given:
        name, _, file = text.partition("=")
        if name not in names:
            name, file = _only(reading, text), text
        found[name] = Path(file).expanduser()
        if not found[name].is_file():
            raise ConfigError(f"expected --data with a file, got {file!r}: there is no such file")
    return found


def _only(reading: Sequence[str], text: str) -> str:
    if len(reading) != 1:
        listed = ", ".join(reading) or "none"
        raise ConfigError(
            f"--data {text}: expected one task that reads a file, got {listed}; add --tasks, or "
            "write --data TASK=FILE"
        )
    return reading[0]


def refuse_ranks(settings: Settings, config: "EvalConfig") -> None:
    """Refuse perplexity with a divided model, whose logits are in several processes.

    Raises:
        ConfigError: both are given.
    """
    size = settings.loading.tensor_parallel_size
    if size > 1 and any(task.name == "perplexity" for task in config.tasks):
        raise ConfigError(
            f"task 'perplexity' needs a model in one process, got --tensor-parallel-size {size}: "
            "leave one of them out"
        )


def opener(settings: Settings) -> "Callable[[KVConfig], LLM]":
    """A function that opens an engine for a KV configuration; the weights are loaded once."""
    loaded: list[LLM] = []

    def open_engine(kv: "KVConfig") -> "LLM":
        from quire.api.llm import LLM

        if not loaded or settings.loading.tensor_parallel_size > 1:
            loaded[:] = [replace(settings, kv=kv).open_llm()]
            return loaded[0]
        return LLM(
            loaded[0].model,
            kv=kv,
            schedule=settings.schedule,
            return_memory=settings.loading.return_memory,
        )

    return open_engine


def evaluation(settings: Settings, config: "EvalConfig", out: Path | None) -> "Evaluation":
    """Run all cells that are not stored.

    Raises:
        ConfigError: an invalid file or option.
    """
    from quire.evals.suite.cells import CellFolder
    from quire.evals.suite.engines import Engines
    from quire.evals.suite.runner import Evaluator

    engines = Engines(opener(settings))
    try:
        evaluator = Evaluator(
            engines,
            settings.kv,
            config,
            identity=(settings.model, settings.loading, settings.schedule),
            stored=CellFolder(out),
            report=lambda line: typer.echo(line, err=True),
        )
        return evaluator.run()
    finally:
        engines.close()


def show(found: "Evaluation") -> None:
    """Print the table of scores and verdicts."""
    from quire.cli.evaluate_view import show_evaluation

    show_evaluation(found)


def as_envelope(found: "Evaluation", settings: Settings, config: "EvalConfig") -> dict[str, object]:
    """The result as one JSON object."""
    arms: dict[str, object] = {
        arm: [cell.summary() for cell in cells] for arm, cells in found.cells.items()
    }
    more = {
        "sanity_check": found.sanity.as_dict(),
        "verdicts": [asdict(verdict) for verdict in found.verdicts],
    }
    options = {
        "tasks": [task.name for task in config.tasks],
        "tokens": list(config.tokens),
        "num_prompts": config.count,
        "seed": config.seed,
        "shots": config.shots,
        "data": {name: path.name for name, path in config.data.items()},
        "max_prompt_tokens": config.prompts.most_tokens,
        "apply_chat_template": config.prompts.chat,
    }
    return envelope("eval", found.claims(), arms | more, settings.as_dict() | options)


def json_bytes(result: dict[str, object]) -> bytes:
    """A result as the content of a file."""
    import json

    return (json.dumps(result, indent=1) + "\n").encode()
