"""Lower bound of the makespan: first-come service of the same lengths on b rows.

Costs are fitted by least squares to the forwards of all dense arms in one round:


    decode_s(rows, slots)   = a + b rows + c slots         slots: rows x columns, pads counted
    read_s(tokens, pairs)   = a + b tokens + c pairs       pairs: prompt tokens x attended tokens

A decode step is timed from its forward to its tokens. Embedding, moving and growing a slab are not
timed: an arm pays for them, the bound does not. The bound has no pads: its slots are tokens.

Ideal first-come list scheduling: when one of b rows is free, it takes the first waiting query. The
query's prompt is prefilled alone, which generates its first token, while all rows wait. Then every
step generates one token for every row. The last steps, when no request is left to fill rows, are
included. Joint prefill of several prompts can be cheaper, so an arm can slightly exceed the bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.rebatch.load import Load


@dataclass(frozen=True, slots=True)
class Costs:
    """Fitted costs in seconds.

    Attributes:
        decode: constant, per row, per slot.
        read: constant, per token, per pair.
    """

    decode: tuple[float, float, float]
    read: tuple[float, float, float]

    def decode_s(self, rows: int, slots: int) -> float:
        """Duration of a decode step."""
        return self.decode[0] + self.decode[1] * rows + self.decode[2] * slots

    def read_s(self, tokens: int) -> float:
        """Duration of the prefill of one prompt alone."""
        return self.read[0] + self.read[1] * tokens + self.read[2] * tokens * (tokens + 1) / 2


@dataclass(slots=True)
class Forwards:
    """Measured forwards.

    Attributes:
        decodes: (rows, slots, seconds) of each decode step.
        reads: (tokens, pairs, seconds) of each prefill, pads included.
    """

    decodes: list[tuple[int, int, float]]
    reads: list[tuple[int, int, float]]


def fit(forwards: Sequence[Forwards]) -> Costs:
    """Fit costs to all forwards."""
    return Costs(
        _fit([found for part in forwards for found in part.decodes]),
        _fit([found for part in forwards for found in part.reads]),
    )


def _fit(found: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Least squares with nonnegative costs: a term that would be negative is dropped."""
    first, second, seconds = np.array(found, dtype=np.float64).T
    terms: NDArray[np.float64] = np.stack([np.ones_like(first), first, second], axis=1)
    used, costs = [0, 1, 2], np.zeros(3)
    while used:
        solved = np.linalg.lstsq(terms[:, used], seconds, rcond=None)[0]
        if (solved >= 0).all():
            costs[used] = solved
            break
        used.pop(int(np.argmin(solved * terms[:, used].mean(axis=0))))
    return float(costs[0]), float(costs[1]), float(costs[2])


def ideal_s(load: Load, rows: int, costs: Costs) -> float:
    """Makespan of ideal list scheduling with all queries present at the start."""
    waiting, total_s = list(load), 0.0
    running: list[list[int]] = []  # [slots, remaining tokens]
    while waiting or running:
        while waiting and len(running) < rows:
            query = waiting.pop(0)
            total_s += costs.read_s(query.prompt_tokens)
            if query.new_tokens > 1:
                running.append([query.prompt_tokens, query.new_tokens - 1])
        for row in running:
            row[0] += 1
            row[1] -= 1
        if running:
            total_s += costs.decode_s(len(running), sum(slots for slots, _ in running))
        running = [row for row in running if row[1]]
    return total_s
