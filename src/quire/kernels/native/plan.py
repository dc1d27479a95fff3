"""Plans of the native backend: a step of layers with the same page class."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import LaneSlots, LayerPages, StepShape
from quire.kernels.gathered_plan import GatheredPlan, group_chunks
from quire.kernels.native.call import AttentionCall


@dataclass(frozen=True, slots=True)
class Ready:
    """Prepared attention of the layers of a plan, built by the first layer.

    Attributes:
        call: arguments of the C library; None if it cannot read the tensors.
        gathered: plan of the rows that the gathered backend computes, or None.
    """

    call: AttentionCall | None
    gathered: object | None


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step for layers with the same page class, the same table and equal lane lengths.

    Attributes:
        step, lanes: shapes in contiguous arrays, as the C library requires.
        page_tokens: slots of a page.
        slot_bytes: bytes of a slot.
        token_row: [tokens] row of each token, if every token is computed as a separate row; None if
            the tokens of a row are computed together.
        ready: prepared attention by properties of a layer's tensors.
        last: the properties and prepared attention of the last layer, or nothing.
    """

    step: StepShape
    lanes: LaneSlots
    page_tokens: int
    slot_bytes: int
    token_row: Tensor | None = None
    ready: dict[tuple[object, ...], Ready] = field(default_factory=dict)
    last: "list[LastLayer]" = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class LastLayer:
    """A layer without column sums and its prepared attention; the next layer is mostly alike.

    Attributes:
        pages: its pages.
        query: its query.
        ready: its prepared attention.
    """

    pages: LayerPages
    query: Tensor
    ready: Ready

    def is_like(self, pages: LayerPages, query: Tensor) -> bool:
        """Return whether the same arguments, apart from addresses, fit this layer."""
        own = self.pages
        return (
            pages.key is own.key
            and pages.value is own.value
            and pages.table is own.table
            and pages.rows is own.rows
            and pages.coded is own.coded
            and pages.full_precision is own.full_precision
            and pages.promoted is own.promoted
            and query.shape == self.query.shape
            and query.dtype == self.query.dtype
            and query.data_ptr() % query.itemsize == 0
        )


def token_plan(step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> NativePlan:
    """Plan every token as a row with one new token, which sees the slots up to its own."""
    token_row = np.repeat(np.arange(len(step.tokens)), step.tokens)
    behind = (step.starts + step.tokens)[token_row] - np.arange(len(token_row)) - 1
    slots = (lanes.slots[token_row] - behind[:, None]).astype(np.int32)
    return NativePlan(
        StepShape.of(np.ones(len(token_row), dtype=np.int32)),
        LaneSlots(slots, lanes.window),
        page_tokens,
        slot_bytes,
        torch.from_numpy(token_row),
    )


def gathered_chunks(plan: NativePlan, rows: NDArray[np.int64]) -> GatheredPlan:
    """Build a plan of the gathered backend for the chunks of these rows."""
    wanted = set(rows.tolist())
    chunks = [c for c in group_chunks(plan.step, plan.lanes) if wanted >= set(c.rows.tolist())]
    return GatheredPlan(plan.step, plan.lanes.window, (), tuple(chunks))


def check_column_sums(plan: NativePlan, query: Tensor, column_sums: Tensor | None) -> None:
    """Refuse column sums that are too small for the step."""
    if column_sums is None:
        return
    wanted = (len(plan.step.tokens), query.shape[1], int(plan.lanes.slots.max(initial=0)))
    rows, heads, slots = column_sums.shape
    if (rows, heads) != wanted[:2] or slots < wanted[2]:
        raise InvariantError(
            f"expected column sums of shape {wanted} or wider, got {tuple(column_sums.shape)}"
        )
