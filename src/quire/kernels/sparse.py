"""Sparse attention over pages (Quest): bounds of the keys of pages, and which pages are read.

A page has, for each KV head, the minimum and the maximum of each element of its stored keys after
RoPE. No stored key k of the page has a product with a query q above

    sum over elements d of max(q[d] * min[d], q[d] * max[d])

The score of a page for a KV head is the sum of these bounds over its query heads, which read the
same pages. Since max(q * min, q * max) is max(q, 0) * max + min(q, 0) * min, it is one product:

    score = sum over d of (sum over heads of max(q[d], 0)) * max[d]
                        + (sum over heads of min(q[d], 0)) * min[d]

A decode row reads the first pages of a lane (sinks), the newest ones, and those with the highest
scores. Other rows of the step attend to all tokens. So do decode rows within their budget.

Bounds are those of the keys as decoded from their codes, rounded outward if they have fewer digits.
Tokens in full precision, and promoted ones, count with their codes. Where a row drops tokens of a
page that it shares, bounds are too wide until the page is copied.
Source: Tang et al. 2024, Quest, arXiv 2406.10774.

Differs from the paper:
    heads: the query heads of a KV head read the same pages.
"""

from dataclasses import dataclass, field, replace
from math import gcd

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    LaneSlots,
    LayerPages,
    SparseBackend,
    StepShape,
)
from quire.kernels.coded import CodedPlanes
from quire.kernels.device_copies import to_device
from quire.kernels.token_precision import (
    FullPrecisionPages,
    add_promoted,
    in_full_precision,
    write_full_precision,
)


def select_pages(
    bounds: Float[Tensor, "row lane column head both_dims"],
    query: Float[Tensor, "row lane head group key_dim"],
    pages: tuple[Int[np.ndarray, "row lane"], Int[np.ndarray, "row lane"]],
    *,
    sinks: Int[np.ndarray, " row"],
    recent: Int[np.ndarray, " row"],
) -> Int[Tensor, "row all_heads count"]:
    """Return the pages that each KV head of each lane reads, without a wait for the device.

    Of pages with equal scores the first ones are read.

    Args:
        bounds: of the pages of all lanes, minima before maxima; those after the last page of a lane
            are not read.
        query: the query heads of each KV head.
        pages: pages of each lane, and pages to read of them.
        sinks: first pages that are read in any case, of each row.
        recent: last pages that are read in any case, of each row.

    Returns:
        The pages of each KV head, ascending, and 0 after the last.
    """
    device, columns = bounds.device, bounds.shape[2]
    weights = torch.cat([query.clamp_max(0).sum(dim=3), query.clamp_min(0).sum(dim=3)], dim=3)
    # not a matrix product: its last bits may depend on the number of pages of other rows
    scores = (bounds.float() * weights[:, :, None]).sum(dim=4).transpose(2, 3)
    held, count = (to_device(x, device)[:, :, None, None] for x in pages)
    first, last = (to_device(x, device)[:, None, None, None] for x in (sinks, recent))
    column = torch.arange(columns, device=device)
    in_any_case = (column < first) | (column >= held - last)
    scores = scores.masked_fill(in_any_case, torch.inf).masked_fill(column >= held, -torch.inf)
    best = scores.sort(dim=3, descending=True, stable=True).indices[..., : int(pages[1].max())]
    unread = torch.arange(best.shape[3], device=device) >= count
    best = best.masked_fill(unread, columns).sort(dim=3).values
    return best.masked_fill(unread, 0).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """A step for a backend that reads all pages of its rows: sparse rows have tables of few pages.

    Attributes:
        backend: attends to the pages, or to copies of them.
        step, lanes, page_tokens, slot_bytes: as of a plan of the backend.
        rows: rows that read only some pages, with one new token each.
        others: the other rows.
        dense: plan of the backend for the other rows; None if there are none.
        plans: plans for the sparse rows, by heads of a page.
    """

    backend: AttentionBackend
    step: StepShape
    lanes: LaneSlots
    page_tokens: int
    slot_bytes: int
    rows: NDArray[np.int64]
    others: NDArray[np.int64]
    dense: object
    plans: dict[int, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        backend: AttentionBackend,
        step: StepShape,
        lanes: LaneSlots,
        page_tokens: int,
        slot_bytes: int,
    ) -> object:
        """Return the plan of the backend itself if no row is sparse, or if it reads pages apart."""
        itself = isinstance(backend, SparseBackend) and backend.plans_sparse
        if lanes.sparse is None or itself:
            return backend.plan(step, lanes, page_tokens, slot_bytes)
        is_sparse = lanes.sparse.pages.any(axis=1)
        rows, others = np.flatnonzero(is_sparse), np.flatnonzero(~is_sparse)
        dense = None
        if len(others):
            own = LaneSlots(np.ascontiguousarray(lanes.slots[others]), lanes.window)
            dense = backend.plan(StepShape.of(step.tokens[others]), own, page_tokens, slot_bytes)
        return cls(backend, step, lanes, page_tokens, slot_bytes, rows, others, dense)

    def attend(
        self,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        *,
        column_sums: Tensor | None = None,
    ) -> Tensor:
        """Compute attention for all rows of the step; see `AttentionBackend.attend`."""
        out = query.new_empty(*query.shape[:2], math.output_dim(pages))
        device = query.device
        if self.dense is not None:
            own, starts, tokens = self.others, self.step.starts, self.step.tokens
            flat = [np.arange(starts[row], starts[row] + tokens[row]) for row in own]
            token, row = to_device(np.concatenate(flat), device), to_device(own, device)
            sums = None if column_sums is None else column_sums[row]
            of_rows = _of_rows(pages, own, StepShape.of(tokens[own]).starts, token)
            own_fresh = (fresh[0][token], fresh[1][token])
            out[token] = self.backend.attend(
                self.dense, of_rows, math, query[token], own_fresh, column_sums=sums
            )
            if column_sums is not None and sums is not None:
                column_sums[row] = sums
        row, token = to_device(self.rows, device), to_device(self.step.starts[self.rows], device)
        columns = self._select(pages, query[token])
        numbers = None
        if pages.offloaded is not None:
            counts, found = self._counts(), columns.cpu().numpy()
            numbers = torch.from_numpy(pages.offloaded.fetch(self.rows, found, counts)).to(device)
        slots = self._slots(pages.key.shape[1])
        of_rows = _of_rows(pages, self.rows, np.arange(len(self.rows)), token)
        held = self.lanes.slots[self.rows]
        apart = _of_heads(of_rows, columns, query.dtype, numbers, held, slots)
        sums = None
        if column_sums is not None:
            sums = column_sums.new_zeros(len(row), query.shape[1], int(slots.max()))
        own_fresh = (fresh[0][token], fresh[1][token])
        plan = self._plan(pages.key.shape[1], slots)
        out[token] = self.backend.attend(
            plan, apart, math, query[token], own_fresh, column_sums=sums
        )
        if column_sums is not None and sums is not None:
            width = column_sums.shape[2]
            column_sums[row] = spread_sums(sums, columns, slots, self.page_tokens, width)
        return out

    def _slots(self, heads: int) -> NDArray[np.int32]:
        """Return the slots that each KV head of the sparse rows reads, [row, KV head]."""
        by_lane = self.lanes.slots_read(self.page_tokens)[self.rows]
        return np.repeat(by_lane, heads, axis=1)

    def _plan(self, heads: int, slots: NDArray[np.int32]) -> object:
        if heads not in self.plans:
            ones = StepShape.of(np.ones(len(self.rows), dtype=np.int32))
            self.plans[heads] = self.backend.plan(
                ones, LaneSlots(slots, self.lanes.window), self.page_tokens, self.slot_bytes
            )
        return self.plans[heads]

    def _held(self) -> NDArray[np.int32]:
        """Return the pages [row, lane] of the sparse rows."""
        return -(-self.lanes.slots[self.rows] // np.int32(self.page_tokens))

    def _counts(self) -> NDArray[np.int32]:
        """Return the pages [row, lane] that the sparse rows read."""
        assert self.lanes.sparse is not None, "see `of`"
        some = self.lanes.sparse.pages[self.rows]
        return np.where(some > 0, some, self._held())

    def _select(self, pages: LayerPages, query: Tensor) -> Int[Tensor, "row kv_head column"]:
        """Return the columns of the page table that each KV head reads; 0 after the last."""
        sparse, heads = self.lanes.sparse, pages.key.shape[1]
        assert pages.bounds is not None, "only such pages are selected"
        assert sparse is not None, "see `of`"
        held, counts = self._held(), self._counts()
        by_lane = query.view(len(query), pages.num_lanes, heads, -1, query.shape[2]).float()
        if pages.offloaded is None:
            own = slice(pages.first_lane, pages.first_lane + pages.num_lanes)
            row = pages.rows[to_device(self.rows, query.device)]
            numbers = pages.table[row, own, : int(held.max())].clamp_min(0).long()
            bounds = pages.bounds[numbers][:, :, :, :, 0]
        else:
            shape = (len(self.rows), pages.num_lanes, int(held.max()), heads)
            bounds = pages.bounds.new_zeros(*shape, pages.bounds.shape[3])
            for (i, lane), count in np.ndenumerate(held):
                own_bounds = pages.offloaded.bounds(pages, int(self.rows[i]), lane, int(count))
                bounds[i, lane, :count] = own_bounds[:, :, 0]
        edges = {"sinks": sparse.sinks[self.rows], "recent": sparse.recent[self.rows]}
        return select_pages(bounds, by_lane, (held, counts), **edges)


def attend_planned(
    backend: AttentionBackend,
    plan: object,
    pages: LayerPages,
    math: AttentionMath,
    query: Tensor,
    fresh: tuple[Tensor, Tensor],
    *,
    column_sums: Tensor | None = None,
) -> Tensor:
    """Compute attention by a plan of the backend, or by a `SparsePlan`."""
    if isinstance(plan, SparsePlan):
        return plan.attend(pages, math, query, fresh, column_sums=column_sums)
    return backend.attend(plan, pages, math, query, fresh, column_sums=column_sums)


def spread_sums(
    sums: Float[Tensor, "row num_heads slot_read"],
    columns: Int[Tensor, "row kv_head column"],
    slots: NDArray[np.int32],
    page_tokens: int,
    width: int,
) -> Float[Tensor, "row num_heads slot"]:
    """Return column sums by slot of the lanes, 0 for slots that are not read.

    Args:
        sums: by slot of the pages that are read, one after the other.
        columns: the pages that are read.
        slots: [row, KV head] slots that are read.
        page_tokens: slots of a page.
        width: slots of the result.
    """
    slot = torch.arange(sums.shape[2], device=sums.device)
    page = columns[:, :, (slot // page_tokens).clamp_max(columns.shape[2] - 1)]
    live = slot < to_device(slots, sums.device)[:, :, None]
    index = torch.where(live, page * page_tokens + slot % page_tokens, 0)
    group = sums.shape[1] // columns.shape[1]
    index, live = (x.repeat_interleave(group, dim=1) for x in (index, live))
    found = sums.new_zeros(*sums.shape[:2], width)
    return found.scatter_add_(2, index, sums.masked_fill(~live, 0))


def _of_rows(
    pages: LayerPages, rows: NDArray[np.int64], starts: NDArray[np.int64], tokens: Tensor
) -> LayerPages:
    """Return the pages of some rows, whose `tokens` of the step begin at `starts`."""
    full = pages.full_precision
    full = None if full is None else full.of_rows(rows, starts, tokens)
    own = pages.rows[to_device(rows, pages.rows.device)]
    return replace(pages, rows=own, full_precision=full)


def _of_heads(
    pages: LayerPages,
    columns: Tensor,
    dtype: torch.dtype,
    fetched: Tensor | None,
    held: NDArray[np.int32],
    read: NDArray[np.int32],
) -> LayerPages:
    """Return the pages of each KV head as one-head pages of its own lane.

    They are views of plain pages whose planes have equal strides; others are copied or decoded.

    Args:
        pages: of the rows.
        columns: of the page table, [row, KV head, column].
        dtype: of copies.
        fetched: the pages of the columns, if not those of the table.
        held: [row, lane] slots of each lane.
        read: [row, KV head] slots of the columns.
    """
    heads, (rows, kv_heads, count) = pages.key.shape[1], columns.shape
    kv_head = torch.arange(kv_heads, device=columns.device)
    lane = (pages.first_lane + kv_head // heads)[None, :, None]
    if fetched is None:
        fetched = pages.table[pages.rows[:, None, None], lane, columns]
    numbers = fetched.clamp_min(0).long()
    head = (kv_head % heads)[None, :, None]
    (page_stride, head_stride), strides = pages.key.stride()[:2], pages.value.stride()[:2]
    unit = gcd(page_stride, head_stride)
    is_alike = pages.coded is None and strides == (page_stride, head_stride)
    if is_alike and pages.key.dtype == dtype and len(pages.key) * page_stride // unit < 1 << 31:
        table = numbers * (page_stride // unit) + head * (head_stride // unit)

        def viewed(plane: Tensor) -> Tensor:
            size = 1 + ((len(plane) - 1) * page_stride + (heads - 1) * head_stride) // unit
            inner = plane.stride()[2:]
            return plane.as_strided((size, 1, *plane.shape[2:]), (unit, head_stride, *inner))

        return _one_head_pages(viewed(pages.key), viewed(pages.value), table.int())

    def copied(plane: Tensor, coded: CodedPlanes | None) -> Tensor:
        if coded is None:
            found = plane[numbers, head]
        else:
            codec = coded.codec
            if codec.constants:
                codec = codec.of_heads(kv_head[None, :, None, None])
            found = codec.decode([of[numbers, head, None] for of in coded.planes])
        return found.reshape(-1, 1, *found.shape[-2:]).to(dtype)

    sides = (None, None) if pages.coded is None else (pages.coded.key, pages.coded.value)
    table = torch.arange(numbers.numel(), dtype=torch.int32, device=columns.device)
    keys, values = copied(pages.key, sides[0]), copied(pages.value, sides[1])
    if pages.full_precision is not None:
        place = columns, numbers, held, read
        _put_finer_tokens(pages, pages.full_precision, place, (keys, values))
    return _one_head_pages(keys, values, table.view(rows, kv_heads, count))


def _put_finer_tokens(
    pages: LayerPages,
    full: FullPrecisionPages,
    place: tuple[Tensor, Tensor, NDArray[np.int32], NDArray[np.int32]],
    decoded: tuple[Tensor, Tensor],
) -> None:
    """Overwrite tokens of decoded pages of single heads with those in finer precision.

    Args:
        pages: of the rows, with promoted tokens or without.
        full: full-precision tokens of the rows.
        place: columns, page numbers, held and read slots; see `_of_heads`.
        decoded: keys and values of the columns, modified in place.
    """
    columns, numbers, *counts = place
    (rows, kv_heads, _), heads, tokens = columns.shape, pages.key.shape[1], pages.page_tokens
    lanes, device = kv_heads // heads, columns.device
    held, read = (to_device(x, device)[:, :, None] for x in counts)
    held = held.repeat_interleave(heads, 1)
    length = to_device(full.lengths, device)[:, None, None].expand_as(held)
    slots = (columns[..., None] * tokens + torch.arange(tokens, device=device)).flatten(2)
    positions = slots + (length - held)
    if pages.positions is not None:
        positions = pages.positions[numbers].flatten(2).long()
    live = torch.arange(slots.shape[2], device=device) < read
    wanted = live & in_full_precision(full.tokens, positions, slots, length - 1, held - 1)
    live = live.view(rows * lanes, heads, -1)
    row = torch.arange(rows, device=device).repeat_interleave(lanes)
    lane = torch.arange(lanes, device=device).repeat(rows)
    table = pages.rows[row], pages.first_lane + lane, 0
    where = row, full.table[table].long(), lane
    sides = [x.view(rows, lanes, heads, slots.shape[2], -1) for x in decoded]
    for head in range(heads):
        at, slot, want = (x[:, head::heads].flatten(0, 1) for x in (positions, slots, wanted))
        key, value = (side[:, :, head].flatten(0, 1)[:, None].clone() for side in sides)
        if pages.promoted is not None:
            records = pages.promoted.table[table].long()
            add_promoted(pages.promoted.of_head(head), records, at, (key, value), live[:, head])
        write_full_precision(full.of_head(head, lanes), where, at, slot, want, (key, value))
        for side, changed in zip(sides, (key, value), strict=True):
            side[:, :, head] = changed.view(rows, lanes, *changed.shape[2:])


def _one_head_pages(key: Tensor, value: Tensor, table: Tensor) -> LayerPages:
    rows, lanes, _ = table.shape
    row = torch.arange(rows, device=table.device)
    return LayerPages(key=key, value=value, table=table, rows=row, first_lane=0, num_lanes=lanes)
