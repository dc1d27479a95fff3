"""Calls of the C library: arguments built once per step and updated per layer."""

import ctypes

import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import (
    AttentionMath,
    AttentionStatistic,
    LaneSlots,
    LayerPages,
    MovedSlots,
    NewSlots,
    StatisticRows,
    StepShape,
)
from quire.kernels.native.arguments import (
    MAX_TOGETHER,
    AttentionArgs,
    MoveArgs,
    TallyArgs,
    WriteArgs,
)
from quire.kernels.native.coding import DTYPES, coding_of, plain_coding
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.parts import Parts
from quire.layout.statistics import REDUCTIONS

ITEMS_A_THREAD = 4  # items of equal size in the work of a thread that balance the threads
SERIAL_BYTES = 128 << 10  # KV bytes in bfloat16 below which threads cost more than they save


class Scratch:
    """Reusable memory that grows on demand."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Current size in bytes."""
        return self._bytes.numel()

    def address(self, num_bytes: int) -> int:
        """Return the address of at least `num_bytes`; growing discards the content."""
        if self.num_bytes < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes.data_ptr()


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
            coded=0,
        )
        if pages.coded is None:
            self._args.key_coding = plain_coding(pages.key)
            self._args.value_coding = plain_coding(pages.value)
        else:
            self._args.coded = 1
            self._args.key_coding = coding_of(pages.coded.key)
            self._args.value_coding = coding_of(pages.coded.value)

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
        args = self._args
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = None if math.sinks is None else math.sinks.float().contiguous()
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
        args.sinks = None if sinks is None else sinks.data_ptr()
        args.scale, args.softcap = math.scale, math.softcap or 0.0
        if args.scratch != memory:
            args.scratch = memory
            args.partials = memory + self._thread_bytes * self._num_threads
        if column_sums is not None:
            args.column_sums = column_sums.data_ptr()
            args.normalisers = args.partials + self._partials_bytes
        parallel_for = self._library.parallel_for
        if self._library.attend(ctypes.byref(args), parallel_for, self._num_threads):
            raise InvariantError("torch_parallel_for failed inside the C extension")


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


class WriteCall:
    """Arguments of writes to the same planes, built once.

    Args:
        library: the loaded C library.
        slots: slots of the first write.
        key: its keys.
    """

    def __init__(self, library: NativeLibrary, slots: NewSlots, key: Tensor) -> None:
        self._library, self._planes = library, (slots.key, slots.value)
        self._vectors, self._dtype, self._lanes = key.shape[1:], key.dtype, slots.pages.shape[1]
        self._itemsize = itemsize = key.itemsize
        _, heads_per_page, page_tokens, head_dim = slots.key.shape
        self._args = WriteArgs(
            plane=(slots.key.data_ptr(), slots.value.data_ptr()),
            page_bytes=slots.key.stride(0) * itemsize,
            vector_bytes=head_dim * itemsize,
            num_lanes=self._lanes,
            heads_per_page=heads_per_page,
            page_tokens=page_tokens,
        )

    def fits(self, slots: NewSlots, key: Tensor, value: Tensor) -> bool:
        """Return whether these tensors differ from the first ones in memory and tokens only."""
        places = (len(key), self._lanes)
        return (
            slots.coded is None
            and slots.key is self._planes[0]
            and slots.value is self._planes[1]
            and slots.pages.shape == slots.offsets.shape == places
            and key.shape[1:] == self._vectors
            and key.shape == value.shape
            and key.dtype == value.dtype == self._dtype
            and slots.pages.dtype == slots.offsets.dtype == torch.int64
            and slots.pages.is_contiguous()
            and slots.offsets.is_contiguous()
            and key.stride(2) == value.stride(2) == 1
        )

    def write(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        """Write keys and values [tokens, num_kv_heads, head_dim] with a contiguous last axis."""
        args, itemsize = self._args, self._itemsize
        args.fresh[:] = (key.data_ptr(), value.data_ptr())
        args.token_stride[:] = (key.stride(0) * itemsize, value.stride(0) * itemsize)
        args.head_stride[:] = (key.stride(1) * itemsize, value.stride(1) * itemsize)
        args.pages, args.offsets = slots.pages.data_ptr(), slots.offsets.data_ptr()
        args.num_tokens = len(key)
        if self._library.write(ctypes.byref(args), self._library.parallel_for):
            raise InvariantError("torch_parallel_for failed inside the C extension")


def move(library: NativeLibrary, moves: MovedSlots, scratch: Scratch) -> None:
    """Copy slots to other slots in every plane; see `AttentionBackend.move`."""
    (from_page, from_offset), (to_page, to_offset) = moves.source, moves.target
    for plane in moves.planes:
        _, heads_per_page, page_tokens, width = plane.shape
        args = MoveArgs(
            plane=plane.data_ptr(),
            page_bytes=plane.stride(0) * plane.itemsize,
            vector_bytes=width * plane.itemsize,
            pages=(from_page.data_ptr(), to_page.data_ptr()),
            offsets=(from_offset.data_ptr(), to_offset.data_ptr()),
            scratch=scratch.address(len(from_page) * heads_per_page * width * plane.itemsize),
            num_moves=len(from_page),
            heads_per_page=heads_per_page,
            page_tokens=page_tokens,
        )
        if library.move(ctypes.byref(args), library.parallel_for):
            raise InvariantError("torch_parallel_for failed inside the C extension")


def tally(
    library: NativeLibrary, target: AttentionStatistic, rows: StatisticRows, column_sums: Tensor
) -> None:
    """Add attention to the statistics of slots; see `AttentionBackend.tally`."""
    _, heads_per_page, page_tokens, _ = target.numbers.shape
    num_rows, num_lanes = rows.slots.shape
    args = TallyArgs(
        numbers=target.numbers.data_ptr(),
        page_bytes=target.numbers.stride(0) * target.numbers.itemsize,
        table=target.table.data_ptr(),
        table_row_stride=target.table.stride(0),
        table_lane_stride=target.table.stride(1),
        step_rows=rows.step_rows.data_ptr(),
        table_rows=rows.table_rows.data_ptr(),
        slots=rows.slots.data_ptr(),
        fresh=rows.fresh.data_ptr(),
        sums=column_sums.data_ptr(),
        sums_stride=column_sums.shape[2],
        num_rows=num_rows,
        num_lanes=num_lanes,
        heads_per_page=heads_per_page,
        group=column_sums.shape[1] // (num_lanes * heads_per_page),
        first_lane=target.first_lane,
        page_tokens=page_tokens,
        heads=REDUCTIONS.index(target.heads),
        count=int(target.count),
        path=library.path,
    )
    if library.tally(ctypes.byref(args), library.parallel_for):
        raise InvariantError("torch_parallel_for failed inside the C extension")
