"""The paper's protocol in `python -m benchmarks batch-max`: read, encode, run, print."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from benchmarks.common.graded_prompts import load
from quire.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.batch_max.judged import Encoded
    from benchmarks.batch_max.paper import PaperConfig, PaperRow
    from benchmarks.common.few_shot import FewShotTask, Sample
    from benchmarks.common.result import PartResult
    from quire.cli.settings import Settings
    from quire.models.loader import LoadedModel


def paper_config(
    settings: "Settings",
    *,
    task: str,
    samples: int,
    input_tokens: int,
    new_tokens: int,
    quick: bool,
) -> "PaperConfig":
    """Configuration of the run; quick divides all lengths by 4 and runs a tenth of the samples.

    Raises:
        UnknownName: no such task.
        ConfigError: invalid lengths.
    """
    from benchmarks.batch_max.paper import PaperConfig
    from benchmarks.common.few_shot import task_named

    config = PaperConfig(
        model=settings.model,
        task=task_named(task).name,
        samples=samples,
        input_tokens=input_tokens,
        new_tokens=new_tokens,
    )
    if not quick:
        return config
    return replace(
        config,
        samples=max(1, samples // 10),
        input_tokens=max(1, input_tokens // 4),
        new_tokens=max(1, new_tokens // 4),
        every=16,
        step=32,
    )


def run_paper(
    settings: "Settings", config: "PaperConfig", data: Path | None, shots: Path | None
) -> "Iterator[tuple[str, PartResult]]":
    """Yield the protocol's only part; rows are printed when they finish.

    Raises:
        ConfigError: no data, or too few examples.
    """
    from benchmarks.batch_max.paper import PaperProtocol, paper_result
    from benchmarks.common.few_shot import task_named

    task = task_named(config.task)
    samples = _samples(task, config, data, shots)
    started_s = time.perf_counter()
    model = load(settings)
    prompts = [_encoded(model, task, sample, config.input_tokens) for sample in samples]
    rows = PaperProtocol(model, settings.kv, config, prompts, _show).run()
    result = paper_result(config, rows, task.score)
    yield "paper", replace(result, seconds=time.perf_counter() - started_s)


def _samples(
    task: "FewShotTask", config: "PaperConfig", data: Path | None, shots: Path | None
) -> "list[Sample]":
    from benchmarks.common.few_shot import make_samples, read_records

    if data is None:
        raise ConfigError(
            f"expected a file with examples of {task.name} for the paper's protocol, got none; "
            "name it with --data"
        )
    shown = [] if shots is None else read_records(shots)
    return make_samples(task, read_records(data), config.samples, shot_records=shown)


def _encoded(
    model: "LoadedModel", task: "FewShotTask", sample: "Sample", input_tokens: int
) -> "Encoded":
    """Truncate a prompt that is too long at its beginning; the first token is retained."""
    from benchmarks.batch_max.judged import Encoded
    from benchmarks.common.graded_prompts import GradedPrompt
    from quire.models.tokenizer import encode_prompt

    if model.tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer; texts cannot be encoded")
    tokens = encode_prompt(model.tokenizer, sample.prompt)
    if len(tokens) > input_tokens:
        tokens = tokens[:1] + tokens[len(tokens) - input_tokens + 1 :]
    grade = partial(_judge, task, sample.references)
    return Encoded(tokens=tuple(tokens), graded=GradedPrompt(prompt=sample.prompt, grade=grade))


def _judge(task: "FewShotTask", references: tuple[str, ...], text: str) -> float:
    return task.judge(text, references)


def _show(row: "PaperRow") -> None:
    if row.judged is None:
        typer.echo(f"{row.label}: {row.batch} rows do not fit")
    else:
        found = row.judged
        typer.echo(
            f"{row.label}: {row.batch} rows, {found.score:.3f}, {found.tokens_per_s:.1f} tokens/s"
        )
