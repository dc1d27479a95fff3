"""Copies of vectors to and between slots and of whole pages; attention statistics of slots."""

import triton
import triton.language as tl

from quire.kernels.triton.device.tiles import record_of, stored_as


# page numbers and offsets are parts of larger tensors, so that their addresses have any alignment
@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def write_vectors(
    plane,
    vectors,
    pages,
    offsets,
    token_stride,
    head_stride,
    page_bytes,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per (token, block of KV heads): write unquantized vectors to their slots."""
    token = tl.program_id(0)
    heads, dim = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_head = heads < NUM_LANES * PAGE_HEADS
    inside = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    place = token * NUM_LANES + heads // PAGE_HEADS
    page = tl.load(pages + place, mask=is_head, other=0)
    offset = tl.load(offsets + place, mask=is_head, other=0)
    source = vectors + token.to(tl.int64) * token_stride + (heads * head_stride)[:, None]
    numbers = tl.load(source + dim[None, :], mask=inside)
    if plane.dtype.element_ty != vectors.dtype.element_ty:
        numbers = stored_as(numbers.to(tl.float32), plane.dtype.element_ty)
    vector = heads % PAGE_HEADS * PAGE_TOKENS + offset
    target = record_of(plane, page, vector, page_bytes, HEAD_DIM)[:, None] + dim[None, :]
    tl.store(target, numbers, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def copy_slots(
    plane,
    scratch,
    pages,
    offsets,
    page_stride,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_SCRATCH: tl.constexpr,
):
    """One program per (slot, block of its numbers): copy slots to or from contiguous memory."""
    move, item = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = item < HEADS * WIDTH
    page, offset = tl.load(pages + move), tl.load(offsets + move)
    record = item // WIDTH * PAGE_TOKENS + offset
    in_plane = plane + page * page_stride + record * WIDTH + item % WIDTH
    in_scratch = scratch + move.to(tl.int64) * (HEADS * WIDTH) + item
    if TO_SCRATCH:
        tl.store(in_scratch, tl.load(in_plane, mask=inside), mask=inside)
    else:
        tl.store(in_plane, tl.load(in_scratch, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["page_items"], do_not_specialize_on_alignment=["pages"])
def copy_pages(
    arena, packed, pages, page_stride, page_items, BLOCK: tl.constexpr, TO_PACKED: tl.constexpr
):
    """One program per (page, block of its numbers): copy pages to or from contiguous memory."""
    index, item = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = item < page_items
    in_arena = arena + tl.load(pages + index) * page_stride + item
    in_packed = packed + index.to(tl.int64) * page_stride + item
    if TO_PACKED:
        tl.store(in_packed, tl.load(in_arena, mask=inside), mask=inside)
    else:
        tl.store(in_arena, tl.load(in_packed, mask=inside), mask=inside)


@triton.jit(
    do_not_specialize=["first_lane", "sums_row_stride", "sums_head_stride"],
    do_not_specialize_on_alignment=["slots"],  # part of a larger tensor
)
def add_attention(
    numbers,
    table,
    sums,
    step_rows,
    table_rows,
    slots,
    fresh,
    sums_row_stride,
    sums_head_stride,
    table_row_stride,
    table_lane_stride,
    page_numbers,
    first_lane,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_MAX: tl.constexpr,
    IS_MEAN: tl.constexpr,
    MEASURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (row, head with a number, block of slots).

    Reduces the weights of a group of query heads, measures them, and adds the result to the numbers
    of old slots; those of new slots are overwritten. MEASURE is an `AttentionMeasure`.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    lane, page_head = head // PAGE_HEADS, head % PAGE_HEADS
    held = tl.load(slots + row * NUM_LANES + lane)
    slot = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = slot < held
    own = sums + tl.load(step_rows + row) * sums_row_stride + slot
    weights = tl.zeros([BLOCK], tl.float32)
    for member in tl.static_range(GROUP):
        of_head = own + (head * GROUP + member).to(tl.int64) * sums_head_stride
        number = tl.load(of_head, mask=live, other=0.0)
        weights = tl.maximum(weights, number) if IS_MAX else weights + number
    if IS_MEAN:
        weights = weights / GROUP
    if MEASURE == 1:
        weights = weights * weights
    if MEASURE == 2:
        seen = tl.maximum(held, 1).to(tl.float32) + tl.zeros_like(weights)
        low = tl.div_rn(1.0 + tl.zeros_like(weights), seen)
        weights = (weights < low).to(tl.float32)
    table_row = tl.load(table_rows + row)
    entry = table + table_row * table_row_stride + (first_lane + lane) * table_lane_stride
    page = tl.load(entry + slot // PAGE_TOKENS, mask=live, other=0).to(tl.int64)
    place = numbers + page * page_numbers + page_head * PAGE_TOKENS + slot % PAGE_TOKENS
    is_old = slot < held - tl.load(fresh + row)
    before = tl.load(place, mask=is_old, other=0.0)
    tl.store(place, before + weights, mask=live)
