"""Few-shot label mapping: `labels`. Word classes get random labels; the query is a new word.

The prompt contains the class of the queried word, but not the word. The answer cannot be copied
from one location: many records contain it, and evicting some of them costs little.
"""

import random
import re
from dataclasses import dataclass

from quire.evals.tasks.base import (
    CHARACTERS_PER_TOKEN,
    TEXT_WEIGHT,
    Setting,
    Span,
    Task,
    TaskFamily,
    TaskQuery,
    place_at,
    running_text,
    snap,
    trim,
)
from quire.evals.tasks.words import CLASS_NAMES, LABELS, Split, class_words

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
        query = TaskQuery(question=f"{word}:", answer=f" {names[requested]}")
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


_PASSAGE_WEIGHT = 0.3
_LONG_SENTENCE = re.compile(r"[A-Z][a-z]+(?: [A-Za-z]+){8}")  # nine words without punctuation
_SENTENCE = re.compile(r'[A-Z][a-z][^.!?\n"]{25,100}[.!?]')


def _passage(rng: random.Random, size_tokens: int, setting: Setting) -> str:
    text = setting.filler(rng, int(size_tokens * CHARACTERS_PER_TOKEN)).replace("\n", " ").strip()
    while len(text) > 12 and setting.measure(text) > size_tokens:
        cut = min(0.97, size_tokens / setting.measure(text))
        text = text[: int(len(text) * cut)].strip()
    if setting.split == "train" and rng.random() < 0.3:
        # Words in random order cannot be predicted from each other, only copied.
        words = text.split(" ")
        rng.shuffle(words)
        text = " ".join(words)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(TaskFamily):
    """A marked passage inside running text, which the final question asks to repeat.

    Attributes:
        passage: length of the passage in tokens; None: 24 in an evaluation, random in training.
    """

    passage: int | None = None

    def build(self, rng: random.Random, setting: Setting) -> Task:
        most = setting.tokens // 2 - 12
        size = self.passage or 24
        if self.passage is None and not setting.evaluates:
            size = rng.randrange(12, max(14, min(160, most)))
        size = max(6, min(size, most))
        text = _passage(rng, size, setting)
        room = max(0, setting.tokens - 2 * size - 16)
        rest = running_text(rng, room, setting, floor=12)
        depth = rng.random() if setting.depth is None else setting.depth
        cut = snap(rest, int(depth * len(rest)))
        spans = (
            (rest[:cut], TEXT_WEIGHT),
            ("\n[passage]", 0.0),
            (f" {text}", _PASSAGE_WEIGHT),
            (" [end]\n", 0.0),
            (rest[cut:].rstrip(), TEXT_WEIGHT),
        )
        query = TaskQuery(
            question="\n[repeat]",
            answer=f" {text}",
            tail=" [end]\n",
            depth=cut / max(1, len(rest)),
        )
        return Task(name="copy", spans=spans, queries=(query,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote(TaskFamily):
    """Running text, then the beginning of one of its sentences, which the output completes.

    Attributes:
        known: words of the sentence in the question.
        words: words of the answer.
    """

    known: int = 6
    words: int = 3

    def build(self, rng: random.Random, setting: Setting) -> Task:
        depth = rng.random() if setting.depth is None else setting.depth
        room = setting.tokens - setting.measure(" word" * 2 * self.known) - 8
        text = running_text(rng, max(0, room), setting)
        starts = [one.start() for one in _LONG_SENTENCE.finditer(text)]
        start = starts[place_at(depth, len(starts))] if starts else 0
        words = text[start:].split(" ")
        known, answer = words[: self.known], words[self.known : self.known + self.words]
        query = TaskQuery(
            question=f'\n\nThe text above has the sentence: "{" ".join(known)}',
            answer=f" {' '.join(answer)}",
            tail='"\n',
            depth=start / max(1, len(text)),
        )
        return Task(name="quote", spans=((text, TEXT_WEIGHT),), queries=(query,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline(TaskFamily):
    """An article, then a question for its headline, which is its first line."""

    def build(self, rng: random.Random, setting: Setting) -> Task:
        found = _SENTENCE.search(setting.filler(rng, 900))
        head = found.group(0) if found else setting.filler(rng, 70).replace("\n", " ").strip()
        text = setting.filler(rng, int(max(24, setting.tokens) * CHARACTERS_PER_TOKEN))
        room = max(16, setting.tokens - 2 * setting.measure(head) - 14)
        text = trim(text, room, setting.measure, floor=12)
        return Task(
            name="headline",
            spans=((f"HEADLINE: {head}\n", 0.0), (text.rstrip(), TEXT_WEIGHT)),
            queries=(TaskQuery(question="\nThe headline was:", answer=f" {head}", depth=0.0),),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """One kind of problem: the operand size, and whether the answer shows its working."""

    digits: int
    steps: bool

    def problem(self, rng: random.Random, split: Split) -> tuple[str, str]:
        top = 10**self.digits
        while True:
            left, right = rng.randrange(top), rng.randrange(top)
            sign = rng.choice("+-")
            if sign == "-" and right > left:
                left, right = right, left
            if _belongs(left, right, split):
                break
        question = f"Q: {left} {sign} {right}\nA: "
        if self.steps and self.digits == 2 and sign == "+":
            # the written method
            units = left % 10 + right % 10
            carry = units // 10
            tens = left // 10 + right // 10 + carry
            return question, (
                f"{left % 10} + {right % 10} = {units}, "
                f"{left // 10} + {right // 10} + {carry} = {tens}, so {left + right}"
            )
        return question, str(left + right if sign == "+" else left - right)


def _belongs(left: int, right: int, split: Split) -> bool:
    """Eight in ten operand pairs belong to training, the others to the evaluation."""
    return ((left * 31 + right * 17) % 10 < 8) == (split == "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(TaskFamily):
    """`Q: 17 + 25`, `A: 42` examples, then a question with held-out operands.

    Attributes:
        digits: 1 or 2; None: random.
        steps: answers show their working (two digits, addition); None: in 4 of 10 tasks.
    """

    digits: int | None = None
    steps: bool | None = None

    def build(self, rng: random.Random, setting: Setting) -> Task:
        digits = self.digits or rng.choice([1, 2])
        steps = rng.random() < 0.4 if self.steps is None else self.steps
        sums = _Sums(digits=digits, steps=steps)
        example_tokens = setting.measure("".join(_sample(rng, sums) for _ in range(4))) / 4
        only_last_counts = setting.queries == 1 and setting.evaluates
        weight = 0.0 if only_last_counts else 1.0
        spans: list[Span] = []
        for _ in range(max(2, int(setting.tokens / example_tokens) - 1)):
            question, answer = sums.problem(rng, "train")
            spans += [(question, 0.0), (f"{answer}\n", weight)]
        question, answer = sums.problem(rng, setting.split)
        query = TaskQuery(question=question, answer=answer)
        return Task(name="arithmetic", spans=tuple(spans), queries=(query,))


def _sample(rng: random.Random, sums: _Sums) -> str:
    """A text as long as an example: the question of one problem with the answer of another."""
    question, _ = sums.problem(rng, "train")
    _, answer = sums.problem(rng, "train")
    return f"{question}{answer}\n"
