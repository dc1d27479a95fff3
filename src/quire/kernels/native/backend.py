"""The native backend: attention in C, straight from the pages.

Where the CPU has no AVX-512 (or head_dim is no multiple of 16) the C library has no code for large
chunks; those are matrix products, and go to the gathered backend.
"""

import ctypes
import logging
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.gathered import GatheredAttention
from quire.kernels.gathered_plan import GatheredPlan, group_chunks
from quire.kernels.native.arguments import DTYPES, AttentionArgs, unfit_tensors
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.parts import Parts, cut

SERIAL_WORK = 2048  # slots times tokens below which waking a second thread costs more than it wins

_log = logging.getLogger(__name__)


class NativePlan:
    """A step as C wants it, shared by layers whose lanes are equally full.

    Args:
        step: new tokens of the rows.
        lanes: how full they are.
        gathered: the backend that takes what C does not.
        sizes: tokens of a page and bytes of a slot.
    """

    def __init__(
        self, step: StepShape, lanes: LaneSlots, gathered: GatheredAttention, sizes: tuple[int, int]
    ) -> None:
        self.step, self.lanes = step, lanes
        self.starts = np.ascontiguousarray(step.starts)
        self.tokens = np.ascontiguousarray(step.tokens)
        self.slots = np.ascontiguousarray(lanes.slots)
        self._gathered, self._sizes = gathered, sizes
        self._parts: dict[tuple[int, int], Parts] = {}
        self._checked: dict[tuple[int, int], str | None] = {}

    def unfit(self, pages: LayerPages, query: Tensor) -> str | None:
        """Why C cannot read these tensors, or None; looked at once for all layers alike."""
        key = (pages.key.data_ptr(), query.data_ptr() % query.itemsize)
        if key not in self._checked:
            self._checked[key] = unfit_tensors(pages, query)
        return self._checked[key]

    def parts(self, group: int, block_queries: int) -> Parts:
        """The parts for layers with so many query heads to a KV head."""
        key = (group, block_queries)
        if key not in self._parts:
            self._parts[key] = cut(self.step, self.lanes, group=group, block_queries=block_queries)
        return self._parts[key]

    @cached_property
    def for_gathered(self) -> object:
        """The whole step as a plan of the gathered backend."""
        return self._gathered.plan(self.step, self.lanes, *self._sizes)

    def chunks_for_gathered(self, rows: object) -> GatheredPlan:
        """The chunks of some rows as such a plan."""
        wanted = set(np.asarray(rows).tolist())
        chunks = [c for c in group_chunks(self.step, self.lanes) if wanted >= set(c.rows.tolist())]
        return GatheredPlan(self.step, self.lanes.window, (), tuple(chunks))


class NativeAttention:
    """Attention over pages of plain numbers on a CPU.

    Args:
        library: the loaded C library.
        gathered: takes what C has no code for.
    """

    name = "native"

    def __init__(self, library: NativeLibrary, gathered: GatheredAttention) -> None:
        self._library, self._gathered = library, gathered
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._noticed: set[str] = set()

    @property
    def peak_scratch_bytes(self) -> int:
        """Most bytes of packed slots and of gathered pages at once."""
        return self._gathered.peak_scratch_bytes + self._scratch.numel()

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Keep the step; its parts depend on the layers and are cut when the first one attends."""
        return NativePlan(step, lanes, self._gathered, (page_tokens, slot_bytes))

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
        """Attend for all rows of the step; see `AttentionBackend.attend`."""
        assert isinstance(plan, NativePlan), "a plan comes from this backend"
        unfit = plan.unfit(pages, query)
        if unfit:
            self._notice(unfit)
            return self._gathered.attend(
                plan.for_gathered, pages, math, query, fresh, column_sums=column_sums
            )
        group = query.shape[1] // (pages.num_lanes * pages.key.shape[1])
        blocks = int(self._library.block_queries(self._library.path, query.shape[2]))
        parts = plan.parts(group, blocks)
        if len(parts.others):
            chunks = plan.chunks_for_gathered(parts.others)
            out = self._gathered.attend(
                chunks, pages, math, query, fresh, column_sums=column_sums
            ).contiguous()
        else:
            out = torch.empty(query.shape, dtype=query.dtype)
        self._attend_parts(plan, parts, pages, math, query, out, column_sums)
        return out

    def _attend_parts(
        self,
        plan: NativePlan,
        parts: Parts,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        out: Tensor,
        column_sums: Tensor | None,
    ) -> None:
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = None if math.sinks is None else math.sinks.float().contiguous()
        heads_per_page, num_heads, head_dim = pages.key.shape[1], query.shape[1], query.shape[2]
        group = num_heads // (pages.num_lanes * heads_per_page)
        sums_stride = 0 if column_sums is None else column_sums.stride(1)
        num_threads = 1 if parts.work < SERIAL_WORK else torch.get_num_threads()
        thread_bytes = self._library.scratch_bytes(head_dim, sums_stride)
        num_partials = parts.num_partials * num_heads * (head_dim + 2)
        num_normalisers = 0 if column_sums is None else 2 * query.shape[0] * num_heads
        scratch = self._scratch_of(
            thread_bytes * num_threads + 4 * (num_partials + num_normalisers)
        )
        partials = scratch + thread_bytes * num_threads
        args = AttentionArgs(
            key=pages.key.data_ptr(),
            value=pages.value.data_ptr(),
            page_bytes=pages.key.stride(0) * pages.key.itemsize,
            table=pages.table.data_ptr(),
            table_row_stride=pages.table.stride(0),
            table_lane_stride=pages.table.stride(1),
            rows=pages.rows.data_ptr(),
            slots=plan.slots.ctypes.data,
            starts=plan.starts.ctypes.data,
            tokens=plan.tokens.ctypes.data,
            query=query.data_ptr(),
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            out=out.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            column_sums=None if column_sums is None else column_sums.data_ptr(),
            sums_stride=sums_stride,
            normalisers=None if column_sums is None else partials + 4 * num_partials,
            partials=partials,
            scratch=scratch,
            scratch_bytes=thread_bytes,
            walks=parts.walks.ctypes.data,
            blocks=parts.blocks.ctypes.data,
            merges=parts.merges.ctypes.data,
            sums=parts.sums.ctypes.data,
            num_walks=len(parts.walks),
            num_blocks=len(parts.blocks),
            num_merges=len(parts.merges),
            num_sums=0 if column_sums is None else len(parts.sums),
            num_partials=parts.num_partials,
            num_lanes=pages.num_lanes,
            heads_per_page=heads_per_page,
            group=group,
            first_lane=pages.first_lane,
            head_dim=head_dim,
            page_tokens=pages.page_tokens,
            dtype=DTYPES[query.dtype],
            window=plan.lanes.window or 0,
            scale=math.scale,
            softcap=math.softcap or 0.0,
            path=self._library.path,
        )
        if self._library.attend(ctypes.byref(args), self._library.parallel_for, num_threads):
            raise InvariantError("torch_parallel_for failed inside the C extension")

    def _scratch_of(self, num_bytes: int) -> int:
        """Address of the scratch memory, which grows and is used again."""
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch.data_ptr()

    def _notice(self, reason: str) -> None:
        if reason not in self._noticed:
            self._noticed.add(reason)
            _log.warning("attention runs through torch and not through C: %s", reason)
