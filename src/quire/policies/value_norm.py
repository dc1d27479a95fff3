"""A rule's scores times the length of values (Expected Attention, Devoto et al. 2025, section 3).

score(token) = (score of the base rule + epsilon) * ||v|| ** power

A token moves the output by its weight times its value, so a token with a long value matters more
than its weight says. CriticalKV (Feng et al. 2025) ranks by the same product.

Differs from the papers: the norm is Euclidean and of the value itself (CriticalKV takes the sum of
magnitudes behind the output projection, whose weights a rule does not see, and only for the second
half of what is kept). Any base whose scores are not negative can be taken.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import Statistic
from quire.policies.base import EvictionPolicy, ScorePolicy
from quire.policies.h2o import H2O
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView


@register("value_norm")
@dataclass(frozen=True, slots=True)
class ValueNorm(ScorePolicy):
    """Keep what the base rule keeps, its scores multiplied by the length of each token's value.

    Attributes:
        base: the rule; what it protects stays protected.
        power: of the length; 0 leaves the scores alone.
        epsilon: added to the scores first, so that values decide where they are 0.
    """

    cost = "the base rule's, and one read of the values"

    base: EvictionPolicy = H2O()  # noqa: RUF009 - frozen
    power: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.base, ScorePolicy):
            raise ConfigError(
                f"value_norm multiplies scores, and {type(self.base).__name__} gives none"
            )
        if type(self.base).select is not ScorePolicy.select:
            raise ConfigError(
                f"value_norm ranks scores, and {type(self.base).__name__} does more than rank its "
                "own; put value_norm inside, as kvcrush:base=(value_norm:base=h2o)"
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
    def least_cap(self) -> int:
        return self.base.least_cap

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
        if bool((score[view.live] < 0).any()):
            raise PolicyError(
                f"value_norm multiplies scores, and {type(self.base).__name__} gives negative "
                "ones; use a base whose scores are attention, such as h2o"
            )
        length: Tensor = torch.linalg.vector_norm(view.values, dim=2)
        return (score + self.epsilon) * length.pow(self.power)

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
        assert isinstance(self.base, ScorePolicy), "checked when it was made"
        return self.base
