"""Row-wise operations of a decoder layer: RMSNorm with the residual sum, gated activation, RoPE.

RoPE of queries and keys is in place, in one kernel with the write of keys and values to pages.
Numbers are rounded where Transformers rounds them: after the residual sum, after the norm, and
after each factor.
"""

import triton
import triton.language as tl

from quire.kernels.triton.device.encode import encode_vector
from quire.kernels.triton.device.tiles import record_of, stored_as


@triton.jit
def rounded_to(numbers, TYPE: tl.constexpr):
    """Numbers rounded to a type, as float32."""
    return stored_as(numbers, TYPE).to(tl.float32)


@triton.jit(do_not_specialize=["eps"])
def add_and_norm(
    stream,
    delta,
    weight,
    normed,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """One program per row: add a row to the residual stream in place; write its RMSNorm.

    All rows are contiguous, [row, WIDTH].
    """
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    numbers = tl.load(stream + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        numbers = rounded_to(numbers + added, stream.dtype.element_ty)
        tl.store(stream + place, stored_as(numbers, stream.dtype.element_ty), mask=inside)
    mean_square = tl.sum(numbers * numbers, 0) / WIDTH
    numbers = rounded_to(numbers * tl.rsqrt(mean_square + eps), normed.dtype.element_ty)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, stored_as(numbers * factor, normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def norm_heads(
    heads,
    query_weight,
    key_weight,
    eps,
    token_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (token, head): RMSNorm of query heads, then of key heads, in place.

    The heads of a token are adjacent: NUM_HEADS query heads, then those of keys.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, BLOCK)
    inside = dim < HEAD_DIM
    place = heads + token * token_stride + head * HEAD_DIM + dim
    numbers = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(numbers * numbers, 0) / HEAD_DIM
    numbers = rounded_to(numbers * tl.rsqrt(mean_square + eps), heads.dtype.element_ty)
    of_query = tl.load(query_weight + dim, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + dim, mask=inside, other=0.0).to(tl.float32)
    factor = tl.where(head < NUM_HEADS, of_query, of_key)
    tl.store(place, stored_as(numbers * factor, heads.dtype.element_ty), mask=inside)


@triton.jit
def gated_silu(both, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program per (row, block of columns): silu(gate) * up of rows [gate, up]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = both + row * (2 * WIDTH) + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    small = tl.exp(-tl.abs(gate))  # never overflows
    active = gate * tl.where(gate < 0, small, 1.0) / (1.0 + small)
    active = rounded_to(active, out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, stored_as(active * up, out.dtype.element_ty), mask=inside)


@triton.jit
def turned(low, high, cosine, sine, TYPE: tl.constexpr):
    """Both halves of rotated heads, rounded to their type."""
    first, second = low.to(tl.float32), high.to(tl.float32)
    new_low = stored_as(first * cosine - second * sine, TYPE)
    return new_low, stored_as(second * cosine + first * sine, TYPE)


@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def rotate_and_write(
    query,
    key,
    value,
    cosine,
    sine,
    source,
    key_plane,
    value_plane,
    pages,
    offsets,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    page_bytes,
    NUM_HEADS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    WRITES: tl.constexpr,
):
    """One program per (token, block of heads): query heads first, then KV heads.

    Rotates in place. With WRITES, rotated keys and values are also written to their slots. With
    HAS_SOURCE, tokens whose `source` is another token are left out.
    """
    token, block = tl.program_id(0), tl.program_id(1)
    long_token = token.to(tl.int64)
    query_blocks: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    half: tl.constexpr = ROTARY_DIM // 2
    pair, lane_heads = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_H)
    is_pair = pair < half
    turns = long_token * ROTARY_DIM + pair
    cos = tl.load(cosine + turns, mask=is_pair, other=1.0)[None, :]
    sin = tl.load(sine + turns, mask=is_pair, other=0.0)[None, :]
    own = 1
    if HAS_SOURCE:
        own = (tl.load(source + token) == token).to(tl.int32)
    if block < query_blocks:
        heads = block * BLOCK_H + lane_heads
        inside = (heads < NUM_HEADS * own)[:, None] & is_pair[None, :]
        place = query + long_token * query_token_stride
        place += heads[:, None] * query_head_stride + pair[None, :]
        low = tl.load(place, mask=inside, other=0.0)
        high = tl.load(place + half, mask=inside, other=0.0)
        new_low, new_high = turned(low, high, cos, sin, query.dtype.element_ty)
        tl.store(place, new_low, mask=inside)
        tl.store(place + half, new_high, mask=inside)
    else:
        heads = (block - query_blocks) * BLOCK_H + lane_heads
        is_head = heads < NUM_LANES * PAGE_HEADS * own
        inside = is_head[:, None] & is_pair[None, :]
        keys = key + long_token * key_token_stride + heads[:, None] * key_head_stride
        place = keys + pair[None, :]
        low = tl.load(place, mask=inside, other=0.0)
        high = tl.load(place + half, mask=inside, other=0.0)
        new_low, new_high = turned(low, high, cos, sin, key.dtype.element_ty)
        tl.store(place, new_low, mask=inside)
        tl.store(place + half, new_high, mask=inside)
        if WRITES:
            slot = token * NUM_LANES + heads // PAGE_HEADS
            page = tl.load(pages + slot, mask=is_head, other=0)
            vector = heads % PAGE_HEADS * PAGE_TOKENS
            vector += tl.load(offsets + slot, mask=is_head, other=0)
            dim, value_dim = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_V)[None, :]
            to_key = record_of(key_plane, page, vector, page_bytes, HEAD_DIM)[:, None]
            tl.store(to_key + pair[None, :], new_low, mask=inside)
            tl.store(to_key + half + pair[None, :], new_high, mask=inside)
            if ROTARY_DIM < HEAD_DIM:
                is_rest = is_head[:, None] & (dim < HEAD_DIM) & (dim >= ROTARY_DIM)
                tl.store(to_key + dim, tl.load(keys + dim, mask=is_rest), mask=is_rest)
            values = value + long_token * value_token_stride + heads[:, None] * value_head_stride
            to_value = record_of(value_plane, page, vector, page_bytes, VALUE_DIM)[:, None]
            is_dim = is_head[:, None] & (value_dim < VALUE_DIM)
            tl.store(to_value + value_dim, tl.load(values + value_dim, mask=is_dim), mask=is_dim)


@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def rotate_and_encode(
    query,
    key,
    value,
    cosine,
    sine,
    source,
    key_codes,
    key_scales,
    key_zeros,
    value_codes,
    value_scales,
    value_zeros,
    pages,
    offsets,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    page_bytes,
    NUM_HEADS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    KEY_KIND: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_CHANNELS: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_CHANNELS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """One program per (token, head): query heads, then key heads, then value heads.

    Queries are rotated in place. Rotated keys and values are encoded into their slots; the keys
    themselves stay before RoPE. HAS_SOURCE as in `rotate_and_write`.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    long_token = token.to(tl.int64)
    kv_heads: tl.constexpr = NUM_LANES * PAGE_HEADS
    own_cos, own_sin = cosine + long_token * ROTARY_DIM, sine + long_token * ROTARY_DIM
    own = 1
    if HAS_SOURCE:
        own = (tl.load(source + token) == token).to(tl.int32)
    if head < NUM_HEADS:
        half: tl.constexpr = ROTARY_DIM // 2
        pair = tl.arange(0, BLOCK_R)
        inside = pair < half * own
        place = query + long_token * query_token_stride + head * query_head_stride + pair
        low = tl.load(place, mask=inside, other=0.0)
        high = tl.load(place + half, mask=inside, other=0.0)
        cos = tl.load(own_cos + pair, mask=inside, other=1.0)
        sin = tl.load(own_sin + pair, mask=inside, other=0.0)
        new_low, new_high = turned(low, high, cos, sin, query.dtype.element_ty)
        tl.store(place, new_low, mask=inside)
        tl.store(place + half, new_high, mask=inside)
    else:
        kv_head = (head - NUM_HEADS) % kv_heads
        slot = token * NUM_LANES + kv_head // PAGE_HEADS
        page, offset = tl.load(pages + slot), tl.load(offsets + slot)
        vector = kv_head % PAGE_HEADS * PAGE_TOKENS + offset
        if head < NUM_HEADS + kv_heads:
            encode_vector(
                key + long_token * key_token_stride + kv_head * key_head_stride,
                own_cos,
                own_sin,
                key_codes,
                key_scales,
                key_zeros,
                page,
                vector,
                page_bytes,
                own,
                HEAD_DIM,
                ROTARY_DIM,
                KEY_KIND,
                KEY_BITS,
                KEY_CHANNELS,
                8 // KEY_BITS,
                KEY_BLOCK,
            )
        else:
            encode_vector(
                value + long_token * value_token_stride + kv_head * value_head_stride,
                own_cos,
                own_sin,
                value_codes,
                value_scales,
                value_zeros,
                page,
                vector,
                page_bytes,
                own,
                VALUE_DIM,
                0,
                VALUE_KIND,
                VALUE_BITS,
                VALUE_CHANNELS,
                8 // VALUE_BITS,
                VALUE_BLOCK,
            )
