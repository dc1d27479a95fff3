"""Attention of rows with several new tokens, over the pages that hold them."""

import triton
import triton.language as tl

from quire.kernels.triton.device.tiles import (
    capped,
    key_products,
    load_queries,
    log_sum,
    pages_of,
    stored_as,
    weighted_values,
    with_sink,
)


@triton.jit
def attend_block(
    q,
    peak,
    total,
    attended,
    own,
    start,
    first,
    end,
    window,
    own_table,
    page_head,
    key_codes,
    key_scales,
    key_zeros,
    key_indices,
    key_outliers,
    value_codes,
    value_scales,
    value_zeros,
    value_indices,
    value_outliers,
    dim,
    value_dim,
    page_bytes,
    scale,
    cap,
    MASKED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OPERAND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
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
    """Attend to a block of slots from `start` on: peak, sum and attended values afterwards.

    Without MASKED, all queries see all slots of the block.
    """
    slot = start + tl.arange(0, BLOCK_T)
    live = slot >= 0
    if MASKED:
        live = (slot >= first) & (slot < end)
    page = pages_of(own_table, slot, live, PAGE_TOKENS)
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
        live,
        dim,
        page_bytes,
        HEAD_DIM,
        KEY_KIND,
        KEY_BITS,
        KEY_CHANNELS,
        KEY_OUTLIERS,
        OPERAND,
    )
    logits = capped(products, scale, cap, HAS_SOFTCAP)
    if MASKED:
        distance = own[:, None] - slot[None, :]
        seen = (distance >= 0) & (distance < window) & live[None, :]
        logits = tl.where(seen, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    base = new_peak
    if MASKED:
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a query without slots so far
    shrink = tl.exp2(peak - base)
    weights = tl.exp2(logits - base[:, None])
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
        live,
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
    return new_peak, total, attended


@triton.jit(do_not_specialize=["first_lane", "window"])
def prefill_blocks(
    query,
    out,
    lse,
    table,
    table_rows,
    slots,
    starts,
    tokens,
    block_rows,
    block_firsts,
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
    scale,
    cap,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OPERAND: tl.constexpr,
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
    """One program per (block of queries, KV head).

    A block has BLOCK_M // GROUP consecutive queries of a row. Its entries are (query, head of the
    group) pairs, so that each key is read once for all heads of its group.
    """
    block, kv_head = tl.program_id(0), tl.program_id(1)
    row, first_query = tl.load(block_rows + block), tl.load(block_firsts + block)
    lane, page_head = kv_head // PAGE_HEADS, kv_head % PAGE_HEADS
    held = tl.load(slots + row * NUM_LANES + lane)
    num_tokens = tl.load(tokens + row)
    table_row = tl.load(table_rows + row).to(tl.int64)
    own_table = table + table_row * table_row_stride + (first_lane + lane) * table_lane_stride

    block_queries: tl.constexpr = BLOCK_M // GROUP
    entry, dim, value_dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    index = first_query + entry // GROUP
    is_query = (entry < block_queries * GROUP) & (index < num_tokens)
    heads = kv_head * GROUP + entry % GROUP
    token = (tl.load(starts + row) + index).to(tl.int64)
    inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
    queries = token * query_token_stride + heads * query_head_stride
    q = load_queries(
        query + queries[:, None] + dim[None, :],
        inside,
        key_factors,
        kv_head,
        dim,
        HEAD_DIM,
        HAS_KEY_FACTORS,
        OPERAND,
    )
    own = held - num_tokens + index  # slot of each query
    first_own = held - num_tokens + first_query
    first = tl.maximum(first_own - window + 1, 0)
    end = tl.minimum(first_own + block_queries, held)

    # Blocks whose slots are seen by all queries need no masks. The others are those at the start of
    # the window and at the diagonal.
    last_own = first_own + block_queries - 1
    lead_end = tl.cdiv(tl.maximum(last_own - window + 1, first), BLOCK_T) * BLOCK_T
    begin = first // BLOCK_T * BLOCK_T
    whole_end = (first_own + 1) // BLOCK_T * BLOCK_T
    whole_begin = tl.minimum(lead_end, tl.maximum(whole_end, begin))
    whole_end = tl.maximum(whole_end, whole_begin)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(whole_begin, whole_end, BLOCK_T):
        peak, total, attended = attend_block(
            q,
            peak,
            total,
            attended,
            own,
            start,
            first,
            end,
            window,
            own_table,
            page_head,
            key_codes,
            key_scales,
            key_zeros,
            key_indices,
            key_outliers,
            value_codes,
            value_scales,
            value_zeros,
            value_indices,
            value_outliers,
            dim,
            value_dim,
            page_bytes,
            scale,
            cap,
            False,
            PAGE_TOKENS,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_T,
            OPERAND,
            HAS_SOFTCAP,
            FOLDS,
            KEY_KIND,
            KEY_BITS,
            KEY_CHANNELS,
            KEY_OUTLIERS,
            VALUE_KIND,
            VALUE_BITS,
            VALUE_CHANNELS,
            VALUE_OUTLIERS,
        )
    lead = whole_begin - begin
    for place in range(0, lead + tl.maximum(end - whole_end, 0), BLOCK_T):
        start = tl.where(place < lead, begin + place, whole_end + place - lead)
        peak, total, attended = attend_block(
            q,
            peak,
            total,
            attended,
            own,
            start,
            first,
            end,
            window,
            own_table,
            page_head,
            key_codes,
            key_scales,
            key_zeros,
            key_indices,
            key_outliers,
            value_codes,
            value_scales,
            value_zeros,
            value_indices,
            value_outliers,
            dim,
            value_dim,
            page_bytes,
            scale,
            cap,
            True,
            PAGE_TOKENS,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_T,
            OPERAND,
            HAS_SOFTCAP,
            FOLDS,
            KEY_KIND,
            KEY_BITS,
            KEY_CHANNELS,
            KEY_OUTLIERS,
            VALUE_KIND,
            VALUE_BITS,
            VALUE_CHANNELS,
            VALUE_OUTLIERS,
        )

    if HAS_SINKS:
        peak, total, shrink = with_sink(peak, total, sinks, heads, is_query)
        attended *= shrink[:, None]
    attended /= tl.where(total == 0, 1.0, total)[:, None]
    if HAS_VALUE_FACTORS:
        factors = value_factors + kv_head * VALUE_DIM + value_dim
        attended *= tl.load(factors, mask=value_dim < VALUE_DIM, other=0.0)[None, :]
    outs = out + (token * out_token_stride + heads * out_head_stride)[:, None] + value_dim[None, :]
    inside = is_query[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(outs, stored_as(attended, out.dtype.element_ty), mask=inside)
    place = token * (NUM_LANES * PAGE_HEADS * GROUP) + heads
    tl.store(lse + place, log_sum(peak, total), mask=is_query)
