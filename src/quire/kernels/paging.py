"""Reads and writes of page slots through typed views of the arena, and their attention statistics.

A plane of a page class is a view [pages, heads, tokens, head_dim] over the whole arena; page
numbers index its first axis.

Attention statistics are numbers per slot that policies use, accumulated from the weight of each
query on each slot, per KV head. The query heads that share a KV head are reduced first
(`over_group`), then weights are measured (`measure_attention`). The C extension does both for a
whole layer at once (native/tally.h); `accumulate_attention` is the torch implementation for any
device.
"""

from collections.abc import Callable
from math import gcd

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from quire.codecs.affine import half_above, half_below
from quire.kernels import device_copies
from quire.kernels.backend import (
    AttentionMeasure,
    AttentionStatistic,
    LayerPages,
    MovedSlots,
    NewSlots,
    StatisticRows,
)
from quire.kernels.coded import CodedPlanes, write_codes
from quire.layout.statistics import MAX, MEAN


def over_group(weights: Float[Tensor, "*shape group slot"], heads: str) -> Tensor:
    """Reduce over the query heads of a KV head, [*shape, slot].

    Args:
        weights: weights of the heads of a group, for one query.
        heads: mean, max or sum.
    """
    if heads == MAX:
        return weights.amax(dim=-2)
    return weights.mean(dim=-2) if heads == MEAN else weights.sum(dim=-2)


def measure_attention(
    count: AttentionMeasure,
    weights: Float[Tensor, "*shape slot"],
    seen: Shaped[Tensor, "*shape 1"],
) -> Float[Tensor, "*shape slot"]:
    """Return what each weight adds to the statistic of its slot.

    Args:
        count: the sum of weights, the sum of their squares, or the number of low weights.
        weights: one query's weights per row.
        seen: number of slots the query sees; a weight below 1 / seen is low. Results for later
            slots are undefined.
    """
    if count is AttentionMeasure.SUM:
        return weights
    if count is AttentionMeasure.SQUARES:
        return weights.square()
    return (weights < 1 / seen.float()).float()


def accumulate_attention(
    tally: AttentionStatistic,
    rows: StatisticRows,
    column_sums: Float[Tensor, "step_row num_heads slot"],
) -> None:
    """Add a step's weights to the statistics of slots; see `AttentionBackend.tally`."""
    held, widest = rows.slots, rows.max_slots
    is_read = widest is None or device_copies.reads_freely(held.device)
    if widest is None:
        widest = int(held.max()) if held.numel() else 0
    _, heads, tokens, _ = tally.numbers.shape
    shape = (len(held), held.shape[1] * heads, -1, widest)
    weights = column_sums[rows.step_rows, :, :widest].reshape(shape)
    seen = held.repeat_interleave(heads, dim=1)[:, :, None]
    weights = measure_attention(tally.count, over_group(weights, tally.heads), seen)
    by_lane = weights.view(len(held), held.shape[1], heads, widest).transpose(2, 3)

    slot = torch.arange(widest, device=held.device)
    if is_read:
        row, lane, index = torch.nonzero(slot < held[:, :, None], as_tuple=True)
        pages = tally.table[rows.table_rows[row], tally.first_lane + lane, index // tokens].long()
        is_old = index < held[row, lane] - rows.fresh[row]
        put(tally.numbers, pages, index % tokens, by_lane[row, lane, index], is_old)
        return
    # past a lane's last slot, the first one is written again: the number of slots is not read
    index = torch.where(slot < held[:, :, None], slot, 0)
    lanes = slice(tally.first_lane, tally.first_lane + held.shape[1])
    pages = tally.table[rows.table_rows, lanes].long().gather(2, index // tokens).reshape(-1)
    is_old = index < held[:, :, None] - rows.fresh[:, None, None]
    added = by_lane.gather(2, index[..., None].expand_as(by_lane)).flatten(0, 2)
    offsets = (index % tokens).reshape(-1)
    put(tally.numbers, pages, offsets, added, is_old.reshape(-1))


def put(
    numbers: Float[Tensor, "page head token 1"],
    pages: Int[Tensor, " entry"],
    offsets: Int[Tensor, " entry"],
    added: Float[Tensor, "entry head"],
    is_old: Shaped[Tensor, " entry"],
    combine: Callable[[Tensor, Tensor], Tensor] = torch.add,
) -> None:
    """Combine with the statistics of old slots, and overwrite those of new slots.

    `combine` of 0 and a number must be the number.
    """
    before = torch.where(is_old[:, None], numbers[pages, :, offsets, 0], 0)
    numbers[pages, :, offsets, 0] = combine(before, added)


class TorchSlots:
    """Slot operations of `AttentionBackend` that the torch backends share."""

    def write(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        """Write keys and values to their slots; see `AttentionBackend.write`."""
        write_slots(slots, key, value)

    def move(self, moves: MovedSlots) -> None:
        """Copy slots to other slots; see `AttentionBackend.move`."""
        move_slots(moves)

    def tally(self, tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> None:
        """Add a step's attention to the statistics of slots; see `AttentionBackend.tally`."""
        accumulate_attention(tally, rows, column_sums)


def page_numbers(
    pages: LayerPages,
    rows: Int[Tensor, " row"],
    lanes: Int[Tensor, " lane"],
    columns: Int[Tensor, "_ column"],
) -> Int[Tensor, "_ column"]:
    """Return the pages of rows of the step in lanes of the layer; arbitrary pages for gaps.

    Arguments broadcast: one row, one lane or one set of columns applies to all entries.
    """
    columns = columns.clamp(max=pages.table.shape[2] - 1)
    numbers = pages.table[pages.rows[rows][:, None], pages.first_lane + lanes[:, None], columns]
    return numbers.clamp_min(0).long()


def write_slots(
    slots: NewSlots,
    key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    value: Float[Tensor, "num_tokens num_kv_heads value_dim"],
) -> None:
    """Write one vector per token and KV head to its slot, for keys and values."""
    if slots.coded is not None:
        write_codes(slots.coded.key, slots.pages, slots.offsets, key)
        write_codes(slots.coded.value, slots.pages, slots.offsets, value)
    else:
        for plane, fresh in ((slots.key, key), (slots.value, value)):
            shape = (*slots.pages.shape, plane.shape[1], plane.shape[3])
            plane[slots.pages, :, slots.offsets] = fresh.reshape(shape)
    write_bounds(slots)


def set_bounds(
    bounds: Float[Tensor, "page head 1 both_dims"],
    key: Tensor,
    coded: CodedPlanes | None,
    pages: Int[Tensor, " some_page"],
    held: Int[Tensor, " some_page"],
) -> None:
    """Compute the bounds of pages from their first slots.

    Args:
        bounds: view of all pages.
        key: keys of all pages, or their codes.
        coded: decodes them; None for unquantized keys.
        pages: numbers of the pages.
        held: slots of each that hold a token, at least one.
    """
    keys = key[pages].float() if coded is None else _decoded(coded, pages)
    dead = torch.arange(keys.shape[2], device=keys.device) >= held[:, None]
    dead = dead[:, None, :, None]
    low = keys.masked_fill(dead, torch.inf).amin(dim=2)
    high = keys.masked_fill(dead, -torch.inf).amax(dim=2)
    if bounds.dtype == torch.float16:
        low, high = half_below(low), half_above(high)
    # plain keys have the type of their bounds
    bounds[pages, :, 0] = torch.cat([low, high], dim=-1).to(bounds.dtype)


def _decoded(coded: CodedPlanes, pages: Tensor) -> Float[Tensor, "some_page head token key_dim"]:
    return coded.codec.decode([plane[pages] for plane in coded.planes]).float()


_MAX_REPEATED_PAGES = 512
"""On a GPU: `unique` waits for the device, and so few pages may be computed several times."""


def write_bounds(slots: NewSlots) -> None:
    """Compute the bounds of the pages to which the new tokens were written."""
    if slots.bounds is None:
        return
    pages, offsets = slots.pages.reshape(-1), slots.offsets.reshape(-1)
    newest = torch.zeros(len(slots.bounds), dtype=offsets.dtype, device=pages.device)
    newest.scatter_reduce_(0, pages.long(), offsets, "amax", include_self=True)
    if len(pages) > _MAX_REPEATED_PAGES or pages.device.type == "cpu":
        pages = torch.unique(pages)
    coded = None if slots.coded is None else slots.coded.key
    set_bounds(slots.bounds, slots.key, coded, pages, newest[pages] + 1)


def move_slots(moves: MovedSlots) -> None:
    """Copy slots to other slots in every plane; see `AttentionBackend.move`."""
    (from_page, from_offset), (to_page, to_offset) = moves.source, moves.target
    for plane in moves.planes:
        plane[to_page, :, to_offset] = plane[from_page, :, from_offset]


def gather_pages(
    plane: Float[Tensor, "page head token head_dim"],
    pages: Int[Tensor, "row column"],
    out: Float[Tensor, " numbers"],
) -> Float[Tensor, "row head slot head_dim"]:
    """Copy pages to contiguous scratch memory: slot = column * tokens + offset.

    Each copy is as long as the places of all pages allow: mostly all slots of a (page, head), and a
    vector or a part of it if pages store positions or vectors of unequal widths.

    Args:
        plane: view of all pages.
        pages: page numbers.
        out: at least rows * heads * columns * tokens * head_dim numbers; reused between calls,
            because touching new memory costs more than the copy.

    Returns:
        A view of `out`.
    """
    _, heads, tokens, head_dim = plane.shape
    page_stride, block = plane.stride(0), tokens * head_dim
    unit = gcd(block, page_stride, plane.storage_offset())
    head = torch.arange(heads, device=plane.device) * (block // unit)
    index = (pages * (page_stride // unit) + plane.storage_offset() // unit)[:, None, :, None]
    index = index + head[None, :, None, None]
    index = index + torch.arange(block // unit, device=plane.device)
    end = plane.storage_offset() + (len(plane) - 1) * page_stride + heads * block
    rows = plane.as_strided((end // unit, unit), (unit, 1), 0)
    gathered = out[: index.numel() * unit].view(-1, unit)
    torch.index_select(rows, 0, index.flatten(), out=gathered)
    return gathered.view(len(pages), heads, -1, head_dim)
