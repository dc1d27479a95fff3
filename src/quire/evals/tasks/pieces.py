"""Components of several task families: numbers, keys, trimmed text, inserted statements."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from quire.evals.tasks.base import TEXT_WEIGHT, Measure, Setting, Span
from quire.evals.tasks.words import Split, vocabulary

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
