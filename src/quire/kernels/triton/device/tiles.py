"""Vectors of one KV head: read from pages, decoded, and multiplied tile by tile."""

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
INT8_CHANNEL = tl.constexpr(2)
FP8 = tl.constexpr(3)
BITS_CODES = tl.constexpr(4)

NAN_CODE = tl.constexpr(-128)  # of int8_channel
FP8_FACTOR = tl.constexpr(256.0)  # e4m3 bits, read as those of a float16, are 2 ** -8 as large
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def pages_of(table, slot, live, PAGE_TOKENS: tl.constexpr):
    """Pages of slots, from the first page of their lane in the table."""
    return tl.load(table + slot // PAGE_TOKENS, mask=live, other=0).to(tl.int64)


@triton.jit
def record_of(plane, page, vector, page_bytes, WIDTH: tl.constexpr):
    """Pointers to the records of vectors in a plane."""
    item_bytes: tl.constexpr = plane.dtype.element_ty.primitive_bitwidth // 8
    return plane + page * (page_bytes // item_bytes) + vector * WIDTH


@triton.jit
def vector_scales(
    scales,
    page,
    vector,
    live,
    page_bytes,
    KIND: tl.constexpr,
    FOLDS: tl.constexpr,
):
    """Factors [slot] of vectors that `load_tile` has not multiplied by."""
    if (KIND == INT8 or KIND == FP8) and FOLDS:  # noqa: SIM109 - `in` takes no constexpr
        own = _scales_of(scales, page, vector, live, page_bytes)
        return own * FP8_FACTOR if KIND == FP8 else own
    return live.to(tl.float32)


@triton.jit
def _scales_of(scales, page, vector, live, page_bytes):
    """Scales [slot] as float32.

    The aligned word of four bytes that holds a scale is loaded, because Triton does not load less
    ahead of its use.
    """
    address = record_of(scales, page, vector, page_bytes, 1).to(tl.int64)
    word = tl.load((address & -4).to(tl.pointer_type(tl.int32)), mask=live, other=0)
    bits = tl.where((address & 2) == 0, word, word >> 16).to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_tile(
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
    """Vectors [slot, dim] of slots; 0 where not live and beyond HEAD_DIM.

    The planes are `codes`, `scales`, `zeros`, `indices` and `outliers`; an unused one is any
    pointer. `page`, `vector` and `live` [slot] are the pages, the indices of the vectors in them,
    and whether to load them. With FOLDS the caller multiplies by `vector_scales`.
    """
    inside = live[:, None] & (dim < HEAD_DIM)[None, :]
    if KIND == BITS_CODES:
        codes_tile = _unpacked(codes, page, vector, inside, dim, page_bytes, HEAD_DIM, BITS)
        scale = _of_channels(scales, page, vector, live, dim, page_bytes, HEAD_DIM, CHANNELS)
        zero = _of_channels(zeros, page, vector, live, dim, page_bytes, HEAD_DIM, CHANNELS)
        numbers = codes_tile * scale + zero
        for i in tl.static_range(OUTLIERS):
            index = record_of(indices, page, vector, page_bytes, OUTLIERS) + i
            number = record_of(outliers, page, vector, page_bytes, OUTLIERS) + i
            channel = tl.load(index, mask=live, other=0).to(tl.int32)
            exact = tl.load(number, mask=live, other=0.0).to(tl.float32)
            numbers = tl.where(dim[None, :] == channel[:, None], exact[:, None], numbers)
        return numbers.to(OPERAND)
    pointers = record_of(codes, page, vector, page_bytes, HEAD_DIM)[:, None] + dim[None, :]
    if KIND == PLAIN:
        return tl.load(pointers, mask=inside, other=0.0).to(OPERAND)
    stored = tl.load(pointers, mask=inside, other=0)
    if KIND == FP8:
        wide = stored.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        numbers = stored.to(tl.float32)
    if KIND == INT8_CHANNEL:
        numbers = tl.where(numbers == NAN_CODE, float("nan"), numbers)
    elif not FOLDS:
        scale = vector_scales(scales, page, vector, live, page_bytes, KIND, True)
        numbers *= scale[:, None]
    return numbers.to(OPERAND)


@triton.jit
def _of_channels(
    plane, page, vector, live, dim, page_bytes, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr
):
    """Numbers [slot, dim] of groups of channels, as float32; each is loaded once if possible."""
    groups: tl.constexpr = HEAD_DIM // CHANNELS
    record = record_of(plane, page, vector, page_bytes, groups)[:, None]
    BLOCK_D: tl.constexpr = dim.shape[0]
    if CHANNELS & (CHANNELS - 1) == 0 and BLOCK_D >= CHANNELS:
        BLOCK_T: tl.constexpr = live.shape[0]
        count: tl.constexpr = BLOCK_D // CHANNELS
        group = tl.arange(0, count)[None, :]
        inside = live[:, None] & (group < groups)
        numbers = tl.load(record + group, mask=inside, other=0.0).to(tl.float32)
        spread = tl.broadcast_to(numbers[:, :, None], [BLOCK_T, count, CHANNELS])
        return tl.reshape(spread, [BLOCK_T, BLOCK_D])
    inside = live[:, None] & (dim < HEAD_DIM)[None, :]
    group = (dim // CHANNELS)[None, :]
    return tl.load(record + group, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _unpacked(
    codes, page, vector, inside, dim, page_bytes, HEAD_DIM: tl.constexpr, BITS: tl.constexpr
):
    """Codes [slot, dim] as float32; `quire.codecs.affine` describes their bytes."""
    width: tl.constexpr = HEAD_DIM * BITS // 8
    row = record_of(codes, page, vector, page_bytes, width)[:, None]
    if BITS == 3:
        low = _segments(row, dim, inside, HEAD_DIM // 4, 2)
        high = _segments(row + HEAD_DIM // 4, dim, inside, HEAD_DIM // 8, 1)
        return (low | (high << 2)).to(tl.float32)
    return _segments(row, dim, inside, width, BITS).to(tl.float32)


@triton.jit
def _segments(row, dim, inside, BYTES: tl.constexpr, BITS: tl.constexpr):
    """Codes whose segments share BYTES bytes."""
    stored = tl.load(row + (dim % BYTES)[None, :], mask=inside, other=0).to(tl.int32)
    return (stored >> (dim // BYTES * BITS)[None, :]) & ((1 << BITS) - 1)


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
