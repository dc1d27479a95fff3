"""Attention calls of the C library: arguments built once per step and updated per layer."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import AttentionMath, LaneSlots, LayerPages, StepShape
from quire.kernels.native.arguments import MAX_TOGETHER, AttentionArgs, copied
from quire.kernels.native.coding import DTYPES, CodingArgs, coding_of, plain_coding
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.parts import Parts

ITEMS_A_THREAD = 4  # items of equal size in the work of a thread that balance the threads
SERIAL_BYTES = 128 << 10  # KV bytes in bfloat16 below which threads cost more than they save


class Scratch:
    """Reusable memory that grows on demand.

    Attributes:
        memory: the current memory.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Current size in bytes."""
        return self.memory.numel()

    def address(self, num_bytes: int) -> int:
        """Return the address of at least `num_bytes`; growing replaces `memory`."""
        if self.num_bytes < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self.memory.data_ptr()


class AttentionCall:
    """Arguments that the layers of a step share, and references that keep their memory alive.

    Args:
        library: the loaded C library.
        step, lanes: step and lanes of the plan.
        parts: how the rows are cut.
        pages: pages of any layer.
        query: query of any layer.
        column_sums: column sums of any layer, or None.
    """

    def __init__(
        self,
        library: NativeLibrary,
        step: StepShape,
        lanes: LaneSlots,
        parts: Parts,
        pages: LayerPages,
        query: Tensor,
        column_sums: Tensor | None,
    ) -> None:
        self._library, self._parts = library, parts
        self._attended: LayerPages | None = None
        self._step, self._lanes, self._pages = step, lanes, pages
        heads_per_page, num_heads, head_dim = pages.key.shape[1], query.shape[1], query.shape[2]
        slot_bytes = 4 * pages.num_lanes * heads_per_page * head_dim
        few = parts.work * slot_bytes < SERIAL_BYTES
        self._num_threads = 1 if few else torch.get_num_threads()
        together = heads_together(heads_per_page, parts, self._num_threads)
        sums_stride = 0 if column_sums is None else column_sums.stride(1)
        self._thread_bytes = library.scratch_bytes(head_dim, sums_stride, together)
        self._partials_bytes = 4 * parts.num_partials * num_heads * (head_dim + 2)
        self._normalisers_bytes = 0 if column_sums is None else 8 * query.shape[0] * num_heads
        self._args = AttentionArgs(
            page_bytes=pages.key.stride(0) * pages.key.itemsize,
            table=pages.table.data_ptr(),
            table_row_stride=pages.table.stride(0),
            table_lane_stride=pages.table.stride(1),
            rows=pages.rows.data_ptr(),
            slots=lanes.slots.ctypes.data,
            starts=step.starts.ctypes.data,
            tokens=step.tokens.ctypes.data,
            sums_stride=sums_stride,
            scratch_bytes=self._thread_bytes,
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
            group=num_heads // (pages.num_lanes * heads_per_page),
            heads_together=together,
            head_dim=head_dim,
            page_tokens=pages.page_tokens,
            dtype=DTYPES[query.dtype],
            window=lanes.window or 0,
            path=library.path,
            coded=pages.coded is not None,
        )
        self._args.key_coding, self._args.value_coding = _codings(pages)

    def attend(
        self,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        out: Tensor,
        column_sums: Tensor | None,
        scratch: Scratch,
    ) -> None:
        """Compute attention of one layer into contiguous `out`; rows in no part are not written."""
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = None if math.sinks is None else math.sinks.float().contiguous()
        self._set_layer(pages, math, query, out, scratch)
        args = self._args
        args.sinks = None if sinks is None else sinks.data_ptr()
        if column_sums is not None:
            args.column_sums = column_sums.data_ptr()
            args.normalisers = args.partials + self._partials_bytes
        parallel_for = self._library.parallel_for
        if self._library.attend(ctypes.byref(args), parallel_for, self._num_threads):
            raise InvariantError("torch_parallel_for failed inside the C extension")

    @property
    def num_threads(self) -> int:
        """Threads that the work is worth."""
        return self._num_threads

    def layer_args(
        self,
        layers: Sequence[tuple[LayerPages, AttentionMath]],
        query: Tensor,
        out: Tensor,
        scratch: Scratch,
    ) -> "ctypes.Array[AttentionArgs]":
        """Return the arguments of layers without sinks and column sums, for a chain."""
        self._set_layer(*layers[0], query, out, scratch)
        copies = copied(self._args, len(layers))
        for args, (pages, math) in zip(copies, layers, strict=True):
            args.first_lane = pages.first_lane
            args.scale, args.softcap = math.scale, math.softcap or 0.0
        return copies

    def _set_layer(
        self, pages: LayerPages, math: AttentionMath, query: Tensor, out: Tensor, scratch: Scratch
    ) -> None:
        args = self._args
        memory = scratch.address(
            self._thread_bytes * self._num_threads + self._partials_bytes + self._normalisers_bytes
        )
        last = self._attended
        if last is None or pages.key is not last.key or pages.value is not last.value:
            args.key, args.value = pages.key.data_ptr(), pages.value.data_ptr()
            self._attended = pages
        args.first_lane = pages.first_lane
        args.query, args.out = query.data_ptr(), out.data_ptr()
        args.query_token_stride, args.query_head_stride = query.stride(0), query.stride(1)
        args.scale, args.softcap = math.scale, math.softcap or 0.0
        if args.scratch != memory:
            args.scratch = memory
            args.partials = memory + self._thread_bytes * self._num_threads


def _codings(pages: LayerPages) -> tuple[CodingArgs, CodingArgs]:
    """Storage of keys and of values."""
    if pages.coded is None:
        return plain_coding(pages.key), plain_coding(pages.value)
    return coding_of(pages.coded.key), coding_of(pages.coded.value)


def heads_together(heads_per_page: int, parts: Parts, num_threads: int) -> int:
    """Return the number of KV heads that one thread walks together, as many as the threads allow.

    Vectors of neighbouring heads are adjacent in a page, so memory is read in longer runs. The
    number changes no output.
    """
    most = int(parts.walk_slots.max(initial=0))
    total, walks = int(parts.walk_slots.sum()), len(parts.walk_slots)
    for heads in range(min(MAX_TOGETHER, heads_per_page), 1, -1):
        if heads_per_page % heads:
            continue
        items = walks * heads_per_page // heads
        small = most * heads * ITEMS_A_THREAD * num_threads <= total * heads_per_page
        if small or (items % num_threads == 0 and 10 * most * walks <= 11 * total):
            return heads
    return 1
