"""Heads of a layer compete for its slots (Ada-KV, Feng et al. 2024, section 4, Algorithm 1).

At each eviction, in each layer, the rule's protected slots are retained, and B slots are left. The
best B slots of all heads together determine how many each head would get. A fraction `floor` of B
is divided evenly:

    head h retains  protected_h + (1 - floor) best_h + floor B / heads

Worked: two heads, B = 4, scores 9 8 7 1 and 6 5 2 1. The best four are 9 8 7 6, so 3 and 1; with
floor = 0.2 the shares are 0.8 * 3 + 0.2 * 2 = 2.8 and 0.8 * 1 + 0.2 * 2 = 1.2: 3 and 1 slots.

Differs from the paper: shares are rounded so that the total is exact (largest fractions up, ties to
the lower head). Each head retains at least one slot in addition to its protected ones. Of equal
scores the lower position comes first, then the lower head. Slots are divided at each eviction, not
once.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError
from quire.policies.budgets.base import Budget
from quire.policies.choose import best_and_tied, choose_slots
from quire.policies.registry import register_budget
from quire.policies.view import KVView


@register_budget("ada")
@dataclass(frozen=True, slots=True)
class Ada(Budget):
    """Move slots to the heads whose tokens score highest; each layer keeps its total.

    Attributes:
        floor: fraction of a layer's slots that is divided evenly.
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
        available = held - taken
        total = torch.minimum(view.by_layer(keep).sum(dim=1), held.sum(dim=1)) - taken.sum(dim=1)
        total = total.clamp_min(0)
        free = view.live & ~protected
        best = view.by_layer(_best_of_layer(view, score, free, total))
        shares = (1 - self.floor) * best + self.floor * _evenly(available, total)
        return (taken + _whole(shares, available, total)).flatten()


def _best_of_layer(
    view: KVView,
    score: Float[Tensor, "lane slot"],
    free: Bool[Tensor, "lane slot"],
    total: Int[Tensor, " layer"],
) -> Int[Tensor, " lane"]:
    """Count, per head, its slots among the layer's best `total` free slots; at least one."""
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
    """Reshape [lane, slot] to [layer, slots of all its heads]."""
    return view.by_layer(numbers).flatten(1)


def _evenly(
    available: Int[Tensor, "layer head"], total: Int[Tensor, " layer"]
) -> Float[Tensor, "layer head"]:
    """Divide `total` evenly over the heads, but give no head more than it has available."""
    rising = available.sort(dim=1).values.double()
    heads = available.shape[1]
    below = torch.nn.functional.pad(rising.cumsum(dim=1), (1, 0))[:, :-1]
    # slots per remaining head if all smaller heads are full
    level = (total[:, None] - below) / torch.arange(heads, 0, -1, device=available.device)
    full = (rising < level).sum(dim=1, keepdim=True).clamp_max(heads - 1)
    return torch.minimum(available.double(), level.gather(1, full))


def _whole(
    shares: Float[Tensor, "layer head"],
    available: Int[Tensor, "layer head"],
    total: Int[Tensor, " layer"],
) -> Int[Tensor, "layer head"]:
    """Round shares to whole slots; the largest fractions are rounded up to keep the total."""
    # round first, so that floating-point error changes neither whole shares nor equal fractions
    down = torch.minimum(shares.round(decimals=9).floor().long(), available)
    fraction = (shares - down).round(decimals=9)
    protected = torch.zeros_like(down, dtype=torch.bool)
    return down + choose_slots(fraction, down < available, protected, total - down.sum(dim=1))
