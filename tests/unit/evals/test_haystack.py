"""Filler text: slices of the packaged books, cut at word boundaries."""

import random
from importlib.resources import files

from quire.evals.tasks import BookFiller, synthetic_filler
from quire.evals.tasks.words import haystack


def test_packaged_books_are_small_ascii_text():
    text = haystack().text

    assert text.isascii()
    assert 150_000 < len(text) < 200_000
    assert "<|" not in text
    assert not set(text) - {chr(code) for code in range(32, 127)} - {"\n"}


def test_every_packaged_book_is_named():
    notes = (files("quire") / "assets" / "haystack.md").read_text()

    for title in ("As Easy as A.B.C.", "Solitary Cyclist", "Five Weeks in a Balloon"):
        assert title in notes


def test_slice_is_a_substring_cut_at_word_boundaries():
    filler = haystack()
    rng = random.Random(0)
    for characters in (50, 1000, 9000):
        text = filler(rng, characters)
        start = filler.text.index(text)

        assert characters - 60 < len(text) <= characters
        assert start == 0 or filler.text[start - 1] == " "
        assert filler.text[start + len(text)] == " "


def test_slice_longer_than_the_book_is_the_whole_book():
    assert BookFiller("once upon a time ")(random.Random(0), 500) == "upon a time"


def test_slice_of_zero_characters_is_empty():
    assert haystack()(random.Random(0), 0) == ""


def test_synthetic_filler_is_reproducible():
    text = synthetic_filler(random.Random(0), 400)

    assert 380 < len(text) <= 400
    assert text == synthetic_filler(random.Random(0), 400)
