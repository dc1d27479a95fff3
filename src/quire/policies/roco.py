"""RoCo (EasyKV, Ren and Zhu 2024, arXiv 2402.06262): mean attention with high-variance tokens kept.

With n = queries that saw a token: mean = sum / n, std = sqrt(squares / n - mean ** 2). The `keep -
protected` tokens of smallest std are candidates, and of these the tokens of smallest mean are
evicted. Tokens whose weights vary are needed by some queries only.

Differs from the paper: if more tokens are evicted at a time than there are candidates, the number
of candidates is raised to the number evicted. The number of newest tokens that are retained is
fixed, not a fraction of the cap.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.layout.statistics import MEAN, AttentionSum, SquareSum, Statistic
from quire.policies.base import ScorePolicy, SinksAndRecent
from quire.policies.choose import choose_slots
from quire.policies.registry import register
from quire.policies.view import KVView


@register("roco")
@dataclass(frozen=True, slots=True)
class RoCo(SinksAndRecent):
    """Retain the tokens whose attention weights vary most, then those of the largest mean weight.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
        heads: reduction over the query heads of a KV head: mean, max or sum.
    """

    cost = "column sums of the attention weights and of their squares"
    reads_vectors = False

    sinks: int = 4
    recent: int = 10
    heads: str = MEAN

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        _ = self.statistics  # refuses an unknown reduction

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return AttentionSum(self.heads), SquareSum(self.heads)

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return view.statistic(self.statistics[0]) / view.queries_seen

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        del score
        return view.statistic(self.statistics[0])

    def choose(
        self,
        view: KVView,
        score: Float[Tensor, "lane slot"],
        protected: Bool[Tensor, "lane slot"],
        keep: Int[Tensor, " lane"],
        piece_tokens: int = 1,
    ) -> Bool[Tensor, "lane slot"]:
        # raise scores instead of masking: masked slots would retain their whole pieces, and more
        # than `keep` slots would be retained
        held, fixed = view.num_slots[:, 0], protected.sum(dim=1)
        may_leave = torch.maximum(keep - fixed, held - keep)
        sums, squares = (view.statistic(statistic) for statistic in self.statistics)
        mean = sums / view.queries_seen
        std = (squares / view.queries_seen - mean.square()).clamp_min(0).sqrt()
        varied = choose_slots(std, view.live, protected, held - may_leave)
        lifted = torch.where(varied, score + 1 + score.amax(dim=1, keepdim=True), score)
        return ScorePolicy.choose(self, view, lifted, protected, keep, piece_tokens)
