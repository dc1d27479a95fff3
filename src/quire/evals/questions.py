"""Prompts of a task at one length, with their expected answers, for quality evaluations.

A prompt and its answer never exceed the requested length. Some families only estimate lengths:
their target length is reduced until the prompt fits.
"""

from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.evals.tasks import Filler, Measure, Task, make
from quire.evals.tasks.fillers import haystack

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DOCUMENT_START = "<|doc|>"
"""The beginning of every training sequence of quire-tiny; plain text for other models."""
_LEAST_TOKENS = 16
_SHRINK = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, its expected answer, and the depth of the answer in the prompt.

    Attributes:
        prompt: text of the prompt.
        answer: text that a greedy continuation must begin with.
        depth: the requested depth, one of DEPTHS.
        place: the actual depth, 0 (first) to 1 (last). None if the answer has no single location.
        answers: all texts that a correct continuation contains. Empty: the answer only.
        chance: accuracy of random guessing (0 to 1).
    """

    prompt: str
    answer: str
    depth: float
    place: float | None = None
    answers: tuple[str, ...] = ()
    chance: float = 0.0


def make_questions(
    task: str,
    tokens: int,
    n: int,
    *,
    measure: Measure,
    filler: Filler | None = None,
    seed: int = 1,
    **options: Any,
) -> list[Question]:
    """The first `n` prompts of a task; equal arguments give equal prompts.

    Args:
        task: a registered family.
        tokens: maximum length of a prompt and its answer, in tokens.
        n: number of prompts.
        measure: counts the tokens of a text with the evaluated model's tokenizer.
        filler: the haystack; None: the shipped books.
        seed: seed of the prompts.
        options: fields of the family, such as `digits`.

    Returns:
        `n` questions; the depths alternate.

    Raises:
        UnknownName: the family is not registered.
        ConfigError: the family's shortest prompt is longer than `tokens`.
    """
    questions = []
    for index in range(n):
        depth = DEPTHS[index % len(DEPTHS)]
        shared = {"measure": measure, "filler": filler or haystack(), "depth": depth}
        found = _fitting(task, seed * 10_000 + index, tokens, shared | options)
        questions.append(_question(found, depth))
    return questions


def _question(task: Task, depth: float) -> Question:
    query = task.queries[0]
    return Question(
        prompt=DOCUMENT_START + task.prompt(),
        answer=query.answer,
        depth=depth,
        place=query.depth,
        answers=query.answers,
        chance=task.chance,
    )


def _fitting(task: str, seed: int, tokens: int, options: dict[str, Any]) -> Task:
    measure: Measure = options["measure"]
    target_tokens = tokens - 2  # the start of the document, and a token that is split at a boundary
    while target_tokens >= _LEAST_TOKENS:
        found = make(task, seed, target_tokens, **options)
        if measure(DOCUMENT_START + found.prompt() + found.queries[0].answer) <= tokens:
            return found
        target_tokens = int(_SHRINK * target_tokens)
    raise ConfigError(f"no prompt of task {task!r} fits into {tokens} tokens; raise tokens")
