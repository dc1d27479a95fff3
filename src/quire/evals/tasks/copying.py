"""Repeat a passage verbatim: `copy` (a marked passage), `headline` (first line of an article)."""

import random
import re
from dataclasses import dataclass

from quire.evals.tasks.base import TEXT_WEIGHT, Query, Setting, Task, TaskFamily
from quire.evals.tasks.pieces import CHARACTERS_PER_TOKEN, running_text, snap, trim

_PASSAGE_WEIGHT = 0.3
_SENTENCE = re.compile(r'[A-Z][a-z][^.!?\n"]{25,100}[.!?]')


def _passage(rng: random.Random, size_tokens: int, setting: Setting) -> str:
    """Text of about `size_tokens` tokens in one line."""
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
        """Generate one task, determined by the random state and the setting."""
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
        query = Query(
            question="\n[repeat]",
            answer=f" {text}",
            tail=" [end]\n",
            depth=cut / max(1, len(rest)),
        )
        return Task(name="copy", spans=spans, queries=(query,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline(TaskFamily):
    """An article, then a question for its headline, which is its first line."""

    def build(self, rng: random.Random, setting: Setting) -> Task:
        """Generate one task, determined by the random state and the setting."""
        found = _SENTENCE.search(setting.filler(rng, 900))
        head = found.group(0) if found else setting.filler(rng, 70).replace("\n", " ").strip()
        text = setting.filler(rng, int(max(24, setting.tokens) * CHARACTERS_PER_TOKEN))
        room = max(16, setting.tokens - 2 * setting.measure(head) - 14)
        text = trim(text, room, setting.measure, floor=12)
        return Task(
            name="headline",
            spans=((f"HEADLINE: {head}\n", 0.0), (text.rstrip(), TEXT_WEIGHT)),
            queries=(Query(question="\nThe headline was:", answer=f" {head}", depth=0.0),),
        )
