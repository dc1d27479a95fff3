"""ROUGE: how much of a reference's words a text has, as F1: pairs of neighbours, or a sequence.

ROUGE-2 counts pairs of neighbouring words. ROUGE-L takes the longest common subsequence of words.

Words are runs of letters a to z and digits, lower case, without stemming: what the package
rouge-score does by default. Pairs are counted, so a text that repeats itself gains nothing.

Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", with n = 2, and
section 3.1 with beta = 1.
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
    return _f1((found & wanted).total(), found.total(), wanted.total())


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest sequence of words that a text and one reference share.

    Args:
        text: to be judged.
        reference: what it is held against.
    """
    found, wanted = _words(text), _words(reference)
    lengths = [0] * (len(wanted) + 1)  # of what a word more of the text has given so far
    for word in found:
        before = list(lengths)
        for place, other in enumerate(wanted, start=1):
            more = before[place - 1] + 1 if word == other else 0
            lengths[place] = max(more, before[place], lengths[place - 1])
    return _f1(lengths[-1], len(found), len(wanted))


def _f1(shared: int, found: int, wanted: int) -> float:
    return 2 * shared / (found + wanted) if shared else 0.0


def best_rouge_2(text: str, references: Iterable[str]) -> float:
    """The highest of several references."""
    return max((rouge_2(text, reference) for reference in references), default=0.0)


def _pairs(text: str) -> Counter[tuple[str, str]]:
    return Counter(pairwise(_words(text)))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
