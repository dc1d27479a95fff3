"""Expected Attention (Devoto et al. 2025, arXiv 2510.00636): estimated attention of future queries.

Queries before RoPE are modelled as normal, with the mean m and covariance S of the queries seen so
far. Over the next F positions RoPE rotates them by R on average, and the expected logit of a key k
is

    z(k) = k . R m * scale + k . R S R^T k * scale^2 / 2  (plus the bias of ALiBi)
    score(token) = (mean over the group of softmax(z) + epsilon) * |value|

Differs from the paper: the moments cover all queries after the sinks, whether or not their tokens
are still cached, and are updated during decoding; the paper uses the prompt's queries. The softmax
is over the tokens cached after the sinks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import MEAN, QueryMoments, Statistic, check_reduction
from quire.policies.base import SinksAndRecent
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView
from quire.policies.windows import reduce_group, softmax_over

MAX_FUTURE = 1 << 16  # each position costs one rotation, and a request may set the number


@register("expected_attention")
@dataclass(frozen=True, slots=True)
class ExpectedAttention(SinksAndRecent):
    """Retain the tokens with the highest expected attention of future queries, times value norms.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted, and whose queries are not
            counted.
        recent: number of newest cached tokens that are never evicted.
        future: number of positions after the last token over which queries are estimated.
        epsilon: added to weights before multiplying by the value norm, so that tokens with long
            values can be retained at low weights.
        heads: reduction over the query heads of a KV head: mean, max or sum.
    """

    cost = "moments of all queries; at an eviction, keys times a matrix for each query head"
    not_on_latents = "the norms of latents are not those of the values projected from them"

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0
    heads: str = MEAN

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        if not 1 <= self.future <= MAX_FUTURE:
            raise ConfigError(
                f"expected future from 1 to {MAX_FUTURE:,} positions, got {self.future}"
            )
        check_at_least(0, epsilon=self.epsilon)
        check_reduction(self.heads)

    @property
    def _moments(self) -> QueryMoments:
        return QueryMoments(skip=self.sinks)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self._moments,)

    def _future(self, next_position: int) -> Sequence[int]:
        return range(next_position, next_position + self.future)

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        mean, spread = _mean_and_covariance(view.statistic(self._moments), view.head_dim)
        turn, scales = view.mean_rotations(self._future)[:, None], view.lane_scales
        mean = (turn @ mean[..., None])[..., 0] * scales
        spread = turn @ spread @ turn.transpose(2, 3) * (scales[:, None] ** 2 / 2)
        keys = view.keys
        logits = keys @ mean.transpose(1, 2)  # [lane, slot, group]
        for head in range(mean.shape[1]):  # one at a time: each needs as much memory as the keys
            logits[:, :, head] += (keys @ spread[:, head] * keys).sum(dim=2)
        logits, biases = logits.transpose(1, 2), view.biases()
        logits = logits if biases is None else logits + biases[:, :, 0]
        behind = view.live & ~view.oldest_positions(self.sinks)
        weights = softmax_over(logits, behind[:, None, :].expand_as(logits))
        norms = view.values.square().sum(dim=2).sqrt()
        return (reduce_group(weights, self.heads) + self.epsilon) * norms


def _mean_and_covariance(
    record: Float[Tensor, "lane 1 number"], dim: int
) -> tuple[Float[Tensor, "lane group {dim}"], Float[Tensor, "lane group {dim} {dim}"]]:
    """Convert counts, sums and products to a mean and a covariance, dividing by count.

    Raises:
        PolicyError: a lane has seen no query.
    """
    heads = record.view(record.shape[0], -1, 1 + dim + dim * dim)
    count = heads[:, :, :1]
    if bool((count < 1).any()):
        raise PolicyError("no query after the sinks was recorded, so none can be estimated")
    mean = heads[:, :, 1 : 1 + dim] / count
    products = (heads[:, :, 1 + dim :] / count).view(*heads.shape[:2], dim, dim)
    return mean, products - mean[..., :, None] * mean[..., None, :]
