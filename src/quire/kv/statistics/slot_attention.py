"""Statistics with one number a slot, made from the weights it gets: sums, squares, low looks.

One query's column sums are its weights, so rows with one token need no more than them; nor does a
chunk where only sums are wanted and the query heads are reduced linearly. For the others of a chunk
the weights are computed again (`chunk_weights`).
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
from quire.kernels.gathered_plan import chunk_lane
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


# ---- chunk weights -------------------------------------------------------------------------------

# Attention weights of a chunk of a prompt, computed again: each query's own, not their sum.
#
# What is not linear in the weights (a maximum over heads, squares, a threshold) needs each query's
# row. Queries go in blocks, KV heads one by one, so that the weights never take more than a bounded
# scratch: `BLOCK_NUMBERS` of them, or one query's where a lane is longer than that.

BLOCK_NUMBERS = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LaneWeights:
    """Weights of some queries of one row in one KV head.

    Attributes:
        kv_head: of the layer.
        weights: float32; 0 where a query does not see a slot.
        seen: slots that each query saw, its own included.
    """

    kv_head: int
    weights: Float[Tensor, "query group slot"]
    seen: Int[Tensor, "query 1"]


def chunk_weights(
    query: Float[Tensor, "query num_heads head_dim"],
    pages: LayerPages,
    row: int,
    slots: list[int],
    math: AttentionMath,
) -> Iterator[LaneWeights]:
    """Weights of one row's newest queries, block by block, KV head by KV head.

    Args:
        query: of the row, after RoPE; the last slots are theirs.
        pages: of the layer, without a window.
        row: of the step.
        slots: live slots of each of the layer's lanes.
        math: scale and extras.
    """
    heads = pages.key.shape[1]
    group = query.shape[1] // (pages.num_lanes * heads)
    for kv_head in range(pages.num_lanes * heads):
        lane, held = kv_head // heads, slots[kv_head // heads]
        part = slice(kv_head * group, (kv_head + 1) * group)
        q = query[:, part].transpose(0, 1)[None].float()
        key = _keys(pages, row, lane, kv_head % heads, held)
        all_seen = _causal(len(query), held, q.device)
        exact = None
        if pages.kept is not None:
            place = chunk_lane(pages, row, lane, held=held, num_tokens=len(query))
            _write_promoted(key, pages, place, kv_head % heads)
            exact = full_precision_columns(pages.kept, place, all_seen)
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
    """Keys [1, 1, slots, head_dim] of a lane's head, those of important tokens finer."""
    promoted = pages.promoted
    if promoted is None:
        return
    page = promoted.table[pages.rows[place.row], pages.first_lane + place.lane, 0].long()[None]
    record = records_of(promoted.marks[page], place.positions[None])[0]
    slot = (record >= 0).nonzero()[:, 0]
    found = decode_records(promoted.coded.key, page.expand(len(slot)), record[slot])
    key[0, 0, slot] = found[:, head]


def _causal(queries: int, slots: int, device: torch.device) -> Tensor:
    """[queries, slots]: the last slots are the queries' own."""
    own = torch.arange(slots - queries, slots, device=device)[:, None]
    return torch.arange(slots, device=device) <= own


def _keys(pages: LayerPages, row: int, lane: int, head: int, slots: int) -> Tensor:
    """Float32 keys [1, 1, slots, head_dim] of a lane's live slots."""
    columns = -(-slots // pages.page_tokens)
    numbers = pages.table[pages.rows[row], pages.first_lane + lane, :columns].long()
    if pages.coded is None:
        return pages.key[numbers, head].flatten(0, 1)[None, None, :slots].float()
    return decode_head(pages.coded.key, numbers, head, lane)[None, None, :slots]
