"""Launches of the kernels on slots, pages, heads and rows."""

import torch
import triton
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from quire.kernels.backend import AttentionStatistic, MovedSlots, NewSlots, StatisticRows
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.rope_write import CosSin
from quire.kernels.triton.coding import FLOATS, SideCoding, coding_of, has_whole_vectors
from quire.kernels.triton.device import rope as rope_kernels
from quire.kernels.triton.device.encode import encode_vectors
from quire.kernels.triton.device.rows import add_and_norm, gated_silu, norm_heads
from quire.kernels.triton.device.slots import copy_pages, copy_slots, write_vectors
from quire.kernels.triton.device.tally import add_attention
from quire.kernels.triton.hardware import device_of
from quire.layout.statistics import MAX, MEAN

ENCODED = ("int8", "fp8", "int4", "int2")
"""Rules that the kernels encode; torch encodes the others."""

MAX_GROUPS = 16  # of a vector: the loop over them is unrolled
BLOCK_ITEMS = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def can_write(slots: NewSlots, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels can write these keys and values to these planes."""
    heads, coded = slots.key.shape[1], slots.coded
    head_dim = slots.key.shape[3] if coded is None else coded.key.codec.head_dim
    num_tokens, num_lanes = slots.pages.shape
    places = (slots.pages, slots.offsets)
    return (
        key.shape == value.shape == (num_tokens, num_lanes * heads, head_dim)
        and slots.offsets.shape == slots.pages.shape
        and all(t.dtype == torch.int64 and t.is_contiguous() for t in places)
        and all(t.stride(2) == 1 and t.dtype in FLOATS for t in (key, value))
        and (
            _can_copy(slots, key, value)
            if coded is None
            else all(map(_can_encode, (coded.key, coded.value)))
        )
    )


def _can_copy(slots: NewSlots, key: Tensor, value: Tensor) -> bool:
    pairs = ((slots.key, key), (slots.value, value))
    return all(plane.dtype == new.dtype and has_whole_vectors(plane) for plane, new in pairs)


def _can_encode(side: CodedPlanes) -> bool:
    spec, head_dim = side.codec.spec, side.codec.head_dim
    fits = spec.is_plain or (
        spec.rule in ENCODED
        and not spec.constants
        and (not spec.has_zeros or spec.num_groups(head_dim) <= MAX_GROUPS)
    )
    return fits and all(has_whole_vectors(plane) for plane in side.planes)


def write(slots: NewSlots, key: Tensor, value: Tensor) -> None:
    """Write keys and values to their slots; see `AttentionBackend.write`."""
    coded = slots.coded
    if coded is None:
        _write_plain(slots.key, slots, key)
        _write_plain(slots.value, slots, value)
        return
    for side, vectors in ((coded.key, key), (coded.value, value)):
        if side.codec.spec.is_plain:
            _write_plain(side.planes[0], slots, vectors)
        else:
            _encode(coding_of(side), slots, vectors)


def _write_plain(plane: Tensor, slots: NewSlots, vectors: Tensor) -> None:
    num_tokens, num_heads, head_dim = vectors.shape
    dims = triton.next_power_of_2(head_dim)
    block = min(triton.next_power_of_2(num_heads), max(1, BLOCK_ITEMS // dims))
    write_vectors[(num_tokens, triton.cdiv(num_heads, block))](
        plane,
        vectors,
        slots.pages,
        slots.offsets,
        *vectors.stride()[:2],
        plane.stride(0) * plane.itemsize,
        slots.pages.shape[1],
        *plane.shape[1:3],
        head_dim,
        block,
        dims,
        num_warps=4,
    )


def _encode(side: SideCoding, slots: NewSlots, vectors: Tensor) -> None:
    num_tokens, num_heads, head_dim = vectors.shape
    codes, scales, zeros = side.planes[:3]
    segments = 8 // side.bits
    encode_vectors[(num_tokens, num_heads)](
        codes,
        scales,
        zeros,
        vectors,
        slots.pages,
        slots.offsets,
        *vectors.stride()[:2],
        codes.stride(0) * codes.itemsize,
        slots.pages.shape[1],
        *codes.shape[1:3],
        head_dim,
        side.kind,
        side.bits,
        side.channels,
        segments,
        triton.next_power_of_2(head_dim // segments),
        num_warps=1,
    )


def rotate(query: Tensor, key: Tensor, rope: CosSin) -> None:
    """Rotate queries and keys in place."""
    with device_of(query):
        _launch_rope(None, query, key, key, rope, None)


def can_rotate_and_write(slots: NewSlots, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether one kernel can rotate and write these heads."""
    coded = slots.coded
    return (
        query.stride(2) == 1
        and query.dtype == key.dtype
        and can_write(slots, key, value)
        and (coded is None or not _has_plain_side(coded))
    )


def rotate_and_write(
    slots: NewSlots, heads: tuple[Tensor, Tensor, Tensor], rope: CosSin, source: Tensor | None
) -> None:
    """Rotate queries and keys, and write keys and values."""
    if slots.coded is None:
        _launch_rope(slots, *heads, rope, source)
    else:
        _launch_coded_rope(slots, slots.coded, *heads, rope, source)


def _has_plain_side(coded: CodedPages) -> bool:
    return any(side.codec.spec.is_plain for side in (coded.key, coded.value))


def _strides(*heads: Tensor) -> list[int]:
    return [stride for tensor in heads for stride in tensor.stride()[:2]]


def _launch_rope(
    slots: NewSlots | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: CosSin,
    source: Tensor | None,
) -> None:
    num_tokens, num_heads, head_dim = query.shape
    dims, half = triton.next_power_of_2(head_dim), rope.rotary_dim // 2
    block = min(triton.next_power_of_2(key.shape[1]), max(1, BLOCK_ITEMS // dims))
    plane = key if slots is None else slots.key
    grid = (num_tokens, triton.cdiv(num_heads, block) + triton.cdiv(key.shape[1], block))
    rope_kernels.rotate_and_write[grid](
        query,
        key,
        value,
        rope.cosine,
        rope.sine,
        query if source is None else source,
        plane,
        value if slots is None else slots.value,
        query if slots is None else slots.pages,
        query if slots is None else slots.offsets,
        *_strides(query, key, value),
        0 if slots is None else plane.stride(0) * plane.itemsize,
        num_heads,
        1 if slots is None else slots.pages.shape[1],
        *(key.shape[1], 1) if slots is None else plane.shape[1:3],
        head_dim,
        rope.rotary_dim,
        block,
        dims,
        triton.next_power_of_2(half),
        source is not None,
        slots is not None,
        num_warps=4,
    )


def _launch_coded_rope(
    slots: NewSlots,
    coded: CodedPages,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: CosSin,
    source: Tensor | None,
) -> None:
    sides = coding_of(coded.key), coding_of(coded.value)
    num_tokens, num_heads, head_dim = query.shape
    codes = sides[0].planes[0]
    rope_kernels.rotate_and_encode[(num_tokens, num_heads + 2 * key.shape[1])](
        query,
        key,
        value,
        rope.cosine,
        rope.sine,
        query if source is None else source,
        *(plane for side in sides for plane in side.planes[:3]),
        slots.pages,
        slots.offsets,
        *_strides(query, key, value),
        codes.stride(0) * codes.itemsize,
        num_heads,
        slots.pages.shape[1],
        *codes.shape[1:3],
        head_dim,
        rope.rotary_dim,
        triton.next_power_of_2(rope.rotary_dim // 2),
        source is not None,
        *(number for side in sides for number in (side.kind, side.bits, side.channels)),
        *(triton.next_power_of_2(head_dim * side.bits // 8) for side in sides),
        num_warps=1,
    )


def can_move(moves: MovedSlots) -> bool:
    """Whether the kernels can copy these slots."""
    places = (*moves.source, *moves.target)
    return all(has_whole_vectors(plane) for plane in moves.planes) and all(
        place.dtype == torch.int64 and place.is_contiguous() for place in places
    )


def move(moves: MovedSlots) -> int:
    """Copy slots to other slots; return the bytes of scratch memory.

    All sources are copied to the scratch memory before any target is written.
    """
    num_moves, max_bytes = len(moves.source[0]), 0
    if not num_moves:
        return 0
    for plane in moves.planes:
        raw = plane.view(_INTEGERS[plane.itemsize])
        _, heads, tokens, width = raw.shape
        scratch = torch.empty(num_moves, heads * width, dtype=raw.dtype, device=raw.device)
        block = min(BLOCK_ITEMS, triton.next_power_of_2(heads * width))
        grid = (num_moves, triton.cdiv(heads * width, block))
        for ends, to_scratch in ((moves.source, True), (moves.target, False)):
            copy_slots[grid](
                raw, scratch, *ends, raw.stride(0), heads, tokens, width, block, to_scratch
            )
        max_bytes = max(max_bytes, scratch.nbytes)
    return max_bytes


def pack_pages(
    whole: UInt8[Tensor, "page page_bytes"],
    pages: Int[Tensor, " packed"],
    packed: UInt8[Tensor, "packed page_bytes"],
) -> None:
    """Copy pages to contiguous memory on their device."""
    _copy_pages(whole, pages, packed, to_packed=True)


def unpack_pages(
    whole: UInt8[Tensor, "page page_bytes"],
    pages: Int[Tensor, " packed"],
    packed: UInt8[Tensor, "packed page_bytes"],
) -> None:
    """Copy pages from contiguous memory on their device."""
    _copy_pages(whole, pages, packed, to_packed=False)


def _copy_pages(whole: Tensor, pages: Tensor, packed: Tensor, *, to_packed: bool) -> None:
    if not len(pages):
        return
    dtype = _widest(whole, packed)
    wide, narrow = whole.view(dtype), packed.view(dtype)
    items = wide.shape[1]
    block = min(BLOCK_ITEMS, triton.next_power_of_2(items))
    grid = (len(pages), triton.cdiv(items, block))
    with device_of(whole):
        copy_pages[grid](wide, narrow, pages, items, items, block, to_packed)


def _widest(*bytes_of: Tensor) -> torch.dtype:
    """The widest integers as which all these rows of bytes can be read."""
    sizes = [t.shape[1] for t in bytes_of] + [t.storage_offset() for t in bytes_of]
    sizes += [t.data_ptr() for t in bytes_of]
    return next(
        t for n, t in sorted(_INTEGERS.items(), reverse=True) if not any(s % n for s in sizes)
    )


_BLOCK = 256
_MAX_GROUP = 32  # query heads of a number: the loop over them is unrolled


def group_of(tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> int:
    """Query heads that share a number; 0 if heads do not divide them."""
    heads = rows.slots.shape[1] * tally.numbers.shape[1]
    return 0 if column_sums.shape[1] % heads else column_sums.shape[1] // heads


def can_tally(tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> bool:
    """Whether the kernel can accumulate these statistics."""
    float32, whole = torch.float32, (rows.step_rows, rows.table_rows, rows.slots, rows.fresh)
    return (
        tally.numbers.dtype == column_sums.dtype == float32
        and tally.table.dtype == torch.int32
        and tally.table.stride(2) == column_sums.stride(2) == 1
        and has_whole_vectors(tally.numbers)
        and all(tensor.is_contiguous() for tensor in whole)
        and 0 < group_of(tally, rows, column_sums) <= _MAX_GROUP
    )


def tally_attention(tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> None:
    """Add a step's attention to the statistics of slots; see `AttentionBackend.tally`.

    No data is read by the CPU: programs of blocks beyond the live slots of a lane do nothing.
    """
    num_rows, num_lanes = rows.slots.shape
    _, heads, tokens, _ = tally.numbers.shape
    if not num_rows:
        return
    add_attention[(num_rows, num_lanes * heads, triton.cdiv(column_sums.shape[2], _BLOCK))](
        tally.numbers,
        tally.table,
        column_sums,
        rows.step_rows,
        rows.table_rows,
        rows.slots,
        rows.fresh,
        *column_sums.stride()[:2],
        *tally.table.stride()[:2],
        tally.numbers.stride(0),
        tally.first_lane,
        num_lanes,
        heads,
        tokens,
        group_of(tally, rows, column_sums),
        tally.heads == MAX,
        tally.heads == MEAN,
        int(tally.count),
        _BLOCK,
        num_warps=4,
    )


_GATE_BLOCK = 1024
_WARP_NUMBERS = 512  # numbers of a row for each warp


def normed(
    stream: Float[Tensor, "row width"],
    delta: Float[Tensor, "row width"] | None,
    weight: Float[Tensor, " width"],
    eps: float,
) -> Float[Tensor, "row width"]:
    """Add to the residual stream in place, and return its RMSNorm.

    Args:
        stream: the residual stream, contiguous.
        delta: added to it, contiguous; None: nothing.
        weight: of the norm.
        eps: added to the mean square.
    """
    out, (rows, width) = torch.empty_like(stream), stream.shape
    block = triton.next_power_of_2(width)
    with device_of(stream):
        add_and_norm[(rows,)](
            stream,
            stream if delta is None else delta,
            weight,
            out,
            eps,
            width,
            block,
            delta is not None,
            num_warps=min(16, max(1, block // _WARP_NUMBERS)),
        )
    return out


def norm_query_and_key(
    heads: Float[Tensor, "token columns"],
    num_heads: tuple[int, int],
    weights: tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]],
    eps: float,
) -> None:
    """Apply RMSNorm to each query and key head in place.

    Args:
        heads: query heads, then key heads, then others; rows may have any stride.
        num_heads: numbers of query and key heads.
        weights: of the norms of query and key heads.
        eps: added to the mean square.
    """
    head_dim = len(weights[0])
    with device_of(heads):
        norm_heads[(len(heads), sum(num_heads))](
            heads,
            *weights,
            eps,
            heads.stride(0),
            num_heads[0],
            head_dim,
            triton.next_power_of_2(head_dim),
            num_warps=1,
        )


def gated(both: Float[Tensor, "row two_widths"]) -> Float[Tensor, "row width"]:
    """Return silu(gate) * up of contiguous rows [gate, up]."""
    rows, width = len(both), both.shape[1] // 2
    out = torch.empty(rows, width, dtype=both.dtype, device=both.device)
    block = min(_GATE_BLOCK, triton.next_power_of_2(width))
    with device_of(both):
        gated_silu[(rows, triton.cdiv(width, block))](both, out, width, block, num_warps=4)
    return out
