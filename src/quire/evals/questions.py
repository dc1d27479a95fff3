"""Prompts with one question each, generated for a length, and the depth of their answers."""

from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError
from quire.evals.tasks import Filler, Measure, Task, make
from quire.evals.tasks.words import haystack

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DOCUMENT_START = "<|doc|>"
"""The beginning of every training sequence of quire-tiny; plain text for other models."""
_MIN_TOKENS = 16
_SHRINK = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, its expected answer, and the depth of the answer in the prompt."""

    prompt: str
    question: str = ""  # end of the prompt, after the context
    answer: str  # text that a greedy continuation must begin with
    depth: float  # requested, one of DEPTHS
    # actual depth, 0 (first) to 1 (last); None if the answer has no single location
    place: float | None = None
    # all texts that a correct continuation contains; empty: the answer only
    answers: tuple[str, ...] = ()
    chance: float = 0.0  # accuracy of random guessing (0 to 1)


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

    Raises:
        ConfigError: a prompt is longer; states the length that the `n` prompts need.
    """
    questions, least = [], 0
    for index in range(n):
        depth = DEPTHS[index % len(DEPTHS)]
        shared = {"measure": measure, "filler": filler or haystack(), "depth": depth}
        found, size = _fitting(task, seed * 10_000 + index, tokens, shared | options)
        questions.append(_question(found, depth))
        least = max(least, size)
    if least > tokens:
        raise ConfigError(
            f"no prompt of task {task!r} fits into {tokens} tokens: expected --tokens of {least} "
            "or more"
        )
    return questions


def _question(task: Task, depth: float) -> Question:
    query = task.queries[0]
    return Question(
        prompt=DOCUMENT_START + task.prompt(),
        question=query.question,
        answer=query.answer,
        depth=depth,
        place=query.depth,
        answers=query.answers,
        chance=task.chance,
    )


def _fitting(task: str, seed: int, tokens: int, options: dict[str, Any]) -> tuple[Task, int]:
    """A task and its length with the answer; the shortest task if none fits."""
    measure: Measure = options["measure"]
    target_tokens = tokens - 2  # the start of the document, and a token that is split at a boundary
    while True:
        target_tokens = max(target_tokens, _MIN_TOKENS)
        found = make(task, seed, target_tokens, **options)
        size = measure(DOCUMENT_START + found.prompt() + found.queries[0].answer)
        if size <= tokens or target_tokens == _MIN_TOKENS:
            return found, size
        target_tokens = int(_SHRINK * target_tokens)
