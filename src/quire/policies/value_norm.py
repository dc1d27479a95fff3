"""Scores times value norms (Expected Attention, Devoto et al. 2025, section 3).

score(token) = (score of the base rule + epsilon) * ||v|| ** power

A token changes the output by its weight times its value, so a token with a long value matters more
than its weight alone indicates. CriticalKV (Feng et al. 2025) ranks by the same product.

Differs from the papers: the norm is Euclidean and of the value itself. CriticalKV sums magnitudes
after the output projection, whose weights a rule cannot read, and only for the second half of the
retained tokens. Any base rule with non-negative scores is accepted.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError, PolicyError
from quire.layout.pages import VALUE
from quire.layout.statistics import Statistic
from quire.policies.base import EvictionPolicy, Keep, ScorePolicy
from quire.policies.h2o import H2O
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView


@register("value_norm")
@dataclass(frozen=True, slots=True)
class ValueNorm(ScorePolicy):
    """Apply the base rule with its scores multiplied by the norm of each token's value.

    Attributes:
        base: the rule; tokens it protects are always retained.
        power: exponent of the norm; 0 leaves the scores unchanged.
        epsilon: added to the scores first, so that values decide between scores of 0.
    """

    cost = "the base rule, and one read of the values"
    not_on_latents = "the norms of latents are not those of the values projected from them"

    base: EvictionPolicy = H2O()  # noqa: RUF009 - frozen
    power: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.base, ScorePolicy):
            raise ConfigError(
                f"value_norm multiplies scores, and {type(self.base).__name__} returns none; use a "
                "base that scores tokens, such as h2o"
            )
        if type(self.base).select is not ScorePolicy.select:
            raise ConfigError(
                f"value_norm ranks scores, and {type(self.base).__name__} does more than rank its "
                "own; nest value_norm inside, such as kvcrush:base=(value_norm:base=h2o)"
            )
        check_at_least(0, power=self.power, epsilon=self.epsilon)

    @property
    def scope(self) -> str:
        return self.base.scope

    @property
    def scores_heads(self) -> bool:
        return self._base.scores_heads

    @property
    def rerotates_keys(self) -> bool:
        return self.base.rerotates_keys

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return self.base.statistics

    @property
    def min_cap(self) -> int:
        return self.base.min_cap

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return self._weighted(view, self._base.checked_score(view))

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        base = self._base
        if type(base).accumulated is ScorePolicy.accumulated:
            return score
        return self._weighted(view, base.accumulated(view, score))

    def _weighted(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        if view.breaks_contract((score < 0) & view.live):
            raise PolicyError(
                f"value_norm needs scores >= 0, and {type(self.base).__name__} returned negative "
                "ones; use a base whose scores are attention weights, such as h2o"
            )
        pages = view.in_pages(VALUE)
        length = torch.linalg.vector_norm(view.values, dim=2) if pages is None else pages.norms()
        return (score + self.epsilon) * length.pow(self.power)

    @property
    def protects_ends(self) -> bool:
        return self._base.protects_ends

    @property
    def only_ranks(self) -> bool:
        return self._base.only_ranks

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        return self._base.protected_ends(keep)

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        return self._base.protected(view, keep)

    def choose(
        self,
        view: KVView,
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
        piece_tokens: int = 1,
    ) -> Bool[Tensor, "lane slot"]:
        return self._base.choose(view, score, protected, keep, piece_tokens)

    @property
    def _base(self) -> ScorePolicy:
        assert isinstance(self.base, ScorePolicy), "checked in __post_init__"
        return self.base
