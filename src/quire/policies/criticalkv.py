"""CriticalKV (Feng et al. 2025, arXiv 2502.03805): tokens whose loss changes the output most.

Evicting a token changes the output of attention by its weight times its value behind the output
projection. With B = budget left after protection:

    1. the floor(first * B) best by the score of the base rule
    2. of the rest, the best by (score + epsilon) * mean over the group of ||W_o^h v||_1

until B tokens are retained. W_o^h are the columns of the output projection that query head h has.
The bound that the second stage lowers holds if the retained tokens have more than half of the
attention; the first stage provides for that. With `budget=ada`, head budgets follow the scores of
the base rule (CriticalAdaKV).

Differs from the paper, which refines SnapKV: any base rule with non-negative scores is accepted.
Epsilon is added to them as they are: to a sum over the window's queries with `snapkv`. A
gate or a norm between the output projection and the residual stream is left out; models that change
the output of attention before projecting it are refused.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError
from quire.policies.base import EvictionPolicy, WrappingPolicy
from quire.policies.choose import in_whole_pieces
from quire.policies.h2o import H2O
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView


@register("criticalkv")
@dataclass(frozen=True, slots=True)
class CriticalKV(WrappingPolicy):
    """Retain the base rule's best tokens, then those with the longest projected values.

    Attributes:
        base: the rule; tokens it protects are always retained. Its scores must be >= 0.
        first: fraction of the budget left after protection that the base rule selects alone.
        epsilon: added to the scores of the second stage, so that values decide between scores of 0.
    """

    name = "criticalkv"
    cost = "the base rule; at an eviction, values times the output projection of each query head"
    reads_projection = True
    not_on_latents = "the values that are projected are expanded from latents for each query head"

    base: EvictionPolicy = H2O()  # noqa: RUF009 - frozen
    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        WrappingPolicy.__post_init__(self)
        if not 0 <= self.first <= 1:
            raise ConfigError(
                "expected 0 <= first <= 1, the fraction of the budget that the base rule selects "
                f"alone, got {self.first}"
            )
        check_at_least(0, epsilon=self.epsilon)

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        score = self.rule.checked_score(view)
        self.require_weights(view, score)
        return score

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        return self.rule.accumulated(view, score)

    def choose(
        self,
        view: KVView,
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
        piece_tokens: int = 1,
    ) -> Bool[Tensor, "lane slot"]:
        must = in_whole_pieces(protected, view.live, piece_tokens)
        held = must.sum(dim=1)
        alone = (keep - held).clamp_min(0).double() * self.first
        by_score = held + alone.round(decimals=9).long()  # 0.3 * 10 gives 3
        retained = self.rule.choose(view, score, must, by_score, piece_tokens)
        weighted = (score + self.epsilon) * view.projected_lengths()
        return self.rule.choose(view, weighted, retained, keep, piece_tokens)
