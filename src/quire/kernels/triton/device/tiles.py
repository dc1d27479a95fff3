"""Products and softmaxes on tiles of keys and values of one KV head."""

import triton
import triton.language as tl

from quire.kernels.triton.device.codes import load_tile, vector_scales

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_products(
    query,
    codes,
    scales,
    zeros,
    indices,
    outliers,
    page,
    vector,
    live,
    dim,
    page_bytes,
    HEAD_DIM: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Products [query, slot] of queries and keys; see `load_tile`."""
    key = load_tile(
        codes,
        scales,
        zeros,
        indices,
        outliers,
        page,
        vector,
        live,
        dim,
        page_bytes,
        HEAD_DIM,
        KIND,
        BITS,
        CHANNELS,
        OUTLIERS,
        True,
        OPERAND,
    )
    factor = vector_scales(scales, page, vector, live, page_bytes, KIND, True)
    return tl.dot(query, tl.trans(key), input_precision="ieee") * factor[None, :]


@triton.jit
def weighted_values(
    weights,
    codes,
    scales,
    zeros,
    indices,
    outliers,
    page,
    vector,
    live,
    dim,
    page_bytes,
    HEAD_DIM: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    FOLDS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Sums [query, dim] of values, weighted [query, slot]; see `load_tile`."""
    value = load_tile(
        codes,
        scales,
        zeros,
        indices,
        outliers,
        page,
        vector,
        live,
        dim,
        page_bytes,
        HEAD_DIM,
        KIND,
        BITS,
        CHANNELS,
        OUTLIERS,
        FOLDS,
        OPERAND,
    )
    factor = vector_scales(scales, page, vector, live, page_bytes, KIND, FOLDS)
    return tl.dot((weights * factor[None, :]).to(OPERAND), value, input_precision="ieee")


@triton.jit
def capped(products, scale, cap, HAS_SOFTCAP: tl.constexpr):
    """Logits times log2(e).

    Args:
        products: products of queries and keys.
        scale: scale times log2(e); with a soft cap c, scale / c.
        cap: c times log2(e).
        HAS_SOFTCAP: whether there is a soft cap.
    """
    logits = products * scale
    if HAS_SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(logits))  # never overflows
        tanh = (1.0 - small) / (1.0 + small)
        logits = cap * tl.where(logits < 0, -tanh, tanh)
    return logits


@triton.jit
def load_queries(
    pointers,
    inside,
    factors,
    kv_head,
    dim,
    HEAD_DIM: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Queries [query, dim]; multiplied by the factors of the channels of their keys, if any."""
    numbers = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        own = tl.load(factors + kv_head * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
        numbers *= own[None, :]
    return numbers.to(OPERAND)


@triton.jit
def stored_as(numbers, TYPE: tl.constexpr):
    """Float32 numbers in the type of their target, rounded half to even.

    Triton 3.9's interpreter truncates to bfloat16, so they are rounded before the conversion.
    """
    if TYPE.is_bf16():
        bits = numbers.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        numbers = tl.where(numbers == numbers, bits.to(tl.float32, bitcast=True), numbers)
    return numbers.to(TYPE)


@triton.jit
def with_sink(peak, total, sinks, heads, is_head):
    """Add the logits of sinks to softmaxes: new peak, and factor on the sums so far."""
    sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
    new_peak = tl.maximum(peak, sink)
    shrink = tl.exp2(peak - new_peak)
    return new_peak, total * shrink + tl.exp2(sink - new_peak), shrink


@triton.jit
def log_sum(peak, total):
    """Log-sum-exp; -infinity without slots."""
    return peak + tl.log2(tl.where(total == 0, 1.0, total))
