"""Encoding of new vectors, with the bits that `quire.codecs` computes on a CPU."""

import triton
import triton.language as tl

from quire.kernels.triton.device.tiles import BITS_CODES, FP8, INT8, record_of, stored_as

LARGEST = tl.constexpr(65504.0)  # of float16
ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: added and subtracted, it rounds half to even
SIGN = tl.constexpr(-32768)  # bit of a float16
BELOW_ZERO = tl.constexpr(-32767)  # bits of the negative float16 of smallest magnitude
FP8_TOP = tl.constexpr(448.0)
FP8_LEAST = tl.constexpr(0.015625)  # smallest normal e4m3, 2 ** -6


@triton.jit
def half_below(numbers):
    """Bits of the largest float16 that is not above each number."""
    nearest = numbers.to(tl.float16)
    wide, bits = nearest.to(tl.float32), nearest.to(tl.int16, bitcast=True).to(tl.int32)
    lower = tl.where(wide > 0, bits - 1, tl.where(wide < 0, bits + 1, BELOW_ZERO))
    return tl.where(wide > numbers, lower, bits).to(tl.int16)


@triton.jit
def half_above(numbers):
    """Bits of the smallest float16 that is not below each number."""
    flipped = half_below(numbers * -1.0)  # the sign of 0 changes too
    return (flipped.to(tl.int32) ^ SIGN).to(tl.int16)


@triton.jit
def as_float(bits):
    """Numbers of the bits of float16, as float32."""
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def rounded(numbers, scale, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Nearest multiples of a scale; 0 for NaN."""
    ratio = tl.div_rn(numbers, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(numbers))
    codes = (ratio + ROUNDS) - ROUNDS
    codes = tl.where(codes < LOW, LOW, tl.where(codes > HIGH, HIGH, codes))
    return tl.where(codes == codes, codes, 0.0).to(tl.int32)


@triton.jit
def fp8_bits(numbers):
    """Bits of the nearest e4m3, half to even, of numbers up to 448."""
    bits = numbers.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    is_small = size < FP8_LEAST
    small = ((tl.where(is_small, size, 0.0) * 512.0 + ROUNDS) - ROUNDS).to(tl.int32)
    code = tl.where(is_small, small, normal)
    code = tl.where(size == size, code, 0x7F)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def load_rotated(vector, cosine, sine, dim, inside, ROTARY_DIM: tl.constexpr, TYPE: tl.constexpr):
    """A vector after RoPE in float32, rounded to its type; `dim` are the channels of a tile."""
    half: tl.constexpr = ROTARY_DIM // 2
    is_rotary = inside & (dim < ROTARY_DIM)
    other = tl.where(dim < half, dim + half, dim - half)
    own = tl.load(vector + dim, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(vector + other, mask=is_rotary, other=0.0).to(tl.float32)
    cos = tl.load(cosine + dim, mask=is_rotary, other=1.0)
    sin = tl.load(sine + dim, mask=is_rotary, other=0.0)
    rotated = own * cos + tl.where(dim < half, -partner, partner) * sin
    return stored_as(rotated, TYPE).to(tl.float32)


@triton.jit
def encode_vector(
    source,
    cosine,
    sine,
    codes,
    scales,
    zeros,
    page,
    vector,
    page_bytes,
    active,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Encode the vector at `source` into a slot, if `active` is 1 and not 0.

    The vector is a tile [segment, byte]: a byte holds one code of each segment. If ROTARY_DIM is
    not 0, RoPE rotates the vector first, by cosines and sines of its first channels.
    """
    width: tl.constexpr = HEAD_DIM // SEGMENTS
    segment, byte = tl.arange(0, SEGMENTS)[:, None], tl.arange(0, BLOCK_S)
    is_byte = byte < width * active
    dim = segment * width + byte[None, :]
    inside = is_byte[None, :] & (segment < SEGMENTS)
    if ROTARY_DIM:
        TYPE: tl.constexpr = source.dtype.element_ty
        x = load_rotated(source, cosine, sine, dim, inside, ROTARY_DIM, TYPE)
    else:
        x = tl.load(source + dim, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))  # NaN stays NaN
    nan = float("nan")
    target = record_of(codes, page, vector, page_bytes, width) + byte
    if KIND == BITS_CODES:
        top: tl.constexpr = (1 << BITS) - 1
        groups: tl.constexpr = HEAD_DIM // CHANNELS
        scale, zero = tl.zeros_like(x), tl.zeros_like(x)
        own_scales = record_of(scales, page, vector, page_bytes, groups)
        own_zeros = record_of(zeros, page, vector, page_bytes, groups)
        for group in tl.static_range(groups):
            member = inside & (dim // CHANNELS == group)
            low = tl.min(tl.min(tl.where(member, x, float("inf")), 1), 0)
            high = tl.max(tl.max(tl.where(member, x, float("-inf")), 1), 0)
            has_nan = tl.max(tl.max((member & (x != x)).to(tl.int32), 1), 0) > 0
            low, high = tl.where(has_nan, nan, low), tl.where(has_nan, nan, high)
            zero_bits = half_below(low)
            group_zero = as_float(zero_bits)
            scale_bits = half_above(tl.div_rn(high - group_zero, top * 1.0))
            tl.store(own_scales + group, scale_bits.to(tl.float16, bitcast=True), mask=active > 0)
            tl.store(own_zeros + group, zero_bits.to(tl.float16, bitcast=True), mask=active > 0)
            scale = tl.where(member, as_float(scale_bits), scale)
            zero = tl.where(member, group_zero, zero)
        numbers = rounded(x - zero, scale, 0.0, top * 1.0)
        packed = tl.sum(tl.where(inside, numbers << (segment * BITS), 0), 0)
        tl.store(target, packed.to(tl.uint8), mask=is_byte)
    else:
        size = tl.max(tl.max(tl.abs(x), 1), 0)
        has_nan = tl.max(tl.max((x != x).to(tl.int32), 1), 0) > 0
        size = tl.where(has_nan, nan, size)
        largest: tl.constexpr = 127.0 if KIND == INT8 else 448.0
        scale_bits = half_above(tl.div_rn(size, largest))
        own_scale = record_of(scales, page, vector, page_bytes, 1)
        tl.store(own_scale, scale_bits.to(tl.float16, bitcast=True), mask=active > 0)
        scale = as_float(scale_bits)
        if KIND == FP8:
            ratio = tl.div_rn(x, tl.where(scale == 0, 1.0, scale) + tl.zeros_like(x))
            ratio = tl.where(ratio > FP8_TOP, FP8_TOP, tl.where(ratio < -FP8_TOP, -FP8_TOP, ratio))
            numbers = fp8_bits(ratio)
        else:
            numbers = rounded(x, scale, -127.0, 127.0)
        tl.store(target, tl.sum(numbers, 0).to(codes.dtype.element_ty), mask=is_byte)


@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])  # parts of larger tensors
def encode_vectors(
    codes,
    scales,
    zeros,
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
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One program per (token, KV head): encode a vector into its slot."""
    token, head = tl.program_id(0), tl.program_id(1)
    place = token * NUM_LANES + head // PAGE_HEADS
    page, offset = tl.load(pages + place), tl.load(offsets + place)
    vector = head % PAGE_HEADS * PAGE_TOKENS + offset
    encode_vector(
        vectors + token.to(tl.int64) * token_stride + head * head_stride,
        vectors,
        vectors,
        codes,
        scales,
        zeros,
        page,
        vector,
        page_bytes,
        1,
        HEAD_DIM,
        0,
        KIND,
        BITS,
        CHANNELS,
        SEGMENTS,
        BLOCK_S,
    )
