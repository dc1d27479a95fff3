"""Recorders of residual similarity, query moments and newest queries of a lane group."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.device_copies import to_device
from quire.kv.flat_batch import FlatBatch
from quire.kv.statistics.pages import Queries, StatisticPages, StatisticRecords
from quire.layout.statistics import QueryMoments, QueryRing

# How much attention changes the residual stream: sum of cosines and number of tokens.


class ResidualSimilarityStep:
    """Records `ResidualSimilarity` of one lane group in a step in which some row uses it."""

    def __init__(self, place: StatisticPages, batch: FlatBatch) -> None:
        rows = np.flatnonzero(place.active_rows(batch))
        self._records = StatisticRecords.of(
            place, batch.rows[rows], np.zeros(len(rows), dtype=np.int64)
        )
        self._num_kv_heads = place.group.lanes_per_layer * place.group.page_class.heads
        device = place.numbers.device
        self._num_rows = len(batch.rows)
        self._row = to_device(batch.token_row, device)
        self._rows = to_device(rows, device)
        self._tokens = to_device(batch.shape.tokens, device).float()

    def note(self, layer: int, cosine: Float[Tensor, " num_tokens"]) -> None:
        """Add a layer's cosines; `layer` is its index in the group."""
        sums = torch.zeros(self._num_rows, device=cosine.device).index_add_(0, self._row, cosine)
        record = torch.stack([sums, self._tokens], dim=1)[self._rows]
        self._records.add(layer, record[:, None].expand(-1, self._num_kv_heads, -1))


# Count, sum and sum of outer products of all queries before RoPE, those of evicted tokens included.


def moments(
    query: Float[Tensor, "row token num_heads head_dim"],
    counted: Bool[Tensor, "row token"],
    num_kv_heads: int,
) -> Float[Tensor, "row num_kv_heads width"]:
    """Return, per query head: number of counted queries, their sum, sum of their outer products."""
    q = query.float() * counted[:, :, None, None]
    count = counted.sum(dim=1).float()[:, None, None].expand(-1, q.shape[2], 1)
    by_head = q.transpose(1, 2)  # [row, head, token, dim]
    products = by_head.transpose(2, 3) @ by_head
    record = torch.cat([count, q.sum(dim=1), products.flatten(2)], dim=2)
    return record.reshape(len(q), num_kv_heads, -1)


class MomentsStep:
    """Records `QueryMoments` of one lane group in a step in which some row uses them."""

    needs_pre_rope_keys = True

    def __init__(self, place: StatisticPages, batch: FlatBatch, positions: np.ndarray) -> None:
        assert isinstance(place.statistic, QueryMoments), "expected pages of QueryMoments"
        rows = np.flatnonzero(place.active_rows(batch))
        device = place.numbers.device
        self._records = StatisticRecords.of(
            place, batch.rows[rows], np.zeros(len(rows), dtype=np.int64)
        )
        self._counted = to_device(positions >= place.statistic.skip, device)
        self._num_kv_heads = place.group.lanes_per_layer * place.group.page_class.heads
        # one-token rows come first in the batch: one product for all of them
        ones = rows[rows < batch.shape.num_decode]
        self._ones = to_device(ones, device)
        starts, tokens = batch.shape.starts, batch.shape.tokens
        self._chunks = [
            slice(int(starts[row]), int(starts[row] + tokens[row])) for row in rows[len(ones) :]
        ]

    def note(self, layer: int, queries: Queries) -> None:
        """Add a layer's queries; `layer` is its index in the group."""
        query = queries.before_rope
        if query is None:
            raise InvariantError("query moments need queries before RoPE, got none")
        added = [
            self._moments(query[part][None], self._counted[part][None]) for part in self._chunks
        ]
        if len(self._ones):
            ones = (query[self._ones][:, None], self._counted[self._ones][:, None])
            added.insert(0, self._moments(*ones))
        self._records.add(layer, torch.cat(added))

    def _moments(self, query: Tensor, counted: Tensor) -> Tensor:
        return moments(query, counted, self._num_kv_heads)


# The newest queries after RoPE: the query at position p is in record p % window.


def ring_records(
    query: Float[Tensor, "record num_heads head_dim"],
    positions: Int[Tensor, " record"],
    num_kv_heads: int,
) -> Float[Tensor, "record num_kv_heads width"]:
    """Concatenate the group's queries of each record, followed by position + 1."""
    by_head = query.float().reshape(len(query), num_kv_heads, -1)
    mark = (positions + 1).float()[:, None, None].expand(-1, num_kv_heads, 1)
    return torch.cat([by_head, mark], dim=2)


class RingStep:
    """Records the `QueryRing` of one lane group in a step in which some row uses it."""

    needs_pre_rope_keys = False

    def __init__(self, place: StatisticPages, batch: FlatBatch, positions: np.ndarray) -> None:
        assert isinstance(place.statistic, QueryRing), "expected pages of a QueryRing"
        window, tokens = place.statistic.window, batch.shape.tokens
        newest = batch.token_offset >= tokens[batch.token_row] - window  # others are overwritten
        chosen = np.flatnonzero(newest & place.active_rows(batch)[batch.token_row])
        device = place.numbers.device
        self._records = StatisticRecords.of(
            place, batch.rows[batch.token_row[chosen]], positions[chosen] % window
        )
        self._tokens = to_device(chosen, device)
        self._positions = to_device(positions[chosen], device)
        self._num_kv_heads = place.group.lanes_per_layer * place.group.page_class.heads

    def note(self, layer: int, queries: Queries) -> None:
        """Write a layer's queries; `layer` is its index in the group."""
        fresh = ring_records(queries.query[self._tokens], self._positions, self._num_kv_heads)
        self._records.write(layer, fresh)
