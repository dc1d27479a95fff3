"""Evicted tokens merged into their representatives: means of values, weighted by scores.

    slice                    token 2   token 3   token 6
    weight (score)              2         1         1        token 3 is retained
    value                       a         b         c        new value of token 3: (2 a + b + c) / 4

With pieces, the n-th token of each piece of a slice is merged into the n-th token of the piece that
is retained. Every KV head has its own weights. Keys and positions stay.
"""

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import PolicyError
from quire.policies.base import MergedValues
from quire.policies.signatures.context import SelectionContext
from quire.policies.signatures.units import Marks


def merged_values(
    context: SelectionContext, slices: NDArray[np.int64], chosen: Marks
) -> MergedValues:
    """Return the new values of the representatives.

    Args:
        context: scores and values of the tokens.
        slices: [row, unit] number of each unit's slice; -1 for units of no slice.
        chosen: [row, unit] representatives, one of each slice.

    Raises:
        PolicyError: the base rule returned a negative score.
    """
    view, units = context.view, context.units
    into, live = _targets(slices, chosen), units.slots(slices >= 0)
    target = torch.from_numpy(_of_slots(into, units.piece_tokens, live.shape[1]))
    new = torch.from_numpy(units.slots(chosen))
    target, new, members = (
        marks.to(view.positions.device).repeat_interleave(context.heads_per_row, dim=0)
        for marks in (target, new, torch.from_numpy(live))
    )
    weight = torch.where(members, _weights(context), 0.0)
    values = view.values[:, units.columns]
    totals = torch.zeros_like(weight).scatter_add_(1, target, weight)
    rows = target[:, :, None].expand_as(values)
    sums = torch.zeros_like(values).scatter_add_(1, rows, weight[:, :, None] * values)
    # a slice without weight keeps the value of its representative
    means = torch.where(totals[:, :, None] > 0, sums / totals[:, :, None].clamp_min(1e-30), values)
    slots = torch.zeros_like(view.live)
    slots[:, units.columns] = new
    return MergedValues(slots, means[new])


def _targets(slices: NDArray[np.int64], chosen: Marks) -> NDArray[np.int64]:
    """[row, unit] the representative of each unit's slice; the unit itself if it has no slice."""
    rows, units = slices.shape
    of_slice = np.zeros((rows, max(1, int(slices.max(initial=0)) + 1)), dtype=np.int64)
    row, unit = np.nonzero(chosen)
    of_slice[row, slices[row, unit]] = unit
    found = np.take_along_axis(of_slice, slices.clip(0), axis=1)
    into: NDArray[np.int64] = np.where(slices >= 0, found, np.arange(units))
    return into


def _of_slots(into: NDArray[np.int64], piece_tokens: int, slots: int) -> NDArray[np.int64]:
    """[row, column] the column into which each column's token is merged."""
    if piece_tokens == 1:
        return into
    column = np.arange(slots)
    found: NDArray[np.int64] = (
        into[:, column // piece_tokens] * piece_tokens + column % piece_tokens
    )
    return found.clip(max=slots - 1)


def _weights(context: SelectionContext) -> Float[Tensor, "lane column"]:
    """Scores of each KV head, the mean over its query heads."""
    score: Tensor = context.score.reshape(-1, context.view.group, context.score.shape[2])
    weight = score[:, :, context.units.columns].mean(dim=1)
    if bool((weight[context.view.live[:, context.units.columns]] < 0).any()):
        raise PolicyError(
            f"merge=values needs scores >= 0, and {type(context.base).__name__} returned negative "
            "ones; use a base whose scores are attention weights, such as h2o, or merge=none"
        )
    return weight
