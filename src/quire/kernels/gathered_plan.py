"""Plans of the gathered backend that all layers of a group share: decode buckets and chunks."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import LaneSlots, LayerPages, StepShape
from quire.kernels.device_copies import to_device
from quire.kernels.paging import page_numbers
from quire.kernels.token_precision import (
    ChunkLane,
    FullPrecisionPages,
    add_promoted,
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
        decoded: keys and values [1, head, slot, head_dim], modified in place.
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
