"""Column sums: a second pass over the keys, after the log-sum-exp of every query is known.

Each program writes its own slots, so the sums do not depend on the order of programs. Slots that
no query sees get 0. Scores of cached tokens: sums of recorded queries, cosines and norms.
"""

import triton
import triton.language as tl

from quire.kernels.triton.device.tiles import (
    LOG2_E,
    capped,
    key_products,
    load_queries,
    load_tile,
    log_sum,
    pages_of,
    vector_scales,
)

MIN_NORM = tl.constexpr(1e-12)  # of a vector whose direction counts, as in torch's normalize


@triton.jit(do_not_specialize=["first_lane", "window", "sums_row_stride", "sums_head_stride"])
def decode_sums(
    query,
    lse,
    sums,
    table,
    table_rows,
    slots,
    key_codes,
    key_scales,
    key_zeros,
    key_indices,
    key_outliers,
    key_factors,
    query_token_stride,
    query_head_stride,
    sums_row_stride,
    sums_head_stride,
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
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OPERAND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_KEY_FACTORS: tl.constexpr,
    KEY_KIND: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    KEY_OUTLIERS: tl.constexpr,
):
    """One program per (block of slots, KV head, row with one new token)."""
    block, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane, page_head = kv_head // PAGE_HEADS, kv_head % PAGE_HEADS
    held = tl.load(slots + row * NUM_LANES + lane)
    if block * BLOCK_T < held:
        table_row = tl.load(table_rows + row).to(tl.int64)
        own_table = table + table_row * table_row_stride + (first_lane + lane) * table_lane_stride
        group, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
        heads, is_head = kv_head * GROUP + group, group < GROUP
        inside = is_head[:, None] & (dim < HEAD_DIM)[None, :]
        queries = row * query_token_stride + heads * query_head_stride
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
        slot = block * BLOCK_T + tl.arange(0, BLOCK_T)
        seen = (slot >= held - window) & (slot < held)
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
        logits = capped(products, scale, cap, HAS_SOFTCAP)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        place = row * (NUM_LANES * PAGE_HEADS * GROUP) + heads
        own_lse = tl.load(lse + place, mask=is_head, other=0.0)
        weights = tl.exp2(logits - own_lse[:, None])
        own_sums = sums + (row.to(tl.int64) * sums_row_stride + heads * sums_head_stride)[:, None]
        is_slot = is_head[:, None] & (slot < held)[None, :]
        tl.store(own_sums + slot[None, :], weights, mask=is_slot)


@triton.jit(
    do_not_specialize=["first_row", "first_lane", "window", "sums_row_stride", "sums_head_stride"]
)
def prefill_sums(
    query,
    lse,
    sums,
    table,
    table_rows,
    slots,
    starts,
    tokens,
    key_codes,
    key_scales,
    key_zeros,
    key_indices,
    key_outliers,
    key_factors,
    query_token_stride,
    query_head_stride,
    sums_row_stride,
    sums_head_stride,
    table_row_stride,
    table_lane_stride,
    page_bytes,
    first_row,
    first_lane,
    window,
    scale,
    cap,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OPERAND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_KEY_FACTORS: tl.constexpr,
    KEY_KIND: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    KEY_OUTLIERS: tl.constexpr,
):
    """One program per (block of slots, query head, row): sums over the row's new tokens."""
    block, head, row = tl.program_id(0), tl.program_id(1), first_row + tl.program_id(2)
    kv_head = head // GROUP
    lane, page_head = kv_head // PAGE_HEADS, kv_head % PAGE_HEADS
    held = tl.load(slots + row * NUM_LANES + lane)
    if block * BLOCK_T < held:
        num_tokens, start = tl.load(tokens + row), tl.load(starts + row)
        table_row = tl.load(table_rows + row).to(tl.int64)
        own_table = table + table_row * table_row_stride + (first_lane + lane) * table_lane_stride
        before = held - num_tokens
        slot = block * BLOCK_T + tl.arange(0, BLOCK_T)
        live = (slot >= before - window + 1) & (slot < held)
        page = pages_of(own_table, slot, live, PAGE_TOKENS)
        vector = page_head * PAGE_TOKENS + slot % PAGE_TOKENS
        dim = tl.arange(0, BLOCK_D)
        # queries that see some of these slots
        first_query = tl.maximum(block * BLOCK_T - before, 0)
        last_slot = block * BLOCK_T + BLOCK_T - 1
        end_query = tl.minimum(last_slot - before + window, num_tokens)
        key = load_tile(
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
            True,
            OPERAND,
        )
        key = tl.trans(key)
        factor = vector_scales(key_scales, page, vector, live, page_bytes, KEY_KIND, True)
        own_sums = tl.zeros([BLOCK_T], tl.float32)
        for first in range(first_query, end_query, BLOCK_M):
            index = first + tl.arange(0, BLOCK_M)
            token = (start + index).to(tl.int64)
            is_query = index < num_tokens
            inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
            queries = token * query_token_stride + head * query_head_stride
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
            products = tl.dot(q, key, input_precision="ieee") * factor[None, :]
            logits = capped(products, scale, cap, HAS_SOFTCAP)
            distance = (before + index)[:, None] - slot[None, :]
            seen = (distance >= 0) & (distance < window) & live[None, :] & is_query[:, None]
            logits = tl.where(seen, logits, float("-inf"))
            place = token * (NUM_LANES * PAGE_HEADS * GROUP) + head
            own_lse = tl.load(lse + place, mask=is_query, other=0.0)
            own_sums += tl.sum(tl.exp2(logits - own_lse[:, None]), 0)
        target = sums + row.to(tl.int64) * sums_row_stride + head * sums_head_stride + slot
        tl.store(target, own_sums, mask=slot < held)


@triton.jit
def _vectors_of(
    pages, order, lane, page_head, place, live, columns, slots, PAGE_TOKENS: tl.constexpr
):
    """Pages of the tokens at places in the order of positions, and the indices of their vectors."""
    slot = tl.load(order + lane * slots + place, mask=live, other=0)
    page = pages_of(pages + lane * columns, slot, live, PAGE_TOKENS)
    return page, page_head * PAGE_TOKENS + slot % PAGE_TOKENS


@triton.jit(do_not_specialize=["columns", "slots", "window"])
def window_sums(
    records,
    scales,
    sums,
    pages,
    order,
    positions,
    held,
    key_codes,
    key_scales,
    key_zeros,
    key_indices,
    key_outliers,
    page_bytes,
    columns,
    slots,
    window,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OPERAND: tl.constexpr,
    KEY_KIND: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    KEY_OUTLIERS: tl.constexpr,
):
    """One program per (query head of a KV head, KV head of a lane)."""
    head, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane, page_head = kv_head // PAGE_HEADS, kv_head % PAGE_HEADS
    count, scale = tl.load(held + lane), tl.load(scales + kv_head) * LOG2_E
    dim, width = tl.arange(0, BLOCK_D), GROUP * HEAD_DIM + 1
    for first in range(0, window, BLOCK_M):
        query = first + tl.arange(0, BLOCK_M)
        is_query = query < window
        record = records + (kv_head * window + query) * width
        newer = tl.load(record + width - 1, mask=is_query, other=0.0)  # first position not seen
        inside = is_query[:, None] & (dim < HEAD_DIM)[None, :]
        q = tl.load((record + head * HEAD_DIM)[:, None] + dim[None, :], mask=inside, other=0.0)
        q = q.to(OPERAND)
        peak = tl.full([BLOCK_M], -1e30, tl.float32)  # of queries that see no slot
        total = tl.zeros([BLOCK_M], tl.float32)
        for turn in tl.static_range(2):
            if turn == 1:
                lse = log_sum(peak, total)
            for start in range(0, count, BLOCK_T):
                place = start + tl.arange(0, BLOCK_T)
                live = place < count
                page, vector = _vectors_of(
                    pages, order, lane, page_head, place, live, columns, slots, PAGE_TOKENS
                )
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
                position = tl.load(positions + lane * slots + place, mask=live, other=0)
                seen = live[None, :] & (position.to(tl.float32)[None, :] < newer[:, None])
                logits = tl.where(seen, products * scale, float("-inf"))
                if turn == 0:
                    new_peak = tl.maximum(peak, tl.max(logits, 1))
                    weights = tl.exp2(logits - new_peak[:, None])
                    total = total * tl.exp2(peak - new_peak) + tl.sum(weights, 1)
                    peak = new_peak
                else:
                    target = sums + (kv_head * GROUP + head) * slots + place
                    before = tl.load(target, mask=live & (first > 0), other=0.0)
                    own = tl.sum(tl.exp2(logits - lse[:, None]), 0)
                    tl.store(target, before + own, mask=live)


@triton.jit(do_not_specialize=["slots", "window", "width", "newest", "kernel"])
def finish_sums(
    sums,
    records,
    scores,
    held,
    slots,
    window,
    width,
    newest,
    kernel,
    PAGE_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    POOL_MAX: tl.constexpr,
    HEADS_MAX: tl.constexpr,
    HEADS_MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (block of slots, KV head of a lane): pool, and reduce over query heads."""
    block, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count, index = tl.load(held + kv_head // PAGE_HEADS), tl.arange(0, BLOCK)
    place, half = block * BLOCK + index, kernel // 2
    after = tl.zeros([BLOCK], tl.float32)  # position after a query's, 0 without one
    for first in range(0, window, BLOCK):
        record = records + (kv_head * window + first + index) * width
        own = tl.load(record + width - 1, mask=first + index < window, other=0.0)
        after = tl.maximum(after, own)
    score = tl.zeros([BLOCK], tl.float32)
    for head in range(GROUP):
        own_sums = sums + (kv_head * GROUP + head) * slots
        pooled = tl.zeros([BLOCK], tl.float32)
        for shift in range(kernel):
            near = place + shift - half
            number = tl.load(own_sums + near, mask=(near >= 0) & (near < count - newest), other=0.0)
            pooled = tl.maximum(pooled, number) if POOL_MAX else pooled + number
        pooled = pooled if POOL_MAX else pooled / kernel
        score = tl.maximum(score, pooled) if HEADS_MAX else score + pooled
    score = score / GROUP if HEADS_MEAN else score
    score = tl.where(tl.max(after, axis=0) > 0, score, float("nan"))
    tl.store(scores + kv_head * slots + place, tl.where(place < count, score, 0.0), place < slots)


@triton.jit(do_not_specialize=["columns", "slots"])
def measure_vectors(
    scores,
    pages,
    order,
    held,
    key_codes,
    key_scales,
    key_zeros,
    key_indices,
    key_outliers,
    page_bytes,
    columns,
    slots,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COSINES: tl.constexpr,
    KEY_KIND: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    KEY_OUTLIERS: tl.constexpr,
):
    """One program per KV head of a lane: norms, or cosines with the mean of the unit vectors."""
    kv_head = tl.program_id(0).to(tl.int64)
    lane, page_head = kv_head // PAGE_HEADS, kv_head % PAGE_HEADS
    count, dim = tl.load(held + lane), tl.arange(0, BLOCK_D)
    anchor = tl.zeros([BLOCK_D], tl.float32)
    for turn in tl.static_range(2 if COSINES else 1):
        if turn == 1:
            anchor /= tl.maximum(tl.sqrt_rn(tl.sum(anchor * anchor, 0)), MIN_NORM)
        for start in range(0, count, BLOCK_T):
            place = start + tl.arange(0, BLOCK_T)
            live = place < count
            page, vector = _vectors_of(
                pages, order, lane, page_head, place, live, columns, slots, PAGE_TOKENS
            )
            numbers = load_tile(
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
                False,
                tl.float32,
            )
            norm = tl.sqrt_rn(tl.sum(numbers * numbers, 1))
            over = 1.0 / tl.maximum(norm, MIN_NORM)
            if turn == 1:
                norm = tl.sum(numbers * anchor[None, :], 1) * over
            elif COSINES:
                anchor += tl.sum(numbers * over[:, None], 0)
            if turn == 1 or not COSINES:
                tl.store(scores + kv_head * slots + place, norm, mask=live)
