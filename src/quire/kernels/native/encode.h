/* Encodes vectors as quire.codecs does, number by number, in portable C.
 *
 * The file is compiled for each instruction set by its including functions. Maxima are taken over the bits of
 * floats as integers: compilers vectorize them, and a NaN is larger than every number.
 */
#ifndef QUIRE_ENCODE_H
#define QUIRE_ENCODE_H

#include <math.h>

#include "codes.h"

#define LARGEST_HALF 65504.0f
#define INFINITE_BITS 0x7f800000
#define HALF_NAN 0x7e00

INLINE int32_t bits_of(float number) {
    int32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

/* Bits whose order as integers is the order of the floats; it is its own inverse. */
INLINE int32_t in_order(int32_t bits) {
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static inline float float_in_order(int32_t ordered) {
    int32_t bits = in_order(ordered);
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* Smallest float16 that is not below a number of at most LARGEST_HALF, and largest that is not above it. */
static inline uint16_t half_above(float number) {
    uint16_t nearest = to_f16(number);
    if (!(from_f16(nearest) < number)) return nearest;
    if ((nearest & 0x7fff) == 0) return 1;
    return (uint16_t)(nearest & 0x8000 ? nearest - 1 : nearest + 1);
}

static inline uint16_t half_below(float number) {
    uint16_t nearest = to_f16(number);
    if (!(from_f16(nearest) > number)) return nearest;
    if ((nearest & 0x7fff) == 0) return 0x8001;
    return (uint16_t)(nearest & 0x8000 ? nearest + 1 : nearest - 1);
}

/* Load a vector as float32 within the range of float16. */
INLINE void load_finite(float *x, const uint8_t *from, int dim, int dtype) {
    const uint16_t *halves = (const uint16_t *)from;
    if (dtype == F32) memcpy(x, from, (size_t)dim * sizeof(float));
    else if (dtype == BF16)
        for (int i = 0; i < dim; i++) x[i] = from_bf16(halves[i]);
    else
        for (int i = 0; i < dim; i++) x[i] = from_f16(halves[i]);
    for (int i = 0; i < dim; i++) {
        x[i] = x[i] < -LARGEST_HALF ? -LARGEST_HALF : x[i];
        x[i] = x[i] > LARGEST_HALF ? LARGEST_HALF : x[i];
    }
}

/* Multiples of a scale, rounded half to even, between `low` and `high`; 0 for a scale that is NaN. */
INLINE void round_codes(const float *x, int count, float zero, uint16_t scale,
                        float low, float high, int32_t *codes) {
    float divisor = scale & 0x7fff ? from_f16(scale) : 1.0f;
    int known = divisor == divisor;
    for (int i = 0; i < count; i++) {
        float code = rintf((x[i] - zero) / divisor);
        code = code < low ? low : code > high ? high : code;
        codes[i] = known ? (int32_t)code : 0;
    }
}

INLINE void encode_int8(const float *x, int dim, uint8_t *codes, uint16_t *scale) {
    int32_t most = 0, rounded[MAX_HEAD_DIM];
    for (int i = 0; i < dim; i++) {
        int32_t size = bits_of(x[i]) & 0x7fffffff;
        most = size > most ? size : most;
    }
    *scale = most > INFINITE_BITS ? HALF_NAN : half_above(float_in_order(most) / 127.0f);
    round_codes(x, dim, 0.0f, *scale, -127.0f, 127.0f, rounded);
    for (int i = 0; i < dim; i++) codes[i] = (uint8_t)rounded[i];
}

/* Codes of `bits` bits of a group of neighbouring channels. */
INLINE void encode_group(const float *x, int count, int bits, int32_t *codes,
                         uint16_t *scale, uint16_t *zero) {
    int32_t least = INT32_MAX, most = INT32_MIN, top = (1 << bits) - 1;
    for (int i = 0; i < count; i++) {
        int32_t ordered = in_order(bits_of(x[i]));
        least = ordered < least ? ordered : least;
        most = ordered > most ? ordered : most;
    }
    if (most > INFINITE_BITS || least < in_order((int32_t)0xff800000)) *scale = *zero = HALF_NAN;
    else {
        *zero = half_below(float_in_order(least));
        *scale = half_above((float_in_order(most) - from_f16(*zero)) / (float)top);
    }
    round_codes(x, count, from_f16(*zero), *scale, 0.0f, (float)top, codes);
}

INLINE void encode_bits(const coding *c, const float *x, int dim, uint8_t *packed,
                        uint16_t *scales, uint16_t *zeros) {
    int32_t codes[MAX_HEAD_DIM];
    for (int first = 0, group = 0; first < dim; first += c->channels, group++)
        encode_group(x + first, c->channels, c->bits, codes + first, scales + group, zeros + group);
    int segment = dim * c->bits / 8;
    for (int i = 0; i < segment; i++) packed[i] = (uint8_t)codes[i];
    for (int s = 1; s < 8 / c->bits; s++)
        for (int i = 0; i < segment; i++) packed[i] |= (uint8_t)(codes[s * segment + i] << s * c->bits);
}

/* Encode a vector into the record of a slot. `plane` holds the codes; the other planes are those of `c`. */
INLINE void encode_vector(const coding *c, const uint8_t *from, int dtype, uint8_t *plane, place p) {
    float x[MAX_HEAD_DIM];
    int dim = c->dim;
    uint8_t *codes = plane + p.page_at + p.record * c->vector_bytes;
    int64_t group = p.record * (dim / c->channels);
    if (c->kind == PLAIN_NUMBERS) {
        for (int i = 0; i < dim; i++) store_number(codes, i, c->dtype, load_number(from, i, dtype));
        return;
    }
    load_finite(x, from, dim, dtype);
    uint16_t *scales = (uint16_t *)((uint8_t *)c->scales + p.page_at) + group;
    if (c->kind == INT8_CODES) encode_int8(x, dim, codes, scales);
    else encode_bits(c, x, dim, codes, scales, (uint16_t *)((uint8_t *)c->zeros + p.page_at) + group);
}

#endif
