"""Count, sum and sum of outer products of all queries before RoPE, evicted tokens' included."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from quire.errors import InvariantError
from quire.kv.flat_batch import FlatBatch
from quire.kv.statistics.pages import Queries, Records, StatisticPages
from quire.layout.statistics import QueryMoments


def moments(
    query: Float[Tensor, "row token num_heads head_dim"],
    counted: Bool[Tensor, "row token"],
    num_kv_heads: int,
) -> Float[Tensor, "row num_kv_heads width"]:
    """For each query head: how many count, their sum, the sum of their outer products."""
    q = query.float() * counted[:, :, None, None]
    count = counted.sum(dim=1).float()[:, None, None].expand(-1, q.shape[2], 1)
    by_head = q.transpose(1, 2)  # [row, head, token, dim]
    products = by_head.transpose(2, 3) @ by_head
    record = torch.cat([count, q.sum(dim=1), products.flatten(2)], dim=2)
    return record.reshape(len(q), num_kv_heads, -1)


class MomentsStep:
    """The moments of one lane group in one step. Not made where no row has them.

    Args:
        place: a `QueryMoments`.
        batch: the step.
        positions: logical positions of its tokens.
    """

    needs_unrotated = True

    def __init__(self, place: StatisticPages, batch: FlatBatch, positions: np.ndarray) -> None:
        assert isinstance(place.statistic, QueryMoments), "made for moments"
        rows = np.flatnonzero(place.active_rows(batch))
        device = place.numbers.device
        self._records = Records.of(place, batch.rows[rows], np.zeros(len(rows), dtype=np.int64))
        self._counted = torch.from_numpy(positions >= place.statistic.skip).to(device)
        self._num_kv_heads = place.group.lanes_per_layer * place.group.page_class.heads
        # rows of one token lie side by side at the front: one product for all of them
        ones = rows[rows < batch.shape.num_decode]
        self._ones = torch.from_numpy(ones).to(device)
        starts, tokens = batch.shape.starts, batch.shape.tokens
        self._chunks = [
            slice(int(starts[row]), int(starts[row] + tokens[row])) for row in rows[len(ones) :]
        ]

    def note(self, layer: int, queries: Queries) -> None:
        """Add a layer's queries; `layer` is counted inside the group."""
        query = queries.before_rope
        if query is None:
            raise InvariantError("moments are of queries before RoPE, and nobody gave them")
        added = [
            self._moments(query[part][None], self._counted[part][None]) for part in self._chunks
        ]
        if len(self._ones):
            ones = (query[self._ones][:, None], self._counted[self._ones][:, None])
            added.insert(0, self._moments(*ones))
        self._records.add(layer, torch.cat(added))

    def _moments(self, query: Tensor, counted: Tensor) -> Tensor:
        return moments(query, counted, self._num_kv_heads)
