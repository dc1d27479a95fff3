"""Few-shot prompts from files of recorded examples, as in the evaluation of KVCrush.

gsm8k         {"question", "answer": "... #### number"}    16 shots  fraction of equal numbers
xsum          {"document", "summary"}                      3 shots   ROUGE-2 against the summary

Quire ships no examples: the data sets have their own licences.

Source: Jha et al. 2025 (KVCrush), table I. The paper prints neither prompts nor shots; the wording
of the prompts is Quire's.

A file is a JSON list, JSON lines, or an object whose values are the examples. Some examples become
shots with their answers, the other examples become prompts.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.common.rouge import best_rouge_2
from quire.errors import ConfigError, UnknownName

Record = Mapping[str, Any]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShotTask:
    """One kind of example.

    Attributes:
        name: name of the task.
        shots: number of solved examples before the question.
        ask: formats an example without its answer, as the end of a prompt.
        answers: reference answers of an example; a shot shows the first.
        grade: maps (output up to the next example, references) to a score from 0 to 1.
        score: name of the mean score.
        stop: text that begins the next example; the output is cut there.
    """

    name: str
    shots: int
    ask: Callable[[Record], str]
    answers: Callable[[Record], tuple[str, ...]]
    grade: Callable[[str, Sequence[str]], float]
    score: str
    stop: str

    def judge(self, text: str, references: Sequence[str]) -> float:
        """Score a continuation up to the text that begins a further example."""
        return self.grade(text.split(self.stop)[0], references)


def final_number(text: str) -> str | None:
    """The first number after `####`, else the last number; without commas and trailing zeros."""
    marked = text.split("####", 1)
    found = _NUMBER.findall(marked[1]) if len(marked) == 2 else []
    number = found[:1] or _NUMBER.findall(marked[0])[-1:]
    return f"{float(number[0].replace(',', '')):g}" if number else None


def _same_number(text: str, references: Sequence[str]) -> float:
    number = final_number(text)
    return float(number is not None and number in map(final_number, references))


TASKS: Mapping[str, FewShotTask] = MappingProxyType(
    {
        "gsm8k": FewShotTask(
            name="gsm8k",
            shots=16,
            ask=lambda record: f"Question: {record['question']}\nAnswer:",
            answers=lambda record: (str(record["answer"]),),
            grade=_same_number,
            score="accuracy",
            stop="\nQuestion:",
        ),
        "xsum": FewShotTask(
            name="xsum",
            shots=3,
            ask=lambda record: f"Article: {record['document']}\n\nIn one sentence:",
            answers=lambda record: (str(record["summary"]),),
            grade=best_rouge_2,
            score="rouge-2",
            stop="\nArticle:",
        ),
    }
)


def task_named(name: str) -> FewShotTask:
    """Return the task with the given name.

    Raises:
        UnknownName: no such task.
    """
    if name not in TASKS:
        raise UnknownName("task", name, TASKS)
    return TASKS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt with its reference answers.

    Attributes:
        prompt: text of the shots and the question.
        references: correct answers; a match with any counts.
    """

    prompt: str
    references: tuple[str, ...]


def read_records(path: Path) -> list[Record]:
    """Read the examples of a file, in file order.

    Raises:
        ConfigError: no such file, or not one of the formats above.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; expected a file of examples"
        ) from error
    try:
        found = _parsed(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is neither JSON nor JSON lines: {error}") from error
    records = list(found.values()) if isinstance(found, Mapping) else found
    many = isinstance(records, list) and bool(records)
    if not many or not all(isinstance(record, Mapping) for record in records):
        raise ConfigError(f"{path} holds no examples: expected one JSON object per example")
    return records


def _parsed(text: str) -> Any:
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in lines]
    one_example = isinstance(found, Mapping) and not all(
        isinstance(value, Mapping) for value in found.values()
    )
    return [found] if one_example else found


def make_samples(task: FewShotTask, records: Sequence[Record], n: int) -> list[Sample]:
    """Draw prompts; all have the same shots, and equal records give equal prompts.

    Args:
        task: wording and shots.
        records: examples for prompts and shots.
        n: number of prompts.

    Raises:
        ConfigError: too few examples, or an example without the fields of the task.
    """
    shuffled = random.Random(0).sample(list(records), len(records))
    requested, others = shuffled[:n], shuffled[n:]
    if len(requested) < n or len(others) < task.shots:
        raise ConfigError(
            f"expected at least {n + task.shots} examples for {n} samples and {task.shots} shots "
            f"of {task.name}, got {len(records)}; request fewer samples"
        )
    try:
        shown = "".join(_solved(task, record) for record in others[: task.shots])
        return [Sample(prompt=shown + task.ask(r), references=task.answers(r)) for r in requested]
    except KeyError as error:
        raise ConfigError(f"an example of {task.name} lacks the field {error}") from error


def _solved(task: FewShotTask, record: Record) -> str:
    return f"{task.ask(record)} {task.answers(record)[0]}\n\n"
