"""Persistence of importance (Scissorhands, Liu et al. 2023, arXiv 2305.17118).

score(token) = -(queries that gave it less than 1 / keys that query saw)

Differs from the paper: looks are counted as they happen over a token's whole life in the cache; the
paper computes the weights of the last 400 queries anew when tokens leave. Counts tie often, and
ties keep the lower position. The newest tokens stay (the paper sets their count to 0). The paper
drops half the cap at a time, which is `every=` half of `cap=`, and gives later layers more, which
is a budget.
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
    """Keep the newest tokens and, of the rest, those that fewest queries overlooked.

    Attributes:
        sinks: tokens at the start of the sequence that never leave.
        recent: so many of the newest cached tokens do not leave.
        heads: how the query heads of a KV head are reduced: mean, max or sum.
        share: compare the share of a token's looks that were low, not their number, which is
            larger for tokens that have been there for longer.
    """

    cost = "a count of low attention weights"

    recent: int = 10
    heads: str = MEAN
    share: bool = False

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        _ = self.statistics  # refuses a reduction that is none

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (LowAttentionCount(self.heads),)

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        low = view.remembered(self.statistics[0])
        return -low / view.queries_seen if self.share else -low

    def accumulated(
        self, view: KVView, score: Float[Tensor, "lane slot"]
    ) -> Float[Tensor, "lane slot"]:
        del score
        return -view.remembered(self.statistics[0])
