"""Attention statistics: numbers per slot, accumulated from attention weights, that policies use.

The input is the weight of each query on each slot, per KV head. The query heads that share a KV
head are reduced first (`over_group`), then weights are measured (`measure_attention`). The C
extension does both for a whole layer at once (native/tally.h); `accumulate_attention` is the torch
implementation for any device.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from quire.kernels.backend import AttentionMeasure, AttentionStatistic, StatisticRows
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
    held = rows.slots
    widest = int(held.max()) if held.numel() else 0
    _, heads, tokens, _ = tally.numbers.shape
    shape = (len(held), held.shape[1] * heads, -1, widest)
    weights = column_sums[rows.step_rows, :, :widest].reshape(shape)
    seen = held.repeat_interleave(heads, dim=1)[:, :, None]
    weights = measure_attention(tally.count, over_group(weights, tally.heads), seen)
    by_lane = weights.view(len(held), held.shape[1], heads, widest).transpose(2, 3)

    slot = torch.arange(widest, device=held.device)
    row, lane, index = torch.nonzero(slot < held[:, :, None], as_tuple=True)
    pages = tally.table[rows.table_rows[row], tally.first_lane + lane, index // tokens].long()
    is_old = index < held[row, lane] - rows.fresh[row]
    put(tally.numbers, pages, index % tokens, by_lane[row, lane, index], is_old)


def put(
    numbers: Float[Tensor, "page head token 1"],
    pages: Int[Tensor, " entry"],
    offsets: Int[Tensor, " entry"],
    added: Float[Tensor, "entry head"],
    is_old: Shaped[Tensor, " entry"],
) -> None:
    """Add to the statistics of old slots, and overwrite those of new slots."""
    before = torch.where(is_old[:, None], numbers[pages, :, offsets, 0], 0)
    numbers[pages, :, offsets, 0] = before + added
