"""Short facts about people, in running text: `facts`. The answer is a word, not a number."""

import random
from dataclasses import dataclass

from quire.evals.tasks.base import Query, Setting, Task, TaskFamily
from quire.evals.tasks.pieces import bury, running_text
from quire.evals.tasks.words import WordKind, vocabulary

_FACT_TOKENS = 14
_TEMPLATES: tuple[tuple[str, str, WordKind], ...] = (
    ("{n} lives in {v}.", "Where does {n} live? {n} lives in", "place"),
    ("{n} was born in {v}.", "Where was {n} born? {n} was born in", "place"),
    (
        "The secret word of {n} is {v}.",
        "What is the secret word of {n}? The secret word of {n} is",
        "noun",
    ),
    ("{n} has lost a {v}.", "What has {n} lost? {n} has lost a", "noun"),
    ("{n} will bring a {v}.", "What will {n} bring? {n} will bring a", "noun"),
)
"""(statement, question, kind of the value); n is the person, v the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A statement about a person, and the question about it."""

    statement: str
    question: str
    answer: str


def make_fact(rng: random.Random, setting: Setting, person: str) -> Fact:
    """A fact about a person."""
    statement, question, kind = rng.choice(_TEMPLATES)
    value = rng.choice(vocabulary(kind, setting.split))
    said = f"\n{statement.format(n=person, v=value)}\n"
    return Fact(statement=said, question=question.format(n=person), answer=f" {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(TaskFamily):
    """Facts about people: the city they live in, objects they lost or will take along.

    Attributes:
        count: number of inserted facts. None: 4 for one query, a random number for several.
    """

    count: int | None = None

    def build(self, rng: random.Random, setting: Setting) -> Task:
        """Generate one task, determined by the random state and the setting."""
        people = vocabulary("name", setting.split)
        count = max(1, min(self._wanted(rng, setting), int(0.6 * setting.tokens / 26), len(people)))
        queries = setting.queries or count
        facts = [make_fact(rng, setting, person) for person in rng.sample(people, count)]
        room = max(16, setting.tokens - (count + queries) * _FACT_TOKENS)
        burial = bury(rng, running_text(rng, room, setting), count, setting.depth)
        requested = tuple(
            Query(
                question=facts[index].question,
                answer=facts[index].answer,
                tail=".\n",
                depth=burial.depth(index),
            )
            for index in burial.asking_order(rng, queries)
        )
        spans = burial.spans([fact.statement for fact in facts], end="\n")
        return Task(name="facts", spans=spans, queries=requested)

    def _wanted(self, rng: random.Random, setting: Setting) -> int:
        if self.count:
            return self.count
        if setting.queries == 1:
            return 4
        return rng.choice([1, 2, 4, 8, max(2, setting.tokens // 48)])
