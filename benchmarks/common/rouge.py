"""ROUGE-2 and ROUGE-L F1 scores of a text against a reference, from the package rouge-score."""

from collections.abc import Iterable
from functools import cache
from typing import Any

_ROUGE_2, _ROUGE_L = "rouge2", "rougeL"


def best_rouge_2(text: str, references: Iterable[str]) -> float:
    """Highest ROUGE-2 F1 over several references."""
    return max((_f1(_ROUGE_2, text, reference) for reference in references), default=0.0)


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L F1 of a text and one reference."""
    return _f1(_ROUGE_L, text, reference)


def _f1(name: str, text: str, reference: str) -> float:
    return float(_scorer().score(target=reference, prediction=text)[name].fmeasure)


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # imports nltk, which is slow

    return RougeScorer([_ROUGE_2, _ROUGE_L])  # without stemming
