"""ROUGE-2 against values worked out by hand."""

import pytest

from quire.evals.rouge import best_rouge_2, rouge_2


@pytest.mark.parametrize(
    ("text", "reference", "f1"),
    [
        # 2 of 5 pairs found (the cat, on the), of 5 wanted: precision and recall 2 / 5
        ("the cat sat on the mat", "the cat lay on the rug", 2 / 5),
        # pairs of the text: a b, b c; of the reference: a b, b c, c d, d e
        ("a b c", "a b c d e", 2 * 1.0 * 0.5 / 1.5),
        # "a b" stands twice in the text and once in the reference: one counts; 1 of 3, 1 of 1
        ("a b a b", "a b", 2 * (1 / 3) / (1 / 3 + 1)),
        ("The Cat, sat.", "the-cat SAT", 1.0),
        ("word", "word", 0.0),  # one word makes no pair
        ("", "the cat", 0.0),
        ("the cat", "", 0.0),
    ],
)
def test_by_hand(text: str, reference: str, f1: float):
    assert rouge_2(text, reference) == pytest.approx(f1)


def test_the_best_reference_counts():
    assert best_rouge_2("a b c", ["x y", "a b c d e", "a b c"]) == 1.0
    assert best_rouge_2("a b c", []) == 0.0
