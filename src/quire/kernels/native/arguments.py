"""ctypes mirrors of the C argument structures: `part` and `attention_args` of args.h."""

import ctypes
from typing import TypeVar

import torch
from torch import Tensor

from quire.kernels.backend import (
    AttentionMath,
    AttentionStatistic,
    LayerPages,
    MovedSlots,
    NewSlots,
    StatisticRows,
)
from quire.kernels.native.coding import DTYPES, CodingArgs, can_encode, unfit_codes

Args = TypeVar("Args", bound=ctypes.Structure)
MAX_TOGETHER = 8  # KV heads one thread walks together, as in walk.h
SUM_SLOTS = 256  # slots of a part of column sums: BLOCK_SLOTS of blocked.h
KEPT_LOGITS = 1 << 18  # logits of a block that computes its own column sums, as in blocked.h
ROW, FIRST, COUNT, PARTIAL, PART_FIELDS = 0, 1, 2, 3, 4  # columns of a part: see `part` in args.h


class AttentionArgs(ctypes.Structure):
    """Mirror of `attention_args`; its size is checked at load."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_row_stride", ctypes.c_int64),
        ("table_lane_stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("column_sums", ctypes.c_void_p),
        ("sums_stride", ctypes.c_int64),
        ("normalisers", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("walks", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("merges", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("num_walks", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("num_merges", ctypes.c_int32),
        ("num_sums", ctypes.c_int32),
        ("num_partials", ctypes.c_int32),
        ("num_lanes", ctypes.c_int32),
        ("heads_per_page", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("first_lane", ctypes.c_int32),
        ("heads_together", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("path", ctypes.c_int32),
        ("coded", ctypes.c_int32),
        ("key_coding", CodingArgs),
        ("value_coding", CodingArgs),
    )


class WriteArgs(ctypes.Structure):
    """Mirror of `write_args` of write.h; its size is checked at load."""

    _fields_ = (
        ("plane", ctypes.c_void_p * 2),
        ("fresh", ctypes.c_void_p * 2),
        ("token_stride", ctypes.c_int64 * 2),
        ("head_stride", ctypes.c_int64 * 2),
        ("page_bytes", ctypes.c_int64),
        ("vector_bytes", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("num_lanes", ctypes.c_int32),
        ("heads_per_page", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("coded", ctypes.c_int32),
        ("codings", CodingArgs * 2),
    )


class MoveArgs(ctypes.Structure):
    """Mirror of `move_args` of move.h; its size is checked at load."""

    _fields_ = (
        ("plane", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("vector_bytes", ctypes.c_int64),
        ("pages", ctypes.c_void_p * 2),
        ("offsets", ctypes.c_void_p * 2),
        ("scratch", ctypes.c_void_p),
        ("num_moves", ctypes.c_int64),
        ("heads_per_page", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
    )


class TallyArgs(ctypes.Structure):
    """Mirror of `tally_args` of tally.h; its size is checked at load."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_row_stride", ctypes.c_int64),
        ("table_lane_stride", ctypes.c_int64),
        ("step_rows", ctypes.c_void_p),
        ("table_rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("fresh", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("sums_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("num_lanes", ctypes.c_int32),
        ("heads_per_page", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("first_lane", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )


def copied(args: Args, number: int) -> "ctypes.Array[Args]":
    """Return copies of an argument structure, next to each other."""
    return (type(args) * number).from_buffer_copy(bytes(args) * number)


def unfit_tensors(
    pages: LayerPages, math: AttentionMath, query: Tensor, column_sums: Tensor | None
) -> str | None:
    """Return why the C library cannot read these tensors, or None."""
    heads, head_dim = pages.key.shape[1], query.shape[2]
    planes = (pages.key, pages.value)
    if any(t.device.type != "cpu" for t in (*planes, pages.table, pages.rows, query)):
        return "tensors are not all on the CPU"
    unfit = _unfit_pages(pages, query) if pages.coded is None else unfit_codes(pages, pages.coded)
    if unfit is not None:
        return unfit
    if query.dtype not in DTYPES:
        return f"queries of {query.dtype}"
    if any(t.data_ptr() % t.itemsize for t in (*planes, query)):
        return "tensors that are not aligned to their item size"
    if pages.table.dtype != torch.int32 or pages.rows.dtype != torch.int64:
        return f"a page table of {pages.table.dtype} and rows of {pages.rows.dtype}"
    if pages.table.stride(2) != 1 or not pages.rows.is_contiguous():
        return "a page table or rows that are not contiguous"
    if query.shape[1] % (pages.num_lanes * heads) or _head_dim(pages) != head_dim:
        return f"queries {tuple(query.shape)} for pages of {heads} heads of {_head_dim(pages)}"
    if math.sinks is not None and math.sinks.numel() != query.shape[1]:
        return f"{math.sinks.numel()} sinks for {query.shape[1]} heads"
    if column_sums is not None and not (
        column_sums.dtype == torch.float32 and column_sums.is_contiguous()
    ):
        return "column sums that are not contiguous float32"
    return None


def _head_dim(pages: LayerPages) -> int:
    return pages.key.shape[3] if pages.coded is None else pages.coded.key.codec.head_dim


def _unfit_pages(pages: LayerPages, query: Tensor) -> str | None:
    if any(plane.dtype != query.dtype for plane in (pages.key, pages.value)):
        return f"pages of {pages.key.dtype} and queries of {query.dtype}"
    if not _are_pages(pages.key, pages.value):
        return f"pages with strides {pages.key.stride()} and {pages.value.stride()}"
    return None


def _are_pages(key: Tensor, value: Tensor) -> bool:
    """Return whether two planes have the same page strides, row-major inside a page."""
    _, _, tokens, head_dim = key.shape
    inner = (tokens * head_dim, head_dim, 1)
    equal = key.shape == value.shape and key.stride() == value.stride()
    return equal and key.stride()[1:] == inner


def can_write(slots: NewSlots, key: Tensor, value: Tensor) -> bool:
    """Return whether the C library can write these keys and values to these planes."""
    heads, coded = slots.key.shape[1], slots.coded
    head_dim = slots.key.shape[3] if coded is None else coded.key.codec.head_dim
    num_tokens, num_lanes = slots.pages.shape
    places = (slots.pages, slots.offsets)
    return (
        key.shape == value.shape == (num_tokens, num_lanes * heads, head_dim)
        and key.dtype == value.dtype
        and slots.offsets.shape == slots.pages.shape
        and all(t.device.type == "cpu" for t in (slots.key, slots.value, key, value, *places))
        and all(t.dtype == torch.int64 and t.is_contiguous() for t in places)
        and all(t.stride(2) == 1 for t in (key, value))
        and (_can_copy(slots, key) if coded is None else can_encode(coded, key))
    )


def _can_copy(slots: NewSlots, key: Tensor) -> bool:
    same_type = slots.key.dtype == slots.value.dtype == key.dtype
    return same_type and _are_pages(slots.key, slots.value)


def can_move(moves: MovedSlots) -> bool:
    """Return whether the C library can copy these slots."""
    places = (*moves.source, *moves.target)
    return (
        all(plane.device.type == "cpu" for plane in moves.planes)
        and all(_has_whole_vectors(plane) for plane in moves.planes)
        and all(place.device.type == "cpu" and place.is_contiguous() for place in places)
        and all(place.dtype == torch.int64 for place in places)
    )


def _has_whole_vectors(plane: Tensor) -> bool:
    _, _, tokens, width = plane.shape
    inner: tuple[int, ...] = (tokens * width, width, 1)
    return plane.stride()[1:] == inner


def can_tally(tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> bool:
    """Return whether the C library can add these column sums to this statistic."""
    _, heads, tokens, width = tally.numbers.shape
    whole = (rows.step_rows, rows.table_rows, rows.slots, rows.fresh, column_sums)
    return (
        width == 1
        and tally.numbers.stride()[1:] == (tokens, 1, 1)
        and column_sums.shape[1] % (heads * rows.slots.shape[1]) == 0
        and all(t.device.type == "cpu" for t in (tally.numbers, tally.table, *whole))
        and all(t.is_contiguous() for t in whole)
        and tally.table.stride(2) == 1
        and all(t.dtype == torch.float32 for t in (tally.numbers, column_sums))
        and all(t.dtype == torch.int32 for t in (tally.table, rows.slots, rows.fresh))
        and all(t.dtype == torch.int64 for t in (rows.step_rows, rows.table_rows))
    )
