"""Numbers hidden in running text: the task `niah` (needle in a haystack).

Source: Kamradt's needle test in RULER's wording (Hsieh et al. 2024). Keys are word pairs.
"""

import random
from dataclasses import dataclass, replace

from quire.evals.tasks.base import (
    SAMPLE_KEY,
    Setting,
    Task,
    TaskFamily,
    TaskQuery,
    bury,
    distinct_keys,
    number,
    place_at,
    running_text,
)
from quire.evals.tasks.words import WordKind, vocabulary


def _needle(key: str, value: str) -> str:
    return f"\nOne of the special magic numbers for {key} is: {value}.\n"


def _question(key: str) -> str:
    return f"\nThe special magic number for {key} mentioned in the text is: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Needles(TaskFamily):
    """Sentences with a special magic number, inserted into prose.

    Attributes:
        digits: length of a number; None: 6 in an evaluation, 3 to 6 in training.
        needles: number of inserted needles; more than 1 is the multi-key variant. None: 1 for one
            query, a random number for several queries.
    """

    digits: int | None = None
    needles: int | None = None

    def build(self, rng: random.Random, setting: Setting) -> Task:
        digits = self.digits or (6 if setting.evaluates else rng.choice([3, 4, 5, 6]))
        wanted = self._wanted(rng, setting)
        needle_tokens = setting.measure(_needle(SAMPLE_KEY, number(rng, digits)))
        query_tokens = setting.measure(_question(SAMPLE_KEY)) + digits + 1
        count = max(1, min(wanted, int(0.6 * setting.tokens / (needle_tokens + query_tokens))))
        queries = setting.queries or count
        room = max(24, setting.tokens - count * needle_tokens - queries * query_tokens)
        text = running_text(rng, room, setting)
        keys = distinct_keys(rng, count, setting.split)
        values = [number(rng, digits) for _ in keys]
        burial = bury(rng, text, count, setting.depth, in_order=True)
        requested = tuple(
            TaskQuery(
                question=_question(keys[index]),
                answer=values[index],
                tail=".",
                depth=burial.depth(index),
                key=keys[index],
            )
            for index in burial.asking_order(rng, queries)
        )
        spans = burial.spans(list(map(_needle, keys, values)))
        return Task(name="niah", spans=spans, queries=requested)

    def _wanted(self, rng: random.Random, setting: Setting) -> int:
        if self.needles:
            return self.needles
        if setting.queries == 1:
            return 1
        return rng.choice([1, 2, 4, 8, max(2, setting.tokens // 64)])


_INTRO = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there.\n"
)
_NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
_QUESTION = "What is the pass key? The pass key is "


@dataclass(frozen=True, slots=True, kw_only=True)
class Passkey(TaskFamily):
    """`The pass key is 48213. Remember it.` between repeated sentences.

    Attributes:
        digits: length of the number.
    """

    digits: int = 5

    def build(self, rng: random.Random, setting: Setting) -> Task:
        key = number(rng, self.digits)
        line = f"The pass key is {key}. Remember it. {key} is the pass key.\n"
        used = setting.measure(_INTRO + line + _QUESTION)
        noise_tokens = setting.measure(_NOISE * 8) / 8
        count = max(1, int((setting.tokens - used) / noise_tokens))
        depth = rng.random() if setting.depth is None else setting.depth
        before = round(depth * count)
        spans = (
            (_INTRO + _NOISE * before, 0.0),
            (line, 0.0),
            (_NOISE * (count - before), 0.0),
        )
        query = TaskQuery(question=_QUESTION, answer=key, tail=".", depth=before / count)
        return Task(name="passkey", spans=spans, queries=(query,))


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
        people = vocabulary("name", setting.split)
        count = max(1, min(self._wanted(rng, setting), int(0.6 * setting.tokens / 26), len(people)))
        queries = setting.queries or count
        facts = [make_fact(rng, setting, person) for person in rng.sample(people, count)]
        room = max(16, setting.tokens - (count + queries) * _FACT_TOKENS)
        burial = bury(rng, running_text(rng, room, setting), count, setting.depth)
        requested = tuple(
            TaskQuery(
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


_LONGEVAL_WORDS = " REGISTER_CONTENT is"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wording:
    """Templates of the text around keys and values; `{k}` and `{v}` are the placeholders."""

    name: str
    intro: str
    record: str
    question: str
    tail: str

    def record_text(self, key: str, value: str) -> str:
        return self.record.format(k=key, v=value)

    def question_text(self, key: str) -> str:
        return self.question.format(k=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Number of records and questions that fit."""

    digits: int
    records: int
    queries: int


def _shape(
    rng: random.Random, setting: Setting, wording: _Wording, digits: int | None, share: float
) -> _Shape:
    """Measure one record and one question, and compute how many fit into the token budget."""
    if digits is None:
        digits = 5 if setting.evaluates else rng.choice([2, 3, 4, 5, 5])
    measure = setting.measure
    record_tokens = measure(wording.record_text(SAMPLE_KEY, number(rng, digits)) * 8) / 8
    question = wording.question_text(SAMPLE_KEY) + number(rng, digits) + wording.tail
    query_tokens = measure(question * 8) / 8
    room = max(record_tokens * 2 + query_tokens, setting.tokens - measure(wording.intro) - 1)
    queries = setting.queries
    if queries is None:
        queries = max(1, int(room * share / query_tokens))
    records = max(2, int((room - queries * query_tokens) / record_tokens))
    return _Shape(digits=digits, records=records, queries=queries)


def _records(
    rng: random.Random, setting: Setting, wording: _Wording, digits: int | None, share: float
) -> Task:
    shape = _shape(rng, setting, wording, digits, share)
    keys = distinct_keys(rng, shape.records, setting.split)
    values = [number(rng, shape.digits) for _ in keys]
    order: list[int] = []
    while len(order) < shape.queries:
        order += rng.sample(range(shape.records), shape.records)
    if setting.depth is not None:
        order = [place_at(setting.depth, shape.records)] * shape.queries
    body = "".join(map(wording.record_text, keys, values))
    queries = tuple(
        TaskQuery(
            question=wording.question_text(keys[index]),
            answer=values[index],
            tail=wording.tail,
            depth=index / max(1, shape.records - 1),
            key=keys[index],
        )
        for index in order[: shape.queries]
    )
    return Task(name=wording.name, spans=((wording.intro, 0.0), (body, 0.0)), queries=queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines(TaskFamily):
    """Records such as `line brisk-lamp: <48213>`, one per line.

    Attributes:
        digits: length of a value; None: 5 in an evaluation, 2 to 5 in training.
        share: fraction (0 to 1) of the tokens for questions if their number is unset.
        words: text between key and value; None: no text, in training sometimes LongEval's text.
    """

    digits: int | None = None
    share: float = 0.4
    words: str | None = None

    def build(self, rng: random.Random, setting: Setting) -> Task:
        words = self.words or ""
        if self.words is None and setting.split == "train":
            words = rng.choices(["", _LONGEVAL_WORDS], [3, 1])[0]
        wording = _Wording(
            name="lines",
            intro="Below is a record of lines.\n",
            record=f"line {{k}}:{words} <{{v}}>\n",
            question=f"line {{k}}:{words} <",
            tail=">\n",
        )
        return _records(rng, setting, wording, self.digits, self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongEval(TaskFamily):
    """`lines` in LongEval's wording, which has five more tokens between key and value.

    Attributes:
        digits: length of a value; None: 5 in an evaluation, 2 to 5 in training.
        share: fraction (0 to 1) of the tokens for questions if their number is unset.
    """

    digits: int | None = None
    share: float = 0.4

    def build(self, rng: random.Random, setting: Setting) -> Task:
        lines = Lines(digits=self.digits, share=self.share, words=_LONGEVAL_WORDS)
        return replace(lines.build(rng, setting), name="longeval")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue(TaskFamily):
    """Pairs such as `"brisk-lamp": "48213",`, one per line.

    Attributes:
        digits: length of a value; None: 5 in an evaluation, 2 to 5 in training.
        share: fraction (0 to 1) of the tokens for questions if their number is unset.
    """

    digits: int | None = None
    share: float = 0.4

    def build(self, rng: random.Random, setting: Setting) -> Task:
        wording = _Wording(
            name="kv",
            intro="Pairs:\n",
            record='"{k}": "{v}",\n',
            question='Key "{k}": "',
            tail='"\n',
        )
        return _records(rng, setting, wording, self.digits, self.share)
