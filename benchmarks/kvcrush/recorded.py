"""Prompts from recorded examples for `python -m benchmarks kvcrush`: `--data gsm8k=FILE`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.common.few_shot import FewShotTask, Sample
    from benchmarks.common.graded_prompts import GradedPrompt
    from benchmarks.kvcrush.config import PromptsConfig
    from benchmarks.kvcrush.prompts import Recorded
    from quire.models.loader import LoadedModel

_DRAWN_PER_PROMPT = 8  # examples drawn for each prompt; too short ones are dropped


def files_of_tasks(named: Sequence[str]) -> Mapping[str, Path]:
    """Parse `TASK=FILE` options, each task once.

    Raises:
        UnknownName: no such task.
        ConfigError: an option has no file, or a task is given twice.
    """
    from benchmarks.common.few_shot import task_named

    found: dict[str, Path] = {}
    for text in named:
        name, _, path = text.partition("=")
        task_named(name)
        if not path or name in found:
            raise ConfigError(f"expected each task once, as {name}=FILE, got --data {text!r}")
        found[name] = Path(path)
    return found


def recorded(
    files: Mapping[str, Path], model: "LoadedModel", config: "PromptsConfig"
) -> "list[Recorded]":
    """Create the prompts of every file.

    Raises:
        ConfigError: no file, an unreadable file, or too few examples that are long enough.
    """
    from benchmarks.common.few_shot import task_named

    if not files:
        raise ConfigError(
            "expected files of examples for the part prompts, got none; name them as in "
            "--data gsm8k=test.jsonl"
        )
    return [_of_task(task_named(name), path, model, config) for name, path in files.items()]


def _of_task(
    task: "FewShotTask", path: Path, model: "LoadedModel", config: "PromptsConfig"
) -> "Recorded":
    from benchmarks.common.few_shot import make_samples, read_records
    from benchmarks.kvcrush.prompts import Recorded

    records, n = read_records(path), config.prompts
    drawn = min(_DRAWN_PER_PROMPT * n, len(records) - task.shots)
    by_shots = [
        make_samples(replace(task, shots=shots), records, drawn)
        for shots in range(task.shots, -1, -1)
    ]
    found = list(_fitting(task, zip(*by_shots, strict=True), model, config))[:n]
    if len(found) < n:
        raise ConfigError(
            f"expected {n} examples of {task.name} with prompts of more than "
            f"{config.min_tokens} tokens, got {len(found)} in {path}; name a file with longer "
            "or more examples"
        )
    prompts, graded = zip(*found, strict=True)
    return Recorded(name=task.name, score=task.score, prompts=prompts, graded=graded)


def _fitting(
    task: "FewShotTask",
    samples: "Iterator[tuple[Sample, ...]]",
    model: "LoadedModel",
    config: "PromptsConfig",
) -> "Iterator[tuple[list[int], GradedPrompt]]":
    """Yield each example with as many shots as fit, if it is then long enough."""
    from benchmarks.common.graded_prompts import GradedPrompt

    for by_shots in samples:
        sample, tokens = longest_that_fits(by_shots, model, config.tokens)
        if len(tokens) > config.min_tokens:
            grade = partial(_judge, task, sample.references)
            yield tokens, GradedPrompt(prompt=sample.prompt, grade=grade)


def longest_that_fits(
    by_shots: "Sequence[Sample]", model: "LoadedModel", most_tokens: int
) -> "tuple[Sample, list[int]]":
    """The prompt with the most shots that fit; without shots, the prompt is truncated to fit."""
    for sample in by_shots:
        tokens = encoded_prompt(model, sample.prompt)
        if len(tokens) <= most_tokens:
            return sample, tokens
    return sample, tokens[:1] + tokens[len(tokens) - most_tokens + 1 :]


def encoded_prompt(model: "LoadedModel", text: str) -> list[int]:
    """Token ids of a prompt, with quire-tiny's document token if the tokenizer has it."""
    from quire.evals.gate import DOCUMENT_START
    from quire.models.tokenizer import encode_prompt

    if model.tokenizer is None:
        raise ConfigError(f"{model.name} has no tokenizer; texts cannot be encoded")
    known = len(encode_prompt(model.tokenizer, DOCUMENT_START)) == 1
    return encode_prompt(model.tokenizer, (DOCUMENT_START if known else "") + text)


def _judge(task: "FewShotTask", references: tuple[str, ...], text: str) -> float:
    return task.judge(text, references)
