"""One block of slots in the attention of a block of queries."""

import triton
import triton.language as tl

from quire.kernels.triton.device.codes import pages_of
from quire.kernels.triton.device.tiles import capped, key_products, weighted_values


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
    page_bytes,
    scale,
    cap,
    MASKED: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
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
        dim,
        page_bytes,
        HEAD_DIM,
        VALUE_KIND,
        VALUE_BITS,
        VALUE_CHANNELS,
        VALUE_OUTLIERS,
        FOLDS,
        OPERAND,
    )
    return new_peak, total, attended
