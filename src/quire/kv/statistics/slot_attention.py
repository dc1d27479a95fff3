"""Statistics with one number a slot, made from the weights it gets: sums, squares, low looks.

One query's column sums are its weights, so rows with one token need no more than them; nor does a
chunk where only sums are wanted and the query heads are reduced linearly. For the others of a chunk
the weights are computed again (`chunk_weights`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.attention_statistics import measure_attention, over_group, put
from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    AttentionMeasure,
    AttentionStatistic,
    LayerPages,
    StatisticRows,
)
from quire.kv.flat_batch import FlatBatch
from quire.kv.statistics.chunk_weights import chunk_weights
from quire.kv.statistics.pages import StatisticPages
from quire.layout.statistics import (
    APART,
    MAX,
    MEAN,
    AttentionSum,
    LowAttentionCount,
    OfWeights,
    SquareSum,
    Statistic,
)

COUNTS: dict[type[Statistic], AttentionMeasure] = {
    AttentionSum: AttentionMeasure.SUM,
    SquareSum: AttentionMeasure.SQUARES,
    LowAttentionCount: AttentionMeasure.LOW,
}


@dataclass(frozen=True, slots=True)
class Watched:
    """One statistic in one step.

    Attributes:
        place: its pages.
        count: what is counted.
        heads: how query heads are reduced; APART where each has its own number.
        rows: for each layer of the group, the rows whose column sums are all it needs.
        again: bool [rows of the step], those whose weights are computed again.
    """

    place: StatisticPages
    count: AttentionMeasure
    heads: str
    rows: tuple[StatisticRows, ...]
    again: NDArray[np.bool_]

    @property
    def needs_sums(self) -> bool:
        """Whether any row needs column sums."""
        return bool(self.rows) and len(self.rows[0].step_rows) > 0

    def tally_of(self, layer: int) -> AttentionStatistic:
        """Where a layer's numbers are; `layer` is counted inside the group."""
        return AttentionStatistic(
            numbers=self.place.numbers,
            table=self.place.device_table.current(),
            first_lane=layer * self.place.group.lanes_per_layer,
            count=self.count,
            heads=MEAN if self.heads == APART else self.heads,  # of one
        )

    def counted(self, weights: Tensor, seen: Tensor) -> Tensor:
        """Looks of one KV head's weights [query, group, slot] as [head with a number, slot]."""
        slots = weights.shape[-1]
        received = weights if self.heads == APART else over_group(weights, self.heads)[:, None]
        added = measure_attention(
            self.count, received, seen[:, None].expand(-1, received.shape[1], -1)
        )
        if self.count is AttentionMeasure.LOW:  # slots behind a query's own were not looked at
            added = added * (torch.arange(slots, device=added.device) < seen)[:, None]
        return added.sum(dim=0)


class AttentionStatisticsStep:
    """All such statistics of one lane group in one step.

    Args:
        places: at least one; `active_rows` of each may be none.
        batch: the step.
        slots: [rows, lanes] of the group, the step's tokens included.
    """

    def __init__(
        self, places: list[StatisticPages], batch: FlatBatch, slots: NDArray[np.int32]
    ) -> None:
        self._batch, self._slots = batch, slots
        self._watched = [_watched(place, batch, slots) for place in places]
        self._again = np.flatnonzero(np.any([w.again for w in self._watched], axis=0))

    @property
    def needs_sums(self) -> bool:
        """Whether attention is to give column sums."""
        return any(watched.needs_sums for watched in self._watched)

    def note(
        self,
        layer: int,
        backend: AttentionBackend,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        column_sums: Tensor | None,
    ) -> None:
        """Add what a layer's slots got; `layer` is counted inside the group."""
        for watched in self._watched:
            if watched.needs_sums and column_sums is not None:
                backend.tally(watched.tally_of(layer), watched.rows[layer], column_sums)
        for row in self._again.tolist():
            self._note_chunk(layer, row, pages, math, query)

    def _note_chunk(
        self, layer: int, row: int, pages: LayerPages, math: AttentionMath, query: Tensor
    ) -> None:
        start, tokens = int(self._batch.shape.starts[row]), int(self._batch.shape.tokens[row])
        slots = self._slots[row].reshape(-1, pages.num_lanes)[layer].tolist()
        watched = [w for w in self._watched if w.again[row]]
        heads = pages.key.shape[1]
        sums = [
            query.new_zeros(
                (pages.num_lanes * heads, w.place.numbers.shape[1] // heads, max(slots)),
                dtype=torch.float32,
            )
            for w in watched
        ]
        for part in chunk_weights(query[start : start + tokens], pages, row, slots, math):
            for one, own in zip(watched, sums, strict=True):
                added = one.counted(part.weights, part.seen)
                own[part.kv_head, :, : added.shape[1]] += added
        for one, own in zip(watched, sums, strict=True):
            table_row = int(self._batch.rows[row])
            _put_chunk(one.tally_of(layer), table_row, slots, tokens, own.flatten(0, 1))


def _put_chunk(
    tally: AttentionStatistic, row: int, slots: list[int], tokens: int, sums: Tensor
) -> None:
    """Put one row's numbers [heads, slots] into its pages."""
    heads, page_tokens = tally.numbers.shape[1:3]
    for lane, held in enumerate(slots):
        slot = torch.arange(held, device=sums.device)
        pages = tally.table[row, tally.first_lane + lane, slot // page_tokens].long()
        added = sums[lane * heads : (lane + 1) * heads, :held].T
        put(tally.numbers, pages, slot % page_tokens, added, slot < held - tokens)


def _watched(place: StatisticPages, batch: FlatBatch, slots: NDArray[np.int32]) -> Watched:
    statistic = place.statistic
    assert isinstance(statistic, OfWeights), "made from weights"
    active = place.active_rows(batch)
    linear = isinstance(statistic, AttentionSum) and statistic.reduction != MAX
    summed = active & ((batch.shape.tokens == 1) | linear)
    return Watched(
        place=place,
        count=COUNTS[type(statistic)],
        heads=statistic.reduction,
        rows=_look_rows(place, batch, slots, np.flatnonzero(summed)),
        again=active & ~summed,
    )


def _look_rows(
    place: StatisticPages, batch: FlatBatch, slots: NDArray[np.int32], rows: NDArray[np.int64]
) -> tuple[StatisticRows, ...]:
    device, layers = place.numbers.device, len(place.group.layers)
    shape = (len(rows), layers, place.group.lanes_per_layer)
    by_layer = slots[rows].reshape(shape).swapaxes(0, 1)
    step_rows, table_rows, fresh, held = (
        torch.from_numpy(np.ascontiguousarray(x)).to(device)
        for x in (rows, batch.rows[rows], batch.shape.tokens[rows], by_layer)
    )
    return tuple(
        StatisticRows(step_rows, table_rows, held[layer], fresh) for layer in range(layers)
    )
