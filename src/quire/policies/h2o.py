"""Heavy hitters (H2O, Zhang et al. 2023, arXiv 2306.14048, Algorithm 1).

score(token) = sum of the attention weights it got from all queries since it was cached, each
softmax over what was cached then; half of what is kept are the newest tokens.

Differs from the paper: tokens leave `every` at a time, not one at each step. Query heads that share
a KV head are reduced in each query's row (the paper has none that share). With `power=2` the
weights are squared before they are summed, as in KV-Compress (Rehg 2024, arXiv 2410.00161).
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import ConfigError
from quire.layout.statistics import MEAN, AttentionSum, SquareSum, Statistic
from quire.policies.base import ScorePolicy
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView

HALF = -1
"""`recent` is half of what is kept."""


@register("h2o")
@dataclass(frozen=True, slots=True)
class H2O(ScorePolicy):
    """Keep the newest tokens and, of the rest, those that got the most attention in sum.

    Attributes:
        sinks: tokens at the start of the sequence that never leave.
        recent: so many of the newest cached tokens do not leave; -1: half of what is kept.
        heads: how the query heads of a KV head are reduced: mean, max or sum.
        power: 1 sums weights, 2 their squares.
    """

    cost = "column sums of the attention weights"

    sinks: int = 0
    recent: int = HALF
    heads: str = MEAN
    power: int = 1

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks)
        check_at_least(HALF, recent=self.recent)
        if self.power not in (1, 2):
            raise ConfigError(f"expected power to be 1 or 2, got {self.power}")
        _ = self.statistics  # refuses a reduction that is none

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        made = AttentionSum if self.power == 1 else SquareSum
        return (made(self.heads),)

    @property
    def least_cap(self) -> int:
        # half of 2 * sinks + 1 is as many as the sinks, and leaves one token to choose
        return 2 * self.sinks + 1 if self.recent == HALF else self.sinks + self.recent + 1

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return view.remembered(self.statistics[0])

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        newest = view.newest(keep[:, None] // 2 if self.recent == HALF else self.recent)
        return view.oldest_positions(self.sinks) | newest
