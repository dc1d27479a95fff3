"""The FlashInfer backend: attention of steps over unquantized pages; others go to another backend.

FlashInfer reads the arena in place: pages are views [pages, heads, tokens, head_dim] with the
stride of a whole page, and keys and values have equal strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    AttentionStatistic,
    LaneSlots,
    LayerPages,
    MovedSlots,
    NewSlots,
    StatisticRows,
    StepShape,
)
from quire.kernels.device_copies import to_device
from quire.kernels.flashinfer.package import DecodeWrapper, PrefillWrapper, unread
from quire.kernels.flashinfer.wrappers import AttentionShape, RowPages, Wrappers
from quire.kernels.rope_write import CosSin, rotated_and_written
from quire.kernels.static_plan import StaticLanes, StaticPlans
from quire.kernels.triton.hardware import device_of


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Wrappers that are planned for one shape of attention.

    Attributes:
        pages: int32 [pages of all rows] page numbers; every layer overwrites them.
        decode: for the rows with one new token; None if there are none.
        prefill: for the other rows, or None.
    """

    pages: Int[Tensor, " page"]
    decode: DecodeWrapper | None = None
    prefill: PrefillWrapper | None = None


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A step for layers with equal lane lengths.

    Attributes:
        step, lanes: shapes on the CPU.
        page_tokens: slots of a page.
        slot_bytes: bytes of a slot, for the other backend.
        places: [2, pages] row and table column of each page that a row's queries see, on the
            device; empty until a layer needs them.
        holders: keep the wrappers of `planned` in use.
        planned: wrappers by the shape of attention.
        other: plan of the other backend, once a layer needed it.
    """

    step: StepShape
    lanes: LaneSlots
    page_tokens: int
    slot_bytes: int
    places: list[Int[Tensor, "2 page"]] = field(default_factory=list)
    planned: dict[AttentionShape, PlannedStep] = field(default_factory=dict)
    holders: list["_Holder"] = field(default_factory=list)
    other: list[object] = field(default_factory=list)


class _Holder:
    """The end of a plan, for `weakref`."""


class FlashInferAttention:
    """Attention over unquantized pages by FlashInfer.

    Args:
        wrappers: FlashInfer's wrappers.
        other: computes what FlashInfer does not, and writes and moves slots. CUDA graphs capture
            its kernels.
    """

    name = "flashinfer"

    def __init__(self, wrappers: Wrappers, other: AttentionBackend) -> None:
        self._wrappers, self._other = wrappers, other
        self._own_bytes = 0

    @property
    def peak_scratch_bytes(self) -> int:
        """Bytes of the workspace once it is used, and of the other backend's scratch."""
        return self._own_bytes + self._other.peak_scratch_bytes

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Keep the shapes of a step; layers plan wrappers when they need them."""
        return FlashInferPlan(step, lanes, page_tokens, slot_bytes)

    def static_plan(
        self, step: StepShape, lanes: StaticLanes, layers: Sequence[LayerPages], slot_bytes: int
    ) -> object | None:
        """Make a plan of the other backend; see `StaticPlans`."""
        if not isinstance(self._other, StaticPlans):
            return None
        return self._other.static_plan(step, lanes, layers, slot_bytes)

    def refresh(self, plan: object, slots: NDArray[np.int32]) -> bool:
        """Prepare a plan of the other backend; see `StaticPlans`."""
        assert isinstance(self._other, StaticPlans), "the plan comes from it"
        return self._other.refresh(plan, slots)

    def write(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        """Write keys and values to their slots; see `AttentionBackend.write`."""
        self._other.write(slots, key, value)

    def rotate_and_write(
        self,
        slots: NewSlots,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rope: CosSin,
        source: Tensor | None = None,
    ) -> bool:
        """See `RopeWriter.rotate_and_write`."""
        heads = (query, key, value)
        return rotated_and_written(self._other, slots, heads, rope, source)

    def move(self, moves: MovedSlots) -> None:
        """Copy slots to other slots; see `AttentionBackend.move`."""
        self._other.move(moves)

    def tally(self, tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> None:
        """Add a step's attention to the statistics of slots; see `AttentionBackend.tally`."""
        self._other.tally(tally, rows, column_sums)

    def attend(
        self,
        plan: object,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        *,
        column_sums: Tensor | None = None,
    ) -> Tensor:
        """Compute attention for all rows of the step; see `AttentionBackend.attend`."""
        if not isinstance(plan, FlashInferPlan):  # from `static_plan`
            return self._other.attend(plan, pages, math, query, fresh, column_sums=column_sums)
        if column_sums is not None or unfit(pages, math, query) is not None:
            if not plan.other:
                args = plan.step, plan.lanes, plan.page_tokens, plan.slot_bytes
                plan.other.append(self._other.plan(*args))
            return self._other.attend(
                plan.other[0], pages, math, query, fresh, column_sums=column_sums
            )
        with device_of(query):
            return self._attend(plan, pages, math, query)

    def _attend(
        self, plan: FlashInferPlan, pages: LayerPages, math: AttentionMath, query: Tensor
    ) -> Tensor:
        shape = AttentionShape(
            num_heads=query.shape[1],
            num_kv_heads=pages.key.shape[1],
            head_dim=query.shape[2],
            page_tokens=plan.page_tokens,
            dtype=query.dtype,
            scale=math.scale,
            softcap=math.softcap,
            window=plan.lanes.window,
        )
        places = self._places(plan, query.device)
        if shape not in plan.planned:
            plan.planned[shape] = self._planned(plan, shape, query.device)
        planned = plan.planned[shape]
        row, column = places
        planned.pages.copy_(pages.table[pages.rows[row], pages.first_lane, column])
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        cache, border = (pages.key, pages.value), plan.step.num_decode
        if planned.decode is not None:
            planned.decode.run(query[:border], cache, out=out[:border])
        if planned.prefill is not None:
            planned.prefill.run(query[border:], cache, out=out[border:])
        return out

    def _places(self, plan: FlashInferPlan, device: torch.device) -> Tensor:
        if not plan.places:
            first, slots = seen_slots(plan)
            counts = -(-slots // plan.page_tokens)
            row = np.repeat(np.arange(len(counts)), counts)
            column = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - first, counts)
            plan.places.append(to_device(np.stack([row, column]), device))
        return plan.places[0]

    def _planned(
        self, plan: FlashInferPlan, shape: AttentionShape, device: torch.device
    ) -> PlannedStep:
        """Plan the wrappers for the rows with one new token, and for the others."""
        self._own_bytes = self._wrappers.workspace_bytes
        holder, border = _Holder(), plan.step.num_decode
        plan.holders.append(holder)
        slots, tokens = seen_slots(plan)[1], plan.step.tokens
        pages = torch.zeros(plan.places[0].shape[1], dtype=torch.int32, device=device)
        parts = [
            RowPages.of(slots[part], tokens[part], plan.page_tokens, pinned=device.type == "cuda")
            for part in (slice(border), slice(border, None))
        ]
        first = int(parts[0].starts[-1])
        decode = prefill = None
        if border:
            decode = self._wrappers.decode(holder, shape, parts[0], pages[:first])
        if border < len(tokens):
            prefill = self._wrappers.prefill(holder, shape, parts[1], pages[first:])
        return PlannedStep(pages, decode, prefill)


def seen_slots(plan: FlashInferPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first page that a query of each row sees, and the live slots from there on.

    Pages before the window of a row's oldest query are free already.
    """
    slots = plan.lanes.slots[:, 0].astype(np.int64)
    if plan.lanes.window is None:
        return np.zeros_like(slots), slots
    oldest = slots - plan.step.tokens + 1 - plan.lanes.window
    first = np.maximum(oldest, 0) // plan.page_tokens
    return first, slots - first * plan.page_tokens


def unfit(pages: LayerPages, math: AttentionMath, query: Tensor) -> str | None:
    """Return why FlashInfer does not compute the attention of a layer, or None."""
    if pages.coded is not None or pages.full_precision is not None or pages.promoted is not None:
        return "quantized pages"
    if pages.num_lanes != 1:
        return "heads with pages of their own"
    if math.sinks is not None or math.rotary is not None:
        return "sinks, or keys before RoPE"
    if pages.key.dtype != query.dtype or pages.value.dtype != query.dtype:
        return f"queries of {query.dtype} over pages of {pages.key.dtype}"
    if pages.key.stride() != pages.value.stride() or pages.key.shape != pages.value.shape:
        return "different strides of keys and values"
    if pages.key.stride(3) != 1 or query.stride(2) != 1 or query.shape[1] % pages.key.shape[1]:
        return f"queries of shape {tuple(query.shape)} over pages of {tuple(pages.key.shape)}"
    if pages.table.dtype != torch.int32:
        return f"a page table of {pages.table.dtype}"
    return unread(query.dtype, query.shape[2])
