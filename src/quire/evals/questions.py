"""Prompts of a task at one length, with the answers that count: what judges of quality ask.

No prompt with its answer is longer than was asked for: families that only guess at lengths are
asked for less until they fit.
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.evals.tasks import Filler, Measure, Task, make
from quire.evals.tasks.fillers import haystack

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DOCUMENT_START = "<|doc|>"
"""What every training sequence of quire-tiny begins with; other models read it as plain text."""
_LEAST_TOKENS = 16
_SHRINK = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, what a greedy continuation must begin with, and where that stands.

    Attributes:
        prompt, answer: texts.
        depth: asked for, one of DEPTHS.
        place: where it came to stand, 0 first to 1 last; None: in no single place.
    """

    prompt: str
    answer: str
    depth: float
    place: float | None = None


def make_questions(
    task: str,
    tokens: int,
    n: int,
    *,
    measure: Measure,
    filler: Filler | None = None,
    seed: int = 1,
) -> list[Question]:
    """The first `n` prompts of a task; they depend on nothing but the arguments.

    Args:
        task: a registered family.
        tokens: most tokens of a prompt with its answer.
        n: how many.
        measure: tokens of a text, as the judged model counts them.
        filler: the haystack; None takes the shipped books.
        seed: another seed gives other prompts.

    Returns:
        `n` questions, the depths taking turns.

    Raises:
        UnknownName: no such family.
        ConfigError: the family's shortest prompt is longer than `tokens`.
    """
    made = []
    for index in range(n):
        depth = DEPTHS[index % len(DEPTHS)]
        found = _fitting(
            task, seed * 10_000 + index, tokens, depth, measure=measure, filler=filler or haystack()
        )
        made.append(_question(found, depth))
    return made


def _question(task: Task, depth: float) -> Question:
    query = task.queries[0]
    prompt = DOCUMENT_START + task.prompt()
    return Question(prompt=prompt, answer=query.answer, depth=depth, place=query.depth)


def _fitting(
    task: str, seed: int, tokens: int, depth: float, *, measure: Measure, filler: Filler
) -> Task:
    asked_for = tokens - 2  # the start of the document, and a token that falls apart at a border
    while asked_for >= _LEAST_TOKENS:
        found = make(task, seed, asked_for, filler=filler, measure=measure, depth=depth)
        if measure(DOCUMENT_START + found.prompt() + found.queries[0].answer) <= tokens:
            return found
        asked_for = int(_SHRINK * asked_for)
    raise ConfigError(f"no prompt of task {task!r} fits into {tokens} tokens; ask for longer ones")
