"""Launches of the kernels: operations on slots, pages, heads and rows, and attention of a layer."""

import math as numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import InvariantError
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
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.kernels.device_copies import to_device
from quire.kernels.triton.coding import (
    BITS_CODES,
    FLOATS,
    FP8,
    PLAIN,
    SideCoding,
    coding_of,
    has_whole_vectors,
    plain_coding,
)
from quire.kernels.triton.device import rows as row_kernels
from quire.kernels.triton.device.decode import decode_splits, merge_splits
from quire.kernels.triton.device.encode import encode_vectors
from quire.kernels.triton.device.prefill import prefill_blocks
from quire.kernels.triton.device.rows import add_and_norm, gated_silu, norm_heads
from quire.kernels.triton.device.slots import (
    add_attention,
    copy_pages,
    copy_slots,
    move_lane_slots,
    order_slots,
    select_slots,
    write_vectors,
)
from quire.kernels.triton.device.sums import (
    decode_sums,
    finish_sums,
    measure_vectors,
    prefill_sums,
    window_sums,
)
from quire.kernels.triton.hardware import Hardware, device_of
from quire.layout.statistics import MAX, MEAN

ENCODED = ("int8", "fp8", "int4", "int2")
"""Rules that the kernels encode; torch encodes the others."""

MAX_GROUPS = 16  # of a vector: the loop over them is unrolled
BLOCK_ITEMS = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NO_WINDOW = 1 << 30
"""Window of layers without one: longer than any row, and its sum with a slot fits 32 bits."""

MAX_SPLITS = 64
ALIGNMENT = 4  # int32 numbers in 16 bytes: Triton compiles other kernels for other addresses
WAVES = 2  # programs of a kernel for each multiprocessor that hide each other's latency


def can_write(slots: NewSlots, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels can write these keys and values to these planes."""
    (num_tokens, num_lanes), coded = slots.pages.shape, slots.coded
    shape, places = (num_tokens, num_lanes * slots.key.shape[1]), (slots.pages, slots.offsets)
    return (
        (key.shape, value.shape) == tuple((*shape, dim) for dim in dims_of(slots))
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
    (num_tokens, num_heads, head_dim), half = query.shape, rope.rotary_dim // 2
    dims = [triton.next_power_of_2(heads.shape[2]) for heads in (key, value)]
    block = min(triton.next_power_of_2(key.shape[1]), max(1, BLOCK_ITEMS // max(dims)))
    plane = key if slots is None else slots.key
    grid = (num_tokens, triton.cdiv(num_heads, block) + triton.cdiv(key.shape[1], block))
    row_kernels.rotate_and_write[grid](
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
        value.shape[2],
        rope.rotary_dim,
        block,
        *dims,
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
    row_kernels.rotate_and_encode[(num_tokens, num_heads + 2 * key.shape[1])](
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
        value.shape[2],
        rope.rotary_dim,
        triton.next_power_of_2(rope.rotary_dim // 2),
        source is not None,
        *(number for side in sides for number in (side.kind, side.bits, side.channels)),
        triton.next_power_of_2(head_dim * sides[0].bits // 8),
        triton.next_power_of_2(value.shape[2] * sides[1].bits // 8),
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


BY_NUMBER = 1
_RANKS = {
    torch.float32: 2,
    torch.float64: 3,
    torch.bool: 4,
}  # by type of the scores; see `select_slots`
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
MAX_SORTED = 1 << 14  # slots of a lane that one program sorts
SLOTS_A_WARP = 512
MOVES_A_PROGRAM, WORDS_A_MOVE = 16, 64


def order_lanes(lanes: HeldLanes) -> tuple[Tensor, Tensor]:
    """Sort the slots of each lane by position; see `LaneSelector.order_lanes`."""
    shape, device = (len(lanes.pages), lanes.max_held), lanes.pages.device
    by_position, slot = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    block = triton.next_power_of_2(max(1, lanes.max_held))
    order_slots[(len(lanes.pages),)](
        lanes.positions,
        lanes.pages,
        lanes.held,
        by_position,
        slot,
        lanes.positions.stride(0),
        lanes.pages.shape[1],
        lanes.max_held,
        lanes.positions.shape[1],
        block,
        num_warps=_sort_warps(block),
    )
    return by_position, slot


def select_lanes(lanes: HeldLanes, ranking: SlotRanking) -> SelectedSlots:
    """Select the slots to retain; see `LaneSelector.select_lanes`."""
    pages, score, numbers = lanes.pages, ranking.score, ranking.numbers
    moves = pages.new_empty(len(pages), 2, ranking.max_moves)
    evicted = pages.new_empty(len(pages), 2 + ranking.max_evicted)
    rank, after = 0, None
    if score is not None:
        rank = _RANKS[score.dtype]
    elif numbers is not None:
        rank, after = BY_NUMBER, numbers.next_position
    block = triton.next_power_of_2(max(1, lanes.max_held))
    select_slots[(len(pages),)](
        lanes.positions,
        pages,
        lanes.held,
        ranking.keep,
        ranking.keep if ranking.newest is None else ranking.newest,
        pages if after is None else after,
        pages if score is None else _bytes_of(score),
        pages if ranking.protected is None else _bytes_of(ranking.protected),
        pages if numbers is None else numbers.numbers,
        pages if numbers is None else numbers.pages,
        moves,
        evicted,
        lanes.positions.stride(0),
        pages.shape[1],
        0 if numbers is None else numbers.numbers.stride(0),
        0 if numbers is None else numbers.pages.shape[1],
        lanes.max_held,
        ranking.sinks,
        1 if score is None else len(pages) // len(score),
        ranking.max_moves,
        ranking.max_evicted,
        lanes.positions.shape[1],
        1 if numbers is None else numbers.numbers.shape[2],
        rank,
        ranking.protected is not None,
        after is not None,
        block,
        num_warps=_sort_warps(block),
    )
    return SelectedSlots(moves, evicted)


def _bytes_of(marks: Tensor) -> Tensor:
    """Marks as integers; other numbers as they are."""
    return marks.view(torch.uint8) if marks.dtype == torch.bool else marks


def _sort_warps(block: int) -> int:
    return min(16, max(1, block // SLOTS_A_WARP))


def move_lanes(planes: Sequence[Tensor], pages: Tensor, selected: SelectedSlots) -> None:
    """Make the moves in planes of a page class; see `LaneSelector.move_lanes`.

    Vectors are copied as integers of the widest type that all of them and their places divide.
    """
    moves, evicted = selected.moves, selected.evicted
    if not moves.numel():
        return
    first = min(planes, key=Tensor.data_ptr)
    at = [plane.data_ptr() - first.data_ptr() for plane in planes]
    widths, page_bytes = [p.shape[3] * p.itemsize for p in planes], first.stride(0) * first.itemsize
    word = numbers.gcd(8, page_bytes, first.data_ptr(), *at, *widths)
    shapes = zip(at, planes, widths, strict=True)
    move_lane_slots[(len(pages), triton.cdiv(moves.shape[2], MOVES_A_PROGRAM))](
        first,
        pages,
        moves,
        evicted,
        page_bytes // word,
        pages.shape[1],
        moves.shape[2],
        evicted.shape[1] - 2,
        _WORDS[word],
        tuple((start // word, plane.shape[1], width // word) for start, plane, width in shapes),
        first.shape[2],
        MOVES_A_PROGRAM,
        min(WORDS_A_MOVE, max(triton.next_power_of_2(w // word) for w in widths)),
        num_warps=4,
    )


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


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """Blocks of queries of the rows with several tokens: [blocks] row, and first query in it."""

    rows: Int[Tensor, " block"]
    firsts: Int[Tensor, " block"]


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step for layers with the same page class and equal lane lengths.

    Attributes:
        step, lanes: shapes on the host.
        page_tokens: slots of a page.
        slot_bytes: bytes of a slot, for the gathered backend.
        slots: [rows, lanes] live slots, on the device.
        starts: [rows] first token of each row.
        tokens: [rows] new tokens of each row.
        blocks: query blocks by their number of queries.
        gathered: plan of the gathered backend, once a layer needed it.
        max_slots: for a plan whose live slots change on the device, the most that a lane can have;
            `lanes` is then empty. None for a plan of one step.
    """

    step: StepShape
    lanes: LaneSlots
    page_tokens: int
    slot_bytes: int
    slots: Int[Tensor, "row lane"]
    starts: Int[Tensor, " row"]
    tokens: Int[Tensor, " row"]
    blocks: dict[int, QueryBlocks] = field(default_factory=dict)
    gathered: list[object] = field(default_factory=list)
    max_slots: int | None = None

    @property
    def window(self) -> int:
        """The window, or `NO_WINDOW`."""
        return NO_WINDOW if self.lanes.window is None else self.lanes.window

    @property
    def longest(self) -> int:
        """Live slots of the fullest lane."""
        return self._longest_of(len(self.step.tokens))

    @property
    def longest_decode(self) -> int:
        """Most slots that a row with one new token attends to."""
        return min(self._longest_of(self.step.num_decode), self.window)

    def _longest_of(self, rows: int) -> int:
        if self.max_slots is not None:
            return self.max_slots
        return int(self.lanes.slots[:rows].max(initial=0))

    def query_blocks(self, queries: int) -> QueryBlocks:
        """Return the blocks of at most `queries` queries; copied to the device on first use."""
        blocks = self.blocks.get(queries)
        if blocks is None:
            rows, firsts = block_starts(self.step, queries)
            blocks = QueryBlocks(*on_device(self.slots.device, rows, firsts))
            self.blocks[queries] = blocks
        return blocks


def make_plan(
    step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int, device: torch.device
) -> TritonPlan:
    """Copy the shapes of a step to the device, in one copy."""
    slots, starts, tokens = on_device(device, lanes.slots, step.starts, step.tokens)
    return TritonPlan(step, lanes, page_tokens, slot_bytes, slots, starts, tokens)


def make_static_plan(
    step: StepShape, lanes: StaticLanes, page_tokens: int, slot_bytes: int
) -> TritonPlan:
    """Make a plan that reads the live slots from where the engine overwrites them."""
    starts, tokens = on_device(lanes.slots.device, step.starts, step.tokens)
    on_host = LaneSlots(np.zeros((0, lanes.slots.shape[1]), dtype=np.int32), lanes.window)
    return TritonPlan(
        step,
        on_host,
        page_tokens,
        slot_bytes,
        lanes.slots,
        starts,
        tokens,
        max_slots=lanes.max_slots,
    )


def on_device(device: torch.device, *arrays: NDArray[np.generic]) -> list[Tensor]:
    """Copy arrays to a device as int32, in one copy that the CPU does not wait for.

    Each of them starts at a multiple of 16 bytes.
    """
    starts = np.cumsum([0, *(-(-x.size // ALIGNMENT) * ALIGNMENT for x in arrays)])
    host = np.zeros(starts[-1], dtype=np.int32)
    for start, x in zip(starts, arrays, strict=False):
        host[start : start + x.size] = x.reshape(-1)
    flat = to_device(host, device)
    return [
        flat[start : start + x.size].view(x.shape)
        for start, x in zip(starts.tolist(), arrays, strict=False)
    ]


def block_starts(step: StepShape, queries: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide the rows after the decode rows into blocks of queries.

    Returns:
        Row and first query of each block. Blocks with the most keys are first within a row, so that
        the longest programs do not start last.
    """
    rows = np.arange(step.num_decode, len(step.tokens))
    counts = -(-step.tokens[rows].astype(np.int64) // queries)
    block = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    last = np.repeat(counts, counts) - 1
    return np.repeat(rows, counts), (last - block) * queries


def split_count(programs: int, blocks: int, multiprocessors: int) -> int:
    """Return the number of programs that share the slots of a row.

    One if rows and heads alone occupy the multiprocessors. Otherwise enough to occupy them, but no
    more than there are blocks of slots.

    Args:
        programs: programs without a split: rows times KV heads.
        blocks: blocks of slots of the longest row.
        multiprocessors: multiprocessors of the device.
    """
    wanted = -(-WAVES * multiprocessors // max(1, programs))
    return max(1, min(wanted, blocks, MAX_SPLITS)) if programs < multiprocessors else 1


def check_column_sums(plan: TritonPlan, heads: int, column_sums: Tensor | None) -> None:
    """Refuse column sums that are too small for the step."""
    wanted = (len(plan.step.tokens), heads, plan.longest)
    if column_sums is not None and (
        column_sums.shape[:2] != wanted[:2] or column_sums.shape[2] < wanted[2]
    ):
        raise InvariantError(
            f"expected column sums of shape {wanted} or wider, got {tuple(column_sums.shape)}"
        )


LOG2_E = numbers.log2(numbers.e)
MIN_BLOCK = 16  # smallest operand of a product on tensor cores
TILE_BYTES = 16 << 10  # of keys or values in flight, for each stage of the loop
MIN_ENTRIES = 128  # (query, head) pairs of a tile of a long chunk
SUM_BYTES = 64 << 10  # of attended values that a program accumulates
_OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the tiles of a layer.

    Attributes:
        dims: channels of a tile of keys; a power of two, at least their elements.
        values: channels of a tile of values, likewise.
        slots: slots of a tile.
        heads: query heads of a tile of a decode row.
        entries: (query, head) pairs of a tile of a chunk.
    """

    dims: int
    values: int
    slots: int
    heads: int
    entries: int

    @classmethod
    def of(
        cls, widths: tuple[int, int], group: int, item_bytes: int, most: int = MIN_ENTRIES
    ) -> "Tiles":
        """Choose tiles that fit the shared memory and the registers of a multiprocessor.

        Args:
            widths: elements of a key and of a value.
            group: query heads of a KV head.
            item_bytes: bytes of an operand of products.
            most: most entries.
        """
        dims, values = (max(MIN_BLOCK, triton.next_power_of_2(dim)) for dim in widths)
        heads = max(MIN_BLOCK, triton.next_power_of_2(group))
        slots = min(128, max(MIN_BLOCK, TILE_BYTES // (max(dims, values) * item_bytes)))
        sum_bytes = SUM_BYTES * most // MIN_ENTRIES
        entries = min(most, max(MIN_BLOCK, sum_bytes // (4 * max(dims, values))))
        if item_bytes == torch.float32.itemsize:  # no tensor cores: operands are in registers
            entries = min(32, entries)
        return cls(dims, values, slots, heads, max(entries, heads))


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Tiles of decode rows, the fastest of a sweep on an H100 (docs/log.md, 2026-11-27).

    Attributes:
        slots: slots of a tile.
        warps: warps of a program.
        tiles_ahead: tiles that are loaded before they are needed.
    """

    slots: int
    warps: int
    tiles_ahead: int

    @classmethod
    def of(cls, tiles: Tiles, kinds: set[int], hardware: Hardware) -> "DecodeTiles":
        """Choose tiles for the kinds of codes of keys and values."""
        if kinds & {BITS_CODES, FP8}:  # decoded with many operations
            slots = min(128, 2 * tiles.slots) if hardware.large_tiles else tiles.slots
            return cls(slots, 4, hardware.tiles_ahead)
        if kinds != {PLAIN}:
            return cls(tiles.slots, 2, hardware.tiles_ahead)
        return cls(tiles.slots, 4, 1)


@dataclass(frozen=True, eq=False)
class LayerCall:
    """The attention of a layer.

    Attributes:
        hardware: properties of the device.
        plan: the step.
        pages, math: see `AttentionBackend.attend`.
        dtype: type of the products on a GPU.
        query: queries, rotated if the codes of the keys are.
        key, value: how the pages are read.
        out: the output; rotated if the codes of the values are.
        lse: log-sum-exp of each token and head, of base 2.
    """

    hardware: Hardware
    plan: TritonPlan
    pages: LayerPages
    math: AttentionMath
    dtype: torch.dtype
    query: Float[Tensor, "num_tokens num_heads head_dim"]
    key: SideCoding
    value: SideCoding
    out: Float[Tensor, "num_tokens num_heads value_dim"]
    lse: Float[Tensor, "num_tokens num_heads"]

    @cached_property
    def kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.pages.num_lanes * self.pages.key.shape[1]

    @cached_property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query.shape[1] // self.kv_heads

    @cached_property
    def key_dim(self) -> int:
        """Elements of a stored key."""
        return self.query.shape[2] - (self.out.shape[2] if self.math.joined else 0)

    @cached_property
    def tiles(self) -> Tiles:
        """Tile sizes."""
        longest = int(self.plan.step.tokens.max(initial=1)) * self.group
        is_plain = self.kinds == {PLAIN}  # codes are decoded in registers
        is_large = self.hardware.large_tiles and is_plain and longest > MIN_ENTRIES
        most = 2 * MIN_ENTRIES if is_large else MIN_ENTRIES
        dims = self.key_dim, self.out.shape[2]
        return Tiles.of(dims, self.group, self.dtype.itemsize, most)

    @cached_property
    def kinds(self) -> set[int]:
        """Kinds of the codes of keys and values."""
        return {self.key.kind, self.value.kind}

    @cached_property
    def shared(self) -> Mapping[str, object]:
        """Arguments of all attention kernels."""
        pages, math = self.pages, self.math
        cap = math.softcap
        return {
            "query": self.query,
            "lse": self.lse,
            "table": pages.table,
            "table_rows": pages.rows,
            "slots": self.plan.slots,
            "query_token_stride": self.query.stride(0),
            "query_head_stride": self.query.stride(1),
            "table_row_stride": pages.table.stride(0),
            "table_lane_stride": pages.table.stride(1),
            "page_bytes": self.key.planes[0].stride(0) * self.key.planes[0].itemsize,
            "first_lane": pages.first_lane,
            "window": self.plan.window,
            "scale": math.scale * LOG2_E if cap is None else math.scale / cap,
            "cap": 1.0 if cap is None else cap * LOG2_E,
            "NUM_LANES": pages.num_lanes,
            "PAGE_HEADS": pages.key.shape[1],
            "PAGE_TOKENS": pages.page_tokens,
            "HEAD_DIM": self.key_dim,
            "GROUP": self.group,
            "BLOCK_D": self.tiles.dims,
            "BLOCK_T": self.tiles.slots,
            "OPERAND": tl.float32 if self.hardware.interpreted else _OPERANDS[self.dtype],
            "HAS_SOFTCAP": cap is not None,
            **side_args("key", self.key),
        }

    @cached_property
    def attends(self) -> Mapping[str, object]:
        """Further arguments of the kernels that write the output."""
        sinks = self.math.sinks
        return {
            **self.shared,
            "out": self.out,
            "sinks": self.query if sinks is None else sinks.contiguous(),
            "out_token_stride": self.out.stride(0),
            "out_head_stride": self.out.stride(1),
            "VALUE_DIM": self.out.shape[2],
            "BLOCK_V": self.tiles.values,
            "HAS_SINKS": sinks is not None,
            # the product of a weight and a scale may be too small for float16
            "FOLDS": self.dtype != torch.float16,
            **side_args("value", self.value),
        }


def side_args(name: str, side: SideCoding) -> dict[str, object]:
    """Arguments of the kernels for keys or values."""
    planes = zip(("codes", "scales", "zeros", "indices", "outliers"), side.planes, strict=True)
    upper = name.upper()
    return {
        **{f"{name}_{plane}": tensor for plane, tensor in planes},
        f"{name}_factors": side.factors_or_codes,
        f"HAS_{upper}_FACTORS": side.factors is not None,
        f"{upper}_KIND": side.kind,
        f"{upper}_BITS": side.bits,
        f"{upper}_CHANNELS": side.channels,
        f"{upper}_OUTLIERS": side.outliers,
    }


def attend_decode(call: LayerCall) -> int:
    """Compute attention for the decode rows; return the bytes of scratch memory."""
    tiles = DecodeTiles.of(call.tiles, call.kinds, call.hardware)
    rows, block = call.plan.step.num_decode, tiles.slots
    most = -(-call.plan.longest_decode // block) + (call.plan.lanes.window is not None)
    # values are wide where keys are joined: more query heads would not fit in registers
    block_heads = MIN_BLOCK if call.math.joined else call.tiles.heads
    head_blocks = -(-call.group // block_heads)
    splits = split_count(rows * call.kv_heads * head_blocks, most, call.hardware.multiprocessors)
    splits = -(-most // -(-most // splits))  # none without slots in the longest row
    (_, heads, value_dim), device = call.out.shape, call.query.device
    is_whole = splits == 1
    count = 0 if is_whole else rows * heads * splits
    partial = torch.empty(count * value_dim, dtype=torch.float32, device=device)
    partial_lse = torch.empty(count, dtype=torch.float32, device=device)
    decode_splits[(rows, call.kv_heads * head_blocks, splits)](
        **(dict(call.attends) | {"BLOCK_T": block} | ({} if is_whole else {"lse": partial_lse})),
        partial=partial,
        num_splits=splits,
        BLOCK_G=block_heads,
        IS_WHOLE=is_whole,
        JOINED=call.math.joined,
        HEAD_BLOCKS=head_blocks,
        num_warps=tiles.warps,
        num_stages=stages(tiles.tiles_ahead),
    )
    if not is_whole:
        merge_decode(call, partial, partial_lse, splits)
    return partial.nbytes + partial_lse.nbytes


def merge_decode(call: LayerCall, partial: Tensor, partial_lse: Tensor, splits: int) -> None:
    """Merge the splits of the decode rows."""
    args = call.attends
    names = ("sinks", "value_factors", "out", "lse", "out_token_stride", "out_head_stride")
    constants = ("VALUE_DIM", "GROUP", "BLOCK_V", "HAS_SINKS", "HAS_VALUE_FACTORS")
    merge_splits[(call.plan.step.num_decode, call.query.shape[1])](
        partial=partial,
        partial_lse=partial_lse,
        num_splits=splits,
        NUM_HEADS=call.query.shape[1],
        BLOCK_S=triton.next_power_of_2(splits),
        num_warps=4,
        **{name: args[name] for name in (*names, *constants)},
    )


def attend_prefill(call: LayerCall) -> None:
    """Compute attention for the rows with several tokens."""
    plan, tiles = call.plan, call.tiles
    blocks = plan.query_blocks(tiles.entries // call.group)
    prefill_blocks[(len(blocks.rows), call.kv_heads)](
        **call.attends,
        starts=plan.starts,
        tokens=plan.tokens,
        block_rows=blocks.rows,
        block_firsts=blocks.firsts,
        BLOCK_M=tiles.entries,
        num_warps=_warps(tiles),
        num_stages=stages(1),
    )


def sum_columns(call: LayerCall, sums: Float[Tensor, "row num_heads slot"]) -> None:
    """Write the column sums of all rows, after attention."""
    plan, tiles = call.plan, call.tiles
    rows, num_decode = len(plan.step.tokens), plan.step.num_decode
    blocks = -(-plan.longest // tiles.slots)
    strides = {"sums_row_stride": sums.stride(0), "sums_head_stride": sums.stride(1)}
    if num_decode:
        decode_sums[(blocks, call.kv_heads, num_decode)](
            **call.shared, **strides, sums=sums, BLOCK_G=tiles.heads, num_warps=4
        )
    if num_decode < rows:
        prefill_sums[(blocks, call.query.shape[1], rows - num_decode)](
            **call.shared,
            **strides,
            sums=sums,
            starts=plan.starts,
            tokens=plan.tokens,
            first_row=num_decode,
            BLOCK_M=min(64, tiles.entries),
            num_warps=4,
            num_stages=2,
        )


def stages(tiles_ahead: int) -> int:
    """Return Triton's pipeline stages for a loop that loads tiles ahead.

    Triton divides the stages between the loads of the tiles and those of their page numbers.
    """
    return 2 * tiles_ahead + 1


def _warps(tiles: Tiles) -> int:
    """Warps of a program that accumulates values of a chunk."""
    return 8 if tiles.entries * max(tiles.dims, tiles.values) * 4 >= SUM_BYTES else 4


def score(
    hardware: Hardware,
    lanes: LaneVectors,
    window: tuple[Tensor, Tensor] | None = None,
    finish: WindowFinish | None = None,
    *,
    cosines: bool = False,
) -> Tensor:
    """Score the tokens of lanes: window sums, mean cosines, or norms; see `ScoringBackend`.

    Args:
        hardware: properties of the device.
        lanes: keys or values.
        window: records and scales of `ScoringBackend.window_sums`.
        finish: what is done with the sums.
        cosines: whether to compute mean cosines.
    """
    plane, slots, dtype = lanes.plane, lanes.order.shape[1], torch.float32
    side = plain_coding(plane) if lanes.coded is None else coding_of(lanes.coded)
    if window is not None and lanes.coded is None:
        dtype = plane.dtype
    heads = len(lanes.order) * plane.shape[1]
    tiles = Tiles.of((lanes.head_dim, lanes.head_dim), 1, dtype.itemsize)
    args = {
        "pages": lanes.pages.contiguous(),
        "order": lanes.order.contiguous(),
        "held": lanes.held,
        "page_bytes": plane.stride(0) * plane.itemsize,
        "columns": lanes.pages.shape[1],
        "slots": slots,
        "PAGE_HEADS": plane.shape[1],
        "PAGE_TOKENS": plane.shape[2],
        "HEAD_DIM": lanes.head_dim,
        "BLOCK_D": tiles.dims,
        "BLOCK_T": min(tiles.slots, 32),
    }
    sides = side_args("key", side)
    args |= {name: of for name, of in sides.items() if "FACTORS" not in name.upper()}
    with device_of(plane):
        if window is None:
            scores = torch.zeros(heads, slots, device=plane.device)
            measure_vectors[(heads,)](scores, COSINES=cosines, **args)
            return scores
        records, scales = window[0].contiguous(), window[1]
        group = (records.shape[2] - 1) // lanes.head_dim
        sums = torch.empty(heads, group, slots, device=plane.device)
        if finish is None:
            sums.zero_()
        window_sums[(group, heads)](
            records,
            scales.contiguous(),
            sums,
            positions=lanes.positions.contiguous(),
            window=records.shape[1],
            GROUP=group,
            BLOCK_M=MIN_BLOCK if records.shape[1] <= MIN_BLOCK else 2 * MIN_BLOCK,
            OPERAND=tl.float32 if hardware.interpreted else _OPERANDS[dtype],
            **args,
        )
        if finish is None:
            return sums
        scores = torch.empty(heads, slots, device=plane.device)
        finish_sums[(triton.cdiv(slots, _BLOCK), heads)](
            *(sums, records, scores, lanes.held, slots, *records.shape[1:]),
            *(finish.newest, finish.kernel, plane.shape[1], group),
            *(finish.pooling == MAX, finish.heads == MAX, finish.heads == MEAN, _BLOCK),
        )
    return scores
