"""Scores of one output, 0 to 1: exact answers, answers found, F1 of words, numbers, code."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from quire.layout.extras import require_extra

EXTRA = "eval"
ROUGE = ("rougeL", "rouge1", "rouge2")


def require_rouge(task: str) -> None:
    """Check that rouge-score is installed.

    Raises:
        ConfigError: it is not; the message has the pip command.
    """
    require_extra(EXTRA, f"task {task!r}")


def best_rouge(output: str, references: Sequence[str]) -> dict[str, float]:
    """F1 of ROUGE-L, ROUGE-1 and ROUGE-2; of several references the best one by each."""
    scored = [_scorer().score(target=one, prediction=output) for one in references]
    return {name: max((float(one[name].fmeasure) for one in scored), default=0.0) for name in ROUGE}


@cache
def _scorer() -> Any:
    require_extra(EXTRA, "ROUGE")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(ROUGE), use_stemmer=True)


_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def starts_with(output: str, reference: str) -> float:
    """1 if the output begins with the reference."""
    return float(output.startswith(reference))


def fraction_found(output: str, references: Sequence[str]) -> float:
    """Fraction of the references that the output contains, ignoring case (RULER)."""
    lowered = output.lower()
    return sum(one.lower() in lowered for one in references) / len(references)


def last_number(text: str) -> str:
    """The last number of a text without separators and units; empty if there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return ""
    number: str = found[-1].replace(",", "").replace("$", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def normalized(text: str) -> str:
    """Lower case without punctuation, articles and repeated spaces (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(output: str, reference: str) -> float:
    """F1 of the normalized words (SQuAD)."""
    words, wanted = normalized(output).split(), normalized(reference).split()
    common = sum((Counter(words) & Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def class_found(output: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes named in the output) if the reference is one of them (LongBench)."""
    named = [one for one in classes if one in output]
    named = [one for one in named if one == reference or one not in reference]
    return 1.0 / len(named) if reference in named else 0.0


def share_of_numbers(output: str, reference: str) -> float:
    """Fraction of the numbers in the output that equal the reference's number (LongBench)."""
    wanted = re.findall(r"\d+", reference)
    found = re.findall(r"\d+", output)
    return sum(one in wanted[:1] for one in found) / len(found) if found else 0.0


def code_similarity(output: str, reference: str) -> float:
    """Similarity of the first line of code that is no comment (LongBench)."""
    lines = output.lstrip("\n").split("\n")
    first = next((one for one in lines if not any(c in one for c in ("`", "#", "//"))), "")
    return SequenceMatcher(None, first, reference).ratio()
