"""SnapKV (Li et al. 2024, arXiv 2404.14469): attention of the last queries, pooled over neighbours.

score(token) = reduce over the group of pool(sum over the window's queries of the weight)

Differs from the paper: the paper evicts once, after prefill, which is `when=prefill_end`. With
other schedules the window is the last queries before each eviction, stored in a ring buffer. The
rows of the window are computed at an eviction over the tokens cached now: a softmax omits tokens
that an earlier eviction removed, although the query attended to them. The paper retains tokens for
each query head; here query heads that share a KV head are reduced after pooling.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from quire.kernels.backend import WindowFinish
from quire.layout.pages import KEY
from quire.layout.statistics import MEAN, QueryRing, Statistic, check_reduction
from quire.policies.base import Keep, ScorePolicy
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView
from quire.policies.windows import AVERAGE, check_pooling, window_scores


@register("snapkv")
@dataclass(frozen=True, slots=True)
class SnapKV(ScorePolicy):
    """Retain the newest tokens and the other tokens to which their queries attend most.

    Attributes:
        window: number of newest tokens whose queries are used; they are retained, within the cap.
        kernel: width of the pooling, odd; 1 disables pooling.
        pooling: avg or max.
        heads: reduction over the query heads of a KV head, after pooling: mean, max or sum.
        sinks: tokens at the start of the sequence that are never evicted.
    """

    cost = "`window` rows of attention at an eviction"
    scores_in_pages = KEY

    window: int = 32
    kernel: int = 5
    pooling: str = AVERAGE
    heads: str = MEAN
    sinks: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks)
        check_pooling(self.kernel, self.pooling)
        check_reduction(self.heads)
        _ = self._ring  # refuses an empty window

    @property
    def _ring(self) -> QueryRing:
        return QueryRing(self.window)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self._ring,)

    @property
    def min_cap(self) -> int:
        return self.sinks + self.window + 1

    @property
    def lanes_apart(self) -> bool:
        return True

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        finish = WindowFinish(self.window, self.kernel, self.pooling, self.heads)
        return window_scores(view, self._ring, finish)

    def protected_ends(self, keep: Keep) -> tuple[int, int | Keep]:
        del keep
        return self.sinks, self.window
