/* Words (int16) of integer products: preparation of queries and weights, and vectors of words; names end
 * with the number of float32 in a vector, which has twice as many words:
 *
 *     code_wordsN(at, kind, bits)     neighbouring codes as words; word_bitsN(bits) masks each word
 *     low_wordsN(a, b) high_wordsN    words of two slots in pairs, half of the channels each
 *     first_of_wordsN(low, high)      sums of such pairs for the first N channels, and second_of_wordsN
 *     sums_of_unitsN(v)               the sums of N vectors of int32, sum i in lane i
 */
#ifndef QUIRE_STRIP_WORDS_H
#define QUIRE_STRIP_WORDS_H

#define MAX_INT16 32767
/* Prevents the compiler from loading a vector from memory at each use. */
#define IN_REGISTER(x) __asm__("" : "+x"(x))

static int in_integers(const attention_args *a, const coding *c, int lanes) {
    int codes = c->kind == INT8_CODES || c->kind == BIT_CODES;
    return a->dtype == BF16 && codes && c->run % (2 * lanes) == 0;
}

/* Interleave four query vectors, `words` numbers of each. */
static void pack_integers(walk *w, float scale, int words) {
    for (int m = 0; m < w->count; m++) {
        int16_t *packed = (int16_t *)w->packed + m / 4 * 4 * MAX_HEAD_DIM + m % 4 * words;
        float top = 0, odd = 0; /* odd: not 0 if a number is not finite */
        int exponent;
        for (int d = 0; d < w->head_dim; d++) {
            float x = from_bf16(w->half[m][d]);
            top = fmaxf(top, fabsf(x)), odd += x * 0;
        }
        frexpf(top, &exponent); /* top < 2^exponent */
        w->quantum[m] = odd == 0 ? ldexpf(scale, exponent - 15) : NAN;
        double over = ldexp(1, 15 - exponent);
        for (int d = 0; d < w->head_dim; d++)
            packed[d / words * 4 * words + d % words] =
                (int16_t)(odd == 0 ? lrint(from_bf16(w->half[m][d]) * over) : 0);
    }
}

/* Round weights of vector m times scales, two slots per unit. Non-finite weights remain non-finite. */
static AVX2 void round_weights(strip_walk *t, int m) {
    const int runs = t->a->value_coding.num_runs, count = t->here->count;
    for (int r = 0; r < runs; r++) {
        const float *weights = t->weights[m].of[r];
        __m256 top = zero8(), total = zero8();
        for (int i = 0; i < count; i += 8) {
            __m256 x = read8(weights + i);
            top = max8(top, _mm256_andnot_ps(set8(-0.0f), x)), total = add8(total, x);
        }
        float most = top8(top);
        __m256 over = set8(most > 1e-30f ? MAX_INT16 / most : 0);
        t->weights[m].quantum[r] = most / MAX_INT16 + 0 * total8(total);
        for (int i = 0; i < count; i += 16) {
            __m256i low = _mm256_cvtps_epi32(mul8(read8(weights + i), over));
            __m256i high = _mm256_cvtps_epi32(mul8(read8(weights + i + 8), over));
            _mm256_storeu_si256((void *)(t->weights[m].pairs[r] + i / 2),
                                _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
        }
    }
}

INLINE AVX2 units8 read_units8(const void *from) { return _mm256_loadu_si256(from); }
INLINE AVX512 units16 read_units16(const void *from) { return _mm512_loadu_si512(from); }
INLINE AVX2 units8 word_bits8(int bits) { return _mm256_set1_epi16((short)bits); }
INLINE AVX512 units16 word_bits16(int bits) { return _mm512_set1_epi16((short)bits); }

INLINE AVX2 units8 code_words8(const uint8_t *at, int kind, units8 bits) {
    __m128i codes = _mm_loadu_si128((const void *)at);
    if (kind == INT8_CODES) return _mm256_cvtepi8_epi16(codes);
    return _mm256_and_si256(_mm256_cvtepu8_epi16(codes), bits);
}
INLINE AVX512 units16 code_words16(const uint8_t *at, int kind, units16 bits) {
    __m256i codes = _mm256_loadu_si256((const void *)at);
    if (kind == INT8_CODES) return _mm512_cvtepi8_epi16(codes);
    return _mm512_and_si512(_mm512_cvtepu8_epi16(codes), bits);
}

INLINE AVX2 units8 low_words8(units8 a, units8 b) { return _mm256_unpacklo_epi16(a, b); }
INLINE AVX2 units8 high_words8(units8 a, units8 b) { return _mm256_unpackhi_epi16(a, b); }
INLINE AVX512 units16 low_words16(units16 a, units16 b) { return _mm512_unpacklo_epi16(a, b); }
INLINE AVX512 units16 high_words16(units16 a, units16 b) { return _mm512_unpackhi_epi16(a, b); }

INLINE AVX2 vec8 first_of_words8(units8 low, units8 high) {
    return _mm256_cvtepi32_ps(_mm256_permute2x128_si256(low, high, 0x20));
}
INLINE AVX2 vec8 second_of_words8(units8 low, units8 high) {
    return _mm256_cvtepi32_ps(_mm256_permute2x128_si256(low, high, 0x31));
}
INLINE AVX512 vec16 first_of_words16(units16 low, units16 high) {
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    return _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(low, order, high));
}
INLINE AVX512 vec16 second_of_words16(units16 low, units16 high) {
    const __m512i order = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    return _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(low, order, high));
}

INLINE AVX2 __m256i add_pairs(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
INLINE AVX2 __m256i add_fours(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}
INLINE AVX2 vec8 sums_of_units8(const units8 *v) {
    __m256i low = add_fours(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
    __m256i high = add_fours(add_pairs(v[4], v[5]), add_pairs(v[6], v[7]));
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                                               _mm256_permute2x128_si256(low, high, 0x31)));
}
INLINE AVX512 vec16 sums_of_units16(const units16 *v) {
    vec16 numbers[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) numbers[i] = _mm512_cvtepi32_ps(v[i]);
    return sums_of(numbers);
}

#endif
