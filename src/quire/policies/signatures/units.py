"""Units of eviction in whole layers: slots, or pieces of neighbouring slots.

    slots      p p p . . . . . . . . p p p p      p protected
    columns          |- - - - - - - -|            from the first to the last evictable slot
    pieces         [    ][    ][    ][    ]       of three: the first and the last hold a protected
                    must  free  free  must        slot, or are partial

Computed on the CPU with NumPy, because the page tables that use the result are there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from quire.policies.choose import Floats, best_of, count_of

Marks = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Units:
    """Slots or pieces of layers whose heads hold the same tokens.

    Attributes:
        live: [layer, slot] slots that hold a token.
        columns: range of slots that contains all evictable slots, in whole units; all others are
            retained. The fields below refer to this range.
        free_slots: [layer, column] slots that are not protected.
        wanted_slots: [layer] number of these to retain if single slots are evicted.
        free: [layer, unit] evictable units; all are whole.
        num_retained: [layer] number of these to retain.
        piece_tokens: slots of a unit.
    """

    live: Marks
    columns: slice
    free_slots: Marks
    wanted_slots: NDArray[np.int64]
    free: Marks
    num_retained: NDArray[np.int64]
    piece_tokens: int

    @classmethod
    def of(
        cls, live: Marks, protected: Marks, keep: NDArray[np.int64], piece_tokens: int
    ) -> "Units":
        """Cut layers into units.

        Args:
            live: [layer, slot] slots that hold a token.
            protected: [layer, slot] slots that are always retained.
            keep: [layer] slots to retain.
            piece_tokens: slots of a unit.
        """
        open_: Marks = live & ~protected
        columns = _between(open_, piece_tokens)
        slots: Marks = open_[:, columns]
        free = slots
        if piece_tokens > 1:
            # a partial piece, or one with a protected slot, has slots that are not free
            free = np.logical_and.reduce(_cut(slots, piece_tokens), axis=-1)
        over, open_slots = keep - count_of(live), count_of(slots)
        wanted = np.maximum(over + open_slots, 0)
        most = open_slots if piece_tokens == 1 else count_of(free)
        num_retained = (over // piece_tokens + most).clip(0, most)
        return cls(live, columns, slots, wanted, free, num_retained, piece_tokens)

    def sums(self, score: Floats) -> Floats:
        """Sum the scores of each unit's slots; undefined for units that are not free.

        Args:
            score: [layer, column].
        """
        if self.piece_tokens == 1:
            return score
        sums: Floats = _cut(score, self.piece_tokens).sum(axis=-1)
        return sums

    def side_by_side(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Concatenate the numbers of each unit's slots, [layer, all numbers, unit].

        Args:
            numbers: [layer, number, column].
        """
        if self.piece_tokens == 1:
            return numbers
        layers, width, _ = numbers.shape
        cut = _cut(numbers, self.piece_tokens)
        return cut.transpose(0, 3, 1, 2).reshape(layers, self.piece_tokens * width, -1)

    def best(self, score: Floats, count: NDArray[np.int64]) -> Marks:
        """Mark the free units with the highest scores, ties to the lower position."""
        return best_of(score, self.free, count)

    def slots(self, units: Marks) -> Marks:
        """Mark all live slots of some units, [layer, column]."""
        live = self.live[:, self.columns]
        if self.piece_tokens > 1:
            units = units.repeat(self.piece_tokens, axis=1)[:, : live.shape[1]]
        return units & live

    def spread(self, retained: Marks, heads: int) -> Bool[Tensor, "lane slot"]:
        """Mark the retained slots for all heads: selected free units and all other slots."""
        kept = self.live.copy()
        kept[:, self.columns] = self.slots(retained | ~self.free)
        return spread(kept, heads)


def spread(retained: Marks, heads: int) -> Bool[Tensor, "lane slot"]:
    """Repeat the slots of each layer for all its heads."""
    return torch.from_numpy(retained if heads == 1 else retained.repeat(heads, axis=0))


def _between(marks: Marks, piece_tokens: int) -> slice:
    """Return the range from the first to the last marked column, in whole pieces."""
    marked = np.flatnonzero(marks.any(axis=0))
    if not len(marked):
        return slice(0, 0)
    first, last = int(marked[0]) // piece_tokens, int(marked[-1]) // piece_tokens
    return slice(first * piece_tokens, (last + 1) * piece_tokens)


def _cut(numbers: NDArray[Any], piece_tokens: int) -> NDArray[Any]:
    """Group neighbouring columns, [..., piece, token]; the last piece is zero-padded."""
    pieces = -(-numbers.shape[-1] // piece_tokens)
    missing = pieces * piece_tokens - numbers.shape[-1]
    padded = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, missing)])
    return padded.reshape(*numbers.shape[:-1], pieces, piece_tokens)
