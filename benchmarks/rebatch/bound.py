"""The bound: how fast first-come service of the same lengths on b rows can be, at measured costs.

Costs are fitted to the forwards of one round, all dense arms together, by least squares:

    decode_s(rows, slots)   = a + b rows + c slots         slots: rows x columns, pads counted
    read_s(tokens, pairs)   = a + b tokens + c pairs       pairs: a prompt's tokens x those they see

A decode step counts from its forward to its tokens; embedding, moving and growing a slab do not
count, so an arm pays for them and the ideal does not. The ideal has no pads: its slots are tokens.

Ideal first-come list scheduling: whenever one of b rows is free, the first in line takes it; its
prompt is prefilled alone (all rows wait), which gives its first token; then every step gives every
row a token. The last steps, when no request is left to fill rows, are included. Prefill of several
prompts together can cost less than alone, so a variant may be slightly above 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.rebatch.load import Load


@dataclass(frozen=True, slots=True)
class Costs:
    """Fitted seconds.

    Attributes:
        decode: constant, of a row, of a slot.
        read: constant, of a token, of a pair.
    """

    decode: tuple[float, float, float]
    read: tuple[float, float, float]

    def decode_s(self, rows: int, slots: int) -> float:
        """A step."""
        return self.decode[0] + self.decode[1] * rows + self.decode[2] * slots

    def read_s(self, tokens: int) -> float:
        """A prompt, alone."""
        return self.read[0] + self.read[1] * tokens + self.read[2] * tokens * (tokens + 1) / 2


@dataclass(slots=True)
class Forwards:
    """What was measured.

    Attributes:
        decodes: (rows, slots, seconds).
        reads: (tokens, pairs, seconds), pads counted.
    """

    decodes: list[tuple[int, int, float]]
    reads: list[tuple[int, int, float]]


def fit(forwards: Sequence[Forwards]) -> Costs:
    """Costs from all of them."""
    return Costs(
        _fit([found for part in forwards for found in part.decodes]),
        _fit([found for part in forwards for found in part.reads]),
    )


def _fit(found: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Least squares with no negative cost: a term that would be negative is left out."""
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
    """Makespan of ideal list scheduling; all queries are there at the start."""
    coming, total_s = list(load), 0.0
    running: list[list[int]] = []  # [slots, tokens to come]
    while coming or running:
        while coming and len(running) < rows:
            requested = coming.pop(0)
            total_s += costs.read_s(requested.prompt_tokens)
            if requested.new_tokens > 1:
                running.append([requested.prompt_tokens, requested.new_tokens - 1])
        for row in running:
            row[0] += 1
            row[1] -= 1
        if running:
            total_s += costs.decode_s(len(running), sum(slots for slots, _ in running))
        running = [row for row in running if row[1]]
    return total_s
