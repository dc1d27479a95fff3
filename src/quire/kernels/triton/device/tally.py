"""Attention statistics of slots, accumulated from the column sums of a step."""

import triton
import triton.language as tl


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
