"""Attention over keys stored before RoPE; keys get new positions at every attention.

The slots a query may see are gathered in the order of their positions, without gaps. The key at
index i of that order is rotated to position i, and the query to its own index. So no position
exceeds the number of slots of a lane, at any sequence length.

Codes hold keys before RoPE too. They are decoded to float32 and then rotated, at every attention,
so a token is encoded once. Tokens in full precision replace the decoded ones before the rotation.

Runs with torch on any device; rows with the same number of new tokens are batched.

Source: StreamingLLM (Xiao et al. 2023), section 3.2, "cache index".
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionMath,
    LaneSlots,
    LayerPages,
    StepShape,
    dims_of,
)
from quire.kernels.coded import decode_slots
from quire.kernels.dense import attend_dense, column_sums_dense
from quire.kernels.device_copies import to_device
from quire.kernels.gathered import DEFAULT_SCRATCH_BYTES
from quire.kernels.paging import TorchSlots
from quire.kernels.token_precision import (
    ChunkLane,
    FullPrecisionColumns,
    FullPrecisionPages,
    add_promoted,
    full_precision_columns,
    in_full_precision,
    write_full_precision,
)

# ---- pre rope plan -------------------------------------------------------------------------------

# Plan of a step over keys before RoPE: entries with the same number of new tokens are batched.

BUCKET_SLACK = 1.25  # longest over shortest entry of a bucket, beyond a few slots
FEW_SLOTS = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Entries whose attention is computed in one call. An entry is a row of the step in one lane.

    The places of an entry are the slots that any of its queries sees, in the order of positions.

    Attributes:
        rows: [entries] index of the row in the step.
        lanes: [entries] lane among the layer's own.
        token: [entries, tokens] indices of the row's new tokens in the flat batch.
        slot: [entries, places] slots of the lane, in storage order.
        held: [entries, 1] live slots of the lane.
        is_live: bool [entries, places] whether the slot exists.
        query_place: [entries, tokens] each query's own place.
        seen: bool [entries, 1, tokens, places] which places a query sees.
    """

    rows: Tensor
    lanes: Tensor
    token: Tensor
    slot: Tensor
    held: Tensor
    is_live: Tensor
    query_place: Tensor
    seen: Tensor

    @property
    def num_tokens(self) -> int:
        """New tokens of each entry."""
        return self.token.shape[1]

    def alone(self) -> "Iterator[Bucket]":
        """Yield a bucket for each entry, without places that are not live."""
        for entry, live in enumerate(self.is_live.sum(dim=1).tolist()):
            one = slice(entry, entry + 1)
            yield Bucket(
                rows=self.rows[one],
                lanes=self.lanes[one],
                token=self.token[one],
                slot=self.slot[one, :live],
                held=self.held[one],
                is_live=self.is_live[one, :live],
                query_place=self.query_place[one],
                seen=self.seen[one, :, :, :live],
            )


def plan_buckets(
    step: StepShape, lanes: LaneSlots, *, max_slots: int, device: torch.device
) -> Iterator[Bucket]:
    """Divide a step into buckets of at most `max_slots` places, or of one entry.

    Args:
        step: new tokens of each row.
        lanes: slots of each row's lanes, and the window.
        max_slots: bound on places over all entries of a bucket.
        device: device of the tensors.
    """
    held = lanes.slots.astype(np.int64)
    tokens = np.broadcast_to(step.tokens[:, None], held.shape)
    first = np.zeros_like(held)
    if lanes.window is not None:  # skip slots older than the window of the oldest query
        first = np.maximum(held - tokens + 1 - lanes.window, 0)
    places = held - first
    for entries in _cut(tokens.reshape(-1), places.reshape(-1), max_slots):
        rows, lane = np.divmod(entries, held.shape[1])
        yield _bucket(step, (rows, lane), held[rows, lane], first[rows, lane], lanes.window, device)


def _cut(
    tokens: NDArray[np.int32], places: NDArray[np.int64], max_slots: int
) -> Iterator[NDArray[np.int64]]:
    """Yield groups of entries with equal numbers of tokens and similar lengths."""
    order = np.lexsort((places, tokens))
    start = 0
    for i in range(1, len(order)):
        begun, entry = order[start], order[i]
        other = tokens[entry] != tokens[begun]
        longer = places[entry] > BUCKET_SLACK * places[begun] + FEW_SLOTS
        if other or longer or (i + 1 - start) * places[entry] > max_slots:
            yield order[start:i]
            start = i
    if len(order):
        yield order[start:]


def _bucket(
    step: StepShape,
    entries: tuple[NDArray[np.int64], NDArray[np.int64]],
    held: NDArray[np.int64],
    first: NDArray[np.int64],
    window: int | None,
    device: torch.device,
) -> Bucket:
    rows, lane = entries
    tokens = int(step.tokens[rows[0]])
    live = (held - first)[:, None]
    place = np.arange(int(live.max()))
    own = live - tokens + np.arange(tokens)
    seen = place <= own[:, :, None]
    if window is not None:
        seen &= place > own[:, :, None] - window
    token = step.starts[rows, None] + np.arange(tokens)
    numbers = (rows, lane, token, first[:, None] + place, held[:, None])
    rows_, lanes_, token_, slot, held_ = (to_device(x, device) for x in numbers)
    return Bucket(
        rows=rows_,
        lanes=lanes_,
        token=token_,
        slot=slot,
        held=held_,
        is_live=to_device(place < live, device),
        query_place=to_device(own, device),
        seen=to_device(seen[:, None], device),
    )


# ---- pre rope ------------------------------------------------------------------------------------

BEHIND_ALL = torch.iinfo(torch.int32).max  # sorts slots that hold no token to the end
COPIES_OF_A_SLOT = 5  # held at once: as stored, in float32, and intermediate results


@dataclass(frozen=True, slots=True)
class _Plan:
    """Data that the layers of a lane group share in one step."""

    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Slots of a bucket's entries in the order of positions; slots without a token are zero.

    Attributes:
        key: [entries, KV heads, places, head_dim], rotated; of all heads if pages hold latents.
        value: [entries, KV heads, places, value_dim].
        slot: [entries, places] slots of the lane.
        exact: columns after the places, for tokens that only some queries of a chunk read in full
            precision; the keys and values include them.
    """

    key: Tensor
    value: Tensor
    slot: Tensor
    exact: FullPrecisionColumns | None = None


class PreRopeAttention(TorchSlots):
    """Attention over pages whose keys are stored before RoPE.

    Args:
        device: device of the pages.
        scratch_bytes: bound on gathered and rotated slots. A single entry may exceed it: the
            longest row needs several copies of its own KV of one layer.
    """

    name = "pre_rope"

    def __init__(self, device: torch.device, *, scratch_bytes: int = DEFAULT_SCRATCH_BYTES) -> None:
        self._device, self._scratch_bytes = device, scratch_bytes
        self.peak_scratch_bytes = 0

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Divide the step into buckets of rows with the same number of new tokens."""
        most = max(1, self._scratch_bytes // (COPIES_OF_A_SLOT * slot_bytes))
        return _Plan(tuple(plan_buckets(step, lanes, max_slots=most, device=self._device)))

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
        """Compute attention for all rows of the step; see `AttentionBackend.attend`.

        Queries are before RoPE too; `math.rotary` rotates them and the keys.
        """
        assert isinstance(plan, _Plan), "a plan comes from this backend"
        out = query.new_empty(*query.shape[:2], math.output_dim(pages))
        by_lane, out_by_lane = (_by_lane(x, pages.num_lanes) for x in (query, out))
        for bucket in self._buckets(plan, pages):
            token, lane = bucket.token, bucket.lanes[:, None]
            found = self._gather(bucket, pages, math, query.dtype)
            seen = bucket.seen if found.exact is None else found.exact.seen
            q = _rotated_queries(by_lane[token, lane], bucket, math, dims_of(pages)[0])
            own_math = math.of_lanes(pages.num_lanes, bucket.lanes)
            if math.alibi is not None:  # by place, as RoPE
                place = torch.arange(bucket.slot.shape[1], device=self._device)
                own_math = own_math.at(
                    place.expand(len(bucket.rows), -1), bucket.query_place[:, -1:]
                )
                if found.exact is not None:
                    own_math = own_math.with_columns(found.exact.index)
            attended = attend_dense(q, found.key, found.value, math=own_math, seen=seen)
            out_by_lane[token, lane] = attended.transpose(1, 2)
            if column_sums is not None:
                sums = column_sums_dense(q, found.key, math=own_math, seen=seen)
                sums = sums if found.exact is None else found.exact.by_slot(sums)
                # write column sums [entries, heads, places] to the slots in storage order
                target = _by_lane(column_sums, pages.num_lanes)
                for entry, live in enumerate(bucket.is_live.sum(dim=1).tolist()):
                    heads = target[int(bucket.rows[entry]), int(bucket.lanes[entry])]
                    heads[:, found.slot[entry, :live]] = sums[entry, :, :live]
        return out

    @staticmethod
    def _buckets(plan: _Plan, pages: LayerPages) -> Iterator[Bucket]:
        """Yield the plan's buckets; chunks with full-precision tokens one entry at a time."""
        for bucket in plan.buckets:
            if pages.full_precision is not None and bucket.num_tokens > 1:
                yield from bucket.alone()
            else:
                yield bucket

    def _gather(
        self, bucket: Bucket, pages: LayerPages, math: AttentionMath, dtype: torch.dtype
    ) -> _Gathered:
        slot, is_live = bucket.slot, bucket.is_live
        numbers, offset = _places(bucket, pages, slot)
        positions = None
        if pages.positions is not None:
            positions = pages.positions[numbers, offset].masked_fill(~is_live, BEHIND_ALL)
            positions, order = positions.sort(dim=1)
            slot, numbers, offset = (x.gather(1, order) for x in (slot, numbers, offset))
        elif pages.full_precision is not None:
            lengths = to_device(pages.full_precision.lengths, slot.device)[bucket.rows]
            positions = slot + (lengths[:, None] - bucket.held)
        key, value = _stored(pages, bucket, numbers, offset)
        # slots without a token may hold NaN, and 0 * NaN is NaN; they sort to the end
        dead = ~is_live[:, :, None, None]
        key, value = key.masked_fill_(dead, 0), value.masked_fill_(dead, 0)
        by_head = key.transpose(1, 2), value.transpose(1, 2)
        exact = None
        if positions is not None and pages.full_precision is not None:
            exact = _write_finer(pages, pages.full_precision, bucket, (slot, positions), by_head)
        index = torch.arange(key.shape[1], device=key.device)
        rotated = self._rotated(key, index, math)
        self._count(key, value, rotated)
        rotated, value = rotated.to(dtype).transpose(1, 2), by_head[1].to(dtype)
        if exact is not None:
            own = self._rotated(exact.key.transpose(1, 2), exact.index, math).transpose(1, 2)
            rotated = exact.append_to(rotated, own)
            value = exact.append_to(value, exact.value)
        return _Gathered(*math.heads(rotated, value), slot, exact)

    @staticmethod
    def _rotated(key: Tensor, places: Tensor, math: AttentionMath) -> Tensor:
        """Rotate keys [entries, places, heads, head_dim] to their places, float32."""
        assert math.rotary is not None, "only called with keys stored before RoPE"
        entries, num_places, heads, head_dim = key.shape
        pre_rope = key.transpose(0, 1).reshape(num_places, entries * heads, head_dim)
        rotated = math.rotary.rotate_pre_rope(pre_rope, places)
        return rotated.view(num_places, entries, heads, head_dim).transpose(0, 1)

    def _count(self, key: Tensor, value: Tensor, rotated: Tensor) -> None:
        held = key.nbytes + value.nbytes + (COPIES_OF_A_SLOT - 1) * rotated.nbytes
        self.peak_scratch_bytes = max(self.peak_scratch_bytes, held)


def _by_lane(flat: Tensor, num_lanes: int) -> Tensor:
    """Reshape [first, num_heads, numbers] to [first, lanes, heads of a lane, numbers]."""
    return flat.view(len(flat), num_lanes, -1, flat.shape[2])


def _places(bucket: Bucket, pages: LayerPages, slot: Tensor) -> tuple[Tensor, Tensor]:
    """Return page numbers and offsets [entries, places] of slots; arbitrary pages for gaps."""
    column = (slot // pages.page_tokens).clamp(max=pages.table.shape[2] - 1)
    row, lane = pages.rows[bucket.rows], pages.first_lane + bucket.lanes
    numbers = pages.table[row[:, None], lane[:, None], column]
    return numbers.clamp_min(0).long(), slot % pages.page_tokens


def _stored(
    pages: LayerPages, bucket: Bucket, numbers: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    """Return keys and values [entries, places, heads, elements], decoded if they are codes."""
    if pages.coded is None:
        return pages.key[numbers, :, offset], pages.value[numbers, :, offset]
    lanes = bucket.lanes[:, None]
    sides = (pages.coded.key, pages.coded.value)
    key, value = (decode_slots(side, numbers, offset, lanes) for side in sides)
    return key, value


def _write_finer(
    pages: LayerPages,
    full: FullPrecisionPages,
    bucket: Bucket,
    ordered: tuple[Tensor, Tensor],
    decoded: tuple[Tensor, Tensor],
) -> FullPrecisionColumns | None:
    """Add the records of promoted tokens, and overwrite tokens with full-precision ones.

    Args:
        pages: pages of the layer.
        full: full-precision tokens of the layer.
        bucket: the entries.
        ordered: slots and positions [entries, places].
        decoded: keys and values [entries, heads, places, elements], modified in place.

    Returns:
        For the single entry of a chunk, additional columns; None for decode entries.
    """
    slot, positions = ordered
    row, lane = pages.rows[bucket.rows], pages.first_lane + bucket.lanes
    if pages.promoted is not None:
        own = pages.promoted.table[row, lane, 0].long()
        add_promoted(pages.promoted, own, positions, decoded, bucket.is_live)
    page = full.table[row, lane, 0].long()
    if bucket.num_tokens > 1:
        place = ChunkLane(
            row=int(bucket.rows[0]),
            lane=int(bucket.lanes[0]),
            page=int(page[0]),
            slots=slot[0],
            positions=positions[0],
            held=int(bucket.held[0, 0]),
            num_tokens=bucket.num_tokens,
        )
        return full_precision_columns(full, place, bucket.seen[0, 0])
    lengths = to_device(full.lengths, slot.device)[bucket.rows][:, None]
    wanted = in_full_precision(full.tokens, positions, slot, lengths - 1, bucket.held - 1)
    at = bucket.rows, page, bucket.lanes
    write_full_precision(full, at, positions, slot, wanted & bucket.is_live, decoded)
    return None


def _rotated_queries(query: Tensor, bucket: Bucket, math: AttentionMath, key_dim: int) -> Tensor:
    """Rotate queries [entries, tokens, heads, head_dim] to their places; heads before tokens.

    The last `key_dim` elements are those that are compared with the keys in pages: of a query to
    latents, its rotated part.
    """
    assert math.rotary is not None, "only called with queries before RoPE"
    own = query[..., query.shape[3] - key_dim :].flatten(0, 1)
    rotated = math.rotary.rotate_pre_rope(own, bucket.query_place.flatten()).to(query.dtype)
    rotated = torch.cat([query.flatten(0, 1)[..., : query.shape[3] - key_dim], rotated], dim=-1)
    return rotated.view(query.shape).transpose(1, 2)
