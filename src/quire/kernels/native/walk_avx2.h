/* Walk over a tile with AVX2, eight numbers at a time. Dims are multiples of 8. */
#ifndef QUIRE_WALK_AVX2_H
#define QUIRE_WALK_AVX2_H

#include "walk.h"

#ifdef HAVE_X86
/* Four slots at a time, to hide the latency of a product. */
INLINE AVX2 void logits_avx2(const walk *w, const tile *t, int m, int dtype, float *logits) {
    int dim = w->head_dim;
    for (int i = 0; i < t->count; i += 4) {
        __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                          _mm256_setzero_ps()};
        int slots = t->count - i < 4 ? t->count - i : 4;
        for (int d = 0; d < dim; d += 8) {
            __m256 q = _mm256_loadu_ps(w->query[m] + d);
            for (int j = 0; j < slots; j++)
                sums[j] = _mm256_fmadd_ps(q, load8(t->key, (int64_t)(i + j) * dim + d, dtype), sums[j]);
        }
        for (int j = 0; j < slots; j++) logits[i + j] = total8(sums[j]);
    }
}

/* take_in of walk.h, eight weights at a time. */
INLINE AVX2 float take_in_avx2(walk *w, int m, float *logits) {
    vec8 x[TILE / 8], top = set8(w->maximum[m]), sum = zero8();
    for (int i = 0; i < TILE / 8; i++) top = max8(top, x[i] = read8(logits + i * 8));
    float maximum = top8(top);
    if (maximum == -INFINITY) {
        memset(logits, 0, TILE * sizeof(float));
        return 1;
    }
    for (int i = 0; i < TILE / 8; i++) {
        x[i] = exp8(sub8(x[i], set8(maximum)));
        sum = add8(sum, x[i]);
        put8(logits + i * 8, x[i]);
    }
    float factor = maximum == w->maximum[m] ? 1 : expf(w->maximum[m] - maximum);
    w->maximum[m] = maximum;
    w->sum[m] = w->sum[m] * factor + total8(sum);
    return factor;
}

INLINE AVX2 void walk_tile_of(walk *w, const tile *t, int dtype, float softcap) {
    float weights[MAX_QUERIES][TILE], factor[MAX_QUERIES];
    int dim = w->value_dim;
    for (int m = 0; m < w->count; m++) {
        logits_avx2(w, t, m, dtype, weights[m]);
        cap_and_mask(w, t, m, softcap, weights[m]);
        keep_logits(w, t, m, weights[m]);
        factor[m] = take_in_avx2(w, m, weights[m]);
    }
    for (int d = 0; d < dim; d += 8) {
        __m256 sums[MAX_QUERIES];
        for (int m = 0; m < w->count; m++)
            sums[m] = _mm256_mul_ps(_mm256_loadu_ps(w->out[m] + d), _mm256_set1_ps(factor[m]));
        for (int i = 0; i < t->count; i++) {
            __m256 v = load8(t->value, (int64_t)i * dim + d, dtype);
            for (int m = 0; m < w->count; m++)
                sums[m] = _mm256_fmadd_ps(_mm256_set1_ps(weights[m][i]), v, sums[m]);
        }
        for (int m = 0; m < w->count; m++) _mm256_storeu_ps(w->out[m] + d, sums[m]);
    }
}

static AVX2 void walk_tile_avx2(walk *w, const tile *t, int dtype, float softcap) {
    if (dtype == F32) walk_tile_of(w, t, F32, softcap);
    else if (dtype == BF16) walk_tile_of(w, t, BF16, softcap);
    else walk_tile_of(w, t, F16, softcap);
}
#endif

#endif
