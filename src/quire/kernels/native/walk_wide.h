/* Thirty-two slots at a time, all seen by every vector, in bfloat16: the fast path of decoding.
 *
 * There is one softmax per 32 slots. All products are dot products of pairs: the values of two slots
 * are interleaved to match a pair of weights. The cache lines of the next 32 slots are prefetched one
 * by one between products, because prefetching all at once would stall on line fill buffers. More slots
 * at a time would need less arithmetic, but the current and the next slots would exceed the L1 cache.
 */
#ifndef QUIRE_WALK_WIDE_H
#define QUIRE_WALK_WIDE_H

#include "walk_avx512.h"

#define WIDE 32
#define WIDE_TILES 2

/* Two runs of sixteen contiguous slots; `next_` may repeat them at the end. */
typedef struct {
    const uint8_t *key[WIDE_TILES], *value[WIDE_TILES];
    const uint8_t *next_key[WIDE_TILES], *next_value[WIDE_TILES];
    int64_t slot;
} wide_tile;

#ifdef HAVE_X86
/* Compute logits of vector m with sixteen slots, unscaled. Each vector prefetches its share of `next`. */
INLINE AVX512_BF16 __m512 wide_logits(const walk *w, const uint8_t *key, const uint8_t *next, int m,
                                      int count, int dim) {
    __m512 sums[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) {
        sums[i] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int d = 0; d < dim; d += 32) {
            int64_t at = ((int64_t)i * dim + d) * 2;
            if (i * count / TILE == m) __builtin_prefetch(next + at, 0, 2);
            sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_loadu_si512(w->half[m] + d),
                                       (__m512bh)_mm512_loadu_si512(key + at));
        }
    }
    return sums_of(sums);
}

/* Convert logits [32] to weights in pairs [16]; returns the factor on the output. */
INLINE AVX512_BF16 float wide_weights(walk *w, int m, int64_t slot, float softcap, __m512 *logits,
                                      uint32_t *weights) {
    __m512 top = _mm512_set1_ps(w->maximum[m]), sum = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int g = 0; g < WIDE_TILES; g++) {
        if (softcap != 0) logits[g] = adjust16(logits[g], softcap, w->bias[m], slot + g * TILE);
        if (w->logits[m] && !w->tops[m]) _mm512_storeu_ps(w->logits[m] + slot + g * TILE, logits[g]);
        top = _mm512_max_ps(top, logits[g]);
    }
    float maximum = _mm512_reduce_max_ps(top), factor = 1;
    if (maximum > w->maximum[m]) {
        factor = expf(w->maximum[m] - maximum);
        w->maximum[m] = maximum;
    }
    top = _mm512_set1_ps(maximum);
#pragma GCC unroll 2
    for (int g = 0; g < WIDE_TILES; g++) {
        __m512 e = exp16(_mm512_sub_ps(logits[g], top));
        sum = _mm512_add_ps(sum, e);
        if (w->tops[m]) {
            _mm512_storeu_ps(w->logits[m] + slot + g * TILE, e);
            w->tops[m][slot / TILE + g] = maximum;
        }
        _mm256_storeu_si256((void *)(weights + g * TILE / 2), (__m256i)_mm512_cvtneps_pbh(e));
    }
    w->sum[m] = w->sum[m] * factor + _mm512_reduce_add_ps(sum);
    return factor;
}

/* out = out * factor + weights * values, 32 dimensions at a time. Interleaving orders blocks of four
 * dimensions as 0 2 4 6 | 1 3 5 7. */
INLINE AVX512_BF16 void wide_values(walk *w, const wide_tile *t, int dim, int count,
                                    const uint32_t (*weights)[WIDE / 2], const float *factor) {
    int64_t line = 0, run = (int64_t)TILE * dim * 2; /* next values, in the order of addresses */
    for (int d = 0; d < dim; d += 32) {
        __m512 even[MAX_QUERIES], odd[MAX_QUERIES];
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            __m512 scale = _mm512_set1_ps(factor[m]);
            __m512 a = _mm512_mul_ps(_mm512_loadu_ps(w->out[m] + d), scale);
            __m512 b = _mm512_mul_ps(_mm512_loadu_ps(w->out[m] + d + 16), scale);
            even[m] = _mm512_shuffle_f32x4(a, b, 0x88);
            odd[m] = _mm512_shuffle_f32x4(a, b, 0xdd);
        }
        for (int g = 0; g < WIDE_TILES; g++) {
            const uint8_t *value = t->value[g] + 2 * d;
#pragma GCC unroll 8
            for (int p = 0; p < TILE / 2; p++) {
                int64_t one = (int64_t)(2 * p) * dim * 2, two = one + dim * 2;
                __m512i a = _mm512_loadu_si512(value + one), b = _mm512_loadu_si512(value + two);
                const uint8_t *next = t->next_value[line / run] + line % run;
                __builtin_prefetch(next, 0, 2);
                __builtin_prefetch(next + 64, 0, 2);
                line += 128;
                __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b);
                __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
                for (int m = 0; m < count; m++) {
                    __m512bh pair = (__m512bh)_mm512_set1_epi32((int)weights[m][g * TILE / 2 + p]);
                    even[m] = _mm512_dpbf16_ps(even[m], pair, low);
                    odd[m] = _mm512_dpbf16_ps(odd[m], pair, high);
                }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            __m512 a = _mm512_shuffle_f32x4(even[m], odd[m], 0x44);
            __m512 b = _mm512_shuffle_f32x4(even[m], odd[m], 0xee);
            _mm512_storeu_ps(w->out[m] + d, _mm512_shuffle_f32x4(a, a, 0xd8));
            _mm512_storeu_ps(w->out[m] + d + 16, _mm512_shuffle_f32x4(b, b, 0xd8));
        }
    }
}

INLINE AVX512_BF16 void walk_wide_of(walk *w, const wide_tile *t, float scale, float softcap, int dim,
                                     int values, int count) {
    uint32_t weights[MAX_QUERIES][WIDE / 2];
    float factor[MAX_QUERIES];
#pragma GCC unroll 8
    for (int m = 0; m < count; m++) {
        __m512 logits[WIDE_TILES];
        for (int g = 0; g < WIDE_TILES; g++)
            logits[g] = _mm512_mul_ps(
                wide_logits(w, t->key[g], t->next_key[g], m, count, dim), _mm512_set1_ps(scale));
        factor[m] = wide_weights(w, m, t->slot, softcap, logits, weights[m]);
    }
    wide_values(w, t, values, count, (const uint32_t(*)[WIDE / 2])weights, factor);
}

/* Compile-time constants, so that the query and the addresses remain in registers. */
#define WALK_WIDE(DIM, VALUES)                                                                     \
    static AVX512_BF16 void walk_wide_##DIM(walk *w, const wide_tile *t, float scale, float softcap) { \
        switch (w->count) {                                                                        \
        case 1: walk_wide_of(w, t, scale, softcap, DIM, VALUES, 1); break;                         \
        case 2: walk_wide_of(w, t, scale, softcap, DIM, VALUES, 2); break;                         \
        case 3: walk_wide_of(w, t, scale, softcap, DIM, VALUES, 3); break;                         \
        case 4: walk_wide_of(w, t, scale, softcap, DIM, VALUES, 4); break;                         \
        case 5: walk_wide_of(w, t, scale, softcap, DIM, VALUES, 5); break;                         \
        case 6: walk_wide_of(w, t, scale, softcap, DIM, VALUES, 6); break;                         \
        case 7: walk_wide_of(w, t, scale, softcap, DIM, VALUES, 7); break;                         \
        default: walk_wide_of(w, t, scale, softcap, DIM, VALUES, 8); break;                        \
        }                                                                                          \
    }
WALK_WIDE(64, 64)
WALK_WIDE(96, 96)
WALK_WIDE(128, 128)
WALK_WIDE(192, 128)
WALK_WIDE(256, 256)

static int has_wide(int dim, int values) {
    return dim == 192 ? values == 128 : dim == values && (dim == 64 || dim == 96 || dim == 128 || dim == 256);
}

static AVX512_BF16 void walk_wide(walk *w, const wide_tile *t, float scale, float softcap) {
    if (w->head_dim == 64) walk_wide_64(w, t, scale, softcap);
    else if (w->head_dim == 96) walk_wide_96(w, t, scale, softcap);
    else if (w->head_dim == 128) walk_wide_128(w, t, scale, softcap);
    else if (w->head_dim == 192) walk_wide_192(w, t, scale, softcap);
    else walk_wide_256(w, t, scale, softcap);
}
#endif

#endif
