"""Whole layers cut into what stays or goes together: slots, or pieces of neighbouring ones.

slots      p p p . . . . . . . . p p p p      p protected
columns          |- - - - - - - -|            from the first to the last that may leave
pieces         [    ][    ][    ][    ]       of three: the first and the last hold a protected
                must  free  free  must        slot, or are not whole
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from quire.policies.choose import best_slots, count_true, cut_pieces


@dataclass(frozen=True, slots=True)
class Units:
    """Slots or pieces of layers whose heads hold the same tokens.

    Attributes:
        live: slots that hold a token.
        columns: slots among which some may leave, in whole units; all others stay. What follows is
            about these.
        free: units that may leave; whole ones.
        room: of the free ones, so many stay.
        piece_tokens: slots of a unit.
    """

    live: Bool[Tensor, "layer slot"]
    columns: slice
    free: Bool[Tensor, "layer unit"]
    room: Int[Tensor, " layer"]
    piece_tokens: int

    @classmethod
    def of(
        cls,
        live: Bool[Tensor, "layer slot"],
        protected: Bool[Tensor, "layer slot"],
        keep: Int[Tensor, " layer"],
        piece_tokens: int,
    ) -> "Units":
        """Cut layers.

        Args:
            live: slots that hold a token.
            protected: slots that stay, live ones.
            keep: slots to keep.
            piece_tokens: slots of a unit.
        """
        columns = _between(live & ~protected, piece_tokens)
        there, must = live[:, columns], protected[:, columns]
        if piece_tokens == 1:
            free = there & ~must
        else:
            whole = cut_pieces(there, piece_tokens).all(dim=2)
            free = whole & ~cut_pieces(must, piece_tokens).any(dim=2)
        most = count_true(free)
        room = (keep - count_true(live)) // piece_tokens + most
        return cls(live, columns, free, room.clamp_min(0).minimum(most), piece_tokens)

    def sums(self, score: Float[Tensor, "layer column"]) -> Float[Tensor, "layer unit"]:
        """What the slots of a unit score together; anything for those that are not free."""
        if self.piece_tokens == 1:
            return score
        return cut_pieces(score, self.piece_tokens).sum(dim=2)

    def side_by_side(
        self, numbers: Shaped[Tensor, "layer number column"]
    ) -> Shaped[Tensor, "layer unit all_numbers"]:
        """What the slots of a unit have, one slot's behind the other's."""
        of_slots = numbers.transpose(1, 2)
        if self.piece_tokens == 1:
            return of_slots
        layers, slots, width = of_slots.shape
        units = self.free.shape[1]
        missing = units * self.piece_tokens - slots
        padded = torch.nn.functional.pad(of_slots, (0, 0, 0, missing))
        return padded.reshape(layers, units, self.piece_tokens * width)

    def best(
        self, score: Float[Tensor, "layer unit"], count: Int[Tensor, " layer"]
    ) -> Bool[Tensor, "layer unit"]:
        """The free units with the highest scores, ties to the lower position."""
        return best_slots(score, self.free, count)

    def slots(self, units: Bool[Tensor, "layer unit"]) -> Bool[Tensor, "layer column"]:
        """All live slots of some units."""
        live = self.live[:, self.columns]
        if self.piece_tokens == 1:
            return units & live
        return units.repeat_interleave(self.piece_tokens, dim=1)[:, : live.shape[1]] & live

    def spread(self, stays: Bool[Tensor, "layer unit"], heads: int) -> Bool[Tensor, "lane slot"]:
        """What stays of the free units beside what must, for all heads of the layers."""
        kept = self.live.clone()
        kept[:, self.columns] = self.slots(stays | ~self.free)
        return kept.repeat_interleave(heads, dim=0)


def _between(marks: Bool[Tensor, "layer slot"], piece_tokens: int) -> slice:
    """Columns from the first to the last that is marked anywhere, pieces whole."""
    marked = marks.any(dim=0).nonzero()[:, 0]
    if not len(marked):
        return slice(0, 0)
    first, last = int(marked[0]) // piece_tokens, int(marked[-1]) // piece_tokens
    return slice(first * piece_tokens, (last + 1) * piece_tokens)
