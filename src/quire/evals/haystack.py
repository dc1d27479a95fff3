"""The book text that records are hidden in, shipped with the package (see assets/haystack.md)."""

from functools import cache
from importlib.resources import files

from quire.evals.tasks.fillers import BookFiller


@cache
def haystack() -> BookFiller:
    """A filler over 195,000 characters of public-domain prose that quire-tiny never trained on."""
    return BookFiller(book_text())


def book_text() -> str:
    """That prose in one piece."""
    return (files("quire") / "assets" / "haystack.txt").read_text(encoding="ascii")
