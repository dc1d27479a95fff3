"""Average attention (Batch-Max, Metel et al. 2025, section 3.2).

score(token) = sum_weights / (curr_id + 1 - kv_id)

curr_id is the last processed position. The divisor is the number of queries that have seen the
token, including its own. H2O's plain sum favours older tokens.

Differs from the paper: the divisor of a decode step is the same as in prefill (the paper counts one
more query, which has not been processed when tokens are evicted). Positions count a request's own
tokens, never padding. Query heads that share a KV head are reduced in each query's row.
"""

from dataclasses import dataclass

from quire.layout.statistics import MEAN, AttentionSum, Statistic
from quire.policies.base import SinksAndRecent, StoredScore, StoredScorePolicy
from quire.policies.registry import register


@register("average")
@dataclass(frozen=True, slots=True)
class Average(SinksAndRecent, StoredScorePolicy):
    """Retain the tokens with the largest mean attention weight per query that saw them.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
        heads: reduction over the query heads of a KV head: mean, max or sum.
    """

    cost = "column sums of the attention weights"
    reads_vectors = False

    heads: str = MEAN

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        _ = self.statistics  # refuses an unknown reduction

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (AttentionSum(self.heads),)

    @property
    def stored_score(self) -> StoredScore:
        return StoredScore(self.statistics[0], per_query=True)
