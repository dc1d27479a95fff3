"""TriAttention (Mao et al. 2026, arXiv 2604.04921): keys scored by the centres of queries.

RoPE rotates the two elements of a band f of a head by the angle position * w_f, and queries before
it concentrate around a centre E[q_f]. A key k, p positions before a query at the centre, has the
logit of a trigonometric series in p. Queries away from the centre add the norms of the bands,
weighted by one minus the concentration R_f = |E[q_f]| / E[|q_f|]:

    S(k, p) = sum_f |E[q_f]| |k_f| cos(w_f p + arg E[q_f] - arg k_f)
            + sum_f (E[|q_f|] - |E[q_f]|) |k_f|
    score   = max over the group of the z-score, over the lane's tokens, of the mean of S(k, p + d)

over the distances d = 1, 2, 4, ..., `max_offset` after the newest token. The first sum is the
product of the key after RoPE with the centre rotated to these positions, whose mean is one matrix.
Worked: one query head and one band, w = pi / 2; the newest token is at position 0, so d = 1, 2 are
positions 1 and 2. The centre (1, 0), turned by 90 and 180 degrees to (0, 1) and (-1, 0), is
(-0.5, 0.5) on average. A key that is (0, 2) after RoPE has 1 in the first sum, and 0.5 * 2 in the
second if E[|q|] is 1.5: S = 2.

Differs from the paper: centres are those of the request's own queries after the sinks, recorded
while they are computed, so that no calibration file is needed; E[|q_f|] is the root of the mean
square. Tokens of the prompt are evicted like others. Elements that RoPE does not rotate, and layers
without it, are bands of one element with w = 0. ALiBi is added to S. The z-scores are over the
tokens after the sinks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import ConfigError, PolicyError
from quire.layout.statistics import MAX, QueryMoments, Statistic, check_reduction
from quire.policies.base import SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView
from quire.policies.windows import reduce_group

MAX_FUTURE_OFFSET = 1 << 20


@register("triattention")
@dataclass(frozen=True, slots=True)
class TriAttention(SinksAndRecent):
    """Retain the keys whose logits with the mean query, at growing distances, are highest.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted, and whose queries are not
            counted.
        recent: number of newest cached tokens that are never evicted.
        max_offset: largest of the distances 1, 2, 4, ... of estimated queries.
        heads: reduction over the query heads of a KV head: mean, max or sum.
    """

    cost = "sums of all queries; at an eviction, two products of the keys"
    has_negative_scores = True
    not_on_latents = "centres are those of the queries of heads before RoPE"

    sinks: int = 4
    max_offset: int = 65536
    heads: str = MAX

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        if not 1 <= self.max_offset <= MAX_FUTURE_OFFSET:
            raise ConfigError(
                f"expected max_offset from 1 to {MAX_FUTURE_OFFSET:,}, got {self.max_offset}"
            )
        check_reduction(self.heads)

    @property
    def _sums(self) -> QueryMoments:
        return QueryMoments(skip=self.sinks, squares=True)

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self._sums,)

    def _future(self, next_position: int) -> Sequence[int]:
        count = self.max_offset.bit_length()
        return [next_position - 1 + (1 << number) for number in range(count)]

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        lanes, dim = view.shape[0], view.head_dim
        record = view.statistic(self._sums).view(lanes, -1, 1 + 2 * dim)
        if view.breaks_contract(record[:, :, 0] < 1):
            raise PolicyError("no query after the sinks was recorded, so none can be estimated")
        centre, squares = (record[:, :, 1:] / record[:, :, :1].clamp_min(1)).tensor_split(2, dim=2)
        # one rotation shows the bands, and the factor on cosines and sines of each element
        turn = view.mean_rotations(lambda _: (1,))
        own = torch.eye(dim, dtype=torch.bool, device=turn.device)
        band, factor = ((turn != 0) | own).float(), turn.square().sum(dim=1, keepdim=True)
        norms = ((numbers * factor) @ band for numbers in (squares, centre.square()))
        spread = next(norms).sqrt() - next(norms).sqrt()  # 0 or more
        keys, turned = view.keys, centre @ view.mean_rotations(self._future).transpose(1, 2)
        # each element of a band of two has the norm of both
        each = spread / band.sum(dim=1, keepdim=True)
        logits = keys @ turned.transpose(1, 2)
        logits += (keys.square() @ band).sqrt() @ each.transpose(1, 2)
        logits, biases = (logits * view.lane_scales).transpose(1, 2), view.biases()
        logits = logits if biases is None else logits + biases[:, :, 0]
        behind = (view.live & ~view.oldest_positions(self.sinks))[:, None]
        tokens = behind.sum(dim=2, keepdim=True).clamp_min(1)
        away = logits - (logits * behind).sum(dim=2, keepdim=True) / tokens
        variance = (away.square() * behind).sum(dim=2, keepdim=True) / tokens
        return reduce_group(away / variance.sqrt().clamp_min(1e-12), self.heads)
