"""Recording of attention statistics in a step; `quire.layout.statistics` defines each statistic.

Statistics of a lane group are pages of their own. They are recorded layer by layer, in three ways.

One number per slot (`AttentionStatisticsStep`): attention sums, sums of squares, low-attention
counts. For a row with one query, the column sums are its attention weights, so column sums suffice.
They also suffice for a prefill chunk if only sums are needed and query heads are reduced linearly.
In all other cases the weights of the chunk are recomputed (`chunk_weights`).

Records of queries: their moments (`MomentsStep`), or the newest ones (`RingStep`).

One record per lane: how much attention changes the residual stream (`ResidualSimilarityStep`).

Layers that read the same lanes count in the same numbers: each query of each of these layers is a
query. Sums add up; numbers and records of single query heads hold those of the first layer, then
those of the next one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    AttentionMeasure,
    AttentionStatistic,
    LayerPages,
    LayerRecords,
    StatisticRows,
    StoredQueries,
)
from quire.kernels.coded import decode_head
from quire.kernels.dense import weights_dense
from quire.kernels.device_copies import to_device
from quire.kernels.gathered import chunk_lane, lane_positions
from quire.kernels.index import indexed_layer
from quire.kernels.latent import folded
from quire.kernels.paging import measure_attention, over_group, put
from quire.kernels.token_precision import (
    ChunkLane,
    decode_records,
    full_precision_columns,
    records_of,
)
from quire.kv.flat_batch import DeviceTable, FlatBatch, Scoring
from quire.kv.tables import LaneTable
from quire.layout.pages import KEY, VALUE, LaneGroup
from quire.layout.statistics import (
    APART,
    MAX,
    MEAN,
    AttentionMax,
    AttentionSum,
    LowAttentionCount,
    OfWeights,
    QueryMoments,
    QueryRing,
    ResidualSimilarity,
    SquareSum,
    Statistic,
)


@dataclass(frozen=True, slots=True)
class StatisticPages:
    """The pages of one statistic."""

    group: LaneGroup
    statistic: Statistic
    numbers: Float[Tensor, "page head record width"]  # float32 view of all pages of the class
    table: LaneTable
    device_table: DeviceTable  # `table` as a tensor
    readers: int = 1  # layers that read the same lanes

    @property
    def is_apart(self) -> bool:
        """Whether each query head has its own numbers."""
        return isinstance(self.statistic, OfWeights) and self.statistic.reduction == APART

    def active_rows(self, batch: FlatBatch) -> NDArray[np.bool_]:
        """Return a mask [rows of the step] of the rows that use this statistic."""
        active: NDArray[np.bool_] = self.table.active[batch.rows]
        return active


@dataclass(frozen=True, slots=True)
class StatisticRecords:
    """Distinct records in the lanes of all layers of a group."""

    numbers: Float[Tensor, "page head record width"]  # float32 view of all pages of the statistic
    pages: Tensor  # int64 [layers, records, lanes of a layer]
    offsets: Tensor  # int64 [records, 1] in the page

    @classmethod
    def of(
        cls, place: StatisticPages, rows: NDArray[np.int64], records: NDArray[np.int64]
    ) -> "StatisticRecords":
        """Locate record `records[i]` of table row `rows[i]` in every lane."""
        group, device = place.group, place.numbers.device
        column, offset = np.divmod(records, group.page_class.tokens)
        lane = np.arange(group.num_lanes)
        pages = place.table.pages[rows[:, None], lane, column[:, None]].astype(np.int64)
        by_layer = pages.reshape(len(rows), len(group.layers), group.lanes_per_layer).swapaxes(0, 1)
        return cls(
            numbers=place.numbers,
            pages=to_device(by_layer, device),
            offsets=to_device(offset[:, None].copy(), device),
        )

    def add(
        self, layer: int, more: Float[Tensor, "record num_kv_heads width"], reader: int = 0
    ) -> None:
        """Add to these records of a layer, to the part of one of the layers that read its lanes."""
        first = reader * more.shape[2]
        numbers = slice(first, first + more.shape[2])
        place = (self.pages[layer], slice(None), self.offsets, numbers)
        by_lane = more.reshape(*self.pages[layer].shape, -1, more.shape[2])
        self.numbers[place] = self.numbers[place] + by_lane


@dataclass(frozen=True, slots=True)
class Queries:
    """Queries of a layer, as input of query statistics."""

    query: Float[Tensor, "num_tokens num_heads head_dim"]  # of the flat batch after RoPE
    # None if no statistic needs them
    before_rope: Float[Tensor, "num_tokens num_heads head_dim"] | None


def positions_of(batch: FlatBatch, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Logical positions [tokens] of the batch's tokens; `lengths` include them."""
    first = lengths[batch.rows] - batch.shape.tokens
    positions: NDArray[np.int64] = first[batch.token_row] + batch.token_offset
    return positions


COUNTS: dict[type[Statistic], AttentionMeasure] = {
    AttentionSum: AttentionMeasure.SUM,
    SquareSum: AttentionMeasure.SQUARES,
    LowAttentionCount: AttentionMeasure.LOW,
    AttentionMax: AttentionMeasure.SUM,  # of one query; maxima are computed from the weights
}


def tally_of(place: StatisticPages, layer: int, reader: int = 0) -> AttentionStatistic:
    """Return the location of a layer's numbers.

    Args:
        place: pages of the statistic.
        layer: index in the group of the layer whose lanes are read.
        reader: which of the layers that read these lanes.
    """
    statistic, numbers = place.statistic, place.numbers
    assert isinstance(statistic, OfWeights), "expected a statistic of attention weights"
    heads = statistic.reduction
    if place.is_apart and place.readers > 1:
        own = numbers.shape[1] // place.readers
        numbers = numbers[:, reader * own : (reader + 1) * own]
    return AttentionStatistic(
        numbers=numbers,
        table=place.device_table.current(),
        first_lane=layer * place.group.lanes_per_layer,
        count=COUNTS[type(statistic)],
        heads=MEAN if heads == APART else heads,  # APART: the mean of one head
    )


@dataclass(frozen=True, slots=True)
class Watched:
    """One per-slot statistic in one step."""

    place: StatisticPages
    count: AttentionMeasure  # the measure to accumulate
    heads: str  # how query heads are reduced; APART if each has its own number
    summed: NDArray[np.int64]  # rows of the step for which column sums suffice
    slots: NDArray[np.int32]  # their live slots [layers, rows, lanes of a layer]
    rows: tuple[StatisticRows, ...]  # they, for each layer; on a CPU, `slots` is their memory
    again: NDArray[np.bool_]  # bool [rows of the step] whose weights are recomputed

    @property
    def needs_sums(self) -> bool:
        return len(self.summed) > 0

    def tally_of(self, layer: int, reader: int = 0) -> AttentionStatistic:
        return tally_of(self.place, layer, reader)

    def counted(self, weights: Tensor, seen: Tensor) -> Tensor:
        """Accumulate one KV head's weights [query, group, slot] to [head with a number, slot]."""
        slots = weights.shape[-1]
        received = weights if self.heads == APART else over_group(weights, self.heads)[:, None]
        if isinstance(self.place.statistic, AttentionMax):
            return received.amax(dim=0)
        added = measure_attention(
            self.count, received, seen[:, None].expand(-1, received.shape[1], -1)
        )
        if self.count is AttentionMeasure.LOW:  # slots after the query's own are masked (causal)
            added = added * (torch.arange(slots, device=added.device) < seen)[:, None]
        return added.sum(dim=0)


class AttentionStatisticsStep:
    """All per-slot statistics of one lane group in one step; slots are [rows, lanes]."""

    def __init__(
        self,
        places: list[StatisticPages],
        batch: FlatBatch,
        slots: NDArray[np.int32],
        scoring: Scoring | None = None,
    ) -> None:
        self._batch, self._slots, self._scoring = batch, slots, scoring
        self._watched = [_watched(place, batch, slots) for place in places]
        self._again = np.flatnonzero(np.any([w.again for w in self._watched], axis=0))

    @property
    def needs_sums(self) -> bool:
        return any(watched.needs_sums for watched in self._watched)

    @property
    def reads_queries(self) -> bool:
        return len(self._again) > 0

    def tallies(self, layer: int) -> tuple[tuple[AttentionStatistic, StatisticRows], ...] | None:
        """Return a layer's statistics of column sums; None if some need the weights themselves."""
        if len(self._again):
            return None
        return tuple((w.tally_of(layer), w.rows[layer]) for w in self._watched)

    def advance(self, slots: NDArray[np.int32]) -> None:
        """Change the live slots to those of the next step of the same decode rows, on a CPU."""
        for watched in self._watched:
            watched.slots[:] = _slots_by_layer(watched.place, slots[watched.summed])

    def note(
        self,
        layer: int,
        backend: AttentionBackend,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        column_sums: Tensor | None,
        reader: int,
    ) -> None:
        """Add the attention of a layer's slots; `layer` is its index in the group."""
        for watched in self._watched:
            if watched.needs_sums and column_sums is not None:
                rows = watched.rows[layer]
                if reader and not watched.place.is_apart:  # the first layer has begun them
                    rows = replace(rows, fresh=torch.zeros_like(rows.fresh))
                backend.tally(watched.tally_of(layer, reader), rows, column_sums)
        for row in self._again.tolist():
            self._note_chunk(layer, row, pages, math, query, reader)

    def _note_chunk(
        self,
        layer: int,
        row: int,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        reader: int,
    ) -> None:
        start, tokens = int(self._batch.shape.starts[row]), int(self._batch.shape.tokens[row])
        slots = self._slots[row].reshape(-1, pages.num_lanes)[layer].tolist()
        watched = [w for w in self._watched if w.again[row]]
        heads, tallies = pages.key.shape[1], [w.tally_of(layer, reader) for w in watched]
        sums = [
            query.new_zeros(
                (pages.num_lanes * heads, tally.numbers.shape[1] // heads, max(slots)),
                dtype=torch.float32,
            )
            for tally in tallies
        ]
        by_layer = self._slots.reshape(len(self._slots), -1, pages.num_lanes)[:, layer]
        indexed = indexed_layer(math, self._batch.shape, by_layer, pages)
        if indexed is not None and row in indexed.select():
            math = replace(math, selected=indexed.seen(np.array([row])))
        for part in chunk_weights(query[start : start + tokens], pages, row, slots, math):
            for statistic, total in zip(watched, sums, strict=True):
                added = statistic.counted(part.weights, part.seen)
                of_head = total[part.kv_head, :, : added.shape[1]]
                of_head.copy_(self._combine(of_head, added))
        for statistic, tally, total in zip(watched, tallies, sums, strict=True):
            table_row = int(self._batch.rows[row])
            fresh = max(slots) if self._scoring is not None and self._scoring.begins else tokens
            fresh = 0 if reader and not statistic.place.is_apart else fresh
            _put_chunk(tally, table_row, slots, fresh, total.flatten(0, 1), self._combine)

    @property
    def _combine(self) -> Callable[[Tensor, Tensor], Tensor]:
        """How numbers of a slot from several queries become one."""
        return torch.add if self._scoring is None else torch.maximum


def _put_chunk(
    tally: AttentionStatistic,
    row: int,
    slots: list[int],
    tokens: int,
    sums: Tensor,
    combine: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Write one row's numbers [heads, slots] into its pages."""
    heads, page_tokens = tally.numbers.shape[1:3]
    for lane, held in enumerate(slots):
        slot = torch.arange(held, device=sums.device)
        pages = tally.table[row, tally.first_lane + lane, slot // page_tokens].long()
        added = sums[lane * heads : (lane + 1) * heads, :held].T
        put(tally.numbers, pages, slot % page_tokens, added, slot < held - tokens, combine)


def _watched(place: StatisticPages, batch: FlatBatch, slots: NDArray[np.int32]) -> Watched:
    statistic = place.statistic
    assert isinstance(statistic, OfWeights), "expected a statistic of attention weights"
    active = place.active_rows(batch)
    linear = isinstance(statistic, AttentionSum) and statistic.reduction != MAX
    alone = (batch.shape.tokens == 1) & (statistic.scoring is None)
    summed = active & (alone | linear)
    rows, device = np.flatnonzero(summed), place.numbers.device
    by_layer = _slots_by_layer(place, slots[rows])
    number = np.full(len(batch.rows), -1, dtype=np.int32)
    number[rows] = np.arange(len(rows))
    step_rows, table_rows, fresh, held, numbers = (
        to_device(x, device)
        for x in (rows, batch.rows[rows], batch.shape.tokens[rows], by_layer, number)
    )
    return Watched(
        place=place,
        count=COUNTS[type(statistic)],
        heads=statistic.reduction,
        summed=rows,
        slots=by_layer,
        rows=tuple(
            StatisticRows(step_rows, table_rows, own, fresh, int(slots.max(initial=0)), numbers)
            for own, slots in zip(held, by_layer, strict=True)
        ),
        again=active & ~summed,
    )


def _slots_by_layer(place: StatisticPages, slots: NDArray[np.int32]) -> NDArray[np.int32]:
    shape = (len(slots), len(place.group.layers), place.group.lanes_per_layer)
    return np.ascontiguousarray(slots.reshape(shape).swapaxes(0, 1))


BLOCK_NUMBERS = 4 * 1024 * 1024
"""Weights that `chunk_weights` computes at a time, or those of one query if a lane is longer."""


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
    """Yield the weights of one row's newest queries, KV head by KV head, block by block.

    Measures that are not linear in the weights (maximum over heads, squares, threshold) need the
    weights of each query. The blocks bound the scratch memory.
    """
    heads = pages.key.shape[1]
    group = query.shape[1] // (pages.num_lanes * heads)
    for kv_head in range(pages.num_lanes * heads):
        lane, held = kv_head // heads, slots[kv_head // heads]
        part = slice(kv_head * group, (kv_head + 1) * group)
        q = query[:, part].transpose(0, 1)[None].float()
        own = torch.arange(held - len(query), held, device=q.device)[:, None]  # the last slots
        all_seen = torch.arange(held, device=q.device) <= own  # causal mask [queries, slots]
        if math.selected is not None:
            all_seen &= math.selected[:, :held]
        exact = chunk = None
        if pages.full_precision is not None:
            chunk = chunk_lane(pages, row, lane, held=held, num_tokens=len(query))
            exact = full_precision_columns(pages.full_precision, chunk, all_seen)
            all_seen = exact.seen[0, 0]
        sides = []
        for side in (VALUE, KEY) if math.joined else (KEY,):
            vectors = _vectors(pages, side, row, lane, kv_head % heads, held)
            if exact is not None and chunk is not None:
                _write_promoted(vectors, pages, side, chunk, kv_head % heads)
                alone = exact.key if side == KEY else exact.value
                vectors = exact.append_to(vectors, alone[:, kv_head % heads, None])
            sides.append(vectors)
        key = sides[0] if len(sides) == 1 else torch.cat(sides, dim=-1)
        own_math = _of_heads(math, pages, row, (lane, held), part)
        if exact is not None:
            own_math = own_math.with_columns(exact.index)
        block = max(1, BLOCK_NUMBERS // (group * held))
        for start in range(0, len(query), block):
            some, mask, count = (x[..., start : start + block, :] for x in (q, all_seen, own + 1))
            weights = weights_dense(some, key, math=own_math, seen=mask[None, None])
            by_slot = weights[0, 0] if exact is None else exact.by_slot(weights[0, 0])
            yield LaneWeights(kv_head, by_slot.transpose(0, 1), count)


def _of_heads(
    math: AttentionMath, pages: LayerPages, row: int, place: tuple[int, int], heads: slice
) -> AttentionMath:
    """Return the operations on some query heads, with the biases of a lane's live slots."""
    (lane, held), alibi = place, math.alibi
    own = replace(math, sinks=None if math.sinks is None else math.sinks[heads])
    if alibi is None:
        return own
    device = pages.table.device
    columns = torch.arange(-(-held // pages.page_tokens), device=device)[None]
    at = torch.tensor([row], device=device), torch.tensor([lane], device=device)
    positions = lane_positions(pages, *at, columns)[0, :held]
    own = replace(own, alibi=replace(alibi, slopes=alibi.slopes[heads]))
    return own.at(positions, positions[-1:])


def _write_promoted(
    vectors: Tensor, pages: LayerPages, side: str, place: ChunkLane, head: int
) -> None:
    """Overwrite vectors [1, 1, slots, elements] of promoted tokens with finer codes, decoded."""
    promoted = pages.promoted
    if promoted is None:
        return
    page = promoted.table[pages.rows[place.row], pages.first_lane + place.lane, 0].long()[None]
    record = records_of(promoted.marks[page], place.positions[None])[0]
    slot = (record >= 0).nonzero()[:, 0]
    coded = promoted.coded.key if side == KEY else promoted.coded.value
    found = decode_records(coded, page.expand(len(slot)), record[slot])
    vectors[0, 0, slot] = found[:, head]


def _vectors(pages: LayerPages, side: str, row: int, lane: int, head: int, slots: int) -> Tensor:
    """Return the float32 keys or values [1, 1, slots, elements] of a lane's live slots."""
    columns = -(-slots // pages.page_tokens)
    numbers = pages.table[pages.rows[row], pages.first_lane + lane, :columns].long()
    if pages.coded is None:
        plane = pages.key if side == KEY else pages.value
        return plane[numbers, head].flatten(0, 1)[None, None, :slots].float()
    coded = pages.coded.key if side == KEY else pages.coded.value
    return decode_head(coded, numbers, head, lane)[None, None, :slots]


class ResidualSimilarityStep:
    """Records `ResidualSimilarity` of one lane group in a step in which some row uses it.

    A record is the sum of cosines and the number of tokens.
    """

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
        """Add a layer's cosines; `layer` is the index in the group of the layer it reads."""
        sums = torch.zeros(self._num_rows, device=cosine.device).index_add_(0, self._row, cosine)
        record = torch.stack([sums, self._tokens], dim=1)[self._rows]
        self._records.add(layer, record[:, None].expand(-1, self._num_kv_heads, -1))


def moments(
    query: Float[Tensor, "row token num_heads head_dim"],
    counted: Bool[Tensor, "row token"],
    num_kv_heads: int,
    *,
    squares: bool = False,
) -> Float[Tensor, "row num_kv_heads width"]:
    """Return, per query head: number of counted queries, their sum, sum of their outer products.

    With `squares`, the sum of the squares of their elements instead of the products.
    """
    q = query.float() * counted[:, :, None, None]
    count = counted.sum(dim=1).float()[:, None, None].expand(-1, q.shape[2], 1)
    by_head = q.transpose(1, 2)  # [row, head, token, dim]
    if squares:
        products = by_head.square().sum(dim=2, keepdim=True)
    else:
        products = by_head.transpose(2, 3) @ by_head
    record = torch.cat([count, q.sum(dim=1), products.flatten(2)], dim=2)
    return record.reshape(len(q), num_kv_heads, -1)


class MomentsStep:
    """Records `QueryMoments` of one lane group in a step in which some row uses them.

    All queries before RoPE count, those of evicted tokens included.
    """

    needs_pre_rope_keys = True

    def __init__(self, place: StatisticPages, batch: FlatBatch, positions: np.ndarray) -> None:
        assert isinstance(place.statistic, QueryMoments), "expected pages of QueryMoments"
        rows = np.flatnonzero(place.active_rows(batch))
        device = place.numbers.device
        self._records = StatisticRecords.of(
            place, batch.rows[rows], np.zeros(len(rows), dtype=np.int64)
        )
        self._squares = place.statistic.squares
        self._counted = to_device(positions >= place.statistic.skip, device)
        self._num_kv_heads = place.group.lanes_per_layer * place.group.page_class.heads
        # one-token rows come first in the batch: one product for all of them
        ones = rows[rows < batch.shape.num_decode]
        self._ones = to_device(ones, device)
        starts, tokens = batch.shape.starts, batch.shape.tokens
        self._chunks = [
            slice(int(starts[row]), int(starts[row] + tokens[row])) for row in rows[len(ones) :]
        ]

    def note(self, layer: int, queries: Queries, reader: int) -> None:
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
        self._records.add(layer, torch.cat(added), reader)

    def _moments(self, query: Tensor, counted: Tensor) -> Tensor:
        return moments(query, counted, self._num_kv_heads, squares=self._squares)


def first_number(place: StatisticPages, reader: int) -> int:
    """Return the first number of a `QueryRing` record that holds queries of a reading layer."""
    return reader * ((place.numbers.shape[3] - 1) // place.readers)


def store_queries(
    stored: StoredQueries, query: Float[Tensor, "num_tokens num_heads head_dim"]
) -> None:
    """Write the queries of each record, those of a group one after the other, and its mark."""
    heads, width = stored.numbers.shape[1], stored.numbers.shape[3]
    by_head = query[stored.tokens].float().reshape(*stored.pages.shape, heads, -1)
    mark = stored.marks[:, None, None, None].expand(*stored.pages.shape, heads, 1)
    place = (stored.pages, slice(None), stored.offsets[:, None])
    if by_head.shape[3] == width - 1:
        stored.numbers[place] = torch.cat([by_head, mark], dim=3)
        return
    stored.numbers[(*place, slice(stored.first, stored.first + by_head.shape[3]))] = by_head
    stored.numbers[(*place, slice(width - 1, width))] = mark


class RingStep:
    """Records the `QueryRing` of one lane group in a step in which some row uses it.

    Queries are those after RoPE; the query at position p is in record p % window.
    """

    needs_pre_rope_keys = False

    def __init__(self, place: StatisticPages, batch: FlatBatch, positions: np.ndarray) -> None:
        assert isinstance(place.statistic, QueryRing), "expected pages of a QueryRing"
        self._place, self._batch, self._window = place, batch, place.statistic.window
        tokens = batch.shape.tokens
        newest = batch.token_offset >= tokens[batch.token_row] - self._window  # others: overwritten
        self._chosen = np.flatnonzero(newest & place.active_rows(batch)[batch.token_row])
        self._records, self._marks = self._records_of(positions)
        self._tokens = to_device(self._chosen, place.numbers.device)

    def note(self, layer: int, queries: Queries, reader: int) -> None:
        """Write a layer's queries; `layer` is its index in the group."""
        store_queries(self.stored(layer, reader), queries.query)

    def stored(self, layer: int, reader: int = 0) -> StoredQueries:
        """Return what a chain writes of a layer; `layer` is its index in the group."""
        records = self._records
        places = (records.pages[layer], records.offsets[:, 0])
        first = first_number(self._place, reader)
        return StoredQueries(records.numbers, *places, self._tokens, self._marks, first)

    def advance(self, positions: np.ndarray) -> None:
        """Change the records to those of the next step of the same decode rows, on a CPU."""
        records, marks = self._records_of(positions)
        self._records.pages.copy_(records.pages)
        self._records.offsets.copy_(records.offsets)
        self._marks.copy_(marks)

    def _records_of(self, positions: np.ndarray) -> tuple[StatisticRecords, Tensor]:
        chosen, batch = self._chosen, self._batch
        rows, own = batch.rows[batch.token_row[chosen]], positions[chosen]
        records = StatisticRecords.of(self._place, rows, own % self._window)
        return records, to_device((own + 1).astype(np.float32), self._place.numbers.device)


QUERY_STEPS: dict[type[Statistic], type[RingStep] | type[MomentsStep]] = {
    QueryRing: RingStep,
    QueryMoments: MomentsStep,
}
SUMS_ALIGNMENT = 16  # float32 numbers in a cache line


@runtime_checkable  # for the shape checks in tests
class Unrotates(Protocol):
    """Undoes RoPE on queries."""

    def unrotate(
        self, rotated: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """Return the queries before RoPE, float32."""
        ...


class SumsScratch:
    """Scratch memory for column sums, reused by every layer."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.empty(0, device=device)

    @property
    def num_bytes(self) -> int:
        return self._numbers.nbytes

    def sums(self, batch: FlatBatch, num_heads: int, slots: int) -> Tensor:
        """Return memory for column sums [rows, num_heads, slots rounded up to SUMS_ALIGNMENT].

        `AttentionBackend.attend` takes it. Earlier sums are overwritten.
        """
        width = -(-slots // SUMS_ALIGNMENT) * SUMS_ALIGNMENT
        shape = (len(batch.rows), num_heads, width)
        count = shape[0] * shape[1] * shape[2]
        if self._numbers.numel() < count:
            self._numbers = torch.empty(count, device=self._numbers.device)
        sums = self._numbers[:count].view(shape)
        sums[batch.shape.num_decode :] = 0
        return sums


class GroupWatch:
    """Records attention statistics of one lane group in one step; slots are [rows, lanes]."""

    def __init__(
        self,
        places: list[StatisticPages],
        batch: FlatBatch,
        slots: NDArray[np.int32],
        lengths: NDArray[np.int64],
        scoring: Scoring | None = None,
    ) -> None:
        self._batch, self._max_slots = batch, int(slots.max(initial=0))
        self.uses = statistics_used(places, batch)
        per_slot = [place for place in places if isinstance(place.statistic, OfWeights)]
        self._slot_attention = (
            AttentionStatisticsStep(per_slot, batch, slots, scoring) if per_slot else None
        )
        positions = positions_of(batch, lengths)
        self._queries = [
            QUERY_STEPS[type(place.statistic)](place, batch, positions)
            for place in places
            if type(place.statistic) in QUERY_STEPS
        ]
        self._residual_similarity = [
            ResidualSimilarityStep(place, batch)
            for place in places
            if isinstance(place.statistic, ResidualSimilarity)
        ]
        self._needs_pre_rope_keys = any(step.needs_pre_rope_keys for step in self._queries)
        self._positions = to_device(positions, places[0].numbers.device)

    @property
    def wants_residual_similarity(self) -> bool:
        return bool(self._residual_similarity)

    @property
    def _reads_queries(self) -> bool:
        """Whether statistics need the queries, not only their column sums."""
        slots = self._slot_attention
        return bool(self._queries) or (slots is not None and slots.reads_queries)

    def records(self, layer: int) -> LayerRecords | None:
        """Return what a chain records of a layer; None if it cannot record all of it."""
        rings = [step for step in self._queries if isinstance(step, RingStep)]
        tallies = () if self._slot_attention is None else self._slot_attention.tallies(layer)
        if self._residual_similarity or len(rings) < len(self._queries) or tallies is None:
            return None
        return LayerRecords(tallies, tuple(ring.stored(layer) for ring in rings))

    def advance(self, slots: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """Change the records of a chain to those of the next step of the same rows, on a CPU."""
        if self._slot_attention is not None:
            self._slot_attention.advance(slots)
        for step in self._queries:
            assert isinstance(step, RingStep), "a chain records no moments"
            step.advance(positions_of(self._batch, lengths))

    def room_for_sums(self, num_heads: int, scratch: SumsScratch) -> Tensor | None:
        """Return memory for the column sums of attention; None if no statistic needs them."""
        if self._slot_attention is None or not self._slot_attention.needs_sums:
            return None
        return scratch.sums(self._batch, num_heads, self._max_slots)

    def note(  # noqa: PLR0913 - a layer, its attention, and which layer reads the lanes
        self,
        layer: int,
        backend: AttentionBackend,
        pages: LayerPages,
        math: AttentionMath,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        column_sums: Tensor | None,
        rotary: Unrotates | None,
        reader: int = 0,
    ) -> None:
        """Record the statistics of a layer's attention.

        `layer` is the index in the group of the layer whose lanes are read, and `reader` says which
        of the layers that read them this is.
        """
        if self._reads_queries:
            math, query = folded(math, query)
        if self._slot_attention is not None:
            self._slot_attention.note(layer, backend, pages, math, query, column_sums, reader)
        if self._queries:
            seen = Queries(query, self._before_rope(query, rotary))
            for step in self._queries:
                step.note(layer, seen, reader)

    def _before_rope(self, query: Tensor, rotary: Unrotates | None) -> Tensor | None:
        if not self._needs_pre_rope_keys:
            return None
        if rotary is None:
            raise InvariantError("query moments need queries before RoPE, which the model lacks")
        return rotary.unrotate(query, self._positions)

    def note_residual_similarity(self, layer: int, cosines: Float[Tensor, " num_tokens"]) -> None:
        """Record how much attention changed the residual stream."""
        for step in self._residual_similarity:
            step.note(layer, cosines)


def statistics_used(
    places: list[StatisticPages], batch: FlatBatch
) -> tuple[tuple[str, int, bytes], ...]:
    """Return the statistics that a step records, with the page table and the rows of each."""
    active = ((place, place.active_rows(batch)) for place in places)
    return tuple(
        (place.statistic.name, id(place.device_table.current()), rows.tobytes())
        for place, rows in active
        if rows.any()
    )


def watch_group(
    places: list[StatisticPages],
    batch: FlatBatch,
    slots: NDArray[np.int32],
    lengths: NDArray[np.int64],
    scoring: Scoring | None = None,
) -> GroupWatch | None:
    """Return the recorder of a step; None if no row of the step uses statistics of this group."""
    active = [place for place in places if place.active_rows(batch).any()]
    return GroupWatch(active, batch, slots, lengths, scoring) if active else None
