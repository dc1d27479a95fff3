"""`quire eval run` and `quire eval fidelity`.

`run` has scores of tasks with intervals, KV bytes and tokens/s, and verdicts; `fidelity` compares
with full KV on prompts of a file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.common import json_option, split_numbers, split_texts
from quire.cli.options import KV, MODEL, SCHEDULE
from quire.cli.report import envelope, prepare_folder, print_json, write_files
from quire.cli.settings import Settings, with_settings
from quire.cli.tables import show_table
from quire.errors import ConfigError
from quire.layout.options import option
from quire.layout.sizes import format_size

if TYPE_CHECKING:
    from quire.api.llm import LLM
    from quire.config.kv_config import KVConfig
    from quire.evals.fidelity import PromptFidelity, Reference
    from quire.evals.intervals import Mean
    from quire.evals.prompt_file import UserPrompt
    from quire.evals.suite.base import EvalTask
    from quire.evals.suite.cells import CellResult
    from quire.evals.suite.registry import Suite
    from quire.evals.suite.runner import EvalConfig, Evaluation, TaskVerdict
    from quire.models.loader import LoadedModel

RESULT_FILE = "result.json"


def question_option() -> Any:
    """`--evict-before-question` of `run` and of `quire board`."""
    return option(
        None,
        help="Evict the KV of the context before the question is computed, and compute it in "
        "decode steps. Default: only with when=prefill_end and with --sparse, where else the first "
        "output token is that of full KV.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRunFlags:
    """Options of `quire eval run`."""

    suite: str | None = option(
        None,
        help="Tasks that run together: quick, recall, redundant, ruler, few-shot or all. "
        "Default: quick, unless --tasks is given.",
        common=True,
    )
    tasks: str = option(
        "", help="Tasks, separated by commas; quire eval tasks lists them.", common=True
    )
    data: Path | None = option(
        None,
        help="Text file in UTF-8 that the task perplexity reads. Default: packaged books.",
        common=True,
    )
    tokens: str = option(
        "",
        help="Lengths of generated prompts, separated by commas. Default: the suite.",
        common=True,
    )
    num_prompts: int | None = option(
        None, help="Prompts of each task. Default: the suite.", common=True
    )
    seed: int = option(1, help="Seed of generated prompts.")
    sanity_check: bool = option(
        True, help="Check which tasks may judge a rule; without it there are no verdicts."
    )
    evict_before_question: bool | None = question_option()
    out: Path | None = option(
        None, help="Folder for the result and its cells; a later run continues there.", common=True
    )
    as_json: bool = json_option()


@with_settings(MODEL, KV, SCHEDULE)
def run(settings: Settings, *, flags: EvalRunFlags) -> None:
    """Measure a model on tasks, and compare an eviction rule or KV codec with full KV.

    Every score has a 95 % interval, KV bytes and tokens/s. With --evict, --kv-codec or --sparse the
    same prompts also run with full KV. Their paired difference is always printed; a task gives a
    verdict only if the model solves it with full KV and passes the sanity check of this task.
    """
    from quire.evals.suite.runner import EvalConfig

    chosen, base = selected(flags.suite, flags.tasks)
    config = EvalConfig(
        tasks=chosen,
        tokens=split_numbers("--tokens", flags.tokens) or base.tokens,
        count=base.count if flags.num_prompts is None else flags.num_prompts,
        seed=flags.seed,
        data=flags.data,
        sanity=flags.sanity_check,
        evict_before_question=flags.evict_before_question,
    )
    size = settings.loading.tensor_parallel_size
    if size > 1 and any(task.name == "perplexity" for task in config.tasks):
        raise ConfigError(
            f"task 'perplexity' needs a model in one process, got --tensor-parallel-size {size}: "
            "leave one of them out"
        )
    if flags.out is not None:
        prepare_folder(flags.out)
    found = evaluation(settings, config, flags.out)
    show_evaluation(found)
    result = as_envelope(found, settings, config)
    if flags.out is not None:
        write_files(flags.out, {RESULT_FILE: json_bytes(result)})
    if flags.as_json:
        print_json(result)


def selected(suite: str | None, tasks: str) -> "tuple[tuple[EvalTask, ...], Suite]":
    """Tasks of the options, and the suite whose lengths and number of prompts are used."""
    from quire.evals.suite.registry import suite_of, task_of

    listed = split_texts(tasks)
    base = suite_of(suite if suite is not None else "quick")
    names = listed if suite is None and listed else [*base.tasks, *listed]
    return tuple(map(task_of, dict.fromkeys(names))), base


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
    """Run all cells that are not stored."""
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
        "data": None if config.data is None else config.data.name,
        "evict_before_question": config.evict_before_question,
    }
    return envelope("eval", found.claims(), arms | more, settings.as_dict() | options)


def json_bytes(result: dict[str, object]) -> bytes:
    """A result as the content of a file."""
    import json

    return (json.dumps(result, indent=1) + "\n").encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFidelityFlags:
    """Options of `quire eval fidelity`."""

    data: Path = option(
        MISSING,
        help="Prompts: JSON lines with prompt (a text or token ids) or messages.",
        common=True,
    )
    max_tokens: int = option(48, help="Output tokens of each prompt.", min_value=1, common=True)
    num_prompts: int | None = option(
        None, help="Use the first prompts only. Default: all.", min_value=1, common=True
    )
    out: Path | None = option(None, help="Folder for the result.", common=True)
    as_json: bool = json_option()


@with_settings(MODEL, KV, SCHEDULE)
def fidelity(settings: Settings, *, flags: EvalFidelityFlags) -> None:
    """Compare outputs and distributions of an eviction rule or KV codec with full KV.

    The greedy output with full KV is the reference; its tokens are forced, so that every
    distribution follows equal tokens. Works with any model and any prompts.
    """
    if settings.loading.tensor_parallel_size > 1:
        raise ConfigError(
            "quire eval fidelity needs a model in one process: leave --tensor-parallel-size out"
        )
    if flags.out is not None:
        prepare_folder(flags.out)
    found = measured(settings, flags.data, flags.max_tokens, flags.num_prompts)
    result = envelope(
        "fidelity",
        claims_of(found),
        {"prompts": [arm_of(*pair) for pair in found]},
        settings.as_dict()
        | {
            "data": flags.data.name,
            "max_tokens": flags.max_tokens,
            "num_prompts": flags.num_prompts,
        },
    )
    show_fidelity(found)
    if flags.out is not None:
        write_files(flags.out, {RESULT_FILE: json_bytes(result)})
    if flags.as_json:
        print_json(result)


_Pair = tuple["Reference", "PromptFidelity"]


def measured(
    settings: Settings, data: Path, max_tokens: int, num_prompts: int | None
) -> Sequence[_Pair]:
    """Reference and fidelity of each prompt."""
    from quire.evals.fidelity import FidelityScorer
    from quire.evals.prompt_file import read_prompts
    from quire.evals.suite.engines import full_kv

    llm = opener(settings)(settings.kv)
    model = llm.model
    llm.close()
    prompts = read_prompts(data, model, limit=num_prompts, content_format=llm.content_format)
    refuse_long(prompts, max_tokens, model)
    longest = max(len(one.token_ids) for one in prompts) + max_tokens
    full, configured = (
        FidelityScorer(model, kv, longest_tokens=longest, new_tokens=max_tokens)
        for kv in (full_kv(settings.kv), settings.kv)
    )
    references = [full.reference(one.token_ids) for one in prompts]
    return [(reference, configured.score(reference)) for reference in references]


def refuse_long(prompts: Sequence["UserPrompt"], max_tokens: int, model: "LoadedModel") -> None:
    """Refuse prompts that exceed the model's context."""
    most = model.spec.max_positions - max_tokens
    for number, one in enumerate(prompts, start=1):
        if len(one.token_ids) > most:
            raise ConfigError(
                f"prompt {number} of --data has {len(one.token_ids)} tokens; with --max-tokens "
                f"{max_tokens} the model's context holds {most}: shorten or remove it"
            )


def means_of(found: Sequence[_Pair]) -> "Mapping[str, Mean]":
    """Means over the prompts, with their intervals."""
    from quire.evals.intervals import SHARE, mean_of

    scores = [score for _, score in found]
    return {
        "top_1": mean_of([score.top_1 for score in scores], limits=SHARE),
        "exact": mean_of([score.exact for score in scores], limits=SHARE),
        "kl_nats": mean_of([score.kl for score in scores]),
    }


def claims_of(found: Sequence[_Pair]) -> dict[str, int | float]:
    """The result as a flat mapping."""
    claims: dict[str, int | float] = {"prompts": len(found)}
    for name, mean in means_of(found).items():
        claims |= {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high}
    claims["kv_peak_bytes"] = max(score.kv_peak_bytes for _, score in found)
    claims["full_kv_peak_bytes"] = max(reference.kv_peak_bytes for reference, _ in found)
    return claims


def arm_of(reference: "Reference", score: "PromptFidelity") -> dict[str, object]:
    """One prompt as JSON values."""
    return {
        "prompt_tokens": len(reference.prompt),
        "output_tokens": len(reference.output),
        "full_kv_peak_bytes": reference.kv_peak_bytes,
        **asdict(score),
    }


def show_fidelity(found: Sequence[_Pair]) -> None:
    """Print the means, and the KV bytes."""
    from quire.layout.sizes import format_size

    claims = claims_of(found)
    title = f"Compared with full KV on {len(found)} prompts"
    means = means_of(found)
    rows = [(name, *_mean_cells(mean)) for name, mean in means.items()]
    show_table(title, ("measure", "mean", "95 % interval"), rows)
    typer.echo(
        f"KV peak of a request: {format_size(int(claims['kv_peak_bytes']))}, with full KV "
        f"{format_size(int(claims['full_kv_peak_bytes']))}"
    )


# two values a cell: the table fits into 80 columns
_SCORES = ("task\nscore", "KV", "n", "mean\n95 % interval", "KV peak\ntokens/s")


def show_evaluation(found: "Evaluation") -> None:
    """Print scores, the result of the sanity check, and verdicts if there are any."""
    from quire.evals.suite.engines import CONFIGURED

    show_table("Scores", _SCORES, _rows(found))
    reason = found.sanity.reason
    typer.echo(f"Sanity check: {found.sanity.status}{reason and f': {reason}'}.")
    if not found.verdicts:
        return
    rows = [_verdict_row(verdict) for verdict in found.verdicts]
    title = f"{found.cells[CONFIGURED][0].arm} compared with full KV"
    show_table(title, ("task", "score", "difference", "verdict"), rows)


def _rows(found: "Evaluation") -> list[tuple[str, ...]]:
    count = max(len(cells) for cells in found.cells.values())
    return [
        row
        for index in range(count)
        for cells in found.cells.values()
        for row in _cell_rows(cells[index])
    ]


def _cell_rows(cell: "CellResult") -> list[tuple[str, ...]]:
    resources = f"{format_size(cell.kv_peak_bytes)}\n{cell.output_tokens_per_s:,.0f}"
    rule, count = cell.arm.replace(",", ",\n"), str(len(cell.prompts))
    return [
        (f"{cell.name}\n{metric}", rule, count, "\n".join(_mean_cells(mean)), resources)
        for metric, mean in cell.means().items()
    ]


def _mean_cells(mean: "Mean") -> tuple[str, str]:
    return f"{mean.mean:.4g}", f"{mean.low:.3g} to {mean.high:.3g}"


def _verdict_row(verdict: "TaskVerdict") -> tuple[str, str, str, str]:
    text = verdict.verdict + (verdict.reason and f": {verdict.reason}")
    return verdict.cell, verdict.metric, str(verdict.difference), text
