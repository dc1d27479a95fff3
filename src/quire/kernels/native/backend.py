"""The native backend: decoding rows and small chunks in C, straight from the pages.

Large chunks are matrix products, which torch does better: they go to the gathered backend.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.gathered import GatheredAttention, GatheredPlan, group_chunks
from quire.kernels.native.library import AttentionArgs, NativeLibrary

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SMALL_CHUNK_TOKENS = 16  # at most so many new tokens of a row are attended in C
SERIAL_SLOTS = 2048  # slots times heads below which waking a second thread costs more than it wins


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step cut in two.

    Attributes:
        rows: indices of the step's rows that C attends.
        starts, tokens, slots: of those rows, in C's types.
        window: 0 for none.
        chunks: the other rows, for the gathered backend.
    """

    rows: Tensor
    starts: NDArray[np.int64]
    tokens: NDArray[np.int32]
    slots: NDArray[np.int32]
    window: int
    chunks: GatheredPlan


class NativeAttention:
    """Attention over pages of plain numbers on a CPU.

    Args:
        library: the loaded C library.
        gathered: takes the large chunks.
    """

    name = "native"

    def __init__(self, library: NativeLibrary, gathered: GatheredAttention) -> None:
        self._library, self._gathered = library, gathered

    @property
    def peak_scratch_bytes(self) -> int:
        """Most bytes the large chunks had gathered at once."""
        return self._gathered.peak_scratch_bytes

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Divide the rows between C and torch."""
        small = np.flatnonzero(step.tokens <= SMALL_CHUNK_TOKENS)
        chunks = [chunk for chunk in group_chunks(step, lanes) if chunk.tokens > SMALL_CHUNK_TOKENS]
        return NativePlan(
            rows=torch.from_numpy(small),
            starts=np.ascontiguousarray(step.starts[small]),
            tokens=np.ascontiguousarray(step.tokens[small]),
            slots=np.ascontiguousarray(lanes.slots[small]),
            window=lanes.window or 0,
            chunks=GatheredPlan(step, lanes.window, (), tuple(chunks)),
        )

    def attend(
        self,
        plan: object,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attend for all rows of the step; see `AttentionBackend.attend`."""
        assert isinstance(plan, NativePlan), "a plan comes from this backend"
        if plan.chunks.chunks:
            out = self._gathered.attend(plan.chunks, pages, math, query, fresh).contiguous()
        else:
            out = torch.empty(query.shape, dtype=query.dtype)
        if len(plan.rows):
            self.attend_rows(plan, pages, math, query, out)
        return out

    def attend_rows(
        self,
        plan: NativePlan,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        out: Tensor,
        *,
        column_sums: Tensor | None = None,
    ) -> None:
        """Let C attend for the plan's rows.

        Args:
            plan: which rows.
            pages: the layer's pages.
            math: scale and extras.
            query: the flat batch; the last axis is contiguous.
            out: [tokens, num_heads, head_dim], contiguous; rows not in the plan are left alone.
            column_sums: float32 [rows of the plan, KV heads, slots], zeros; gets each slot's
                weights summed over the queries and the query heads of its group.
        """
        rows = pages.rows[plan.rows]
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = None if math.sinks is None else math.sinks.float().contiguous()
        args = AttentionArgs(
            key=pages.key.data_ptr(),
            value=pages.value.data_ptr(),
            page_bytes=pages.key.stride(0) * pages.key.itemsize,
            table=pages.table.data_ptr(),
            table_row_stride=pages.table.stride(0),
            table_lane_stride=pages.table.stride(1),
            rows=rows.data_ptr(),
            slots=plan.slots.ctypes.data,
            starts=plan.starts.ctypes.data,
            tokens=plan.tokens.ctypes.data,
            query=query.data_ptr(),
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            out=out.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            column_sums=None if column_sums is None else column_sums.data_ptr(),
            sums_stride=0 if column_sums is None else column_sums.stride(1),
            num_rows=len(plan.rows),
            num_lanes=pages.num_lanes,
            heads_per_page=pages.key.shape[1],
            group=query.shape[1] // (pages.num_lanes * pages.key.shape[1]),
            first_lane=pages.first_lane,
            head_dim=query.shape[2],
            page_tokens=pages.page_tokens,
            dtype=DTYPES[query.dtype],
            window=plan.window,
            scale=math.scale,
            softcap=math.softcap or 0.0,
            path=self._library.path,
        )
        failed = self._library.attend(
            ctypes.byref(args), self._library.parallel_for, self._num_threads(plan)
        )
        if failed:
            raise InvariantError(f"the C extension gave code {failed}: no memory for a tile")

    def _num_threads(self, plan: NativePlan) -> int:
        small = int(plan.slots.sum()) * int(plan.tokens.max()) < SERIAL_SLOTS
        return 1 if small else torch.get_num_threads()
