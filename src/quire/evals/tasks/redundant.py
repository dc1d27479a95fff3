"""Answers that many parts of the prompt imply: `repeats`, `retold`, `majority`, `topics`.

In the recall tasks of this package one record has the answer: a cache that has evicted it fails.
Here the answer has several sources, as in most real prompts, and a part of the tokens can be
enough:

    task      what is repeated                              the answer follows from
    repeats   every line of a record, `copies` times        any copy
    retold    every fact, `copies` times in running text    any copy
    majority  a word with its label, sometimes a wrong one  most of its lines
    topics    lines of words of one class and its label     any line of the class
"""

import random
from dataclasses import dataclass

from quire.evals.tasks.base import (
    SAMPLE_KEY,
    Setting,
    Span,
    Task,
    TaskFamily,
    TaskQuery,
    distinct_keys,
    number,
    place_at,
    running_text,
    snap,
)
from quire.evals.tasks.needles import Fact, make_fact
from quire.evals.tasks.words import CLASS_NAMES, LABELS, class_words, vocabulary

_FACT_TOKENS = 14
_MAX_TRAINING_COPIES = 6


def _copies(rng: random.Random, setting: Setting, copies: int) -> int:
    return copies if setting.evaluates else rng.randrange(2, _MAX_TRAINING_COPIES + 1)


def _shuffled_rounds(rng: random.Random, count: int, rounds: int) -> list[int]:
    """Every index once in each round, in a new order: copies are spread over the prompt."""
    return [index for _ in range(rounds) for index in rng.sample(range(count), count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats(TaskFamily):
    """Lines such as `line brisk-lamp: <48213>`, each of them several times.

    Attributes:
        copies: number of copies of a line; in training it varies.
        digits: length of a value.
    """

    copies: int = 4
    digits: int = 5

    def build(self, rng: random.Random, setting: Setting) -> Task:
        copies = _copies(rng, setting, self.copies)
        line = f"line {SAMPLE_KEY}: <{number(rng, self.digits)}>\n"
        line_tokens = setting.measure(line * 8) / 8
        intro = "Below is a record of lines.\n"
        queries = setting.queries or max(1, int(0.3 * setting.tokens / line_tokens))
        room_tokens = setting.tokens - setting.measure(intro) - queries * line_tokens
        count = max(2, int(room_tokens / line_tokens / copies))
        keys = distinct_keys(rng, count, setting.split)
        values = [number(rng, self.digits) for _ in keys]
        order = _shuffled_rounds(rng, count, copies)
        body = "".join(f"line {keys[index]}: <{values[index]}>\n" for index in order)
        chosen = [rng.randrange(count) for _ in range(queries)]
        if setting.depth is not None:
            chosen = [place_at(setting.depth, count)] * queries
        requested = tuple(
            TaskQuery(question=f"line {keys[i]}: <", answer=values[i], tail=">\n", key=keys[i])
            for i in chosen
        )
        return Task(name="repeats", spans=((intro, 0.0), (body, 0.0)), queries=requested)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retold(TaskFamily):
    """Facts about people in running text, each of them told several times.

    Attributes:
        copies: number of times that a fact is told; in training it varies.
        count: number of facts in an evaluation.
    """

    copies: int = 4
    count: int = 3

    def build(self, rng: random.Random, setting: Setting) -> Task:
        copies = _copies(rng, setting, self.copies)
        people = vocabulary("name", setting.split)
        wanted = self.count if setting.queries == 1 else rng.choice([1, 2, 3, 4])
        most = int(0.6 * setting.tokens / (_FACT_TOKENS * (copies + 1)))
        count = max(1, min(wanted, most, len(people)))
        facts = [make_fact(rng, setting, person) for person in rng.sample(people, count)]
        queries = setting.queries or count
        room_tokens = max(16, setting.tokens - (count * copies + queries) * _FACT_TOKENS)
        spans = _told(rng, running_text(rng, room_tokens, setting), facts, copies)
        requested = tuple(
            TaskQuery(question=fact.question, answer=fact.answer, tail=".\n")
            for fact in (facts * queries)[:queries]
        )
        return Task(name="retold", spans=spans, queries=requested)


def _told(rng: random.Random, text: str, facts: list[Fact], copies: int) -> tuple[Span, ...]:
    order = _shuffled_rounds(rng, len(facts), copies)
    cuts = sorted(snap(text, rng.randrange(len(text) + 1)) for _ in order)
    spans: list[Span] = []
    last = 0
    for cut, index in zip(cuts, order, strict=True):
        spans += [(text[last:cut], 0.5), (facts[index].statement, 0.0)]
        last = cut
    return (*spans, (text[last:].rstrip() + "\n", 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Majority(TaskFamily):
    """Lines such as `fountain: green`; the answer is the most frequent label of a word.

    Attributes:
        words: number of different words in an evaluation.
        wrong: fraction (0 to 0.5) of the lines of a word that have another label.
    """

    words: int = 6
    wrong: float = 0.2

    def build(self, rng: random.Random, setting: Setting) -> Task:
        line_tokens = setting.measure("fountain: green\n" * 8) / 8
        queries = setting.queries or max(1, int(0.3 * setting.tokens / line_tokens))
        num_lines = max(6, int(setting.tokens / line_tokens) - queries - 1)
        wanted = self.words if setting.evaluates else rng.randrange(2, 9)
        count = max(1, min(wanted, num_lines // 3))
        words = rng.sample(vocabulary("noun", setting.split), count)
        labels = [rng.choice(LABELS) for _ in words]
        rounds = -(-num_lines // count)
        order = _shuffled_rounds(rng, count, rounds)[: max(num_lines, 3 * count)]
        wrong = _wrong_lines(rng, order, count, self.wrong)
        lines = [
            f"{words[index]}: {_other(rng, labels[index]) if at in wrong else labels[index]}\n"
            for at, index in enumerate(order)
        ]
        requested = tuple(
            TaskQuery(question=f"{words[i]}:", answer=f" {labels[i]}", key=words[i])
            for i in (rng.randrange(count) for _ in range(queries))
        )
        spans = (("".join(lines), 0.0),)
        return Task(name="majority", spans=spans, queries=requested, chance=1 / len(LABELS))


def _wrong_lines(rng: random.Random, order: list[int], count: int, share: float) -> set[int]:
    """Positions of lines with a wrong label: the same fraction of the lines of every word."""
    found: set[int] = set()
    for index in range(count):
        own = [at for at, other in enumerate(order) if other == index]
        found |= set(rng.sample(own, int(share * len(own))))
    return found


def _other(rng: random.Random, label: str) -> str:
    return rng.choice([other for other in LABELS if other != label])


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics(TaskFamily):
    """Lines such as `goat lion: green`, then words of one of the classes.

    Attributes:
        classes: number of classes in an evaluation.
        words: number of words in a line.
    """

    classes: int = 2
    words: int = 2

    def build(self, rng: random.Random, setting: Setting) -> Task:
        count = self.classes if setting.evaluates else rng.randrange(2, 6)
        classes, labels = rng.sample(CLASS_NAMES, count), rng.sample(LABELS, count)
        sample = " ".join(class_words(classes[0], "train")[: self.words]) + ": green\n"
        num_lines = max(2 * count, int(setting.tokens / (setting.measure(sample * 8) / 8)) - 1)
        first = list(range(count))
        shown = [*first, *(rng.randrange(count) for _ in range(num_lines - count))]
        if setting.queries is None:
            return Task(name="topics", spans=self._dense(rng, shown, classes, labels), queries=())
        context = "".join(f"{self._line(rng, classes[i])}: {labels[i]}\n" for i in shown)
        chosen = [rng.randrange(count) for _ in range(setting.queries)]
        requested = tuple(
            TaskQuery(question=f"{self._line(rng, classes[i])}:", answer=f" {labels[i]}")
            for i in chosen
        )
        return Task(name="topics", spans=((context, 0.0),), queries=requested, chance=1 / count)

    def _line(self, rng: random.Random, class_name: str) -> str:
        return " ".join(rng.sample(class_words(class_name, "train"), self.words))

    def _dense(
        self, rng: random.Random, shown: list[int], classes: list[str], labels: list[str]
    ) -> tuple[Span, ...]:
        """Questions for training: every line after the first of its class."""
        spans: list[Span] = []
        for at, index in enumerate(shown):
            weight = 0.0 if at < len(classes) else 1.0
            line = self._line(rng, classes[index])
            spans += [(f"{line}:", 0.0), (f" {labels[index]}\n", weight)]
        return tuple(spans)
