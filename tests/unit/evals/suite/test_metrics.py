"""Scores of outputs, compared with values computed by hand."""

import importlib.util

import pytest

from quire.errors import ConfigError
from quire.evals.suite import metrics
from quire.evals.suite.metrics import best_rouge, require_rouge

HAS_ROUGE = importlib.util.find_spec("rouge_score") is not None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 1,234.", "1234"),
        ("She makes $18.00 a day", "18"),
        ("3 + 4 = 7", "7"),
        ("it falls to -5", "-5"),
        ("0.50", "0.5"),
        ("none", ""),
        ("100", "100"),
    ],
)
def test_last_number_has_no_separators_and_units(text, number):
    assert metrics.last_number(text) == number


def test_fraction_of_answers_is_counted():
    assert metrics.fraction_found("123, 456 and ABC", ["123", "789", "abc", "0"]) == 0.5


@pytest.mark.parametrize(
    ("output", "reference", "f1"),
    [
        ("The cat, sat!", "a cat sat", 1.0),
        ("cat dog", "cat bird fish", 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)),
        ("", "cat", 0.0),
        ("dog", "cat", 0.0),
    ],
)
def test_word_f1_ignores_case_punctuation_and_articles(output, reference, f1):
    assert metrics.word_f1(output, reference) == pytest.approx(f1)


def test_named_classes_share_the_score():
    classes = ["date", "city", "city in Europe"]

    assert metrics.class_found("a city in Europe", "city in Europe", classes) == 1.0
    assert metrics.class_found("a date or a city", "city", classes) == 0.5
    assert metrics.class_found("nothing", "city", classes) == 0.0


def test_numbers_and_code_are_compared_as_in_longbench():
    assert metrics.share_of_numbers("Paragraph 3 or 5", "Paragraph 3") == 0.5
    assert metrics.share_of_numbers("none", "Paragraph 3") == 0.0
    assert metrics.code_similarity("\n# comment\nx = 1\ny = 2", "x = 1") == 1.0
    assert metrics.code_similarity("```", "x = 1") == 0.0


@pytest.mark.skipif(not HAS_ROUGE, reason="rouge-score is not installed")
def test_best_reference_counts_for_each_rouge():
    # "police kill the gunman" against "police killed the gunman" (Lin 2004); stems are equal
    found = best_rouge("police kill the gunman", ["cats", "police killed the gunman"])

    assert found == {"rougeL": 1.0, "rouge1": 1.0, "rouge2": 1.0}
    assert best_rouge("the gunman kill police", ["police killed the gunman"])["rougeL"] == 0.5


def test_missing_rouge_is_explained(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"task 'xsum' needs .*rouge_score.*quire-llm\[eval\]"):
        require_rouge("xsum")
