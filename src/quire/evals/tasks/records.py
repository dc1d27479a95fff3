"""Many records, then questions that repeat a record's key: `lines`, `longeval`, `kv`.

All records except the queried one are distractors of the same form. These are therefore the
strictest recall tasks in this package. Keys are word pairs, values are numbers.

Sources: LongEval's line retrieval (Li et al. 2023) and the key-value retrieval of "Lost in the
Middle" (Liu et al. 2023).
"""

import random
from dataclasses import dataclass, replace

from quire.evals.tasks.base import Query, Setting, Task, TaskFamily
from quire.evals.tasks.pieces import SAMPLE_KEY, distinct_keys, number, place_at

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
        Query(
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
        """Generate one task, determined by the random state and the setting."""
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
        """Generate one task, determined by the random state and the setting."""
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
        """Generate one task, determined by the random state and the setting."""
        wording = _Wording(
            name="kv",
            intro="Pairs:\n",
            record='"{k}": "{v}",\n',
            question='Key "{k}": "',
            tail='"\n',
        )
        return _records(rng, setting, wording, self.digits, self.share)
