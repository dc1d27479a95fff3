"""Verdicts: a configuration compared with full KV, prompt by prompt.

A verdict is given only if the model passed the sanity check. A task with exact answers must also
reach its own bound with full KV, since a model that cannot do a task cannot lose it.
"""

from dataclasses import dataclass

from quire.evals.intervals import Mean, mean_of
from quire.evals.suite.base import EvalTask
from quire.evals.suite.cells import CellResult
from quire.evals.suite.sanity import Sanity

WORSE, BETTER, SAME, NONE = "worse", "better", "no difference found", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Comparison of one cell.

    Attributes:
        cell: name of the cell.
        metric: the compared score.
        verdict: one of `WORSE`, `BETTER`, `SAME`, `NONE`.
        difference: score with the configuration minus that with full KV, with its interval over
            the prompts; None without a verdict.
        reason: why there is no verdict; empty if there is one.
    """

    cell: str
    metric: str
    verdict: str
    difference: Mean | None = None
    reason: str = ""


def compare(task: EvalTask, full: CellResult, configured: CellResult, sanity: Sanity) -> Verdict:
    """Compare two cells of the same prompts."""
    metric = task.metrics[0]
    reason = _why_none(task, full, sanity)
    if reason:
        return Verdict(cell=full.name, metric=metric, verdict=NONE, reason=reason)
    pairs = zip(configured.values(metric), full.values(metric), strict=True)
    difference = mean_of([found - reference for found, reference in pairs])
    verdict = _direction(difference, lower_is_better=task.lower_is_better)
    return Verdict(cell=full.name, metric=metric, verdict=verdict, difference=difference)


def _why_none(task: EvalTask, full: CellResult, sanity: Sanity) -> str:
    if not sanity.passed:
        return sanity.reason
    score = mean_of(full.values(task.metrics[0])).mean
    if task.needs_full is not None and score < task.needs_full:
        return f"expected at least {task.needs_full:g} with full KV, got {score:.2f}"
    return ""


def _direction(difference: Mean, *, lower_is_better: bool) -> str:
    """The interval decides: an interval with 0 inside shows no difference."""
    if difference.low <= 0 <= difference.high:
        return SAME
    return BETTER if (difference.mean < 0) == lower_is_better else WORSE
