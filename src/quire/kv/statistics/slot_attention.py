"""Statistics with one number per slot: attention sums, sums of squares, low-attention counts.

For a row with one query, the column sums are its attention weights, so column sums suffice. They
also suffice for a prefill chunk if only sums are needed and query heads are reduced linearly. In
all other cases the weights of the chunk are recomputed (`chunk_weights`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int
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
from quire.kernels.coded import decode_head
from quire.kernels.dense import weights_dense
from quire.kernels.device_copies import to_device
from quire.kernels.gathered import chunk_lane
from quire.kernels.token_precision import (
    ChunkLane,
    decode_records,
    full_precision_columns,
    records_of,
)
from quire.kv.flat_batch import FlatBatch
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
    """One per-slot statistic in one step."""

    place: StatisticPages
    count: AttentionMeasure  # the measure to accumulate
    heads: str  # how query heads are reduced; APART if each has its own number
    rows: tuple[StatisticRows, ...]  # for each layer, those for which column sums suffice
    again: NDArray[np.bool_]  # bool [rows of the step] whose weights are recomputed

    @property
    def needs_sums(self) -> bool:
        return bool(self.rows) and len(self.rows[0].step_rows) > 0

    def tally_of(self, layer: int) -> AttentionStatistic:
        """Return the location of a layer's numbers; `layer` is its index in the group."""
        return AttentionStatistic(
            numbers=self.place.numbers,
            table=self.place.device_table.current(),
            first_lane=layer * self.place.group.lanes_per_layer,
            count=self.count,
            heads=MEAN if self.heads == APART else self.heads,  # APART: the mean of one head
        )

    def counted(self, weights: Tensor, seen: Tensor) -> Tensor:
        """Accumulate one KV head's weights [query, group, slot] to [head with a number, slot]."""
        slots = weights.shape[-1]
        received = weights if self.heads == APART else over_group(weights, self.heads)[:, None]
        added = measure_attention(
            self.count, received, seen[:, None].expand(-1, received.shape[1], -1)
        )
        if self.count is AttentionMeasure.LOW:  # slots after the query's own are masked (causal)
            added = added * (torch.arange(slots, device=added.device) < seen)[:, None]
        return added.sum(dim=0)


class AttentionStatisticsStep:
    """All per-slot statistics of one lane group in one step; slots are [rows, lanes]."""

    def __init__(
        self, places: list[StatisticPages], batch: FlatBatch, slots: NDArray[np.int32]
    ) -> None:
        self._batch, self._slots = batch, slots
        self._watched = [_watched(place, batch, slots) for place in places]
        self._again = np.flatnonzero(np.any([w.again for w in self._watched], axis=0))

    @property
    def needs_sums(self) -> bool:
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
        """Add the attention of a layer's slots; `layer` is its index in the group."""
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
            for statistic, total in zip(watched, sums, strict=True):
                added = statistic.counted(part.weights, part.seen)
                total[part.kv_head, :, : added.shape[1]] += added
        for statistic, total in zip(watched, sums, strict=True):
            table_row = int(self._batch.rows[row])
            _put_chunk(statistic.tally_of(layer), table_row, slots, tokens, total.flatten(0, 1))


def _put_chunk(
    tally: AttentionStatistic, row: int, slots: list[int], tokens: int, sums: Tensor
) -> None:
    """Write one row's numbers [heads, slots] into its pages."""
    heads, page_tokens = tally.numbers.shape[1:3]
    for lane, held in enumerate(slots):
        slot = torch.arange(held, device=sums.device)
        pages = tally.table[row, tally.first_lane + lane, slot // page_tokens].long()
        added = sums[lane * heads : (lane + 1) * heads, :held].T
        put(tally.numbers, pages, slot % page_tokens, added, slot < held - tokens)


def _watched(place: StatisticPages, batch: FlatBatch, slots: NDArray[np.int32]) -> Watched:
    statistic = place.statistic
    assert isinstance(statistic, OfWeights), "expected a statistic of attention weights"
    active = place.active_rows(batch)
    linear = isinstance(statistic, AttentionSum) and statistic.reduction != MAX
    summed = active & ((batch.shape.tokens == 1) | linear)
    return Watched(
        place=place,
        count=COUNTS[type(statistic)],
        heads=statistic.reduction,
        rows=_statistic_rows(place, batch, slots, np.flatnonzero(summed)),
        again=active & ~summed,
    )


def _statistic_rows(
    place: StatisticPages, batch: FlatBatch, slots: NDArray[np.int32], rows: NDArray[np.int64]
) -> tuple[StatisticRows, ...]:
    device, layers = place.numbers.device, len(place.group.layers)
    shape = (len(rows), layers, place.group.lanes_per_layer)
    by_layer = slots[rows].reshape(shape).swapaxes(0, 1)
    step_rows, table_rows, fresh, held = (
        to_device(x, device) for x in (rows, batch.rows[rows], batch.shape.tokens[rows], by_layer)
    )
    return tuple(
        StatisticRows(step_rows, table_rows, held[layer], fresh) for layer in range(layers)
    )


# Recomputed attention weights of a prefill chunk, per query instead of summed over queries.
#
# Measures that are not linear in the weights (maximum over heads, squares, threshold) need the row
# of each query. Queries are processed in blocks, KV heads one by one, so the weights need a bounded
# scratch: `BLOCK_NUMBERS` weights, or those of one query if a lane is longer.

BLOCK_NUMBERS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LaneWeights:
    """Attention weights of some queries of one row in one KV head."""

    kv_head: int
    weights: Float[Tensor, "query group slot"]  # float32; 0 for masked slots
    seen: Int[Tensor, "query 1"]  # slots that each query attends to, its own included


def chunk_weights(
    query: Float[Tensor, "query num_heads head_dim"],
    pages: LayerPages,
    row: int,
    slots: list[int],
    math: AttentionMath,
) -> Iterator[LaneWeights]:
    """Yield the weights of one row's newest queries, KV head by KV head, block by block."""
    heads = pages.key.shape[1]
    group = query.shape[1] // (pages.num_lanes * heads)
    for kv_head in range(pages.num_lanes * heads):
        lane, held = kv_head // heads, slots[kv_head // heads]
        part = slice(kv_head * group, (kv_head + 1) * group)
        q = query[:, part].transpose(0, 1)[None].float()
        key = _keys(pages, row, lane, kv_head % heads, held)
        all_seen = _causal(len(query), held, q.device)
        exact = None
        if pages.full_precision is not None:
            place = chunk_lane(pages, row, lane, held=held, num_tokens=len(query))
            _write_promoted(key, pages, place, kv_head % heads)
            exact = full_precision_columns(pages.full_precision, place, all_seen)
            key = exact.append_to(key, exact.key[:, kv_head % heads, None])
            all_seen = exact.seen[0, 0]
        sinks = None if math.sinks is None else math.sinks[part]
        own_math = replace(math, sinks=sinks)
        block = max(1, BLOCK_NUMBERS // (group * held))
        for start in range(0, len(query), block):
            some, mask = (x[..., start : start + block, :] for x in (q, all_seen))
            weights = weights_dense(some, key, math=own_math, seen=mask[None, None])
            by_slot = weights[0, 0] if exact is None else exact.by_slot(weights[0, 0])
            yield LaneWeights(kv_head, by_slot.transpose(0, 1), mask.sum(dim=1, keepdim=True))


def _write_promoted(key: Tensor, pages: LayerPages, place: ChunkLane, head: int) -> None:
    """Overwrite keys [1, 1, slots, head_dim] of promoted tokens with their finer codes, decoded."""
    promoted = pages.promoted
    if promoted is None:
        return
    page = promoted.table[pages.rows[place.row], pages.first_lane + place.lane, 0].long()[None]
    record = records_of(promoted.marks[page], place.positions[None])[0]
    slot = (record >= 0).nonzero()[:, 0]
    found = decode_records(promoted.coded.key, page.expand(len(slot)), record[slot])
    key[0, 0, slot] = found[:, head]


def _causal(queries: int, slots: int, device: torch.device) -> Tensor:
    """Return the causal mask [queries, slots]; the last slots are the queries' own."""
    own = torch.arange(slots - queries, slots, device=device)[:, None]
    return torch.arange(slots, device=device) <= own


def _keys(pages: LayerPages, row: int, lane: int, head: int, slots: int) -> Tensor:
    """Return the float32 keys [1, 1, slots, head_dim] of a lane's live slots."""
    columns = -(-slots // pages.page_tokens)
    numbers = pages.table[pages.rows[row], pages.first_lane + lane, :columns].long()
    if pages.coded is None:
        return pages.key[numbers, head].flatten(0, 1)[None, None, :slots].float()
    return decode_head(pages.coded.key, numbers, head, lane)[None, None, :slots]
