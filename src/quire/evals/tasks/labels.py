"""Few-shot label mapping: `labels`. Word classes get random labels; the query is a new word.

The prompt contains the class of the queried word, but not the word. The answer cannot be copied
from one location: many records contain it, and evicting some of them costs little.
"""

import random
from dataclasses import dataclass

from quire.evals.tasks.base import Query, Setting, Span, Task, TaskFamily
from quire.evals.tasks.words import CLASS_NAMES, LABELS, class_words

_Shot = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels(TaskFamily):
    """Shots such as `fountain: green`, then a word of one of the classes.

    Attributes:
        classes: number of classes; None: 4 in an evaluation, 2 to 5 in training.
        new_words: query a word that is not in the training split; this needs word knowledge that a
            model of a few million parameters rarely has.
    """

    classes: int | None = None
    new_words: bool = False

    def build(self, rng: random.Random, setting: Setting) -> Task:
        """Generate one task, determined by the random state and the setting."""
        count = self.classes or (4 if setting.evaluates else rng.choice([2, 3, 4, 5]))
        chosen = rng.sample(CLASS_NAMES, count)
        names = rng.sample(LABELS, count)
        shot_tokens = setting.measure("fountain: green\n" * 8) / 8
        shots = max(2 * count, int(setting.tokens / shot_tokens) - 1)
        requested = rng.randrange(count)
        word = rng.choice(class_words(chosen[requested], "eval" if self.new_words else "train"))
        hidden = word if setting.queries == 1 else None
        shown = _shots(rng, chosen, shots, hidden)
        if hidden is None:
            return Task(name="labels", spans=_dense(shown, names), queries=(), chance=1 / count)
        context = "".join(f"{example}: {names[index]}\n" for example, index in shown)
        query = Query(question=f"{word}:", answer=f" {names[requested]}")
        return Task(name="labels", spans=((context, 0.0),), queries=(query,), chance=1 / count)


def _shots(rng: random.Random, classes: list[str], count: int, hidden: str | None) -> list[_Shot]:
    """(word, class index) examples, first one of each class; `hidden` is excluded."""
    shots: list[_Shot] = []
    while len(shots) < count:
        first = len(shots) < len(classes)
        index = len(shots) % len(classes) if first else rng.randrange(len(classes))
        word = rng.choice(class_words(classes[index], "train"))
        if word != hidden:
            shots.append((word, index))
    return shots


def _dense(shots: list[_Shot], names: list[str]) -> tuple[Span, ...]:
    """Questions for training: every shot after the first of its class."""
    spans: list[Span] = []
    seen: set[int] = set()
    for word, index in shots:
        spans += [(f"{word}:", 0.0), (f" {names[index]}\n", 1.0 if index in seen else 0.0)]
        seen.add(index)
    return tuple(spans)
