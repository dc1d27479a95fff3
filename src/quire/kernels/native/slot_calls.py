"""Calls of the C library on slots of pages: writing, moving, adding attention to statistics."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import AttentionStatistic, MovedSlots, NewSlots, StatisticRows
from quire.kernels.native.arguments import MoveArgs, TallyArgs, WriteArgs, copied
from quire.kernels.native.call import Scratch
from quire.kernels.native.coding import DTYPES, coding_of
from quire.kernels.native.library import NativeLibrary
from quire.layout.statistics import REDUCTIONS


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
        self._itemsize, self._is_coded = key.itemsize, slots.coded is not None
        _, heads_per_page, page_tokens, width = slots.key.shape
        self._args = WriteArgs(
            plane=(slots.key.data_ptr(), slots.value.data_ptr()),
            page_bytes=slots.key.stride(0) * slots.key.itemsize,
            vector_bytes=width * slots.key.itemsize,
            num_lanes=self._lanes,
            heads_per_page=heads_per_page,
            page_tokens=page_tokens,
            head_dim=key.shape[2],
            path=library.path,
            coded=self._is_coded,
        )
        if slots.coded is not None:
            self._args.dtype = DTYPES[key.dtype]
            self._args.codings[:] = (coding_of(slots.coded.key), coding_of(slots.coded.value))

    def fits(self, slots: NewSlots, key: Tensor, value: Tensor) -> bool:
        """Return whether these tensors differ from the first ones in memory and tokens only."""
        places = (len(key), self._lanes)
        return (
            (slots.coded is not None) == self._is_coded
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
        self._set(slots, key, value)
        if self._library.write(ctypes.byref(self._args), self._library.parallel_for):
            raise InvariantError("torch_parallel_for failed inside the C extension")

    def layer_args(
        self, layers: Sequence[NewSlots], key: Tensor, value: Tensor
    ) -> "ctypes.Array[WriteArgs]":
        """Return the arguments of writes that differ in their slots only, for a chain."""
        self._set(layers[0], key, value)
        copies = copied(self._args, len(layers))
        for args, slots in zip(copies, layers, strict=True):
            args.pages, args.offsets = slots.pages.data_ptr(), slots.offsets.data_ptr()
        return copies

    def _set(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        args, itemsize = self._args, self._itemsize
        args.fresh[:] = (key.data_ptr(), value.data_ptr())
        args.token_stride[:] = (key.stride(0) * itemsize, value.stride(0) * itemsize)
        args.head_stride[:] = (key.stride(1) * itemsize, value.stride(1) * itemsize)
        args.pages, args.offsets = slots.pages.data_ptr(), slots.offsets.data_ptr()
        args.num_tokens = len(key)


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
