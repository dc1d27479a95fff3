"""The native backend: attention in C, straight from the pages.

Where the CPU has no AVX-512 (or head_dim is no multiple of 16) the C library has no code for large
chunks; those are matrix products, and go to the gathered backend.
"""

import logging
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, NewSlots, StepShape
from quire.kernels.gathered import GatheredAttention
from quire.kernels.gathered_plan import GatheredPlan, group_chunks
from quire.kernels.native.arguments import can_write, unfit_tensors
from quire.kernels.native.call import AttentionCall, Scratch, write
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.parts import Parts, cut

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
        tokens, starts = np.ascontiguousarray(step.tokens), np.ascontiguousarray(step.starts)
        self.step = StepShape(tokens, starts, step.num_decode)
        self.lanes = LaneSlots(np.ascontiguousarray(lanes.slots), lanes.window)
        self._gathered, self._sizes = gathered, sizes
        self._parts: dict[tuple[int, int], Parts] = {}
        self._checked: dict[tuple[int, int], str | None] = {}
        self._calls: dict[tuple[int, int, int], AttentionCall] = {}

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

    def call(
        self,
        library: NativeLibrary,
        parts: Parts,
        pages: LayerPages,
        query: Tensor,
        column_sums: Tensor | None,
    ) -> AttentionCall:
        """The call for these layers, built by the first of them."""
        sums_stride = 0 if column_sums is None else column_sums.stride(1)
        key = (query.shape[1], pages.table.data_ptr(), sums_stride)
        if key not in self._calls:
            self._calls[key] = AttentionCall(
                library, self.step, self.lanes, parts, pages, query, column_sums
            )
        return self._calls[key]

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
        self._scratch = Scratch()
        self._noticed: set[str] = set()

    @property
    def peak_scratch_bytes(self) -> int:
        """Most bytes of packed slots and of gathered pages at once."""
        return self._gathered.peak_scratch_bytes + self._scratch.num_bytes

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Keep the step; its parts depend on the layers and are cut when the first one attends."""
        return NativePlan(step, lanes, self._gathered, (page_tokens, slot_bytes))

    def write(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        """Put keys and values into their slots; see `AttentionBackend.write`."""
        if can_write(slots, key, value):
            write(self._library, slots, key, value)
        else:
            self._gathered.write(slots, key, value)

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
        call = plan.call(self._library, parts, pages, query, column_sums)
        call.attend(pages, math, query, out, column_sums, self._scratch)
        return out

    def _notice(self, reason: str) -> None:
        if reason not in self._noticed:
            self._noticed.add(reason)
            _log.warning("attention runs through torch and not through C: %s", reason)
