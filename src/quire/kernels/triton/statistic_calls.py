"""Launches of the kernel that accumulates attention statistics."""

import torch
import triton
from torch import Tensor

from quire.kernels.backend import AttentionStatistic, StatisticRows
from quire.kernels.triton.coding import has_whole_vectors
from quire.kernels.triton.device.tally import add_attention
from quire.layout.statistics import MAX, MEAN

_BLOCK = 256
_MOST_GROUP = 32  # query heads of a number: the loop over them is unrolled


def group_of(tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> int:
    """Query heads that share a number; 0 if heads do not divide them."""
    heads = rows.slots.shape[1] * tally.numbers.shape[1]
    return 0 if column_sums.shape[1] % heads else column_sums.shape[1] // heads


def can_tally(tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> bool:
    """Whether the kernel can accumulate these statistics."""
    float32, whole = torch.float32, (rows.step_rows, rows.table_rows, rows.slots, rows.fresh)
    return (
        tally.numbers.dtype == column_sums.dtype == float32
        and tally.table.dtype == torch.int32
        and tally.table.stride(2) == column_sums.stride(2) == 1
        and has_whole_vectors(tally.numbers)
        and all(tensor.is_contiguous() for tensor in whole)
        and 0 < group_of(tally, rows, column_sums) <= _MOST_GROUP
    )


def tally_attention(tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> None:
    """Add a step's attention to the statistics of slots; see `AttentionBackend.tally`.

    No data is read by the CPU: programs of blocks beyond the live slots of a lane do nothing.
    """
    num_rows, num_lanes = rows.slots.shape
    _, heads, tokens, _ = tally.numbers.shape
    if not num_rows:
        return
    add_attention[(num_rows, num_lanes * heads, triton.cdiv(column_sums.shape[2], _BLOCK))](
        tally.numbers,
        tally.table,
        column_sums,
        rows.step_rows,
        rows.table_rows,
        rows.slots,
        rows.fresh,
        *column_sums.stride()[:2],
        *tally.table.stride()[:2],
        tally.numbers.stride(0),
        tally.first_lane,
        num_lanes,
        heads,
        tokens,
        group_of(tally, rows, column_sums),
        tally.heads == MAX,
        tally.heads == MEAN,
        int(tally.count),
        _BLOCK,
        num_warps=4,
    )
