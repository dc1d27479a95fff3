r"""Base classes of tasks: a context of weighted spans, and questions about its contents.

    spans:    "Pairs:\n" | "old-lamp": "48213",\n ... |
    queries:                                           Key "old-lamp": " | 48213 | "\n
    prompt:   ----------------- context ------------- + --- question ---
    training: ----------------- context ------------- + question, answer, tail of every query

All families are deterministic: tasks from equal random states are equal character by character.
Scores measured at different times therefore refer to the same prompts.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.evals.tasks.fillers import Filler, synthetic_filler
from quire.evals.tasks.words import Split

Measure = Callable[[str], int]
Span = tuple[str, float]
TEXT_WEIGHT = 0.5
"""Loss weight of running text in training; answers weigh 1, random keys and digits 0."""


def rough_measure(text: str) -> int:
    """Length in tokens, estimated as a third of the characters, at least 1."""
    return max(1, len(text) // 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One question and its expected answer.

    Attributes:
        question: text after the context; the answer follows without a space.
        answer: text that a greedy continuation must begin with.
        tail: text after the answer in training.
        depth: location of the queried record in the context, 0 (first) to 1 (last). None if the
            answer has no single location.
        key: the word that names the record. None if the record has no key.
        answers: all texts that a correct output contains. Empty: the answer only.
    """

    question: str
    answer: str
    tail: str = "\n"
    depth: float | None = None
    key: str | None = None
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A context and the questions about it.

    Attributes:
        name: the registered name of the family.
        spans: (text, loss weight in training) of the context, in order.
        queries: the questions; an evaluation uses the first.
        chance: accuracy of random guessing (0 to 1).
    """

    name: str
    spans: tuple[Span, ...]
    queries: tuple[Query, ...]
    chance: float = 0.0

    @property
    def context(self) -> str:
        """The text before the first question."""
        return "".join(text for text, _ in self.spans)

    def prompt(self, index: int = 0) -> str:
        """The context and one question: the prompt of an evaluation."""
        return self.context + self.queries[index].question

    def training_spans(self) -> tuple[Span, ...]:
        """The context, then every question with its answer (weight 1) and tail."""
        requested = [
            span
            for query in self.queries
            for span in ((query.question, 0.0), (query.answer, 1.0), (query.tail, 0.0))
        ]
        return (*self.spans, *requested)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings that all families share.

    Attributes:
        tokens: target length of context and questions together, in units of `measure`.
        filler: generates the running text between the records.
        measure: counts the tokens of a text.
        split: selects the word lists and operands; the two splits are disjoint.
        queries: number of questions; None: as many as a training sequence should hold.
        depth: location of the first question's record, 0 to 1; None: random.
    """

    tokens: int
    filler: Filler = synthetic_filler
    measure: Measure = rough_measure
    split: Split = "eval"
    queries: int | None = 1
    depth: float | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"expected tokens >= 1, got {self.tokens}; raise tokens")
        if self.depth is not None and not 0 <= self.depth <= 1:
            raise ConfigError(f"expected depth in [0, 1], got {self.depth}; 0 is the first record")

    @property
    def evaluates(self) -> bool:
        """Whether prompts are built for evaluation: from words and operands unused in training."""
        return self.split == "eval"


class TaskFamily(ABC):
    """Base of task families: a frozen dataclass whose fields are the family's options."""

    __slots__ = ()

    @abstractmethod
    def build(self, rng: random.Random, setting: Setting) -> Task:
        """Generate one task, determined by the random state and the setting."""
