"""ROUGE of Lin 2004 with the package rouge-score, which is imported when the first text is scored.

Words are stemmed, as in the published results of XSum and CNN/DM.
"""

from collections.abc import Sequence
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
