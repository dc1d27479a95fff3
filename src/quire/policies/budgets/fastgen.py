"""Each head retains the least that recovers its attention (FastGen, Ge et al. 2024, Algorithm 1).

After prefill, each head takes the first of these sets whose slots received at least `share` of the
attention that the prompt's queries gave to the head's slots:

    the rule's protected slots and one more        such as sinks and recent tokens
    the rule's best slots, up to the cap
    all slots                                      so memory is not bounded by the cap

With `when=prefill_and_decode` and `when=pressure` the cap bounds the sum over all heads: the heads
of the third kind divide equally what the others leave. Heads are then measured on the slots that
they hold.

Differs from the paper: its sets are special tokens, punctuation, frequent tokens, local tokens and
all tokens, with frequent and local sizes as ratios of the prompt; here the rule and the cap define
the sets. Recovery is the fraction of the attention mass, summed over the prompt's queries.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from quire.errors import ConfigError
from quire.layout.statistics import AttentionSum, Statistic
from quire.policies.base import ScorePolicy
from quire.policies.budgets.base import UNBOUNDED, Budget, Shape
from quire.policies.registry import register_budget
from quire.policies.view import KVView

_ATTENTION = AttentionSum()


@register_budget("fastgen")
@dataclass(frozen=True, slots=True)
class FastGen(Budget):
    """Each head retains the minimum, the cap or all slots, depending on its prompt's attention.

    Attributes:
        share: fraction of the prompt's attention that the retained slots must have received.
    """

    needs_prompt = True
    by_head = True
    keeps_total = False

    share: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"expected 0 < share <= 1, got {self.share}")

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (_ATTENTION,)

    def lane_capacities(self, shape: Shape) -> tuple[int, ...] | None:
        return (UNBOUNDED,) * shape.num_lanes

    def finalize(self, view: KVView, rule: ScorePolicy, shape: Shape) -> tuple[int, ...]:
        least, cap = (self._recovers(view, rule, shape, cap) for cap in (shape.least, shape.cap))
        caps = tuple(
            shape.least if enough else shape.cap if at_cap else UNBOUNDED
            for enough, at_cap in zip(least.tolist(), cap.tolist(), strict=True)
        )
        return shape.within_total(caps) if shape.bounded else caps

    def _recovers(
        self, view: KVView, rule: ScorePolicy, shape: Shape, cap: int
    ) -> Bool[Tensor, " lane"]:
        """Return whether a lane of this cap retains the required fraction of its attention."""
        held = view.num_slots[:, 0]
        keep = held.clamp_max(cap - shape.leaving)
        if bool((held <= keep).all()):
            return torch.ones_like(keep, dtype=torch.bool)
        received = view.statistic(_ATTENTION)
        kept = (received * rule.select(view, keep, shape.piece_tokens)).sum(dim=1)
        return kept >= self.share * received.sum(dim=1)
