"""ROUGE-2: how many pairs of neighbouring words of a reference a text has, as F1.

Words are runs of letters a to z and digits, lower case, without stemming: what the package
rouge-score does by default. Pairs are counted, so a text that repeats itself gains nothing.

Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", with n = 2.
"""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

_WORD = re.compile(r"[a-z0-9]+")


def rouge_2(text: str, reference: str) -> float:
    """F1 of the word pairs of a text and one reference: 0 where they share none, 1 at most.

    Args:
        text: to be judged.
        reference: what it is held against.
    """
    found, wanted = _pairs(text), _pairs(reference)
    shared = (found & wanted).total()
    if not shared:
        return 0.0
    precision, recall = shared / found.total(), shared / wanted.total()
    return 2 * precision * recall / (precision + recall)


def best_rouge_2(text: str, references: Iterable[str]) -> float:
    """The highest of several references."""
    return max((rouge_2(text, reference) for reference in references), default=0.0)


def _pairs(text: str) -> Counter[tuple[str, str]]:
    return Counter(pairwise(_WORD.findall(text.lower())))
