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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from quire.errors import ConfigError
from quire.evals.tasks.words import Filler, Split, synthetic_filler, vocabulary

Measure = Callable[[str], int]
Span = tuple[str, float]
TEXT_WEIGHT = 0.5
"""Loss weight of running text in training; answers weigh 1, random keys and digits 0."""


def rough_measure(text: str) -> int:
    """Length in tokens, estimated as a third of the characters, at least 1."""
    return max(1, len(text) // 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskQuery:
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
    queries: tuple[TaskQuery, ...]
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
            raise ConfigError(f"expected tokens >= 1, got {self.tokens}; raise --tokens")
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


CHARACTERS_PER_TOKEN = 4.2
"""More than any text needs, so that a slice is always long enough to be trimmed."""
SAMPLE_KEY = "mellow-lantern"
"""A key of typical length, to measure how many tokens one record takes."""
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def number(rng: random.Random, digits: int) -> str:
    """A number of exactly `digits` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def letters(rng: random.Random, count: int) -> str:
    """`count` capital letters, without I and O, which resemble digits."""
    return "".join(rng.choice(_LETTERS) for _ in range(count))


def _key(rng: random.Random, split: Split, style: str) -> str:
    if style == "pair":
        return (
            f"{rng.choice(vocabulary('adjective', split))}-{rng.choice(vocabulary('noun', split))}"
        )
    if style == "syllables":
        count = rng.choice([2, 3])
        return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(count))
    return letters(rng, rng.choice([3, 4]))


def distinct_keys(rng: random.Random, count: int, split: Split) -> list[str]:
    """Draw `count` different keys: word pairs in evaluation, some in other forms in training."""
    style = "pair"
    if split == "train":
        style = rng.choices(["pair", "syllables", "letters"], [6, 2, 1])[0]
    keys: dict[str, None] = {}
    while len(keys) < count:
        keys[_key(rng, split, style)] = None
    return list(keys)


def place_at(depth: float, count: int) -> int:
    """Index of the record at a relative depth among `count`."""
    return min(count - 1, max(0, round(depth * (count - 1))))


def trim(text: str, room_tokens: int, measure: Measure, *, floor: int = 40) -> str:
    """Shorten until the text fits, or until `floor` characters are left."""
    while len(text) > floor and measure(text) > room_tokens:
        text = text[: int(len(text) * min(0.97, room_tokens / measure(text)))]
    return text


def running_text(rng: random.Random, room_tokens: int, setting: Setting, *, floor: int = 40) -> str:
    """Filler text of at most about `room_tokens` tokens; the minimum length may exceed this."""
    text = setting.filler(rng, int(room_tokens * CHARACTERS_PER_TOKEN))
    return trim(text, room_tokens, setting.measure, floor=floor)


def snap(text: str, cut: int) -> int:
    """Move a cut to the next space, so that no word is split."""
    if cut <= 0:
        return 0
    blank = text.find(" ", cut)
    return len(text) if blank < 0 or cut >= len(text) else blank


@dataclass(frozen=True, slots=True, kw_only=True)
class Burial:
    """Locations of statements in a running text.

    Attributes:
        text: the running text.
        cuts: character position of each statement.
        requested: index of the statement the first question is about.
    """

    text: str
    cuts: tuple[int, ...]
    requested: int

    def depth(self, index: int) -> float:
        """Relative location of one statement, 0 to 1."""
        return self.cuts[index] / max(1, len(self.text))

    def spans(self, statements: Sequence[str], *, end: str = "") -> tuple[Span, ...]:
        """The text with the statements inserted; their loss weight in training is 0."""
        spans: list[Span] = []
        last = 0
        for cut, index in sorted(zip(self.cuts, range(len(self.cuts)), strict=True)):
            spans += [(self.text[last:cut], TEXT_WEIGHT), (statements[index], 0.0)]
            last = cut
        return (*spans, (self.text[last:].rstrip() + end, TEXT_WEIGHT))

    def asking_order(self, rng: random.Random, queries: int) -> Iterator[int]:
        """The queried statement, then the others in random order, repeated without end."""
        count = len(self.cuts)
        others = [index for index in rng.sample(range(count), count) if index != self.requested]
        return islice(cycle([self.requested, *others]), queries)


def bury(
    rng: random.Random, text: str, count: int, depth: float | None, *, in_order: bool = False
) -> Burial:
    """Choose locations for `count` statements; the queried one is at `depth` unless it is None."""
    requested = rng.randrange(count)
    cuts = [rng.randrange(len(text) + 1) for _ in range(count)]
    if in_order:
        cuts.sort()
    if depth is not None:
        cuts[requested] = int(depth * len(text))
    return Burial(text=text, cuts=tuple(snap(text, cut) for cut in cuts), requested=requested)
