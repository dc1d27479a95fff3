"""What an eviction policy is: a frozen dataclass that says which slots of a lane stay.

A policy has no state. It sees one sequence at a time, never its companions; it gets a number of
slots to keep, never a ratio; and what must stay (sinks, newest tokens) is a mask, never a score.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import PolicyError


@dataclass(frozen=True, slots=True)
class KVView:
    """What a policy may look at: one sequence, the lanes of one layer group.

    Attributes:
        positions: logical position of each slot, in any order; -1 where a lane has no slot.
        next_position: logical position the next token will get.
    """

    positions: Int[Tensor, "lane slot"]
    next_position: int

    @property
    def live(self) -> Bool[Tensor, "lane slot"]:
        """Slots that hold a token."""
        return self.positions >= 0


class EvictionPolicy(ABC):
    """Decides which slots stay. Subclasses are frozen dataclasses; their fields are options."""

    @property
    def least_cap(self) -> int:
        """Tokens a lane must be able to hold for this policy to make sense."""
        return 1

    @abstractmethod
    def select(self, view: KVView, keep: int) -> Bool[Tensor, "lane slot"]:
        """Choose the slots that stay.

        Args:
            view: one sequence.
            keep: slots to keep in every lane; no more than any lane holds.

        Returns:
            True where a slot stays; exactly `keep` in each lane.
        """


class ScorePolicy(EvictionPolicy):
    """Keeps protected slots and, of the rest, those that score highest.

    Ties keep the lower position, so that equal scores give one answer on every machine.
    """

    @abstractmethod
    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        """Importance of each slot, finite where live; higher stays."""

    def protected(self, view: KVView) -> Bool[Tensor, "lane slot"]:
        """Slots that stay whatever they score; at most `least_cap - 1` a lane."""
        return torch.zeros_like(view.live)

    @final
    def select(self, view: KVView, keep: int) -> Bool[Tensor, "lane slot"]:
        """Protected slots first, then by score, then by position."""
        score, live, protected = self.score(view), view.live, self.protected(view)
        for given in (score, protected):
            if given.shape != live.shape:
                raise PolicyError(
                    f"{type(self).__name__}: expected {list(live.shape)}, got {list(given.shape)}"
                )
        most = int(protected.sum(dim=1).amax())
        if most > keep:
            raise PolicyError(
                f"{type(self).__name__} protects {most} slots of a lane, but {keep} may stay; "
                "least_cap must say so"
            )
        if not torch.isfinite(score[live]).all():
            raise PolicyError(f"{type(self).__name__} gave a score that is not finite")
        by_position = view.positions.argsort(dim=1, stable=True)
        ranked = torch.where(live, score, float("-inf")).gather(1, by_position)
        by_score = by_position.gather(1, ranked.argsort(dim=1, descending=True, stable=True))
        first = protected.gather(1, by_score).int().argsort(dim=1, descending=True, stable=True)
        order = by_score.gather(1, first)
        return torch.zeros_like(live).scatter_(1, order[:, :keep], value=True)
