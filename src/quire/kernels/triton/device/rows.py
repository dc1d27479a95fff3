"""Row-wise operations of a decoder layer: RMSNorm with the residual sum, gated activation.

Numbers are rounded where Transformers rounds them: after the residual sum, after the norm, and
after each factor.
"""

import triton
import triton.language as tl

from quire.kernels.triton.device.tiles import stored_as


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
