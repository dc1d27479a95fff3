"""Attention of rows with one new token: split over the slots, and merged."""

import triton
import triton.language as tl

from quire.kernels.triton.device.tiles import (
    LOG2_E,
    capped,
    key_products,
    load_queries,
    log_sum,
    pages_of,
    stored_as,
    weighted_values,
    with_sink,
)


@triton.jit(do_not_specialize=["num_splits", "first_lane", "window"])
def decode_splits(
    query,
    out,
    partial,
    lse,
    table,
    table_rows,
    slots,
    sinks,
    key_codes,
    key_scales,
    key_zeros,
    key_indices,
    key_outliers,
    key_factors,
    value_codes,
    value_scales,
    value_zeros,
    value_indices,
    value_outliers,
    value_factors,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    table_row_stride,
    table_lane_stride,
    page_bytes,
    first_lane,
    window,
    num_splits,
    scale,
    cap,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OPERAND: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    JOINED: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_KEY_FACTORS: tl.constexpr,
    HAS_VALUE_FACTORS: tl.constexpr,
    FOLDS: tl.constexpr,
    KEY_KIND: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    KEY_OUTLIERS: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    VALUE_OUTLIERS: tl.constexpr,
):
    """One program per (row, block of query heads, split): attention over some slots.

    A KV head has HEAD_BLOCKS blocks of query heads. With JOINED the key of a slot is its value
    followed by its stored key (latents), and a query has as many elements.

    The splits of a lane have equal numbers of blocks of its live slots, which are read here: a CUDA
    graph repeats the launch while they change.

    With IS_WHOLE a row has one split: writes the output and the log-sum-exp [row, head]. Otherwise
    writes the output of the split to `partial` [row, head, split, VALUE_DIM] and its log-sum-exp
    [row, head, split], without sinks and factors.
    """
    row, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = block // HEAD_BLOCKS
    lane, page_head = kv_head // PAGE_HEADS, kv_head % PAGE_HEADS
    held = tl.load(slots + row * NUM_LANES + lane)
    first = tl.maximum(held - window, 0)
    first_block = first // BLOCK_T
    split_blocks = tl.cdiv(tl.cdiv(held, BLOCK_T) - first_block, num_splits)
    begin = (first_block + split * split_blocks) * BLOCK_T
    end = tl.minimum(begin + split_blocks * BLOCK_T, held)
    table_row = tl.load(table_rows + row).to(tl.int64)
    own_table = table + table_row * table_row_stride + (first_lane + lane) * table_lane_stride

    group = block % HEAD_BLOCKS * BLOCK_G + tl.arange(0, BLOCK_G)
    dim, value_dim = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    heads, is_head = kv_head * GROUP + group, group < GROUP
    inside = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    queries = query + row * query_token_stride + heads[:, None] * query_head_stride
    if JOINED:
        of_value = load_queries(
            queries + value_dim[None, :],
            is_head[:, None] & (value_dim < VALUE_DIM)[None, :],
            value_factors,
            kv_head,
            value_dim,
            VALUE_DIM,
            HAS_VALUE_FACTORS,
            OPERAND,
        )
        queries += VALUE_DIM
    queries += dim[None, :]
    q = load_queries(queries, inside, key_factors, kv_head, dim, HEAD_DIM, HAS_KEY_FACTORS, OPERAND)
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    attended = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_T):
        slot = start + tl.arange(0, BLOCK_T)
        seen = (slot >= first) & (slot < end)
        page = pages_of(own_table, slot, seen, PAGE_TOKENS)
        vector = page_head * PAGE_TOKENS + slot % PAGE_TOKENS
        products = key_products(
            q,
            key_codes,
            key_scales,
            key_zeros,
            key_indices,
            key_outliers,
            page,
            vector,
            seen,
            dim,
            page_bytes,
            HEAD_DIM,
            KEY_KIND,
            KEY_BITS,
            KEY_CHANNELS,
            KEY_OUTLIERS,
            OPERAND,
        )
        if JOINED:
            products += key_products(
                of_value,
                value_codes,
                value_scales,
                value_zeros,
                value_indices,
                value_outliers,
                page,
                vector,
                seen,
                value_dim,
                page_bytes,
                VALUE_DIM,
                VALUE_KIND,
                VALUE_BITS,
                VALUE_CHANNELS,
                VALUE_OUTLIERS,
                OPERAND,
            )
        logits = capped(products, scale, cap, HAS_SOFTCAP)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))  # finite: every block has a slot seen
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(logits - new_peak[:, None])
        total = total * shrink + tl.sum(weights, 1)
        attended *= shrink[:, None]
        attended += weighted_values(
            weights,
            value_codes,
            value_scales,
            value_zeros,
            value_indices,
            value_outliers,
            page,
            vector,
            seen,
            value_dim,
            page_bytes,
            VALUE_DIM,
            VALUE_KIND,
            VALUE_BITS,
            VALUE_CHANNELS,
            VALUE_OUTLIERS,
            FOLDS,
            OPERAND,
        )
        peak = new_peak

    inside = is_head[:, None] & (value_dim < VALUE_DIM)[None, :]
    place = (row * NUM_LANES * PAGE_HEADS * GROUP + heads).to(tl.int64)
    if IS_WHOLE:
        if HAS_SINKS:
            peak, total, shrink = with_sink(peak, total, sinks, heads, is_head)
            attended *= shrink[:, None]
        attended /= total[:, None]
        if HAS_VALUE_FACTORS:
            factors = value_factors + kv_head * VALUE_DIM + value_dim
            attended *= tl.load(factors, mask=value_dim < VALUE_DIM, other=0.0)[None, :]
        outs = out + row * out_token_stride + heads[:, None] * out_head_stride + value_dim[None, :]
        tl.store(outs, stored_as(attended, out.dtype.element_ty), mask=inside)
        tl.store(lse + place, log_sum(peak, total), mask=is_head)
    else:
        place = place * num_splits + split
        if begin < end:
            parts = partial + place[:, None] * VALUE_DIM + value_dim[None, :]
            tl.store(parts, attended / total[:, None], mask=inside)
        tl.store(lse + place, log_sum(peak, total), mask=is_head)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    partial,
    partial_lse,
    sinks,
    value_factors,
    out,
    lse,
    out_token_stride,
    out_head_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_VALUE_FACTORS: tl.constexpr,
):
    """One program per (row, query head): merge the splits and the sink; write the log-sum-exp.

    Source: the merge of FlashDecoding's splits, as in `quire.kernels.dense.merge`.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    place = (row * NUM_HEADS + head).to(tl.int64)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    lses = partial_lse + place * num_splits + split
    own_lse = tl.load(lses, mask=split < num_splits, other=float("-inf"))
    peak = tl.max(own_lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        peak = tl.maximum(peak, sink)
    weights = tl.exp2(own_lse - peak)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - peak)
    has_slots = own_lse != float("-inf")  # the output of other splits was not written
    inside = has_slots[:, None] & (dim < VALUE_DIM)[None, :]
    parts = partial + (place * num_splits + split)[:, None] * VALUE_DIM + dim[None, :]
    numbers = tl.load(parts, mask=inside, other=0.0)
    merged = tl.sum(numbers * weights[:, None], 0) / total
    if HAS_VALUE_FACTORS:
        factors = value_factors + head // GROUP * VALUE_DIM + dim
        merged *= tl.load(factors, mask=dim < VALUE_DIM, other=0.0)
    outs = out + row * out_token_stride + head * out_head_stride + dim
    tl.store(outs, stored_as(merged, out.dtype.element_ty), mask=dim < VALUE_DIM)
    tl.store(lse + place, peak + tl.log2(total))
