"""The portable backend: gather pages side by side, then `scaled_dot_product_attention`.

entries of a row     1 for layer pages, one per KV head for one-head pages
decode bucket        entries of similar length, gathered together, one call
fresh chunks         nothing stored before them: they attend to themselves, nothing is gathered
other chunks         gathered and attended one entry at a time
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.dense import attend_dense
from quire.kernels.paging import gather_pages

DEFAULT_SCRATCH_BYTES = 64 * 1024 * 1024
BUCKET_SLACK = 1.25  # longest over shortest entry of a decode bucket, beyond a page


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Decode entries gathered together.

    Attributes:
        rows: [entries] index of the row in the step.
        lanes: [entries] lane among the layer's own.
        columns: pages gathered for each entry.
        shortest: slots of the shortest entry: what lies behind it may be no live slot.
        dead: bool [entries, 1, slots - shortest, 1] slots that were never written, or None.
        seen: bool [entries, 1, 1, slots], or None when every slot of every entry is seen.
    """

    rows: Tensor
    lanes: Tensor
    columns: int
    shortest: int
    dead: Tensor | None
    seen: Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows with the same number of new tokens that attend in one call.

    Attributes:
        rows: indices of the rows in the step.
        tokens: new tokens of each.
        slots: [lanes] slots of the row after the step; more than `tokens` only for a single row.
    """

    rows: NDArray[np.int64]
    tokens: int
    slots: NDArray[np.int32]

    @property
    def is_fresh(self) -> bool:
        """Nothing was stored before these tokens."""
        return bool((self.slots == self.tokens).all())


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """What the layers of a lane group share in one step."""

    step: StepShape
    window: int | None
    buckets: tuple[DecodeBucket, ...]
    chunks: tuple[Chunk, ...]


class GatheredAttention:
    """Attention over pages on any device, for any page class with plain numbers.

    Args:
        device: where the pages are.
        scratch_bytes: bound on gathered keys and values at a time. One entry alone may exceed it:
            the longest row costs its own KV of one layer.
    """

    name = "gathered"

    def __init__(self, device: torch.device, *, scratch_bytes: int = DEFAULT_SCRATCH_BYTES) -> None:
        self._device = device
        self._scratch_bytes = scratch_bytes
        self.peak_scratch_bytes = 0
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)

    # ---- once for all layers alike -------------------------------------------------------------

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Cut decode entries into buckets and group the chunks."""
        decode = lanes.slots[: step.num_decode].reshape(-1)
        order = np.argsort(decode, kind="stable")
        buckets = [
            self._bucket(decode, entries, lanes, page_tokens)
            for entries in self._cut(decode[order], order, page_tokens, slot_bytes)
        ]
        return GatheredPlan(step, lanes.window, tuple(buckets), tuple(group_chunks(step, lanes)))

    def _cut(
        self,
        lengths: NDArray[np.int32],
        order: NDArray[np.int64],
        page_tokens: int,
        slot_bytes: int,
    ) -> Iterator[NDArray[np.int64]]:
        """Cut entries, sorted by length, where they get too long or too many for the scratch."""
        start = 0
        pages = -(-lengths.astype(np.int64) // page_tokens)
        gathered_bytes = pages * (page_tokens * slot_bytes)
        for i in range(1, len(order)):
            too_long = lengths[i] > BUCKET_SLACK * lengths[start] + page_tokens
            if too_long or (i + 1 - start) * gathered_bytes[i] > self._scratch_bytes:
                yield order[start:i]
                start = i
        if len(order):
            yield order[start:]

    def _bucket(
        self,
        lengths: NDArray[np.int32],
        entries: NDArray[np.int64],
        lanes: LaneSlots,
        page_tokens: int,
    ) -> DecodeBucket:
        held = lengths[entries, None]
        rows, lane = np.divmod(entries, lanes.slots.shape[1])
        columns, shortest = -(-int(held.max()) // page_tokens), int(held.min())
        slot = np.arange(columns * page_tokens)
        live = slot < held
        seen = live if lanes.window is None else live & (slot >= held - lanes.window)
        dead = ~live[:, shortest:]
        return DecodeBucket(
            rows=self._tensor(rows),
            lanes=self._tensor(lane),
            columns=columns,
            shortest=shortest,
            dead=self._tensor(dead)[:, None, :, None] if dead.any() else None,
            seen=None if seen.all() else self._tensor(seen)[:, None, None],
        )

    # ---- every layer ---------------------------------------------------------------------------

    def attend(
        self,
        plan: object,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend for all rows of the step; see `AttentionBackend.attend`."""
        assert isinstance(plan, GatheredPlan), "a plan comes from this backend"
        out = torch.empty_like(query)
        num_decode = plan.step.num_decode
        if num_decode:
            self._decode(plan, pages, math, query[:num_decode], out[:num_decode])
        for chunk in plan.chunks:
            token = torch.cat(
                [torch.arange(s, s + chunk.tokens) for s in plan.step.starts[chunk.rows].tolist()]
            ).to(self._device)
            shape = (len(chunk.rows), chunk.tokens, *query.shape[1:])
            q = query[token].view(shape).transpose(1, 2)
            if chunk.is_fresh:
                attended = self._fresh_chunk(plan, chunk, math, q, token, fresh)
            else:
                attended = self._stored_chunk(plan, chunk, math, q, pages)
            out[token] = attended.transpose(1, 2).flatten(0, 1)
        return out

    def _decode(
        self, plan: GatheredPlan, pages: LayerPages, math: AttentionMath, query: Tensor, out: Tensor
    ) -> None:
        by_lane, out_by_lane = _by_lane(query, pages), _by_lane(out, pages)
        for bucket in plan.buckets:
            key, value = self._gather(pages, bucket.rows, bucket.lanes, bucket.columns)
            if bucket.dead is not None:
                # free slots may hold anything, and 0 * NaN is NaN
                key[:, :, bucket.shortest :].masked_fill_(bucket.dead, 0)
                value[:, :, bucket.shortest :].masked_fill_(bucket.dead, 0)
            out_by_lane[bucket.rows, bucket.lanes] = attend_dense(
                by_lane[bucket.rows, bucket.lanes].unsqueeze(2),
                key,
                value,
                math=_math_of(math, pages, bucket.lanes),
                seen=bucket.seen,
            ).squeeze(2)

    def _fresh_chunk(
        self,
        plan: GatheredPlan,
        chunk: Chunk,
        math: AttentionMath,
        query: Tensor,
        token: Tensor,
        fresh: tuple[Tensor, Tensor],
    ) -> Tensor:
        shape = (len(chunk.rows), chunk.tokens, *fresh[0].shape[1:])
        key, value = (x[token].view(shape).transpose(1, 2) for x in fresh)
        if plan.window is None or chunk.tokens <= plan.window:
            return attend_dense(query, key, value, math=math, seen=None, causal=True)
        seen = self._chunk_seen(chunk.tokens, chunk.tokens, plan.window)
        return attend_dense(query, key, value, math=math, seen=seen)

    def _stored_chunk(
        self,
        plan: GatheredPlan,
        chunk: Chunk,
        math: AttentionMath,
        query: Tensor,
        pages: LayerPages,
    ) -> Tensor:
        row = self._tensor(chunk.rows)
        parts = []
        for lane, slots in enumerate(chunk.slots.tolist()):
            lane_index = torch.tensor([lane], device=self._device)
            columns = -(-slots // pages.page_tokens)
            key, value = self._gather(pages, row, lane_index, columns)
            per_lane = query.shape[1] // len(chunk.slots)
            parts.append(
                attend_dense(
                    query[:, lane * per_lane : (lane + 1) * per_lane],
                    key[:, :, :slots],
                    value[:, :, :slots],
                    math=_math_of(math, pages, lane_index),
                    seen=self._chunk_seen(chunk.tokens, slots, plan.window),
                )
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _chunk_seen(self, tokens: int, slots: int, window: int | None) -> Tensor:
        """[1, 1, tokens, slots]: the last `tokens` slots are the queries' own."""
        own = torch.arange(slots - tokens, slots, device=self._device)[:, None]
        slot = torch.arange(slots, device=self._device)
        seen = slot <= own
        if window is not None:
            seen &= slot > own - window
        return seen[None, None]

    def _gather(
        self, pages: LayerPages, rows: Tensor, lanes: Tensor, columns: int
    ) -> tuple[Tensor, Tensor]:
        numbers = pages.table[pages.rows[rows], pages.first_lane + lanes, :columns]
        numbers = numbers.clamp_min(0).long()  # rows with fewer pages: any page, cleared as dead
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

    def _scratch_of(self, num_bytes: int) -> Tensor:
        """The scratch memory, grown where one entry needs more than the bound."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self.peak_scratch_bytes = num_bytes
        return self._scratch

    def _tensor(self, numbers: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)


def _by_lane(flat: Tensor, pages: LayerPages) -> Tensor:
    """[rows, num_heads, head_dim] as [rows, lanes, heads of a lane, head_dim], the same memory."""
    return flat.view(len(flat), pages.num_lanes, -1, flat.shape[2])


def _math_of(math: AttentionMath, pages: LayerPages, lanes: Tensor) -> AttentionMath:
    """Each entry's own heads' sinks."""
    if math.sinks is None:
        return math
    return replace(math, sinks=math.sinks.view(pages.num_lanes, -1)[lanes])


def group_chunks(step: StepShape, lanes: LaneSlots) -> Iterator[Chunk]:
    """Group rows that start fresh with equally many tokens; the others stand alone."""
    fresh: dict[int, list[int]] = {}
    for row in range(step.num_decode, len(step.tokens)):
        tokens, slots = int(step.tokens[row]), lanes.slots[row]
        if (slots == tokens).all():
            fresh.setdefault(tokens, []).append(row)
        else:
            yield Chunk(np.array([row]), tokens, slots)
    for tokens, rows in fresh.items():
        yield Chunk(np.array(rows), tokens, lanes.slots[rows[0]])
