"""ROUGE-2 and ROUGE-L compared with values computed by hand."""

import pytest

from benchmarks.common.rouge import best_rouge_2, rouge_l


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
def test_rouge_2_matches_hand_computation(text: str, reference: str, f1: float):
    assert best_rouge_2(text, [reference]) == pytest.approx(f1)


def test_best_reference_counts():
    assert best_rouge_2("a b c", ["x y", "a b c d e", "a b c"]) == 1.0
    assert best_rouge_2("a b c", []) == 0.0


@pytest.mark.parametrize(
    ("text", "reference", "f1"),
    [
        # the longest is "the on the" of 5 words each
        ("the cat on a the", "the dog sat on the", 3 / 5),
        # the example of Lin 2004, section 3.1: police ... the gunman, and the gunman
        ("police kill the gunman", "police killed the gunman", 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4),
        # 2 of 2 words, of 4 wanted: precision 1, recall 1/2
        ("a d", "a b c d", 2 * 1.0 * 0.5 / 1.5),
        ("A, b!", "a b", 1.0),
        ("a", "b", 0.0),
        ("", "", 0.0),
    ],
)
def test_rouge_l_matches_hand_computation(text: str, reference: str, f1: float):
    assert rouge_l(text, reference) == pytest.approx(f1)
    assert rouge_l(reference, text) == pytest.approx(f1)
