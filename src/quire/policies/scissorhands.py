"""Persistence of importance (Scissorhands, Liu et al. 2023, arXiv 2305.17118).

score(token) = -(number of queries whose weight on it is below 1 / keys that the query sees)

Differs from the paper: low weights are counted at every step while a token is cached; the paper
recomputes the weights of the last 400 queries at an eviction. Counts tie often, and ties retain the
lower position. The newest tokens are retained (the paper sets their count to 0). The paper evicts
half the cap at a time, which is `every=` half of `cap=`. It gives later layers a larger cap, which
is a budget (`scissors`).
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from quire.layout.statistics import MEAN, LowAttentionCount, Statistic
from quire.policies.base import SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView


@register("scissorhands")
@dataclass(frozen=True, slots=True)
class Scissorhands(SinksAndRecent):
    """Retain the newest tokens and, of the rest, those with the fewest low attention weights.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
        heads: reduction over the query heads of a KV head: mean, max or sum.
        share: compare the fraction of queries with a low weight, not their number, which is
            larger for older tokens.
    """

    cost = "a count of low attention weights"
    has_negative_scores = True
    reads_vectors = False

    recent: int = 10
    heads: str = MEAN
    share: bool = False

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        _ = self.statistics  # refuses an unknown reduction

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (LowAttentionCount(self.heads),)

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        low = view.statistic(self.statistics[0])
        return -low / view.queries_seen if self.share else -low

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        del score
        return -view.statistic(self.statistics[0])
