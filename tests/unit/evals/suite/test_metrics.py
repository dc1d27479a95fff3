"""Scores of outputs, compared with values computed by hand."""

from quire.evals.suite import metrics


def test_fraction_of_answers_is_counted():
    assert metrics.fraction_found("123, 456 and ABC", ["123", "789", "abc", "0"]) == 0.5
