"""Gain of one policy over another on the same prompts, with confidence intervals.

A pair is one prompt (each has its own seed). If several pairs of policies are compared, a prompt
counts with its mean over them: they share the prompt, so they are not independent. Intervals are
bootstrap intervals: prompts are resampled inside each task; the wider ones resample tasks first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.intervals import bootstrap_mean
from benchmarks.eviction.cells import Cell
from quire.errors import InvariantError

ByTask = Mapping[str, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Difference of two accuracies, mean over tasks.

    Attributes:
        mean: accuracy with the method minus accuracy without it.
        low, high: 95 % interval over prompts and tasks.
        prompts_low, prompts_high: 95 % interval over prompts, with the tasks fixed.
    """

    mean: float
    low: float
    high: float
    prompts_low: float
    prompts_high: float

    def claims(self, name: str) -> dict[str, int | float]:
        """The gain as claims with a common name prefix."""
        return {
            f"{name}_mean": self.mean,
            f"{name}_low": self.low,
            f"{name}_high": self.high,
            f"{name}_prompts_low": self.prompts_low,
            f"{name}_prompts_high": self.prompts_high,
        }


def gain_of(pairs: Sequence[tuple[ByTask, ByTask]]) -> Gain:
    """Gain of the second over the first of each pair.

    Args:
        pairs: cells by task, without and with the method; all pairs have the same tasks.
    """
    by_task = [
        np.mean([_gains(without[task], crushing[task]) for without, crushing in pairs], axis=0)
        for task in pairs[0][0]
    ]
    low, high = bootstrap_mean(by_task, groups_too=True)
    prompts_low, prompts_high = bootstrap_mean(by_task, groups_too=False)
    return Gain(
        mean=float(np.mean([gain.mean() for gain in by_task])),
        low=low,
        high=high,
        prompts_low=prompts_low,
        prompts_high=prompts_high,
    )


def _gains(without: Cell, crushing: Cell) -> NDArray[np.float64]:
    """Per prompt: 1 if only `crushing` is correct, -1 if only `without` is correct, else 0."""
    for cell in (without, crushing):
        if len(cell.outcomes) != cell.key.prompts:
            raise InvariantError(
                f"expected an outcome for each of {cell.key.prompts} prompts of "
                f"{cell.key.evict!r}, got {len(cell.outcomes)}; use another folder for --out"
            )
    return _outcomes(crushing) - _outcomes(without)


def _outcomes(cell: Cell) -> NDArray[np.float64]:
    return np.array([outcome == "1" for outcome in cell.outcomes], dtype=np.float64)
