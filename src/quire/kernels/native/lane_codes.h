/* Codes as vectors of float32, and sums of vectors; names end with the number of lanes:
 *
 *     codeN(at, kind, dtype, bits)   N neighbouring codes as numbers; `bits` masks one code in a byte
 *     bitsN(bits)                    `bits` in every lane
 *     sumsN(v)                       the sums of N vectors, sum i in lane i
 *     even_bf16N(at) odd_bf16N(at)   the even or odd numbers of 2 * N bfloat16
 *     first_of_pairsN(even, odd)     the first N of 2 * N numbers in order, and second_of_pairsN
 *     load_numbersN(at, dtype)       N neighbouring numbers
 */
#ifndef QUIRE_LANE_CODES_H
#define QUIRE_LANE_CODES_H

#include "vectors.h"
#include "walk_avx512.h"

INLINE AVX512 units16 bits16(int bits) { return _mm512_set1_epi32(bits); }
INLINE AVX2 units8 bits8(int bits) { return _mm256_set1_epi32(bits); }

INLINE AVX512 vec16 code16(const uint8_t *at, int kind, int dtype, units16 bits) {
    if (kind == PLAIN_NUMBERS) return load16(at, 0, dtype, 0xffff);
    __m128i codes = _mm_loadu_si128((const void *)at);
    if (kind == INT8_CODES) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    if (kind == FP8_CODES) {
        __m256i wide = _mm256_cvtepi8_epi16(codes);
        __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16((short)0x8000));
        __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
        return _mm512_cvtph_ps(_mm256_or_si256(sign, rest));
    }
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_cvtepu8_epi32(codes), bits));
}

INLINE AVX2 vec8 code8(const uint8_t *at, int kind, int dtype, units8 bits) {
    if (kind == PLAIN_NUMBERS) return load8(at, 0, dtype);
    __m128i codes = _mm_loadl_epi64((const void *)at);
    if (kind == INT8_CODES) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    if (kind == FP8_CODES) {
        __m128i wide = _mm_cvtepi8_epi16(codes);
        __m128i sign = _mm_and_si128(wide, _mm_set1_epi16((short)0x8000));
        __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
        return _mm256_cvtph_ps(_mm_or_si128(sign, rest));
    }
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_cvtepu8_epi32(codes), bits));
}

/* Convert one float16 per lane to float32. */
INLINE AVX512 vec16 halves16(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }
INLINE AVX2 vec8 halves8(const void *from) { return _mm256_cvtph_ps(_mm_loadu_si128(from)); }

INLINE AVX512 vec16 load_numbers16(const uint8_t *at, int dtype) { return load16(at, 0, dtype, 0xffff); }
INLINE AVX2 vec8 load_numbers8(const uint8_t *at, int dtype) { return load8(at, 0, dtype); }

INLINE AVX512 vec16 even_bf16_16(const uint8_t *at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(at), 16));
}
INLINE AVX512 vec16 odd_bf16_16(const uint8_t *at) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(at), _mm512_set1_epi32((int)0xffff0000)));
}
INLINE AVX2 vec8 even_bf16_8(const uint8_t *at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const void *)at), 16));
}
INLINE AVX2 vec8 odd_bf16_8(const uint8_t *at) {
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_loadu_si256((const void *)at), _mm256_set1_epi32((int)0xffff0000)));
}

INLINE AVX512 vec16 first_of_pairs16(vec16 even, vec16 odd) {
    const __m512i order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(even, order, odd);
}
INLINE AVX512 vec16 second_of_pairs16(vec16 even, vec16 odd) {
    const __m512i order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(even, order, odd);
}
INLINE AVX2 vec8 first_of_pairs8(vec8 even, vec8 odd) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd), 0x20);
}
INLINE AVX2 vec8 second_of_pairs8(vec8 even, vec8 odd) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd), 0x31);
}

INLINE AVX512 vec16 sums16(const vec16 *v) { return sums_of(v); }
INLINE AVX2 vec8 sums8(const vec8 *v) {
    vec8 low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    vec8 high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

#endif
