"""ctypes mirrors of the C argument structures: `part` and `attention_args` of args.h."""

import ctypes
from math import gcd
from typing import TypeVar

import torch
from torch import Tensor

from quire.codecs.hadamard import ROTATED
from quire.kernels.backend import (
    AttentionMath,
    AttentionStatistic,
    LayerPages,
    MovedSlots,
    NewSlots,
    StatisticRows,
    dims_of,
)
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.layout.codecs import CodecSpec

PLAIN_NUMBERS, INT8_CODES, BIT_CODES, FP8_CODES = range(4)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_RUNS = 16  # runs of a vector: MAX_RUNS of walk.h
MAX_OUTLIERS = 8  # outliers of a vector: MAX_OUTLIERS of strip.h

_KINDS = {
    "int8": INT8_CODES,
    "fp8": FP8_CODES,
    "int4": BIT_CODES,
    "int2": BIT_CODES,
    "int4_outliers": BIT_CODES,
    "int4_hadamard": BIT_CODES,  # of rotated vectors, see `ROTATED`
}

_ENCODED = ("int8", "int4", "int2")
"""Rules that the C library encodes; torch encodes the others."""
Args = TypeVar("Args", bound=ctypes.Structure)
MAX_TOGETHER = 8  # KV heads one thread walks together, as in walk.h
SUM_SLOTS = 256  # slots of a part of column sums: BLOCK_SLOTS of blocked.h
KEPT_LOGITS = 1 << 18  # logits of a block that computes its own column sums, as in blocked.h
ROW, FIRST, COUNT, PARTIAL, PART_FIELDS = 0, 1, 2, 3, 4  # columns of a part: see `part` in args.h


class CodingArgs(ctypes.Structure):
    """Mirror of `coding`; it is part of `attention_args`, whose size is checked at load."""

    _fields_ = (
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("outliers", ctypes.c_void_p),
        ("vector_bytes", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("run", ctypes.c_int32),
        ("num_runs", ctypes.c_int32),
        ("num_outliers", ctypes.c_int32),
        ("index_bytes", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


def coding_of(side: CodedPlanes) -> CodingArgs:
    """Describe coded keys or values for the C library."""
    spec, head_dim, codes = side.codec.spec, side.codec.head_dim, side.planes[0]
    named = dict(zip((p.name for p in spec.planes(head_dim)), side.planes, strict=True))
    indices = named.get("outlier_indices")
    return CodingArgs(
        scales=_address(named.get("scales")),
        zeros=_address(named.get("zeros")),
        indices=_address(indices),
        outliers=_address(named.get("outlier_values")),
        vector_bytes=codes.shape[3] * codes.itemsize,
        kind=_kind(spec),
        dtype=DTYPES[codes.dtype] if spec.is_plain else 0,
        bits=spec.code_bits,
        channels=_channels(spec, head_dim),
        run=_run(spec, head_dim),
        num_runs=head_dim // _run(spec, head_dim),
        num_outliers=spec.num_outliers(head_dim),
        index_bytes=0 if indices is None else indices.itemsize,
        dim=head_dim,
    )


def plain_coding(plane: Tensor) -> CodingArgs:
    """Describe a plane [pages, heads, tokens, head_dim] of plain numbers for the C library."""
    head_dim = plane.shape[3]
    return CodingArgs(
        vector_bytes=head_dim * plane.itemsize,
        kind=PLAIN_NUMBERS,
        dtype=DTYPES.get(plane.dtype, 0),  # others are copied only
        channels=head_dim,
        run=head_dim,
        num_runs=1,
        dim=head_dim,
    )


def codings_of(pages: LayerPages | NewSlots) -> tuple[CodingArgs, CodingArgs]:
    """Describe keys and values for the C library."""
    if pages.coded is None:
        return plain_coding(pages.key), plain_coding(pages.value)
    return coding_of(pages.coded.key), coding_of(pages.coded.value)


def why_not(spec: CodecSpec, head_dim: int) -> str | None:
    """Return why the C library cannot read a codec, or None."""
    if (not spec.is_plain and spec.rule not in _KINDS) or spec.constants:
        return f"it does not read {spec.name}"
    if head_dim // _run(spec, head_dim) > MAX_RUNS:
        return (
            f"it reads at most {MAX_RUNS} groups of a vector, and {spec.name} has more for "
            f"head_dim {head_dim}"
        )
    if spec.num_outliers(head_dim) > MAX_OUTLIERS:
        return f"it reads at most {MAX_OUTLIERS} outliers of a vector, {spec.name} has more"
    return None


def are_rotated(pages: LayerPages | NewSlots) -> tuple[bool, bool]:
    """Return whether keys are rotated, and whether values are."""
    coded = pages.coded
    if coded is None:
        return False, False
    return coded.key.codec.spec.rule in ROTATED, coded.value.codec.spec.rule in ROTATED


def unfit_codes(pages: LayerPages, coded: CodedPages) -> str | None:
    """Return why the C library cannot read these pages, or None."""
    if pages.full_precision is not None:
        return "full-precision tokens"
    if pages.promoted is not None:
        return "tokens in a finer codec than their pages"
    for side in (coded.key, coded.value):
        reason = why_not(side.codec.spec, side.codec.head_dim)
        if reason is not None:
            return reason
        if any(not _is_whole(plane) for plane in side.planes):
            return "planes of codes whose strides differ from those of pages"
    return None


def can_encode(coded: CodedPages, vectors: Tensor) -> bool:
    """Return whether the C library can encode these vectors into these planes."""
    sides = (coded.key, coded.value)
    return vectors.dtype in DTYPES and all(
        why_not(side.codec.spec, side.codec.head_dim) is None
        and (side.codec.spec.is_plain or side.codec.spec.rule in _ENCODED)
        and all(_is_whole(plane) for plane in side.planes)
        for side in sides
    )


def _is_whole(plane: Tensor) -> bool:
    _, _, tokens, width = plane.shape
    inner: tuple[int, ...] = (tokens * width, width, 1)
    return plane.device.type == "cpu" and plane.stride()[1:] == inner


def _address(plane: Tensor | None) -> int | None:
    return None if plane is None else plane.data_ptr()


def _kind(spec: CodecSpec) -> int:
    return PLAIN_NUMBERS if spec.is_plain else _KINDS[spec.rule]


def _channels(spec: CodecSpec, head_dim: int) -> int:
    """Return the number of neighbouring channels that share a scale."""
    return spec.group_of(head_dim) if spec.has_zeros else head_dim


def _run(spec: CodecSpec, head_dim: int) -> int:
    """Return the number of channels that share a scale and are adjacent in the packed bytes."""
    segments = 8 // spec.code_bits if spec.rule in _KINDS and spec.code_bits < 8 else 1
    return gcd(_channels(spec, head_dim), head_dim // segments)


class TallyArgs(ctypes.Structure):
    """Mirror of `tally_args` of args.h; its size is checked at load."""

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
        ("number", ctypes.c_void_p),
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


class RingArgs(ctypes.Structure):
    """Mirror of `ring_args` of args.h; its size is checked at load."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("marks", ctypes.c_void_p),
        ("num_records", ctypes.c_int32),
        ("num_lanes", ctypes.c_int32),
        ("heads_per_page", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class SparseArgs(ctypes.Structure):
    """Mirror of `sparse_args` of args.h; its size is checked at load."""

    _fields_ = (
        ("bounds", ctypes.c_void_p),
        ("held", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("recent", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("picks", ctypes.c_void_p),
        ("at", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("picked", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("only", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


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
        ("bias", ctypes.c_void_p),
        ("bias_row_stride", ctypes.c_int64),
        ("bias_head_stride", ctypes.c_int64),
        ("bias_end", ctypes.c_int64),
        ("bias_rows", ctypes.c_void_p),
        ("column_sums", ctypes.c_void_p),
        ("sums_stride", ctypes.c_int64),
        ("tallies", ctypes.c_void_p),
        ("rings", ctypes.c_void_p),
        ("tops", ctypes.c_void_p),
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
        ("num_tallies", ctypes.c_int32),
        ("num_rings", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("coded", ctypes.c_int32),
        ("joined", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("key_coding", CodingArgs),
        ("value_coding", CodingArgs),
        ("sparse", ctypes.c_void_p),
    )


class ScoreArgs(ctypes.Structure):
    """Mirror of `score_args`; its size is checked at load."""

    _fields_ = (
        ("vectors", AttentionArgs),
        ("pages", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("held", ctypes.c_void_p),
        ("records", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("num_lanes", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("score", ctypes.c_int32),
        ("kernel", ctypes.c_int32),
        ("pool_max", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("newest", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class WriteArgs(ctypes.Structure):
    """Mirror of `write_args` of write.h; its size is checked at load."""

    _fields_ = (
        ("plane", ctypes.c_void_p * 2),
        ("fresh", ctypes.c_void_p * 2),
        ("token_stride", ctypes.c_int64 * 2),
        ("head_stride", ctypes.c_int64 * 2),
        ("page_bytes", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("num_lanes", ctypes.c_int32),
        ("heads_per_page", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("coded", ctypes.c_int32),
        ("bounds_dtype", ctypes.c_int32),
        ("codings", CodingArgs * 2),
        ("bounds", ctypes.c_void_p),
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


class MovedPlane(ctypes.Structure):
    """Mirror of `moved_plane` of move.h; its size is checked at load."""

    _fields_ = (
        ("plane", ctypes.c_void_p),
        ("vector_bytes", ctypes.c_int64),
        ("heads_per_page", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class LaneMoveArgs(ctypes.Structure):
    """Mirror of `lane_move_args` of move.h; its size is checked at load."""

    _fields_ = (
        ("planes", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("moves", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("num_planes", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("max_moves", ctypes.c_int32),
        ("count_stride", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
    )


def copied(args: Args, number: int) -> "ctypes.Array[Args]":
    """Return copies of an argument structure, next to each other."""
    return (type(args) * number).from_buffer_copy(bytes(args) * number)


EXPANDED = "latents that are expanded to keys and values of heads"


def unfit_tensors(
    pages: LayerPages, math: AttentionMath, query: Tensor, column_sums: Tensor | None
) -> str | None:
    """Return why the C library cannot read these tensors, or None."""
    if math.latent is not None and not math.joined:
        return EXPANDED
    heads, dims = pages.key.shape[1], dims_of(pages)
    head_dim = sum(dims) if math.joined else dims[0]
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
    if query.shape[1] % (pages.num_lanes * heads) or query.shape[2] != head_dim:
        return f"queries {tuple(query.shape)} for pages of {heads} heads of {head_dim}"
    if column_sums is not None and not (
        column_sums.dtype == torch.float32 and column_sums.is_contiguous()
    ):
        return "column sums that are not contiguous float32"
    return _unfit_heads(math, query.shape[1])


def unfit_blocks(dim: int, max_dim: int, group: int, block_queries: int) -> str | None:
    """Return why blocks of query vectors cannot attend to joined keys, or None.

    Args:
        dim: the most elements of a value or of a stored key.
        max_dim: the most elements that blocks unpack.
        group: query heads of a KV head.
        block_queries: query vectors of a block; 0 if there are none for these elements.
    """
    if block_queries == 0:
        return "joined keys without vector instructions, or whose parts are no multiples of 8"
    if dim > max_dim:
        return f"joined keys with a part of {dim} elements, above {max_dim}"
    if group > block_queries:
        return f"joined keys with {group} query heads per KV head, above {block_queries}"
    return None


def _unfit_heads(math: AttentionMath, num_heads: int) -> str | None:
    if math.selected is not None:
        return "attention to selected tokens"
    slopes = None if math.alibi is None else math.alibi.slopes
    for name, numbers in (("sinks", math.sinks), ("slopes", slopes)):
        if numbers is not None and numbers.numel() != num_heads:
            return f"{numbers.numel()} {name} for {num_heads} heads"
    return None


def _unfit_pages(pages: LayerPages, query: Tensor) -> str | None:
    if any(plane.dtype != query.dtype for plane in (pages.key, pages.value)):
        return f"pages of {pages.key.dtype} and queries of {query.dtype}"
    if not _are_pages(pages.key, pages.value):
        return f"pages with strides {pages.key.stride()} and {pages.value.stride()}"
    return None


def _are_pages(key: Tensor, value: Tensor) -> bool:
    """Return whether two planes are of the same pages, row-major inside a page."""
    equal = key.shape[:3] == value.shape[:3]
    equal &= len(key) == 1 or key.stride(0) == value.stride(0)
    return equal and _has_whole_vectors(key) and _has_whole_vectors(value)


def can_write(slots: NewSlots, key: Tensor, value: Tensor) -> bool:
    """Return whether the C library can write these keys and values to these planes."""
    (num_tokens, num_lanes), coded = slots.pages.shape, slots.coded
    shape, places = (num_tokens, num_lanes * slots.key.shape[1]), (slots.pages, slots.offsets)
    return (
        (key.shape, value.shape) == tuple((*shape, dim) for dim in dims_of(slots))
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


def can_tally(tally: AttentionStatistic, rows: StatisticRows, num_heads: int) -> bool:
    """Return whether the C library can add column sums of this many heads to this statistic."""
    _, heads, tokens, width = tally.numbers.shape
    whole = (rows.step_rows, rows.table_rows, rows.slots, rows.fresh)
    return (
        width == 1
        and tally.numbers.stride()[1:] == (tokens, 1, 1)
        and num_heads % (heads * rows.slots.shape[1]) == 0
        and all(t.device.type == "cpu" for t in (tally.numbers, tally.table, *whole))
        and all(t.is_contiguous() for t in whole)
        and tally.table.stride(2) == 1
        and tally.numbers.dtype == torch.float32
        and all(t.dtype == torch.int32 for t in (tally.table, rows.slots, rows.fresh))
        and all(t.dtype == torch.int64 for t in (rows.step_rows, rows.table_rows))
    )


WINDOW_SUMS, MEAN_COSINES, NORMS = range(3)  # scores of cached tokens, as in args.h


def can_score(plane: Tensor, coded: CodedPlanes | None) -> bool:
    """Return whether the C library can score these keys or values."""
    if coded is None:
        return _is_whole(plane) and plane.dtype in DTYPES
    spec = coded.codec.spec
    fits = why_not(spec, coded.codec.head_dim) is None and spec.rule not in ROTATED
    return fits and all(map(_is_whole, coded.planes))


def can_read_sums(column_sums: Tensor) -> bool:
    """Return whether the C library can read column sums."""
    on_cpu = column_sums.device.type == "cpu"
    return on_cpu and column_sums.is_contiguous() and column_sums.dtype == torch.float32


PANEL_COLUMNS = 64  # output columns of a panel, as in linear.h
GATE_COLUMNS = 32  # columns of the gate in a panel of a gated product
GROUP_CODES = 128  # codes with one scale
PLAIN, AVX2, AVX512, AVX512_BF16 = range(4)  # code paths, as in args.h
STORE, ADD, GATE_SILU = range(3)  # what happens to the sums


class LinearArgs(ctypes.Structure):
    """Mirror of `linear_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_row_bytes", ctypes.c_int64),
        ("x_scales", ctypes.c_void_p),
        ("x_sums", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("outer", ctypes.c_int32),
        ("weight_kind", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("finish", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )


class NormArgs(ctypes.Structure):
    """Mirror of `norm_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class RopeArgs(ctypes.Structure):
    """Mirror of `rope_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("column", ctypes.c_int64 * 3),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("norm", ctypes.c_void_p * 2),
        ("out", ctypes.c_void_p * 3),
        ("heads", ctypes.c_int32 * 3),
        ("rows", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class CodeArgs(ctypes.Structure):
    """Mirror of `code_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )


class ConvertArgs(ctypes.Structure):
    """Mirror of `convert_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class ChainCall(ctypes.Structure):
    """Mirror of `chain_call`; its size is checked at load."""

    _fields_ = (
        ("args", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("part", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class SampleRow(ctypes.Structure):
    """Mirror of `sample_row`; its size is checked at load."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("log_total", ctypes.c_double),
        ("log_min_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
    )


class SampleArgs(ctypes.Structure):
    """Mirror of `sample_args`; its size is checked at load."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("logits_row", ctypes.c_int64),
        ("options", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class StatesArgs(ctypes.Structure):
    """Mirror of `paged_states` of recurrent.c; it is part of structures with checked sizes."""

    _fields_ = (
        ("plane", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("per_row", ctypes.c_int32),
        ("vectors", ctypes.c_int32),
    )


class RowNumbers(ctypes.Structure):
    """Mirror of `row_numbers` of recurrent.c; it is part of structures with checked sizes."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class ConvolveArgs(ctypes.Structure):
    """Mirror of `convolve_args`; its size is checked at load."""

    _fields_ = (
        ("states", StatesArgs),
        ("x", RowNumbers),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("length", ctypes.c_int32),
        ("taps", ctypes.c_int32),
        ("silu", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )


class DeltaArgs(ctypes.Structure):
    """Mirror of `delta_args`; its size is checked at load."""

    _fields_ = (
        ("states", StatesArgs),
        ("query", RowNumbers),
        ("key", RowNumbers),
        ("value", RowNumbers),
        ("decay", RowNumbers),
        ("beta", RowNumbers),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("key_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("decays", ctypes.c_int32),
        ("normalize", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class SpaceArgs(ctypes.Structure):
    """Mirror of `space_args`; its size is checked at load."""

    _fields_ = (
        ("states", StatesArgs),
        ("x", RowNumbers),
        ("step", RowNumbers),
        ("key", RowNumbers),
        ("query", RowNumbers),
        ("decay", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("groups", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )


class FreeArgs(ctypes.Structure):
    """Mirror of `free_args`; its size is checked at load."""

    _fields_ = (
        ("live", ctypes.c_void_p),
        ("protected", ctypes.c_void_p),
        ("keep", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("retained", ctypes.c_void_p),
        ("columns", ctypes.c_int64 * 2),
        ("rows", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class BestArgs(ctypes.Structure):
    """Mirror of `best_args`; its size is checked at load."""

    _fields_ = (
        ("score", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("score_row", ctypes.c_int64),
        ("score_head", ctypes.c_int64),
        ("free_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("rows_per_layer", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class AlignArgs(ctypes.Structure):
    """Mirror of `align_args`; its size is checked at load."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("past_end", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("rows_per_layer", ctypes.c_int32),
        ("heads", ctypes.c_int32),
    )


class SignArgs(ctypes.Structure):
    """Mirror of `sign_args`; its size is checked at load."""

    _fields_ = (("free", FreeArgs), ("best", BestArgs), ("align", AlignArgs))


class RetainArgs(ctypes.Structure):
    """Mirror of `retain_args`; its size is checked at load."""

    _fields_ = (
        ("live", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("retained", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("anchor", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("represent", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("marks", ctypes.c_void_p),
        ("score_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("unit_words", ctypes.c_int32),
        ("pick_best", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class RepresentArgs(ctypes.Structure):
    """Mirror of `represent_args`; its size is checked at load."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("anchor", ctypes.c_void_p),
        ("grouped", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("score_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("units", ctypes.c_int32),
        ("unit_words", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )


class LaneArgs(ctypes.Structure):
    """Mirror of `lane_args` of select.h; its size is checked at load."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("held", ctypes.c_void_p),
        ("by_position", ctypes.c_void_p),
        ("slot", ctypes.c_void_p),
        ("keep", ctypes.c_void_p),
        ("newest", ctypes.c_void_p),
        ("protected", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("number_pages", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("moves", ctypes.c_void_p),
        ("evicted", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("number_page_bytes", ctypes.c_int64),
        ("lanes", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("number_columns", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("number_tokens", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("lanes_per_score", ctypes.c_int32),
        ("sinks", ctypes.c_int32),
        ("max_moves", ctypes.c_int32),
        ("max_evicted", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )
