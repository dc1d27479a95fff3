"""The portable backend: gathers pages to contiguous memory for `scaled_dot_product_attention`.

entries of a row     1 for layer pages, one per KV head for one-head pages
decode bucket        entries of similar length, gathered and attended in one call
fresh chunks         without earlier tokens: they attend to themselves without gathering;
                     with coded pages they attend to their stored codes instead
other chunks         gathered and attended one entry at a time
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionMath,
    LaneSlots,
    LayerPages,
    StepShape,
    dims_of,
)
from quire.kernels.coded import CodedPages, decode_pages, decoded_slot_bytes
from quire.kernels.dense import attend_dense, column_sums_dense
from quire.kernels.device_copies import to_device
from quire.kernels.paging import TorchSlots, gather_pages, page_numbers
from quire.kernels.token_precision import (
    ChunkLane,
    FullPrecisionPages,
    add_promoted,
    full_precision_columns,
    in_full_precision,
    write_full_precision,
)

BUCKET_SLACK = 1.25  # longest over shortest entry of a decode bucket, beyond a page


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decode entries gathered together. An entry is a row with one new token, in one lane.

    Attributes:
        rows: [entries] index of the row in the step.
        lanes: [entries] lane among the layer's own.
        places: row, lane and first gathered slot of each entry, on the CPU.
        columns: [entries, columns] of the page table that are gathered.
        slots: [entries, 1] number of the first gathered slot.
        held: [entries, 1] live slots.
        dead: bool [entries, 1, gathered slots, 1] slots with undefined content, or None.
        seen: bool [entries, 1, 1, gathered slots], or None if every slot is seen.
    """

    rows: Tensor
    lanes: Tensor
    places: list[tuple[int, int, int]]
    columns: Tensor
    slots: NDArray[np.int64]
    held: NDArray[np.int64]
    dead: Tensor | None
    seen: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows with the same number of new tokens whose attention is computed in one call.

    Attributes:
        rows: indices of the rows in the step.
        tokens: new tokens of each row.
        slots: [lanes] slots of the row after the step; more than `tokens` only for a single row.
    """

    rows: NDArray[np.int64]
    tokens: int
    slots: NDArray[np.int32]

    @property
    def is_fresh(self) -> bool:
        """Whether no tokens were stored before these."""
        return bool((self.slots == self.tokens).all())


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """Data that the layers of a lane group share in one step."""

    step: StepShape
    window: int | None
    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[Chunk, ...]


def plan_gathering(
    step: StepShape,
    lanes: LaneSlots,
    *,
    page_tokens: int,
    slot_bytes: int,
    scratch_bytes: int,
    device: torch.device,
) -> GatheredPlan:
    """Divide decode entries into buckets that fit the scratch memory, and group the chunks."""
    held = lanes.slots[: step.num_decode].reshape(-1).astype(np.int64)
    first = _first_seen(held, lanes.window) // page_tokens
    pages = -(-held // page_tokens) - first
    order = np.argsort(pages, kind="stable")
    gathered_bytes = pages[order] * (page_tokens * slot_bytes)
    buckets = []
    for part in _cut(pages[order], gathered_bytes, scratch_bytes):
        entries = order[part]
        rows, lane = np.divmod(entries, lanes.slots.shape[1])
        columns = first[entries, None] + np.arange(int(pages[entries].max()))
        slot = first[entries, None] * page_tokens + np.arange(columns.shape[1] * page_tokens)
        seen = slot < held[entries, None]
        seen &= slot >= _first_seen(held[entries, None], lanes.window)
        mask = None if seen.all() else to_device(seen, device)
        buckets.append(
            DecodeBucket(
                rows=to_device(rows, device),
                lanes=to_device(lane, device),
                places=list(zip(rows.tolist(), lane.tolist(), slot[:, 0].tolist(), strict=True)),
                columns=to_device(columns, device),
                slots=slot[:, :1],
                held=held[entries, None],
                dead=None if mask is None else ~mask[:, None, :, None],
                seen=None if mask is None else mask[:, None, None],
            )
        )
    return GatheredPlan(step, lanes.window, tuple(buckets), tuple(group_chunks(step, lanes)))


def _first_seen(held: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """Return the first slot that the newest token of a lane sees."""
    return np.zeros_like(held) if window is None else np.maximum(held - window, 0)


def _cut(
    pages: NDArray[np.int64], gathered_bytes: NDArray[np.int64], scratch_bytes: int
) -> Iterator[slice]:
    """Split entries, sorted by pages, by length and scratch size."""
    start = 0
    for i in range(1, len(pages)):
        too_long = pages[i] > BUCKET_SLACK * pages[start] + 1
        if too_long or (i + 1 - start) * gathered_bytes[i] > scratch_bytes:
            yield slice(start, i)
            start = i
    if len(pages):
        yield slice(start, len(pages))


def group_chunks(step: StepShape, lanes: LaneSlots) -> Iterator[Chunk]:
    """Group fresh rows with the same number of tokens; other rows form single chunks."""
    fresh: dict[int, list[int]] = {}
    for row in range(step.num_decode, len(step.tokens)):
        tokens, slots = int(step.tokens[row]), lanes.slots[row]
        if (slots == tokens).all():
            fresh.setdefault(tokens, []).append(row)
        else:
            yield Chunk(np.array([row]), tokens, slots)
    for tokens, rows in fresh.items():
        yield Chunk(np.array(rows), tokens, lanes.slots[rows[0]])


# ---- gathered full precision ---------------------------------------------------------------------

# Tokens that attention reads in higher precision than their codes.


def write_full_precision_in_bucket(
    pages: LayerPages,
    full: FullPrecisionPages,
    bucket: DecodeBucket,
    decoded: tuple[Tensor, Tensor],
) -> None:
    """Overwrite decoded tokens of decode rows with full-precision and promoted ones.

    Args:
        pages: pages of the layer.
        full: full-precision tokens of the layer.
        bucket: rows and lanes that are gathered together.
        decoded: their keys and values, modified in place.
    """
    device = decoded[0].device
    first, held = (to_device(x, device) for x in (bucket.slots, bucket.held))
    lengths = to_device(full.lengths, device)[bucket.rows][:, None]
    slots = first + torch.arange(decoded[0].shape[2], device=device)
    if pages.positions is None:
        positions = slots + (lengths - held)
    else:
        numbers = page_numbers(pages, bucket.rows, bucket.lanes, bucket.columns)
        positions = pages.positions[numbers].flatten(1).long()
    live = None if bucket.seen is None else bucket.seen[:, 0, 0]
    if pages.promoted is not None:
        own = pages.promoted.table[pages.rows[bucket.rows], pages.first_lane + bucket.lanes, 0]
        add_promoted(pages.promoted, own.long(), positions, decoded, live)
    wanted = in_full_precision(full.tokens, positions, slots, lengths - 1, held - 1)
    if live is not None:
        wanted = wanted & live
    page = full.table[pages.rows[bucket.rows], pages.first_lane + bucket.lanes, 0].long()
    place = bucket.rows, page, bucket.lanes
    write_full_precision(full, place, positions, slots, wanted, decoded)


def add_promoted_in_chunk(
    pages: LayerPages, place: ChunkLane, decoded: tuple[Tensor, Tensor]
) -> None:
    """Add the records of promoted tokens to the decoded slots of a lane.

    Args:
        pages: pages of the layer.
        place: the lane and its gathered slots.
        decoded: keys and values [1, head, slot, elements], modified in place.
    """
    if pages.promoted is None:
        return
    table_row, table_lane = pages.rows[place.row], pages.first_lane + place.lane
    page = pages.promoted.table[table_row, table_lane, 0].long()[None]
    add_promoted(pages.promoted, page, place.positions[None], decoded)


def chunk_lane(
    pages: LayerPages, row: int, lane: int, *, held: int, num_tokens: int, first: int = 0
) -> ChunkLane:
    """Return a lane of a row whose chunk attends, with its slots and their positions.

    Args:
        pages: pages of the layer, with full-precision tokens.
        row: row of the step.
        lane: lane of the layer.
        held: live slots of the lane.
        num_tokens: tokens of the chunk.
        first: first gathered slot.
    """
    assert pages.full_precision is not None, "only called with full-precision tokens"
    table_row, table_lane = pages.rows[row], pages.first_lane + lane
    slots = torch.arange(first, held, device=pages.table.device)
    if pages.positions is None:
        positions = slots + (int(pages.full_precision.lengths[row]) - held)
    else:
        numbers = pages.table[table_row, table_lane, slots // pages.page_tokens].long()
        positions = pages.positions[numbers, slots % pages.page_tokens].long()
    page = int(pages.full_precision.table[table_row, table_lane, 0])
    return ChunkLane(row, lane, page, slots, positions, held, num_tokens)


DEFAULT_SCRATCH_BYTES = 64 * 1024 * 1024


class GatheredAttention(TorchSlots):
    """Attention over pages on any device, for any page class.

    Args:
        device: device of the pages.
        scratch_bytes: bound on gathered keys and values. A single entry may exceed it: the longest
            row needs its own KV of one layer.
    """

    name = "gathered"

    def __init__(self, device: torch.device, *, scratch_bytes: int = DEFAULT_SCRATCH_BYTES) -> None:
        self._device = device
        self._scratch_bytes = scratch_bytes
        self.peak_scratch_bytes = 0
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Divide decode entries into buckets and group the chunks."""
        return plan_gathering(
            step,
            lanes,
            page_tokens=page_tokens,
            slot_bytes=slot_bytes,
            scratch_bytes=self._scratch_bytes,
            device=self._device,
        )

    def attend(
        self,
        plan: object,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        *,
        column_sums: Tensor | None = None,
    ) -> Tensor:
        """Compute attention for all rows of the step; see `AttentionBackend.attend`."""
        assert isinstance(plan, GatheredPlan), "a plan comes from this backend"
        out = query.new_empty(*query.shape[:2], math.output_dim(pages))
        for bucket in plan.buckets:
            self._decode(bucket, plan, pages, math, query, out, column_sums)
        for chunk in self._chunks(plan, pages):
            starts = plan.step.starts[chunk.rows, None] + np.arange(chunk.tokens)
            token = to_device(starts.reshape(-1), self._device)
            shape = (len(chunk.rows), chunk.tokens, *query.shape[1:])
            q, own_math = query[token].view(shape).transpose(1, 2), math
            if math.selected is not None:
                own_math = replace(math, selected=math.selected[token].view(*shape[:2], -1))
            if chunk.is_fresh and pages.coded is None:
                attended = self._fresh_chunk(plan, chunk, own_math, q, token, fresh, column_sums)
            else:
                attended = self._stored_chunk(plan, chunk, own_math, q, pages, column_sums)
            out[token] = attended.transpose(1, 2).flatten(0, 1)
        return out

    def _chunks(self, plan: GatheredPlan, pages: LayerPages) -> Iterator[Chunk]:
        """Yield the plan's chunks; with coded pages, split to fit the scratch memory."""
        if pages.coded is None:
            yield from plan.chunks
            return
        page_bytes = pages.page_tokens * decoded_slot_bytes(pages.key.shape[1], dims_of(pages))
        for chunk in plan.chunks:
            num_pages = -(-int(chunk.slots.max()) // pages.page_tokens)
            most = max(1, self._scratch_bytes // (num_pages * page_bytes))
            if pages.full_precision is not None:  # rows may have unequal lengths
                most = 1
            for first in range(0, len(chunk.rows), most):
                yield replace(chunk, rows=chunk.rows[first : first + most])

    def _decode(
        self,
        bucket: DecodeBucket,
        plan: GatheredPlan,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        out: Tensor,
        column_sums: Tensor | None,
    ) -> None:
        num_decode = plan.step.num_decode
        rows, lanes = bucket.rows, bucket.lanes
        by_lane, out_by_lane = (_by_lane(x[:num_decode], pages) for x in (query, out))
        key, value = self.gather(pages, rows, lanes, bucket.columns, query.dtype)
        if bucket.dead is not None:
            # free slots may hold NaN, and 0 * NaN is NaN
            key.masked_fill_(bucket.dead, 0)
            value.masked_fill_(bucket.dead, 0)
        if pages.full_precision is not None:
            write_full_precision_in_bucket(pages, pages.full_precision, bucket, (key, value))
        key, value = math.heads(key, value)
        q = by_lane[rows, lanes].unsqueeze(2)
        own_math = _in_bucket(math.of_lanes(pages.num_lanes, lanes), pages, bucket)
        seen = bucket.seen
        if math.selected is not None:
            seen = math.selected[rows, None, None, : key.shape[2]]
        attended = attend_dense(q, key, value, math=own_math, seen=seen)
        out_by_lane[rows, lanes] = attended.squeeze(2)
        if column_sums is not None:
            sums = column_sums_dense(q, key, math=own_math, seen=seen)
            target = _by_lane(column_sums, pages)
            for i, (row, lane, first) in enumerate(bucket.places):
                own = target[row, lane, :, first : first + sums.shape[2]]
                own.copy_(sums[i, :, : own.shape[1]])

    def _fresh_chunk(
        self,
        plan: GatheredPlan,
        chunk: Chunk,
        math: AttentionMath,
        query: Tensor,
        token: Tensor,
        fresh: tuple[Tensor, Tensor],
        column_sums: Tensor | None,
    ) -> Tensor:
        shape = (len(chunk.rows), chunk.tokens, fresh[0].shape[1], -1)
        key, value = math.heads(*(x[token].view(shape).transpose(1, 2) for x in fresh))
        if math.alibi is not None:  # the first tokens of their rows
            math = math.at(torch.arange(chunk.tokens, device=self._device), chunk.tokens - 1)
        if column_sums is not None:
            seen = self._chunk_seen(chunk.tokens, chunk.tokens, plan.window, math.selected)
            sums = column_sums_dense(query, key, math=math, seen=seen)
            rows = to_device(chunk.rows, self._device)
            column_sums[rows, :, : chunk.tokens] = sums
        if math.selected is None and (plan.window is None or chunk.tokens <= plan.window):
            return attend_dense(query, key, value, math=math, seen=None, causal=True)
        seen = self._chunk_seen(chunk.tokens, chunk.tokens, plan.window, math.selected)
        return attend_dense(query, key, value, math=math, seen=seen)

    def _stored_chunk(
        self,
        plan: GatheredPlan,
        chunk: Chunk,
        math: AttentionMath,
        query: Tensor,
        pages: LayerPages,
        column_sums: Tensor | None,
    ) -> Tensor:
        row, parts = to_device(chunk.rows, self._device), []
        per_lane = query.shape[1] // len(chunk.slots)
        for lane, slots in enumerate(chunk.slots.tolist()):
            lane_index = torch.tensor([lane], device=self._device)
            heads = slice(lane * per_lane, (lane + 1) * per_lane)
            # skip slots older than the window of the oldest query
            oldest = slots - chunk.tokens
            first = 0 if plan.window is None else max(0, oldest + 1 - plan.window)
            column = first // pages.page_tokens
            columns = torch.arange(column, -(-slots // pages.page_tokens), device=self._device)
            live = slice(first - column * pages.page_tokens, slots - column * pages.page_tokens)
            gathered = self.gather(pages, row, lane_index, columns[None], query.dtype)
            key, value = (x[:, :, live] for x in gathered)
            q, own_math = query[:, heads], math.of_lanes(pages.num_lanes, lane_index)
            if math.alibi is not None:
                positions = lane_positions(pages, row, lane_index, columns[None])[:, live]
                own_math = own_math.at(positions, positions[:, -1:])
            seen = self._chunk_seen(chunk.tokens, slots - first, plan.window, math.selected)
            exact = None
            if pages.full_precision is not None:
                place = chunk_lane(
                    pages,
                    int(chunk.rows[0]),
                    lane,
                    held=slots,
                    num_tokens=chunk.tokens,
                    first=first,
                )
                add_promoted_in_chunk(pages, place, (key, value))
                exact = full_precision_columns(pages.full_precision, place, seen[0, 0])
                seen = exact.seen
                key, value = exact.append_to(key, exact.key), exact.append_to(value, exact.value)
                own_math = own_math.with_columns(exact.index)
            key, value = math.heads(key, value)
            parts.append(attend_dense(q, key, value, math=own_math, seen=seen))
            if column_sums is not None:
                sums = column_sums_dense(q, key, math=own_math, seen=seen)
                column_sums[row, heads, first:slots] = (
                    sums if exact is None else exact.by_slot(sums)
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _chunk_seen(
        self, tokens: int, slots: int, window: int | None, selected: Tensor | None
    ) -> Tensor:
        """Return the mask [1 or rows, 1, tokens, slots] of queries at the last `tokens` slots."""
        own = torch.arange(slots - tokens, slots, device=self._device)[:, None]
        slot = torch.arange(slots, device=self._device)
        seen = slot <= own
        if window is not None:
            seen &= slot > own - window
        return seen[None, None] if selected is None else selected[:, None, :, :slots] & seen

    def gather(
        self,
        pages: LayerPages,
        rows: Tensor,
        lanes: Tensor,
        columns: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Gather keys and values [entries, heads, slots, elements] of table columns."""
        numbers = page_numbers(pages, rows, lanes, columns)
        if pages.coded is not None:
            return self._decode_pages(pages, pages.coded, numbers, lanes, dtype)
        planes = (pages.key, pages.value)
        counts = [numbers.numel() * plane[0].numel() for plane in planes]
        key_bytes, value_bytes = (
            count * plane.itemsize for count, plane in zip(counts, planes, strict=True)
        )
        scratch = self._scratch_of(key_bytes + value_bytes)
        parts = (scratch[:key_bytes], scratch[key_bytes : key_bytes + value_bytes])
        key, value = (
            gather_pages(plane, numbers, part.view(plane.dtype))
            for plane, part in zip(planes, parts, strict=True)
        )
        return key, value

    def _decode_pages(
        self,
        pages: LayerPages,
        coded: CodedPages,
        numbers: Tensor,
        lanes: Tensor,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        heads, slots = pages.key.shape[1], numbers.numel() * pages.page_tokens
        key_bytes, value_bytes = (slots * heads * dim * dtype.itemsize for dim in dims_of(pages))
        scratch = self._scratch_of(key_bytes + value_bytes)
        key, value = (
            decode_pages(side, numbers, own.view(dtype), lanes)
            for side, own in (
                (coded.key, scratch[:key_bytes]),
                (coded.value, scratch[key_bytes : key_bytes + value_bytes]),
            )
        )
        held_bytes = slots * decoded_slot_bytes(heads, dims_of(pages))
        self.peak_scratch_bytes = max(self.peak_scratch_bytes, held_bytes)
        return key, value

    def _scratch_of(self, num_bytes: int) -> Tensor:
        """Return scratch memory, grown if one entry needs more than the bound."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self.peak_scratch_bytes = max(self.peak_scratch_bytes, num_bytes)
        return self._scratch


def _by_lane(flat: Tensor, pages: LayerPages) -> Tensor:
    """Reshape [rows, num_heads, numbers] to [rows, lanes, heads of a lane, numbers]."""
    return flat.view(len(flat), pages.num_lanes, -1, flat.shape[2])


def _in_bucket(math: AttentionMath, pages: LayerPages, bucket: DecodeBucket) -> AttentionMath:
    """Return the operations with the biases of a bucket's slots."""
    if math.alibi is None:
        return math
    positions = lane_positions(pages, bucket.rows, bucket.lanes, bucket.columns)
    own = to_device(bucket.held - 1 - bucket.slots, positions.device)
    return math.at(positions, positions.gather(1, own))


def lane_positions(
    pages: LayerPages,
    rows: Int[Tensor, " entry"],
    lanes: Int[Tensor, " entry"],
    columns: Int[Tensor, "entry column"],
) -> Int[Tensor, "entry slot"]:
    """Return the logical positions of the slots of table columns; undefined for free slots.

    Slots in the order of their positions are counted from 0.

    Args:
        pages: pages of the layer.
        rows: rows of the step.
        lanes: lanes among the layer's own.
        columns: columns of the page table.
    """
    if pages.positions is not None:
        numbers = page_numbers(pages, rows, lanes, columns)
        return pages.positions[numbers].flatten(1).long()
    offset = torch.arange(pages.page_tokens, device=columns.device)
    return (columns[:, :, None] * pages.page_tokens + offset).flatten(1).expand(len(rows), -1)
