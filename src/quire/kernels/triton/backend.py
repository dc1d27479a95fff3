"""The Triton backend: attention directly from the pages, on a GPU.

What the kernels do not read (codecs that are not in `coding.KINDS`, tokens in full precision) is
computed by the gathered backend, layer by layer.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.codecs.hadamard import rotate
from quire.kernels.backend import (
    AttentionMath,
    AttentionStatistic,
    CosSin,
    HeldLanes,
    LaneSlots,
    LaneVectors,
    LayerPages,
    MovedSlots,
    NewSlots,
    SelectedSlots,
    SlotRanking,
    StaticLanes,
    StatisticRows,
    StepShape,
    WindowFinish,
    dims_of,
)
from quire.kernels.coded import CodedPlanes
from quire.kernels.gathered import GatheredAttention
from quire.kernels.paging import write_bounds
from quire.kernels.triton import launch
from quire.kernels.triton.coding import FLOATS, sides_of, unfit_pages, unfit_scores
from quire.kernels.triton.hardware import Hardware, device_of
from quire.kernels.triton.launch import (
    LayerCall,
    TritonPlan,
    attend_decode,
    attend_prefill,
    can_move,
    can_tally,
    can_write,
    check_column_sums,
    make_plan,
    make_static_plan,
    sum_columns,
    tally_attention,
)

_log = logging.getLogger(__name__)


class TritonAttention:
    """Attention over unquantized and coded pages on a GPU.

    Args:
        device: device of the pages.
        gathered: computes what the kernels do not read.
        hardware: properties of the device.
    """

    name = "triton"

    def __init__(
        self,
        device: torch.device,
        gathered: GatheredAttention,
        hardware: Hardware | None = None,
    ) -> None:
        self._device, self._gathered = device, gathered
        self._hardware = hardware or Hardware.of(device)
        self._noticed: set[str] = set()
        self._own_bytes = 0

    @property
    def peak_scratch_bytes(self) -> int:
        """Most bytes of partial results and gathered pages held at once."""
        return self._gathered.peak_scratch_bytes + self._own_bytes

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Copy the shapes of the step to the device."""
        return make_plan(step, lanes, page_tokens, slot_bytes, self._device)

    def static_plan(
        self, step: StepShape, lanes: StaticLanes, layers: Sequence[LayerPages], slot_bytes: int
    ) -> object | None:
        """Make a plan whose live slots change on the device; see `StaticPlans`."""
        if any(unfit_layer(pages) is not None for pages in layers):
            return None
        return make_static_plan(step, lanes, layers[0].page_tokens, slot_bytes)

    def refresh(self, plan: object, slots: NDArray[np.int32]) -> bool:
        """Return whether the plan has enough splits for these slots; see `StaticPlans`."""
        assert isinstance(plan, TritonPlan), "a plan comes from this backend"
        assert plan.max_slots is not None, "from static_plan"
        return int(slots.max(initial=0)) <= plan.max_slots

    def write(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        """Write keys and values to their slots; see `AttentionBackend.write`."""
        if can_write(slots, key, value):
            with device_of(key):
                launch.write(slots, key, value)
                write_bounds(slots)
        else:
            self._gathered.write(slots, key, value)

    def rotate_and_write(
        self,
        slots: NewSlots,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rope: CosSin,
        source: Tensor | None = None,
    ) -> bool:
        """Rotate queries and keys, and write keys and values; see `RopeWriter`."""
        if not launch.can_rotate_and_write(slots, query, key, value):
            return False
        with device_of(key):
            launch.rotate_and_write(slots, (query, key, value), rope, source)
            write_bounds(slots)
        return True

    def move(self, moves: MovedSlots) -> None:
        """Copy slots to other slots; see `AttentionBackend.move`."""
        if can_move(moves):
            with device_of(moves.planes[0]):
                self._own_bytes = max(self._own_bytes, launch.move(moves))
        else:
            self._gathered.move(moves)

    def order_lanes(self, lanes: HeldLanes) -> tuple[Tensor, Tensor] | None:
        """Sort the slots of each lane by position; see `LaneSelector`."""
        if lanes.max_held > launch.MAX_SORTED:
            return None
        with device_of(lanes.pages):
            return launch.order_lanes(lanes)

    def select_lanes(self, lanes: HeldLanes, ranking: SlotRanking) -> SelectedSlots | None:
        """Select the slots to retain; see `LaneSelector`."""
        if lanes.max_held > launch.MAX_SORTED:
            return None
        with device_of(lanes.pages):
            return launch.select_lanes(lanes, ranking)

    def move_lanes(self, planes: Sequence[Tensor], pages: Tensor, selected: SelectedSlots) -> None:
        """Make the moves in planes of a page class; see `LaneSelector`."""
        with device_of(pages):
            launch.move_lanes(planes, pages, selected)

    def tally(self, tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> None:
        """Add a step's attention to the statistics of slots; see `AttentionBackend.tally`."""
        if can_tally(tally, rows, column_sums):
            with device_of(column_sums):
                tally_attention(tally, rows, column_sums)
        else:
            self._gathered.tally(tally, rows, column_sums)

    def can_score(self, plane: Tensor, coded: CodedPlanes | None) -> bool:
        return unfit_scores(plane, coded) is None

    def window_sums(
        self,
        lanes: LaneVectors,
        records: Tensor,
        scales: Tensor,
        finish: WindowFinish | None = None,
    ) -> Tensor:
        return launch.score(self._hardware, lanes, (records, scales), finish)

    def mean_cosines(self, lanes: LaneVectors) -> Tensor:
        return launch.score(self._hardware, lanes, cosines=True)

    def norms(self, lanes: LaneVectors) -> Tensor:
        return launch.score(self._hardware, lanes)

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
        assert isinstance(plan, TritonPlan), "a plan comes from this backend"
        check_column_sums(plan, query.shape[1], column_sums)
        reason = unfit(pages, math, query, column_sums)
        if reason is None and math.joined:
            reason = _unfit_joined(plan.step, pages, column_sums)
        if reason is not None:
            if plan.max_slots is not None:
                raise RuntimeError(f"the Triton kernels cannot compute this step: {reason}")
            self._notice(reason)
            if not plan.gathered:
                args = plan.step, plan.lanes, plan.page_tokens, plan.slot_bytes
                plan.gathered.append(self._gathered.plan(*args))
            return self._gathered.attend(
                plan.gathered[0], pages, math, query, fresh, column_sums=column_sums
            )
        with device_of(query):
            return self._attend(plan, pages, math, query, column_sums)

    def _attend(
        self,
        plan: TritonPlan,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        column_sums: Tensor | None,
    ) -> Tensor:
        key, value = sides_of(pages)
        dtype, device = query.dtype, query.device
        own_query = rotate(query.float()) if key.rotated else query
        out_dtype = torch.float32 if value.rotated else dtype
        out = torch.empty(*query.shape[:2], dims_of(pages)[1], dtype=out_dtype, device=device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=device)
        call = LayerCall(self._hardware, plan, pages, math, dtype, own_query, key, value, out, lse)
        own_bytes = lse.nbytes
        if plan.step.num_decode:
            own_bytes += attend_decode(call)
        if plan.step.num_decode < len(plan.step.tokens):
            attend_prefill(call)
        if column_sums is not None:
            sum_columns(call, column_sums)
        self._own_bytes = max(self._own_bytes, own_bytes)
        return rotate(out).to(dtype) if value.rotated else out

    def _notice(self, reason: str) -> None:
        if reason not in self._noticed:
            self._noticed.add(reason)
            _log.warning("attention falls back from Triton to gathered pages: %s", reason)


def unfit_layer(pages: LayerPages) -> str | None:
    """Return why the kernels cannot read the pages or the page table of a layer, or None."""
    return unfit_pages(pages, dims_of(pages)[0]) or _unfit_table(pages)


def _unfit_table(pages: LayerPages) -> str | None:
    if pages.table.dtype != torch.int32 or pages.table.stride(2) != 1:
        return f"a page table of {pages.table.dtype} with strides {pages.table.stride()}"
    return None


def _unfit_joined(step: StepShape, pages: LayerPages, column_sums: Tensor | None) -> str | None:
    """Return why the kernels cannot attend to joined keys in a step, or None."""
    if step.num_decode < len(step.tokens):
        return "several tokens of a row that attend to latents"
    if column_sums is not None:
        return "column sums of attention to latents"
    return "rotated codes of latents" if any(s.rotated for s in sides_of(pages)) else None


def unfit(
    pages: LayerPages, math: AttentionMath, query: Tensor, column_sums: Tensor | None
) -> str | None:
    """Return why the kernels cannot compute the attention of a layer, or None."""
    if query.dtype not in FLOATS or query.stride(2) != 1:
        return f"queries of {query.dtype} with strides {query.stride()}"
    if math.latent is not None and not math.joined:
        return "latents that are expanded to keys and values of heads"
    key_dim = query.shape[2] - (dims_of(pages)[1] if math.joined else 0)
    reason = unfit_pages(pages, key_dim) or _unfit_table(pages)
    if reason is not None:
        return reason
    if query.shape[1] % (pages.num_lanes * pages.key.shape[1]):
        return f"{query.shape[1]} query heads for pages of {pages.key.shape[1]} heads"
    if math.sinks is not None and math.sinks.numel() != query.shape[1]:
        return f"{math.sinks.numel()} sinks for {query.shape[1]} heads"
    if math.alibi is not None:
        return "the kernels add no ALiBi to logits"
    if math.selected is not None:
        return "attention to selected tokens"
    if column_sums is not None and (
        column_sums.dtype != torch.float32 or column_sums.stride(2) != 1
    ):
        return "column sums that are not float32 with adjacent slots"
    return None
