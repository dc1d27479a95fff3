"""Whole layers cut into what stays or goes together: slots, or pieces of neighbouring ones."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from quire.policies.choose import choose_slots, cut_pieces, held_pieces, spread_pieces
from quire.policies.view import KVView


@dataclass(frozen=True, slots=True)
class Units:
    """Slots or pieces of layers whose heads hold the same tokens.

    Attributes:
        live: [layer, slot] slots that hold a token.
        must: units that stay.
        free: units that may leave.
        room: of the free ones, so many stay.
        piece_tokens: slots of a unit.
    """

    live: Bool[Tensor, "layer slot"]
    must: Bool[Tensor, "layer unit"]
    free: Bool[Tensor, "layer unit"]
    room: Int[Tensor, " layer"]
    piece_tokens: int

    @classmethod
    def of(
        cls,
        view: KVView,
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
        piece_tokens: int,
    ) -> "Units":
        """Cut a view's layers.

        Args:
            view: whole layers, all heads of one with the same tokens.
            protected: slots that stay.
            keep: slots to keep of each lane.
            piece_tokens: slots of a unit.
        """
        of_layer = slice(None, None, view.heads_per_layer)
        live, keep = view.live[of_layer], keep[of_layer]
        cut = cut_pieces(live, piece_tokens)
        must = held_pieces(cut, cut_pieces(protected[of_layer] & live, piece_tokens))
        must &= cut.any(dim=2)
        free = cut.any(dim=2) & ~must
        room = (keep - (cut.sum(dim=2) * must).sum(dim=1)) // piece_tokens
        return cls(live, must, free, room.clamp_min(0).minimum(free.sum(dim=1)), piece_tokens)

    def sums(self, score: Float[Tensor, "layer slot"]) -> Float[Tensor, "layer unit"]:
        """What a unit's slots score together."""
        return cut_pieces(torch.where(self.live, score, 0.0), self.piece_tokens).sum(dim=2)

    def side_by_side(
        self, numbers: Shaped[Tensor, "layer slot number"]
    ) -> Shaped[Tensor, "layer unit all_numbers"]:
        """What a unit's slots have, one slot's behind the other's."""
        layers, slots, width = numbers.shape
        units = self.free.shape[1]
        missing = units * self.piece_tokens - slots
        padded = torch.nn.functional.pad(numbers, (0, 0, 0, missing))
        return padded.reshape(layers, units, self.piece_tokens * width)

    def best(
        self, score: Float[Tensor, "layer unit"], count: Int[Tensor, " layer"]
    ) -> Bool[Tensor, "layer unit"]:
        """The free units with the highest scores, ties to the lower position."""
        return choose_slots(score, self.free, torch.zeros_like(self.free), count)

    def slots(self, units: Bool[Tensor, "layer unit"]) -> Bool[Tensor, "layer slot"]:
        """All live slots of some units."""
        return spread_pieces(units, self.live, self.piece_tokens)

    def spread(self, stays: Bool[Tensor, "layer unit"], heads: int) -> Bool[Tensor, "lane slot"]:
        """What stays beside what must, for all heads of the layers."""
        return self.slots(stays | self.must).repeat_interleave(heads, dim=0)
