/* Integer products of a strip, for bfloat16 queries on AVX2. Included by strip.h.
 *
 * Codes are converted to int16, which needs half the vectors of float32, and one instruction adds two
 * products per lane. A query vector is stored as int16 times a power of two, which is exact for numbers
 * down to 1/128 of its largest; sums of int32 cannot overflow. Weights of a strip are int16 times a
 * factor per run: the error is at most 2^-16 of the strip's largest weight; a bfloat16 output has a
 * precision of 2^-9. Logits, and therefore column sums, do not have this error. Float32 queries use
 * float32 products.
 */
#ifndef QUIRE_STRIP_INTEGERS_H
#define QUIRE_STRIP_INTEGERS_H

#define MOST_INT16 32767
/* Prevents the compiler from loading a vector from memory at each use. */
#define IN_REGISTER(x) __asm__("" : "+x"(x))

static int in_integers(const attention_args *a, const coding *c, int lanes) {
    int codes = c->kind == INT8_CODES || c->kind == BIT_CODES;
    return lanes == 8 && a->dtype == BF16 && codes && c->run % 16 == 0;
}

/* Interleave four query vectors, 16 numbers of each. */
static void pack_integers(walk *w, float scale) {
    for (int m = 0; m < w->count; m++) {
        int16_t *packed = (int16_t *)w->packed + m / 4 * 4 * MAX_HEAD_DIM + m % 4 * 16;
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
            packed[d / 16 * 64 + d % 16] =
                (int16_t)(odd == 0 ? lrint(from_bf16(w->half[m][d]) * over) : 0);
    }
}

INLINE AVX2 __m256i code_words(const uint8_t *at, int kind, __m256i bits) {
    __m128i codes = _mm_loadu_si128((const void *)at);
    if (kind == INT8_CODES) return _mm256_cvtepi8_epi16(codes);
    return _mm256_and_si256(_mm256_cvtepu8_epi16(codes), bits);
}

INLINE AVX2 __m256i add_pairs(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

INLINE AVX2 __m256i add_fours(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* The sums of eight vectors, sum i in lane i. */
INLINE AVX2 __m256i sums_of_words(const __m256i *v) {
    __m256i low = add_fours(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
    __m256i high = add_fours(add_pairs(v[4], v[5]), add_pairs(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                            _mm256_permute2x128_si256(low, high, 0x31));
}

/* Compute products of `queries` vectors from m on with run r of the strip's codes. */
INLINE AVX2 void dots_of_run(strip_walk *t, int m, int r, const int queries, const int kind) {
    const coding *c = &t->a->key_coding;
    const int slots = 8 / queries;
    const strip *s = t->here;
    const int16_t *query = (const int16_t *)t->w->packed + m * MAX_HEAD_DIM + r * c->run * 4;
    const __m256i bits = _mm256_set1_epi16((short)t->key_places.runs[r].bits);
    const int64_t at = t->key_shift + t->key_places.runs[r].at;
    for (int i = 0; i < s->count; i += slots) {
        __m256i sums[8];
        if (m == 0 && r == 0) prefetch_during_keys(t, i, slots);
#pragma GCC unroll 8
        for (int n = 0; n < 8; n++) sums[n] = _mm256_setzero_si256();
        for (int d = 0; d < c->run; d += 16) {
            __m256i x[8];
#pragma GCC unroll 8
            for (int j = 0; j < slots; j++) x[j] = code_words(s->key[i + j] + at + d, kind, bits);
#pragma GCC unroll 4
            for (int k = 0; k < queries; k++) {
                __m256i q = _mm256_loadu_si256((const void *)(query + d * 4 + k * 16));
                IN_REGISTER(q);
#pragma GCC unroll 8
                for (int j = 0; j < slots; j++) {
                    sums[j * queries + k] =
                        _mm256_add_epi32(sums[j * queries + k], _mm256_madd_epi16(q, x[j]));
                    IN_REGISTER(sums[j * queries + k]);
                }
            }
        }
        put8(t->dots + i * queries, _mm256_cvtepi32_ps(sums_of_words(sums)));
    }
}

/* As dots of strip_body.h. */
INLINE AVX2 void integer_dots(strip_walk *t, int m, const int queries, const int kind) {
    const int num_runs = kind == BIT_CODES ? t->a->key_coding.num_runs : 1;
    for (int r = 0; r < num_runs; r++) {
        dots_of_run(t, m, r, queries, kind);
        for (int k = 0; k < queries; k++) {
            float quantum = t->w->quantum[m + k], *logits = t->logits[m + k];
            if (kind != BIT_CODES)
                for (int i = 0; i < STRIP; i++) logits[i] = t->dots[i * queries + k] * quantum;
            else
                for (int i = 0; i < STRIP; i++)
                    logits[i] = t->dots[i * queries + k] * quantum * t->key_scales[r][i] + (r ? logits[i] : 0);
        }
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
        __m256 over = set8(most > 1e-30f ? MOST_INT16 / most : 0);
        t->weights[m].quantum[r] = most / MOST_INT16 + 0 * total8(total);
        for (int i = 0; i < count; i += 16) {
            __m256i low = _mm256_cvtps_epi32(mul8(read8(weights + i), over));
            __m256i high = _mm256_cvtps_epi32(mul8(read8(weights + i + 8), over));
            _mm256_storeu_si256((void *)(t->weights[m].pairs[r] + i / 2),
                                _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
        }
    }
}

/* Prefetch a share of the next strip's keys, in proportion to channels first .. end - 1, to limit the
 * number of outstanding cache lines. */
static inline void prefetch_during_values(const strip_walk *t, int first, int end) {
    int dim = t->a->head_dim, last = STRIP * end / dim;
    if (t->next == NULL) return;
    if (last > t->next->count) last = t->next->count;
    for (int i = STRIP * first / dim; i < last; i += 2)
        prefetch(t->next->key[i] + t->next_key_shift, 2 * t->a->key_coding.vector_bytes);
}

/* As add_codes of strip_body.h, to `units` times 16 channels. */
INLINE AVX2 void add_words(strip_walk *t, int64_t at, int m, int r, int d, const int queries,
                           const int units, const int kind) {
    const __m256i bits = _mm256_set1_epi16((short)t->value_places.runs[r].bits);
    __m256i sums[8];
#pragma GCC unroll 8
    for (int n = 0; n < queries * units * 2; n++) sums[n] = _mm256_setzero_si256();
    const int32_t *pairs[4];
    const uint8_t *const *value = t->here->value;
    const int64_t end = (t->here->count + 1) / 2;
    if (m == 0) prefetch_during_values(t, d, d + units * 16);
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) pairs[k] = t->weights[m + k].pairs[r];
    for (int64_t i = 0; i < end; i++) {
        __m256i x[8];
#pragma GCC unroll 4
        for (int u = 0; u < units; u++) {
            __m256i a = code_words(value[i * 2] + at + u * 16, kind, bits);
            __m256i b = code_words(value[i * 2 + 1] + at + u * 16, kind, bits);
            x[u * 2] = _mm256_unpacklo_epi16(a, b), x[u * 2 + 1] = _mm256_unpackhi_epi16(a, b);
        }
#pragma GCC unroll 4
        for (int k = 0; k < queries; k++) {
            __m256i pair = _mm256_set1_epi32(pairs[k][i]);
#pragma GCC unroll 8
            for (int n = 0; n < units * 2; n++) {
                sums[k * units * 2 + n] =
                    _mm256_add_epi32(sums[k * units * 2 + n], _mm256_madd_epi16(pair, x[n]));
                IN_REGISTER(sums[k * units * 2 + n]);
            }
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) {
        const __m256 factor = set8(t->factor[m + k]), extra = set8(t->extra[m + k][r]);
        const __m256 quantum = set8(t->weights[m + k].quantum[r]);
#pragma GCC unroll 4
        for (int u = 0; u < units; u++) {
            float *out = t->w->out[m + k] + d + u * 16;
            __m256i a = sums[(k * units + u) * 2], b = sums[(k * units + u) * 2 + 1];
            __m256 low = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, 0x20));
            __m256 high = _mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, 0x31));
            put8(out, fma8(low, quantum, fma8(read8(out), factor, extra)));
            put8(out + 8, fma8(high, quantum, fma8(read8(out + 8), factor, extra)));
        }
    }
}

/* Add weights x codes to all channels. */
INLINE AVX2 void add_strip_words(strip_walk *t, int m, const int queries, const int kind) {
    const coding *c = &t->a->value_coding;
    const int units = 4 / queries;
    for (int r = 0; r < c->num_runs; r++) {
        int64_t at = t->value_shift + t->value_places.runs[r].at;
        int d = 0, first = r * c->run;
        for (; d + units * 16 <= c->run; d += units * 16)
            add_words(t, at + d, m, r, first + d, queries, units, kind);
        for (; d < c->run; d += 16) add_words(t, at + d, m, r, first + d, queries, 1, kind);
    }
}

static AVX2 void integer_dots_of(strip_walk *t) {
    if (t->a->key_coding.kind == INT8_CODES) FOR_QUERIES(integer_dots, INT8_CODES)
    else FOR_QUERIES(integer_dots, BIT_CODES)
}

static AVX2 void add_integers_of_strip(strip_walk *t) {
    for (int m = 0; m < t->w->count; m++) round_weights(t, m);
    if (t->a->value_coding.kind == INT8_CODES) FOR_QUERIES(add_strip_words, INT8_CODES)
    else FOR_QUERIES(add_strip_words, BIT_CODES)
}

#endif
