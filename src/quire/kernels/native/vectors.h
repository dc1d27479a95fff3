/* Vectors of sixteen (AVX-512) or eight (AVX2) float32; names end with that number, and blocked_body.h
 * is compiled for both.
 *
 *     vecN maskN unitsN          numbers, masks, 32-bit units; units_ofN loads units
 *     zeroN setN readN putN      and read_someN, put_someN with a mask, zeros for other lanes
 *     bytesN                     reads signed bytes
 *     addN subN mulN fmaN maxN   lane by lane
 *     topN totalN                maximum and sum of all lanes
 *     chooseN(mask, a, b)        b if the mask is set, else a
 *     betweenN(low, high)        mask of lanes low .. high - 1; both may be out of range
 *     expN powerN                e^x and 2^x
 *     softcapN narrowN           the soft cap on logits; conversion to bfloat16 or float16
 *     adjustN                    the soft cap, if it is above 0, and biases by slot, if not NULL
 */
#ifndef QUIRE_VECTORS_H
#define QUIRE_VECTORS_H

#include "numbers.h"

#define JOINED(left, right) left##right
#define JOIN(left, right) JOINED(left, right)
#define V(name) JOIN(name, LANES) /* `name` in this many lanes */

#ifdef HAVE_X86

/* ---- sixteen lanes; see also numbers.h ---------------------------------------------------------- */

typedef __m512 vec16;
typedef __mmask16 mask16;

INLINE AVX512 vec16 zero16(void) { return _mm512_setzero_ps(); }
INLINE AVX512 vec16 set16(float x) { return _mm512_set1_ps(x); }
INLINE AVX512 vec16 read16(const void *from) { return _mm512_loadu_ps(from); }
INLINE AVX512 void put16(void *to, vec16 x) { _mm512_storeu_ps(to, x); }
INLINE AVX512 vec16 read_some16(mask16 mask, const float *from) { return _mm512_maskz_loadu_ps(mask, from); }
INLINE AVX512 void put_some16(float *to, mask16 mask, vec16 x) { _mm512_mask_storeu_ps(to, mask, x); }
INLINE AVX512 vec16 bytes16(const uint8_t *from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from)));
}
INLINE AVX512 vec16 add16(vec16 a, vec16 b) { return _mm512_add_ps(a, b); }
INLINE AVX512 vec16 sub16(vec16 a, vec16 b) { return _mm512_sub_ps(a, b); }
INLINE AVX512 vec16 mul16(vec16 a, vec16 b) { return _mm512_mul_ps(a, b); }
INLINE AVX512 vec16 fma16(vec16 a, vec16 b, vec16 sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE AVX512 vec16 max16(vec16 a, vec16 b) { return _mm512_max_ps(a, b); }
INLINE AVX512 float top16(vec16 x) { return _mm512_reduce_max_ps(x); }
INLINE AVX512 float total16(vec16 x) { return _mm512_reduce_add_ps(x); }
INLINE AVX512 vec16 choose16(mask16 mask, vec16 a, vec16 b) { return _mm512_mask_blend_ps(mask, a, b); }

/* Convert to bfloat16, as to_bf16, or float16. */
INLINE AVX512 void narrow16(uint16_t *to, vec16 x, int dtype) {
    if (dtype == F16) {
        _mm256_storeu_si256((void *)to, _mm512_cvtps_ph(x, 0));
        return;
    }
    __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
    __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    __m512i round = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    round = _mm512_mask_or_epi32(_mm512_srli_epi32(round, 16), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), high,
                                 _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((void *)to, _mm512_cvtepi32_epi16(round));
}

/* Transpose sixteen rows of sixteen units. */
INLINE AVX512 void transpose16(__m512i *r) {
    __m512i s[16];
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd);
    }
}

typedef __m512i units16;

INLINE AVX512 units16 no_units16(void) { return _mm512_setzero_si512(); }
INLINE AVX512 units16 as_units16(vec16 x) { return _mm512_castps_si512(x); }
INLINE AVX512 units16 units_of16(const uint8_t *numbers, int64_t i, int dtype) {
    return as_units16(load16(numbers, i, dtype, 0xffff));
}
INLINE AVX512 void put_units16(uint32_t *to, units16 x) { _mm512_storeu_si512(to, x); }

/* ---- eight lanes -------------------------------------------------------------------------------- */

typedef __m256 vec8;
typedef __m256i mask8;
typedef __m256i units8;

INLINE AVX2 vec8 zero8(void) { return _mm256_setzero_ps(); }
INLINE AVX2 vec8 set8(float x) { return _mm256_set1_ps(x); }
INLINE AVX2 vec8 read8(const void *from) { return _mm256_loadu_ps(from); }
INLINE AVX2 void put8(void *to, vec8 x) { _mm256_storeu_ps(to, x); }
INLINE AVX2 vec8 read_some8(mask8 mask, const float *from) { return _mm256_maskload_ps(from, mask); }
INLINE AVX2 void put_some8(float *to, mask8 mask, vec8 x) { _mm256_maskstore_ps(to, mask, x); }
INLINE AVX2 vec8 bytes8(const uint8_t *from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from)));
}
INLINE AVX2 vec8 add8(vec8 a, vec8 b) { return _mm256_add_ps(a, b); }
INLINE AVX2 vec8 sub8(vec8 a, vec8 b) { return _mm256_sub_ps(a, b); }
INLINE AVX2 vec8 mul8(vec8 a, vec8 b) { return _mm256_mul_ps(a, b); }
INLINE AVX2 vec8 fma8(vec8 a, vec8 b, vec8 sum) { return _mm256_fmadd_ps(a, b, sum); }
INLINE AVX2 vec8 max8(vec8 a, vec8 b) { return _mm256_max_ps(a, b); }
INLINE AVX2 vec8 choose8(mask8 mask, vec8 a, vec8 b) {
    return _mm256_blendv_ps(a, b, _mm256_castsi256_ps(mask));
}

INLINE AVX2 float total8(vec8 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

INLINE AVX2 float top8(vec8 x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

INLINE AVX2 mask8 between8(int64_t low, int64_t high) {
    int first = (int)(low < 0 ? 0 : low > 8 ? 8 : low), end = (int)(high < 0 ? 0 : high > 8 ? 8 : high);
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(first - 1)),
                            _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
}

/* e^x for x <= 0 as exp16; 0 for subnormal results, which the exponent shift cannot represent. */
INLINE AVX2 vec8 exp8(vec8 x) {
    __m256 normal = _mm256_cmp_ps(x, set8(-87.0f), _CMP_GE_OQ);
    x = _mm256_max_ps(x, set8(-87.0f));
    __m256 n = _mm256_round_ps(mul8(x, set8(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, set8(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, set8(-2.12194440e-4f), r);
    __m256 p = fma8(set8(1.9875691500e-4f), r, set8(1.3981999507e-3f));
    p = fma8(p, r, set8(8.3334519073e-3f));
    p = fma8(p, r, set8(4.1665795894e-2f));
    p = fma8(p, r, set8(1.6666665459e-1f));
    p = fma8(p, r, set8(5.0000001201e-1f));
    p = fma8(mul8(p, r), r, add8(r, set8(1.0f)));
    __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    return _mm256_and_ps(p, normal);
}

/* 2^x for x <= 0 as power16; 0 for subnormal results. */
INLINE AVX2 vec8 power8(vec8 x) {
    __m256 normal = _mm256_cmp_ps(x, set8(-125.0f), _CMP_GE_OQ);
    x = _mm256_max_ps(x, set8(-125.0f));
    __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = sub8(x, n);
    __m256 p = fma8(set8(1.3276471993e-3f), r, set8(9.6755413345e-3f));
    p = fma8(p, r, set8(5.5507132735e-2f));
    p = fma8(p, r, set8(2.4022119724e-1f));
    p = fma8(p, r, set8(6.9314696706e-1f));
    p = fma8(p, r, set8(1.0000000717f));
    __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    return _mm256_and_ps(p, normal);
}

/* As softcap16. */
INLINE AVX2 vec8 softcap8(vec8 x, float cap) {
    const __m256 sign = set8(-0.0f), one = set8(1.0f);
    __m256 e = exp8(mul8(_mm256_andnot_ps(sign, mul8(x, set8(1 / cap))), set8(-2.0f)));
    __m256 t = _mm256_div_ps(sub8(one, e), add8(one, e));
    return _mm256_or_ps(mul8(t, set8(cap)), _mm256_and_ps(sign, x));
}

INLINE AVX2 vec8 adjust8(vec8 x, float cap, const float *bias, int64_t slot) {
    if (cap > 0) x = softcap8(x, cap);
    return bias ? add8(x, read8(bias + slot)) : x;
}

INLINE AVX2 void narrow8(uint16_t *to, vec8 x, int dtype) {
    if (dtype == F16) {
        _mm_storeu_si128((void *)to, _mm256_cvtps_ph(x, 0));
        return;
    }
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i round = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    round = _mm256_blendv_epi8(_mm256_srli_epi32(round, 16), quiet,
                               _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    round = _mm256_permute4x64_epi64(_mm256_packus_epi32(round, round), 0x08);
    _mm_storeu_si128((void *)to, _mm256_castsi256_si128(round));
}

/* Transpose eight rows of eight units. */
INLINE AVX2 void transpose8(__m256i *r) {
    __m256i s[8], t[8];
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        t[i] = _mm256_unpacklo_epi64(s[i], s[i + 2]);
        t[i + 1] = _mm256_unpackhi_epi64(s[i], s[i + 2]);
        t[i + 2] = _mm256_unpacklo_epi64(s[i + 1], s[i + 3]);
        t[i + 3] = _mm256_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2x128_si256(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2x128_si256(t[i], t[i + 4], 0x31);
    }
}

INLINE AVX2 units8 no_units8(void) { return _mm256_setzero_si256(); }
INLINE AVX2 units8 as_units8(vec8 x) { return _mm256_castps_si256(x); }
INLINE AVX2 units8 units_of8(const uint8_t *numbers, int64_t i, int dtype) {
    return as_units8(load8(numbers, i, dtype));
}
INLINE AVX2 void put_units8(uint32_t *to, units8 x) { _mm256_storeu_si256((void *)to, x); }
#endif

#endif
