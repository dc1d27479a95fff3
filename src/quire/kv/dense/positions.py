"""Logical positions of a slab's new columns."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

NOTHING = -1
"""The position of a slot that holds no token."""


def padded_positions(
    known: Int[Tensor, " rows"], counts: Sequence[int], columns: int, *, at_start: bool
) -> Int[Tensor, "rows column"]:
    """Positions of new columns, NOTHING for pads.

    Args:
        known: tokens that each row has.
        counts: new ones of each row, at most `columns`.
        columns: new ones.
        at_start: a row's tokens are the first of them, else the last.
    """
    count = torch.tensor(counts, device=known.device)[:, None]
    column = torch.arange(columns, device=known.device)
    offset = column if at_start else column - (columns - count)
    return torch.where((offset >= 0) & (offset < count), known[:, None] + offset, NOTHING)
