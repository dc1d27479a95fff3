"""ROUGE-2 and ROUGE-L F1 scores of a text against a reference.

ROUGE-2 counts pairs of neighbouring words. ROUGE-L takes the longest common subsequence of words.

Words are runs of the letters a to z and digits, in lower case, without stemming, as in the package
rouge-score's default. Pairs are counted with multiplicity, so repeated text gains no score.

Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", with n = 2, and
section 3.1 with beta = 1.
"""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

_WORD = re.compile(r"[a-z0-9]+")


def rouge_2(text: str, reference: str) -> float:
    """F1 of the word pairs of a text and one reference: 0 (no common pair) to 1.

    Args:
        text: text to score.
        reference: reference text.
    """
    found, wanted = _pairs(text), _pairs(reference)
    return _f1((found & wanted).total(), found.total(), wanted.total())


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words of a text and one reference.

    Args:
        text: text to score.
        reference: reference text.
    """
    found, wanted = _words(text), _words(reference)
    lengths = [0] * (len(wanted) + 1)  # longest common subsequence with each prefix of `wanted`
    for word in found:
        before = list(lengths)
        for index, other in enumerate(wanted, start=1):
            more = before[index - 1] + 1 if word == other else 0
            lengths[index] = max(more, before[index], lengths[index - 1])
    return _f1(lengths[-1], len(found), len(wanted))


def _f1(shared: int, found: int, wanted: int) -> float:
    return 2 * shared / (found + wanted) if shared else 0.0


def best_rouge_2(text: str, references: Iterable[str]) -> float:
    """Highest ROUGE-2 F1 over several references."""
    return max((rouge_2(text, reference) for reference in references), default=0.0)


def _pairs(text: str) -> Counter[tuple[str, str]]:
    return Counter(pairwise(_words(text)))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
