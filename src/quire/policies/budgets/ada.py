"""Heads of a layer compete for its slots (Ada-KV, Feng et al. 2024, section 4, Algorithm 1).

At each eviction, in each layer: the rule's protected slots stay; of the B slots that are left the
best of all heads together say how many each head would get, and a share of `floor` is given evenly:

    head h keeps  protected_h + (1 - floor) best_h + floor B / heads

Worked: two heads, B = 4, scores 9 8 7 1 and 6 5 2 1. The best four are 9 8 7 6, so 3 and 1; with
floor = 0.2 the shares are 0.8 * 3 + 0.2 * 2 = 2.8 and 0.8 * 1 + 0.2 * 2 = 1.2: 3 and 1 slots.

Differs from the paper: shares are rounded so that the total is exact (largest fractions up, ties to
the lower head); each head keeps at least one slot beside its protected ones; of equal scores the
lower position counts first, then the lower head. It is done at each eviction, not once.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError
from quire.policies.best import best_and_tied
from quire.policies.budgets.base import Budget
from quire.policies.choose import choose_slots
from quire.policies.registry import register_budget
from quire.policies.view import KVView


@register_budget("ada")
@dataclass(frozen=True, slots=True)
class Ada(Budget):
    """Slots move to the heads whose tokens score highest; each layer keeps its total.

    Attributes:
        floor: share of a layer's slots that is given evenly.
    """

    ragged = True
    by_head = True

    floor: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"expected 0 <= floor <= 1, got {self.floor}")

    def divide(
        self,
        view: KVView,
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
    ) -> Int[Tensor, " lane"]:
        held, taken = view.by_layer(view.live.sum(dim=1)), view.by_layer(protected.sum(dim=1))
        room = held - taken
        total = torch.minimum(view.by_layer(keep).sum(dim=1), held.sum(dim=1)) - taken.sum(dim=1)
        total = total.clamp_min(0)
        free = view.live & ~protected
        best = view.by_layer(_best_of_layer(view, score, free, total))
        shares = (1 - self.floor) * best + self.floor * _evenly(room, total)
        return (taken + _whole(shares, room, total)).flatten()


def _best_of_layer(
    view: KVView,
    score: Float[Tensor, "lane slot"],
    free: Bool[Tensor, "lane slot"],
    total: Int[Tensor, " layer"],
) -> Int[Tensor, " lane"]:
    """How many of its layer's best `total` free slots each head has, its own best one included."""
    one = (total >= view.heads_per_layer).repeat_interleave(view.heads_per_layer)
    given = choose_slots(score, free, free & ~free, (one & free.any(dim=1)).long())
    rest = free & ~given
    left = total - view.by_layer(given.sum(dim=1)).sum(dim=1)
    above, tied, still = best_and_tied(_flat(view, score), _flat(view, rest), left)
    if bool((tied.sum(dim=1) > still).any()):
        heads = torch.arange(view.heads_per_layer, device=score.device)
        order = view.by_layer(view.positions) * view.heads_per_layer + heads[:, None]
        tied = choose_slots(-order.flatten(1).double(), tied, tied & ~tied, still)
    count = (above | tied).view(free.shape).sum(dim=1)
    return count + given.sum(dim=1)


def _flat(view: KVView, numbers: Tensor) -> Tensor:
    """[lane, slot] as [layer, slots of all its heads]."""
    return view.by_layer(numbers).flatten(1)


def _evenly(
    room: Int[Tensor, "layer head"], total: Int[Tensor, " layer"]
) -> Float[Tensor, "layer head"]:
    """The same for each head, but no more than it has room for: together `total`."""
    rising = room.sort(dim=1).values.double()
    heads = room.shape[1]
    below = torch.nn.functional.pad(rising.cumsum(dim=1), (1, 0))[:, :-1]
    # the level, were the heads before each one full
    level = (total[:, None] - below) / torch.arange(heads, 0, -1, device=room.device)
    full = (rising < level).sum(dim=1, keepdim=True).clamp_max(heads - 1)
    return torch.minimum(room.double(), level.gather(1, full))


def _whole(
    shares: Float[Tensor, "layer head"],
    room: Int[Tensor, "layer head"],
    total: Int[Tensor, " layer"],
) -> Int[Tensor, "layer head"]:
    """Shares as whole slots, the largest fractions rounded up so that the total is exact."""
    down = torch.minimum(shares.round(decimals=9).floor().long(), room)  # what should be whole, is
    fraction = (shares - down).round(decimals=9)  # and equal fractions are equal
    return down + choose_slots(
        fraction, down < room, torch.zeros_like(down, dtype=torch.bool), total - down.sum(dim=1)
    )
