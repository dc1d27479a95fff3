"""Heavy hitters (H2O, Zhang et al. 2023, arXiv 2306.14048, Algorithm 1).

score(token) = sum of the attention weights from all queries since the token was cached, each
softmax over the tokens cached at that time. Half of the retained tokens are the newest ones.

Differs from the paper: `every` tokens are evicted at a time, not one per step. Query heads that
share a KV head are reduced in each query's row (the paper's models have no shared KV heads). With
`power=2` the weights are squared before they are summed, as in KV-Compress (Rehg 2024, arXiv
2410.00161).
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.layout.statistics import MEAN, AttentionSum, SquareSum, Statistic
from quire.policies.base import Keep, StoredScore, StoredScorePolicy
from quire.policies.options import check_at_least
from quire.policies.registry import register

HALF = -1
"""`recent` is half of the retained tokens."""


@register("h2o")
@dataclass(frozen=True, slots=True)
class H2O(StoredScorePolicy):
    """Retain the newest tokens, and the other tokens with the largest sums of attention weights.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted; -1: half of the retained
            tokens.
        heads: reduction over the query heads of a KV head: mean, max or sum.
        power: 1 sums weights, 2 their squares.
    """

    cost = "column sums of the attention weights"
    reads_vectors = False

    sinks: int = 0
    recent: int = HALF
    heads: str = MEAN
    power: int = 1

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks)
        check_at_least(HALF, recent=self.recent)
        if self.power not in (1, 2):
            raise ConfigError(f"expected power to be 1 or 2, got {self.power}")
        _ = self.statistics  # refuses an unknown reduction

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        statistic = AttentionSum if self.power == 1 else SquareSum
        return (statistic(self.heads),)

    @property
    def min_cap(self) -> int:
        # half of 2 * sinks + 1 equals the number of sinks and leaves one token to select
        return 2 * self.sinks + 1 if self.recent == HALF else self.sinks + self.recent + 1

    @property
    def lanes_apart(self) -> bool:
        return True

    @property
    def stored_score(self) -> StoredScore:
        return StoredScore(self.statistics[0])

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        return self.sinks, keep // 2 if self.recent == HALF else self.recent
