"""Running text between the records: slices of a book, or generated sentences."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

Filler = Callable[[random.Random, int], str]
"""(random state, characters) -> neutral text of about this many characters."""

_SUBJECTS = (
    *("The old man", "A young girl", "The farmer", "My brother", "The captain"),
    *("Her aunt", "The gardener", "A stranger", "The miller", "Our teacher"),
)
_VERBS = (
    *("walked", "looked", "went slowly", "ran", "stood quietly"),
    *("waited", "sat down", "sang", "turned", "slept"),
)
_PLACES = (
    *("by the river", "in the garden", "under the trees", "at the gate", "near the church"),
    *("on the hill", "along the road", "in the kitchen", "beside the fire", "at the market"),
)


def synthetic_filler(rng: random.Random, characters: int) -> str:
    """Short generated sentences, easier to distinguish from records than prose; no file needed."""
    text = ""
    while len(text) < characters:
        text += f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_PLACES)}. "
    return text[:characters].rsplit(" ", 1)[0]


@dataclass(frozen=True, slots=True)
class BookFiller:
    """Slices of one long text, cut at spaces.

    Attributes:
        text: the whole text; a slice begins anywhere except in the last 400 characters.
    """

    text: str

    def __call__(self, rng: random.Random, characters: int) -> str:
        """A slice of at most `characters` characters from a random position."""
        if characters <= 0:
            return ""
        start = rng.randrange(max(1, len(self.text) - characters - 400))
        blank = self.text.find(" ", start)
        if 0 <= blank <= start + 200:
            start = blank + 1
        end = self.text.rfind(" ", start, start + characters)
        return self.text[start : end if end > start else start + characters]


# ---- haystack ------------------------------------------------------------------------------------

# The book text that records are hidden in, shipped with the package (see assets/haystack.md).


@cache
def haystack() -> BookFiller:
    """A filler of 195,000 characters of public-domain prose, not in quire-tiny's training data."""
    return BookFiller(book_text())


def book_text() -> str:
    """The whole haystack text."""
    return (files("quire") / "assets" / "haystack.txt").read_text(encoding="ascii")
