"""Prompts drawn from a file of recorded examples: some are shown with their answers, some asked.

A file is a JSON list, JSON lines, or an object whose values are the examples.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.few_shot import FewShotTask, Record
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt.

    Attributes:
        prompt: with its shots.
        references: any of which is right.
    """

    prompt: str
    references: tuple[str, ...]


def read_records(path: Path) -> list[Record]:
    """Examples of a file, in its order.

    Raises:
        ConfigError: no such file, or not one of the forms above.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; name a file of examples"
        ) from error
    try:
        found = _parsed(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is neither JSON nor JSON lines: {error}") from error
    records = list(found.values()) if isinstance(found, Mapping) else found
    many = isinstance(records, list) and bool(records)
    if not many or not all(isinstance(record, Mapping) for record in records):
        raise ConfigError(f"{path} holds no examples: expected objects, one for each")
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


def make_samples(
    task: FewShotTask,
    records: Sequence[Record],
    n: int,
    *,
    shot_records: Sequence[Record] = (),
    seed: int = 0,
) -> list[Sample]:
    """Draw prompts; all have the same shots, as far as the records and the seed are the same.

    Args:
        task: wording and shots.
        records: examples to ask.
        n: how many.
        shot_records: examples to show; without any, those of `records` that are not asked.
        seed: of the draw.

    Raises:
        ConfigError: too few examples, or one without the fields of the task.
    """
    shuffled = random.Random(seed).sample(list(records), len(records))
    requested, others = shuffled[:n], list(shot_records) or shuffled[n:]
    if len(requested) < n or len(others) < task.shots:
        raise ConfigError(
            f"{n} samples and {task.shots} shots of {task.name} need more examples than the "
            f"{len(records)} there are; ask for fewer samples, or name a file of shots"
        )
    try:
        shown = "".join(_solved(task, record) for record in others[: task.shots])
        return [Sample(prompt=shown + task.ask(r), references=task.answers(r)) for r in requested]
    except KeyError as error:
        raise ConfigError(f"an example of {task.name} has no field {error}") from error


def _solved(task: FewShotTask, record: Record) -> str:
    return f"{task.ask(record)} {task.answers(record)[0]}\n\n"
