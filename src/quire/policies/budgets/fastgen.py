"""Each head keeps the least that recovers its attention (FastGen, Ge et al. 2024, Algorithm 1).

When the prompt has been read, each head takes the first of these whose slots got at least `share`
of all the attention that the prompt's queries gave to its slots:

    what the rule protects, and one more           sinks and recent tokens, say
    the rule's best, up to the cap
    everything                                     so the memory is not bounded by the cap

Differs from the paper: there the ladder is special tokens, punctuation, frequent ones, local ones
and everything, and frequent and local sizes are ratios of the prompt; here the rule and the cap say
that. Recovery is the share of the attention mass, summed over the prompt's queries.
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

_LOOKS = AttentionSum()


@register_budget("fastgen")
@dataclass(frozen=True, slots=True)
class FastGen(Budget):
    """Each head keeps the least, the cap or everything, by what its prompt's attention asks for.

    Attributes:
        share: of the prompt's attention that what is kept must have got.
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
        return (_LOOKS,)

    def lane_caps(self, shape: Shape) -> tuple[int, ...] | None:
        return (UNBOUNDED,) * shape.num_lanes

    def finalize(self, view: KVView, rule: ScorePolicy, shape: Shape) -> tuple[int, ...]:
        least, cap = (self._recovers(view, rule, shape, cap) for cap in (shape.least, shape.cap))
        return tuple(
            shape.least if enough else shape.cap if at_cap else UNBOUNDED
            for enough, at_cap in zip(least.tolist(), cap.tolist(), strict=True)
        )

    def _recovers(
        self, view: KVView, rule: ScorePolicy, shape: Shape, cap: int
    ) -> Bool[Tensor, " lane"]:
        """Whether a lane of this cap keeps what its attention asks for."""
        keep = torch.full_like(view.num_slots[:, 0], cap - shape.leaving)
        if bool((view.num_slots[:, 0] <= keep).all()):
            return torch.ones_like(keep, dtype=torch.bool)
        received = view.remembered(_LOOKS)
        kept = (received * rule.select(view, keep, shape.piece_tokens)).sum(dim=1)
        return kept >= self.share * received.sum(dim=1)
