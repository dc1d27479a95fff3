"""Scores times value norms (Expected Attention, Devoto et al. 2025, section 3).

score(token) = (score of the base rule + epsilon) * ||v|| ** power

A token changes the output by its weight times its value, so a token with a long value matters more
than its weight alone indicates.

Differs from the paper: any base rule with non-negative scores is accepted. The norm is Euclidean
and of the value itself; `criticalkv` measures values behind the output projection.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.layout.pages import VALUE
from quire.policies.base import EvictionPolicy, ScorePolicy, WrappingPolicy
from quire.policies.h2o import H2O
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView


@register("value_norm")
@dataclass(frozen=True, slots=True)
class ValueNorm(WrappingPolicy):
    """Apply the base rule with its scores multiplied by the norm of each token's value.

    Attributes:
        base: the rule; tokens it protects are always retained.
        power: exponent of the norm; 0 leaves the scores unchanged.
        epsilon: added to the scores first, so that values decide between scores of 0.
    """

    name = "value_norm"
    cost = "the base rule, and one read of the values"
    not_on_latents = "the norms of latents are not those of the values projected from them"

    base: EvictionPolicy = H2O()  # noqa: RUF009 - frozen
    power: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        WrappingPolicy.__post_init__(self)
        check_at_least(0, power=self.power, epsilon=self.epsilon)

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return self._weighted(view, self.rule.checked_score(view))

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        if type(self.rule).accumulated is ScorePolicy.accumulated:
            return score
        return self._weighted(view, self.rule.accumulated(view, score))

    def _weighted(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        self.require_weights(view, score)
        pages = view.in_pages(VALUE)
        length = torch.linalg.vector_norm(view.values, dim=2) if pages is None else pages.norms()
        return (score + self.epsilon) * length.pow(self.power)
