"""ROUGE-L compared with values computed by hand."""

import pytest

from benchmarks.common.rouge import rouge_l


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
