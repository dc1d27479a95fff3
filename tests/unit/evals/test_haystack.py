"""Running text: slices of the shipped books, cut at blanks."""

import random
from importlib.resources import files

from quire.evals.tasks import BookFiller, synthetic_filler
from quire.evals.tasks.fillers import haystack


def test_the_shipped_books_are_small_plain_text():
    text = haystack().text

    assert text.isascii()
    assert 150_000 < len(text) < 200_000
    assert "<|" not in text
    assert not set(text) - {chr(code) for code in range(32, 127)} - {"\n"}


def test_every_shipped_book_is_named():
    notes = (files("quire") / "assets" / "haystack.md").read_text()

    for title in ("As Easy as A.B.C.", "Solitary Cyclist", "Five Weeks in a Balloon"):
        assert title in notes


def test_a_slice_is_part_of_the_book_and_begins_and_ends_between_words():
    filler = haystack()
    rng = random.Random(0)
    for characters in (50, 1000, 9000):
        text = filler(rng, characters)
        place = filler.text.index(text)

        assert characters - 60 < len(text) <= characters
        assert place == 0 or filler.text[place - 1] == " "
        assert filler.text[place + len(text)] == " "


def test_a_slice_longer_than_the_book_is_the_book():
    assert BookFiller("once upon a time ")(random.Random(0), 500) == "upon a time"


def test_no_characters_are_no_text():
    assert haystack()(random.Random(0), 0) == ""


def test_made_up_sentences_need_no_file():
    text = synthetic_filler(random.Random(0), 400)

    assert 380 < len(text) <= 400
    assert text == synthetic_filler(random.Random(0), 400)
