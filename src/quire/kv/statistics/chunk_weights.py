"""Attention weights of a chunk of a prompt, computed again: each query's own, not their sum.

What is not linear in the weights (a maximum over heads, squares, a threshold) needs each query's
row. Queries go in blocks, KV heads one by one, so that the weights never take more than a bounded
scratch: `BLOCK_NUMBERS` of them, or one query's where a lane is longer than that.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kernels.backend import AttentionMath, LayerPages
from quire.kernels.coded import decode_head
from quire.kernels.dense import weights_dense
from quire.kernels.full_precision import LanePlace, made_columns
from quire.kernels.gathered_full_precision import lane_place
from quire.kernels.promoted import decode_records, records_of

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
        made = None
        if pages.kept is not None:
            place = lane_place(pages, row, lane, held=held, num_tokens=len(query))
            _write_promoted(key, pages, place, kv_head % heads)
            made = made_columns(pages.kept, place, all_seen)
            key = made.behind(key, made.key[:, kv_head % heads, None])
            all_seen = made.seen[0, 0]
        sinks = None if math.sinks is None else math.sinks[part]
        own_math = replace(math, sinks=sinks)
        block = max(1, BLOCK_NUMBERS // (group * held))
        for start in range(0, len(query), block):
            some, mask = (x[..., start : start + block, :] for x in (q, all_seen))
            weights = weights_dense(some, key, math=own_math, seen=mask[None, None])
            by_slot = weights[0, 0] if made is None else made.by_slot(weights[0, 0])
            yield LaneWeights(kv_head, by_slot.transpose(0, 1), mask.sum(dim=1, keepdim=True))


def _write_promoted(key: Tensor, pages: LayerPages, place: LanePlace, head: int) -> None:
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
