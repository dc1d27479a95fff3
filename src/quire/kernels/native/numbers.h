/* Conversion of float32, bfloat16 and float16 in pages, queries and outputs. */
#ifndef QUIRE_NUMBERS_H
#define QUIRE_NUMBERS_H

#include <string.h>

#include "args.h"

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, 4);
    return number;
}

static inline uint16_t to_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 0x1f;
    uint32_t mantissa = bits & 0x3ff, wide;
    float number;
    if (exponent == 0) {
        number = (float)mantissa * 0x1p-24f;
        return sign ? -number : number;
    }
    wide = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13);
    memcpy(&number, &wide, 4);
    return number;
}

static inline uint16_t to_f16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* subnormal: adding a power of two rounds half to even */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return (uint16_t)(sign | ((bits - 0x38000000) >> 13));
}

static inline float load_number(const void *numbers, int64_t i, int dtype) {
    if (dtype == F32) return ((const float *)numbers)[i];
    uint16_t bits = ((const uint16_t *)numbers)[i];
    return dtype == BF16 ? from_bf16(bits) : from_f16(bits);
}

static inline void store_number(void *numbers, int64_t i, int dtype, float number) {
    if (dtype == F32) ((float *)numbers)[i] = number;
    else ((uint16_t *)numbers)[i] = dtype == BF16 ? to_bf16(number) : to_f16(number);
}

#ifdef HAVE_X86
INLINE AVX2 __m256 load8(const uint8_t *numbers, int64_t i, int dtype) {
    if (dtype == F32) return _mm256_loadu_ps((const float *)numbers + i);
    __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)numbers + i));
    if (dtype == F16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

INLINE AVX512 __m512 load16(const uint8_t *numbers, int64_t i, int dtype, __mmask16 mask) {
    if (dtype == F32) return _mm512_maskz_loadu_ps(mask, (const float *)numbers + i);
    __m256i bits = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)numbers + i);
    if (dtype == F16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* e^x for x <= 0, relative error below 3e-7: 2^n times a polynomial on [-ln2/2, ln2/2]. */
INLINE AVX512 __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-110.0f)); /* e^-110 is 0 in float32 */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* 2^x for x <= 0, relative error below 3e-7: 2^n times a polynomial on [-1/2, 1/2]. */
INLINE AVX512 __m512 power16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-150.0f)); /* 2^-150 is 0 in float32 */
    __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n), p = _mm512_set1_ps(1.3276471993e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6755413345e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5507132735e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022119724e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314696706e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0000000717f));
    return _mm512_scalef_ps(p, n);
}

/* c tanh(x / c), absolute error below 2e-7 c: tanh y = (1 - e) / (1 + e), e = exp(-2 |y|). */
INLINE AVX512 __m512 softcap16(__m512 x, float cap) {
    const __m512 sign = _mm512_set1_ps(-0.0f), one = _mm512_set1_ps(1.0f);
    __m512 y = _mm512_andnot_ps(sign, _mm512_mul_ps(x, _mm512_set1_ps(1 / cap)));
    __m512 e = exp16(_mm512_mul_ps(y, _mm512_set1_ps(-2.0f)));
    __m512 t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    return _mm512_or_ps(_mm512_mul_ps(t, _mm512_set1_ps(cap)), _mm512_and_ps(sign, x));
}

INLINE AVX512 __m512 adjust16(__m512 x, float cap, const float *bias, int64_t slot) {
    if (cap > 0) x = softcap16(x, cap);
    return bias ? _mm512_add_ps(x, _mm512_loadu_ps(bias + slot)) : x;
}

/* Mask of lanes low .. high - 1 of 16; both may be out of range. */
INLINE AVX512 __mmask16 between16(int64_t low, int64_t high) {
    low = low < 0 ? 0 : low > 16 ? 16 : low;
    high = high < 0 ? 0 : high > 16 ? 16 : high;
    return (__mmask16)(((1u << high) - 1) & ~((1u << low) - 1));
}
#endif

#endif
