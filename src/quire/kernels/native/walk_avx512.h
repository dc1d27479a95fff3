/* Walk over a tile with AVX-512, and with bfloat16 products if the CPU supports them. */
#ifndef QUIRE_WALK_AVX512_H
#define QUIRE_WALK_AVX512_H

#include "walk.h"

#ifdef HAVE_X86
/* The sums of 16 vectors as one vector, sum r in lane r: four rounds of pairwise additions. */
INLINE AVX512 __m512 sums_of(const __m512 *a) {
    __m512 b[8], c[4], d[2];
    for (int i = 0; i < 8; i++)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d low = _mm512_castps_pd(b[2 * i]), high = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    for (int i = 0; i < 2; i++)
        d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88),
                         _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
}

INLINE AVX512 __m512 logits_f32(const walk *w, const tile *t, int m, int dtype, int dim) {
    __m512 sums[TILE];
    for (int i = 0; i < TILE; i++) sums[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16) {
        __mmask16 mask = dim - d >= 16 ? 0xffff : (__mmask16)((1 << (dim - d)) - 1);
        __m512 q = _mm512_maskz_loadu_ps(mask, w->query[m] + d);
        for (int i = 0; i < t->count; i++)
            sums[i] = _mm512_fmadd_ps(q, load16(t->key, (int64_t)i * dim + d, dtype, mask), sums[i]);
    }
    return sums_of(sums);
}

/* Sixteen whole slots: the loop over slots is unrolled, and the sums remain in registers. */
INLINE AVX512 __m512 logits_f32_full(const walk *w, const tile *t, int m, int dtype, int dim) {
    __m512 sums[TILE];
    for (int i = 0; i < TILE; i++) sums[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16) {
        __m512 q = _mm512_loadu_ps(w->query[m] + d);
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++)
            sums[i] = _mm512_fmadd_ps(q, load16(t->key, (int64_t)i * dim + d, dtype, 0xffff), sums[i]);
    }
    return sums_of(sums);
}

INLINE AVX512_BF16 __m512 logits_bf16_full(const walk *w, const tile *t, int m, int dim) {
    __m512 sums[TILE];
    const uint16_t *key = (const uint16_t *)t->key;
    for (int i = 0; i < TILE; i++) sums[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 32) {
        __m512bh q = (__m512bh)_mm512_loadu_si512(w->half[m] + d);
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++)
            sums[i] = _mm512_dpbf16_ps(sums[i], q, (__m512bh)_mm512_loadu_si512(key + i * dim + d));
    }
    return sums_of(sums);
}

/* Cap, mask, update maximum and sum, and write the weights. Returns the factor on the output. */
INLINE AVX512 float take_in16(walk *w, const tile *t, int m, __m512 logits, float softcap,
                              float *weights) {
    int64_t high = w->high[m] - t->slot < t->count ? w->high[m] - t->slot : t->count;
    __mmask16 seen = between16(w->low[m] - t->slot, high);
    if (softcap != 0) logits = adjust16(logits, softcap, w->bias[m], t->slot);
    logits = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), logits);
    if (w->logits[m] && !w->tops[m]) _mm512_mask_storeu_ps(w->logits[m] + t->slot, seen, logits);
    if (!seen) {
        _mm512_storeu_ps(weights, _mm512_setzero_ps());
        return 1;
    }
    float top = _mm512_reduce_max_ps(logits), factor = 1;
    if (top > w->maximum[m]) {
        factor = expf(w->maximum[m] - top);
        w->maximum[m] = top;
    }
    __m512 p = _mm512_maskz_mov_ps(
        seen, exp16(_mm512_sub_ps(logits, _mm512_set1_ps(w->maximum[m]))));
    w->sum[m] = w->sum[m] * factor + _mm512_reduce_add_ps(p);
    _mm512_storeu_ps(weights, p);
    if (w->tops[m]) {
        _mm512_mask_storeu_ps(w->logits[m] + t->slot, seen, p);
        w->tops[m][t->slot / TILE] = w->maximum[m];
    }
    return factor;
}

/* out[m] = out[m] * factor[m] + weights[m] * values, for a constant number of queries. */
INLINE AVX512 void add_values(walk *w, const tile *t, int dtype, int dim, int count,
                              const float (*weights)[TILE], const float *factor) {
    for (int d = 0; d < dim; d += 16) {
        __mmask16 mask = dim - d >= 16 ? 0xffff : (__mmask16)((1 << (dim - d)) - 1);
        __m512 sums[MAX_QUERIES];
#pragma GCC unroll 8
        for (int m = 0; m < count; m++)
            sums[m] = _mm512_mul_ps(_mm512_loadu_ps(w->out[m] + d), _mm512_set1_ps(factor[m]));
        for (int i = 0; i < t->count; i++) {
            __m512 v = load16(t->value, (int64_t)i * dim + d, dtype, mask);
#pragma GCC unroll 8
            for (int m = 0; m < count; m++)
                sums[m] = _mm512_fmadd_ps(_mm512_set1_ps(weights[m][i]), v, sums[m]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) _mm512_storeu_ps(w->out[m] + d, sums[m]);
    }
}

INLINE AVX512 void add_values_of(walk *w, const tile *t, int dtype, const float (*weights)[TILE],
                                 const float *factor) {
    int dim = w->value_dim;
    switch (w->count) {
    case 1: add_values(w, t, dtype, dim, 1, weights, factor); break;
    case 2: add_values(w, t, dtype, dim, 2, weights, factor); break;
    case 3: add_values(w, t, dtype, dim, 3, weights, factor); break;
    case 4: add_values(w, t, dtype, dim, 4, weights, factor); break;
    case 5: add_values(w, t, dtype, dim, 5, weights, factor); break;
    case 6: add_values(w, t, dtype, dim, 6, weights, factor); break;
    case 7: add_values(w, t, dtype, dim, 7, weights, factor); break;
    default: add_values(w, t, dtype, dim, 8, weights, factor); break;
    }
}

INLINE AVX512 void walk_tile_wide(walk *w, const tile *t, int dtype, float softcap) {
    float weights[MAX_QUERIES][TILE], factor[MAX_QUERIES];
    int dim = w->head_dim, full = t->count == TILE && dim % 16 == 0;
    for (int m = 0; m < w->count; m++) {
        __m512 logits = full ? logits_f32_full(w, t, m, dtype, dim) : logits_f32(w, t, m, dtype, dim);
        factor[m] = take_in16(w, t, m, logits, softcap, weights[m]);
    }
    add_values_of(w, t, dtype, (const float(*)[TILE])weights, factor);
}

static AVX512 void walk_tile_avx512(walk *w, const tile *t, int dtype, float softcap) {
    if (dtype == F32) walk_tile_wide(w, t, F32, softcap);
    else if (dtype == BF16) walk_tile_wide(w, t, BF16, softcap);
    else walk_tile_wide(w, t, F16, softcap);
}

static AVX512_BF16 void walk_tile_bf16(walk *w, const tile *t, float scale, float softcap) {
    float weights[MAX_QUERIES][TILE], factor[MAX_QUERIES];
    int dim = w->head_dim;
    for (int m = 0; m < w->count; m++) {
        __m512 logits = _mm512_mul_ps(logits_bf16_full(w, t, m, dim), _mm512_set1_ps(scale));
        factor[m] = take_in16(w, t, m, logits, softcap, weights[m]);
    }
    add_values_of(w, t, BF16, (const float(*)[TILE])weights, factor);
}
#endif

#endif
