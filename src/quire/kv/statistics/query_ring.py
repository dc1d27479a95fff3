"""The newest queries after RoPE: the query at position p stands in record p % window."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kv.flat_batch import FlatBatch
from quire.kv.statistics.pages import Queries, Records, StatisticPages
from quire.layout.statistics import QueryRing


def ring_records(
    query: Float[Tensor, "record num_heads head_dim"],
    positions: Int[Tensor, " record"],
    num_kv_heads: int,
) -> Float[Tensor, "record num_kv_heads width"]:
    """The group's queries one behind the other, then position + 1 as a number."""
    by_head = query.float().reshape(len(query), num_kv_heads, -1)
    mark = (positions + 1).float()[:, None, None].expand(-1, num_kv_heads, 1)
    return torch.cat([by_head, mark], dim=2)


class RingStep:
    """The ring of one lane group in one step. Not made where no row has one.

    Args:
        place: a `QueryRing`.
        batch: the step.
        positions: logical positions of its tokens.
    """

    needs_unrotated = False

    def __init__(self, place: StatisticPages, batch: FlatBatch, positions: np.ndarray) -> None:
        assert isinstance(place.statistic, QueryRing), "made for a ring"
        window, tokens = place.statistic.window, batch.shape.tokens
        newest = batch.token_offset >= tokens[batch.token_row] - window  # the last to be written
        chosen = np.flatnonzero(newest & place.active_rows(batch)[batch.token_row])
        device = place.numbers.device
        self._records = Records.of(
            place, batch.rows[batch.token_row[chosen]], positions[chosen] % window
        )
        self._tokens = torch.from_numpy(chosen).to(device)
        self._positions = torch.from_numpy(positions[chosen]).to(device)
        self._num_kv_heads = place.group.lanes_per_layer * place.group.page_class.heads

    def note(self, layer: int, queries: Queries) -> None:
        """Write a layer's queries; `layer` is counted inside the group."""
        fresh = ring_records(queries.query[self._tokens], self._positions, self._num_kv_heads)
        self._records.write(layer, fresh)
