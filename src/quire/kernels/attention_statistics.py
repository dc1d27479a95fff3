"""What the weights that queries gave to slots become: numbers that a policy ranks slots by.

A look is one query's weight on a slot, one number for each KV head: the query heads that share it
are reduced first (`over_group`), then looks are counted (`measure_attention`). C does both for a
whole layer at once (native/tally.h); `accumulate_attention` is the same in torch, on any device.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from quire.kernels.backend import AttentionMeasure, AttentionStatistic, StatisticRows
from quire.layout.statistics import MAX, MEAN


def over_group(weights: Float[Tensor, "*shape group slot"], heads: str) -> Tensor:
    """One number for the query heads of a KV head: [*shape, slot].

    Args:
        weights: of the heads of a group, for one query.
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
    """What each look adds to a slot.

    Args:
        count: their sum, the sum of their squares, or how many are low.
        weights: one query's in each row.
        seen: slots that query saw; a low look is less than 1 / seen. Slots from there on saw
            nothing and get anything.
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
    """Add a step's looks to the numbers of slots; see `AttentionBackend.tally`."""
    held = rows.slots
    widest = int(held.max()) if held.numel() else 0
    _, heads, tokens, _ = tally.numbers.shape
    shape = (len(held), held.shape[1] * heads, -1, widest)
    weights = column_sums[rows.step_rows, :, :widest].reshape(shape)
    seen = held.repeat_interleave(heads, dim=1)[:, :, None]
    weights = measure_attention(tally.count, over_group(weights, tally.heads), seen)
    by_lane = weights.view(len(held), held.shape[1], heads, widest).transpose(2, 3)

    slot = torch.arange(widest, device=held.device)
    row, lane, place = torch.nonzero(slot < held[:, :, None], as_tuple=True)
    pages = tally.table[rows.table_rows[row], tally.first_lane + lane, place // tokens].long()
    is_old = place < held[row, lane] - rows.fresh[row]
    put(tally.numbers, pages, place % tokens, by_lane[row, lane, place], is_old)


def put(
    numbers: Float[Tensor, "page head token 1"],
    pages: Int[Tensor, " entry"],
    offsets: Int[Tensor, " entry"],
    added: Float[Tensor, "entry head"],
    is_old: Shaped[Tensor, " entry"],
) -> None:
    """Add to slots that have numbers, and write over what is left in slots that are new."""
    before = torch.where(is_old[:, None], numbers[pages, :, offsets, 0], 0)
    numbers[pages, :, offsets, 0] = before + added
