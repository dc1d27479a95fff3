"""ROUGE-L F1 score of a text against a reference, from the package rouge-score."""

from functools import cache
from typing import Any


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L F1 of a text and one reference."""
    return float(_scorer().score(target=reference, prediction=text)["rougeL"].fmeasure)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which is slow

    return RougeScorer(["rougeL"])  # without stemming
