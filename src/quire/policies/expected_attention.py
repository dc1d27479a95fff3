"""Expected Attention (Devoto et al. 2025, arXiv 2510.00636): what queries to come would look at.

Queries before RoPE are taken as normal with the mean m and covariance S of those seen so far. Over
the next F positions RoPE turns them by R on average, and a key k expects

    z(k) = k . R m * scale + k . R S R^T k * scale^2 / 2
    score(token) = (mean over the group of softmax(z) + epsilon) * |value|

Differs from the paper: moments are over all queries behind the sinks, whether their tokens are
still cached or not, and grow while an answer is made; the paper takes the prompt's. The softmax is
over what is cached behind the sinks.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import MEAN, QueryMoments, Statistic, check_reduction
from quire.policies.base import SinksAndRecent
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView
from quire.policies.windows import reduce_group, softmax_over

MOST_FUTURE = 1 << 16  # each is turned by itself, and a request may say how many


@register("expected_attention")
@dataclass(frozen=True, slots=True)
class ExpectedAttention(SinksAndRecent):
    """Keep the tokens to which the next queries are expected to give most, times value norms.

    Attributes:
        sinks: tokens at the start of the sequence that never leave, and whose queries do not count.
        recent: so many of the newest cached tokens do not leave.
        future: positions behind the last token over which queries are expected.
        epsilon: added to weights before the value norm, so that long values can stay by themselves.
        heads: how the query heads of a KV head are reduced: mean, max or sum.
    """

    cost = "moments of all queries; keys times a matrix, for each query head, at an eviction"

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0
    heads: str = MEAN

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        if not 1 <= self.future <= MOST_FUTURE:
            raise ConfigError(
                f"expected future from 1 to {MOST_FUTURE:,} positions, got {self.future}"
            )
        check_at_least(0, epsilon=self.epsilon)
        check_reduction(self.heads)

    @property
    def _moments(self) -> QueryMoments:
        return QueryMoments(skip=self.sinks)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self._moments,)

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        logits = self._expected_logits(view)
        behind = view.live & ~view.oldest_positions(self.sinks)
        weights = softmax_over(logits, behind[:, None, :].expand_as(logits))
        norms = view.values.square().sum(dim=2).sqrt()
        return (reduce_group(weights, self.heads) + self.epsilon) * norms

    def _expected_logits(self, view: KVView) -> Float[Tensor, "lane group slot"]:
        mean, spread = _mean_and_covariance(view.remembered(self._moments), view.head_dim)
        turn = self._turn(view)
        mean = (turn @ mean[..., None])[..., 0] * view.scale
        spread = turn @ spread @ turn.transpose(2, 3) * (view.scale**2 / 2)
        keys = view.keys
        logits = keys @ mean.transpose(1, 2)  # [lane, slot, group]
        for head in range(mean.shape[1]):  # one at a time: each takes as much as the keys
            logits[:, :, head] += (keys @ spread[:, head] * keys).sum(dim=2)
        return logits.transpose(1, 2)

    def _turn(self, view: KVView) -> Float[Tensor, "lane 1 head_dim head_dim"]:
        """The mean rotation of each lane's layer over the positions to come."""
        if view.rotation is None:
            raise PolicyError("this view was made without rotations, so queries cannot be expected")
        layers = view.lane_layers.view(-1, view.heads_per_layer)[:, 0].tolist()
        turns = [
            view.rotation.mean_rotation(layer, view.next_position, self.future) for layer in layers
        ]
        return torch.stack(turns).repeat_interleave(view.heads_per_layer, dim=0)[:, None]


def _mean_and_covariance(
    record: Float[Tensor, "lane 1 number"], dim: int
) -> tuple[Float[Tensor, "lane group {dim}"], Float[Tensor, "lane group {dim} {dim}"]]:
    """From counts, sums and products to moments with 1 / count.

    Raises:
        PolicyError: a lane has seen no query.
    """
    heads = record.view(record.shape[0], -1, 1 + dim + dim * dim)
    count = heads[:, :, :1]
    if bool((count < 1).any()):
        raise PolicyError("no query behind the sinks was seen, so none can be expected")
    mean = heads[:, :, 1 : 1 + dim] / count
    products = (heads[:, :, 1 + dim :] / count).view(*heads.shape[:2], dim, dim)
    return mean, products - mean[..., :, None] * mean[..., None, :]
