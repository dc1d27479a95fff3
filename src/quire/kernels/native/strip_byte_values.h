/* Weights of a strip and their products with bytes of values (VNNI); see strip_bytes.h. The bytes of four
 * slots are interleaved, and a weight is uint16 in two unsigned bytes, with a factor per run as in
 * strip_integers.h. */
#ifndef QUIRE_STRIP_BYTE_VALUES_H
#define QUIRE_STRIP_BYTE_VALUES_H

#include "strip_bytes.h"

#define MAX_UINT16 65535

/* Number of runs that a block of 64 channels has; its first run has the weights. */
INLINE int runs_of_block(const coding *c) { return c->run < BLOCK_CHANNELS ? BLOCK_CHANNELS / c->run : 1; }

/* Store 64 weights of vector m for run r as bytes. Non-finite weights remain so, by the factor. */
INLINE AVX512_VNNI void split_weights(strip_walk *t, int m, int r, const __m512 *weights) {
    uint8_t *bytes = (uint8_t *)t->weights[m].pairs[r];
    __m512 top = zero16();
    __mmask16 odd = 0;
#pragma GCC unroll 4
    for (int g = 0; g < STRIP / 16; g++) {
        top = max16(top, weights[g]);
        odd |= _mm512_cmp_ps_mask(weights[g], weights[g], _CMP_UNORD_Q);
    }
    float most = top16(top);
    __m512 over = set16(most > 1e-30f ? MAX_UINT16 / most : 0);
    t->weights[m].quantum[r] = odd ? NAN : most / MAX_UINT16;
#pragma GCC unroll 4
    for (int g = 0; g < STRIP / 16; g++) {
        __m512i x = _mm512_cvtps_epi32(mul16(weights[g], over));
        _mm_storeu_si128((void *)(bytes + 16 * g), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
        _mm_storeu_si128((void *)(bytes + STRIP + 16 * g), _mm512_cvtepi32_epi8(x));
    }
}

/* Split the weights of weigh_slots; slots after the last have weight 0. */
static AVX512_VNNI void split_weights_of(strip_walk *t, int m) {
    const coding *v = &t->a->value_coding;
    for (int r = 0; r < v->num_runs; r += runs_of_block(v)) {
        __m512 x[STRIP / 16];
        for (int g = 0; g < STRIP / 16; g++)
            x[g] = _mm512_maskz_loadu_ps(between16(0, t->here->count - 16 * g), t->weights[m].of[r] + 16 * g);
        split_weights(t, m, r, x);
    }
}

/* As weigh_slots and split_weights_of, in registers, for 64 slots that every vector sees. */
static AVX512_VNNI void weigh_whole(strip_walk *t, int m) {
    const coding *c = &t->a->key_coding, *v = &t->a->value_coding;
    walk *w = t->w;
    float *kept = w->logits[m] ? w->logits[m] + t->here->slot : NULL;
    __m512 x[STRIP / 16], top = set16(w->maximum[m]), sum = zero16();
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) {
        x[g] = read16(t->logits[m] + 16 * g);
        if (c->scales && c->kind != BIT_CODES) x[g] = mul16(x[g], read16(t->key_scales[0] + 16 * g));
        for (int r = 0; c->zeros && r < c->num_runs; r++)
            x[g] = fma16(set16(w->query_sums[m][r]), read16(t->key_zeros[r] + 16 * g), x[g]);
        if (t->a->softcap != 0) x[g] = adjust16(x[g], t->a->softcap, w->bias[m], t->here->slot + 16 * g);
        if (kept) put16(kept + 16 * g, x[g]);
        top = max16(top, x[g]);
    }
    float maximum = top16(top);
    t->factor[m] = maximum == w->maximum[m] ? 1 : expf(w->maximum[m] - maximum);
    top = set16(maximum == -INFINITY ? 0 : maximum);
#pragma GCC unroll 4
    for (int g = 0; g < 4; g++) x[g] = exp16(sub16(x[g], top)), sum = add16(sum, x[g]);
    w->maximum[m] = maximum;
    w->sum[m] = w->sum[m] * t->factor[m] + total16(sum);
    for (int r = 0; r < v->num_runs; r += runs_of_block(v)) {
        __m512 y[STRIP / 16], extra = zero16();
#pragma GCC unroll 4
        for (int g = 0; g < STRIP / 16; g++) {
            y[g] = mul16(x[g], read16(t->value_scales[r] + 16 * g));
            if (v->zeros) extra = fma16(x[g], read16(t->value_zeros[r] + 16 * g), extra);
        }
        t->extra[m][r] = v->zeros ? total16(extra) : 0;
        split_weights(t, m, r, y);
    }
}

/* Whether weigh_whole fits. */
static int is_whole(const strip_walk *t) {
    const walk *w = t->w;
    return t->byte_values && !t->a->value_coding.num_outliers && t->here->count == STRIP &&
           w->low[w->count - 1] <= t->here->slot && w->high[0] >= t->here->slot + STRIP;
}

/* The codes of 64 channels, which are in `bytes` bytes. */
INLINE AVX512 __m512i block_codes(const uint8_t *at, const int kind, const int bytes, __m512i right,
                                  __m512i mask) {
    if (kind == INT8_CODES) return _mm512_loadu_si512(at);
    __m512i x = bytes == 64   ? _mm512_loadu_si512(at)
                : bytes == 32 ? _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)at))
                              : _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)at));
    return _mm512_and_si512(_mm512_srlv_epi64(x, right), mask);
}

/* Shifts of the codes of the 64 channels from d on, in `bytes` bytes. */
INLINE AVX512 __m512i shifts_of(const coding *c, int d, const int bytes) {
    const __m512i in_halves = _mm512_setr_epi64(0, 0, 0, 0, 1, 1, 1, 1);
    const __m512i in_quarters = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
    const __m512i segment = bytes == 32 ? in_halves : bytes == 16 ? in_quarters : _mm512_setzero_si512();
    return _mm512_mullo_epi64(_mm512_add_epi64(segment, _mm512_set1_epi64(d / c->vector_bytes)),
                              _mm512_set1_epi64(c->bits));
}

/* Compute weights x codes of `parts` quarters of the 64 channels from d on, from quarter `part` on, in
 * units of quantum. Quarter n has the channels 4 n .. 4 n + 3 of each sixteen. */
INLINE AVX512_VNNI void sum_bytes(strip_walk *t, int m, int d, const int part, const int parts,
                                  const int queries, const int kind, const int width, __m512i (*sums)[4]) {
    const coding *c = &t->a->value_coding;
    const int64_t at = t->value_shift + (kind == INT8_CODES ? d : d % (int)c->vector_bytes);
    const int r = d / c->run;
    const __m512i mask = _mm512_set1_epi8((char)((1 << c->bits) - 1)), right = shifts_of(c, d, width);
    const uint8_t *const *value = t->here->value;
    const int end = (t->here->count + 3) / 4;
    __m512i high[4][4], low[4][4];
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++)
#pragma GCC unroll 4
        for (int n = 0; n < parts; n++) high[k][n] = low[k][n] = _mm512_setzero_si512();
    for (int i = 0; i < end; i++) {
        if (part == 0 && m == 0 && d == 0 && t->ahead_bytes && i % 4 == 0) prefetch_page_ahead(t, 1, i / 4);
        __m512i a = block_codes(value[4 * i] + at, kind, width, right, mask);
        __m512i b = block_codes(value[4 * i + 1] + at, kind, width, right, mask);
        __m512i e = block_codes(value[4 * i + 2] + at, kind, width, right, mask);
        __m512i f = block_codes(value[4 * i + 3] + at, kind, width, right, mask);
        __m512i x[4];
        if (part == 0) {
            __m512i p = _mm512_unpacklo_epi8(a, b), q = _mm512_unpacklo_epi8(e, f);
            x[0] = _mm512_unpacklo_epi16(p, q), x[1] = _mm512_unpackhi_epi16(p, q);
        }
        if (part + parts > 2) {
            __m512i p = _mm512_unpackhi_epi8(a, b), q = _mm512_unpackhi_epi8(e, f);
            x[2] = _mm512_unpacklo_epi16(p, q), x[3] = _mm512_unpackhi_epi16(p, q);
        }
#pragma GCC unroll 4
        for (int k = 0; k < queries; k++) {
            const int32_t *weight = t->weights[m + k].pairs[r] + i;
            __m512i one = _mm512_set1_epi32(weight[0]), two = _mm512_set1_epi32(weight[STRIP / 4]);
#pragma GCC unroll 4
            for (int n = 0; n < parts; n++) {
                high[k][n] = add_bytes(high[k][n], one, x[part + n]);
                low[k][n] = add_bytes(low[k][n], two, x[part + n]);
            }
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++)
#pragma GCC unroll 4
        for (int n = 0; n < parts; n++)
            sums[k][part + n] = _mm512_add_epi32(_mm512_slli_epi32(high[k][n], 8), low[k][n]);
}

/* As add_codes of strip_body.h, to 64 channels. */
INLINE AVX512_VNNI void add_byte_block(strip_walk *t, int m, int d, const int queries, const int kind,
                                       const int width) {
    const coding *c = &t->a->value_coding;
    const int r = d / c->run, shift = kind == INT8_CODES ? 0 : d / (int)c->vector_bytes * c->bits;
    __m512i sums[4][4];
    if (m == 0 && t->ahead_bytes == 0) prefetch_next_values(t, d, d + BLOCK_CHANNELS);
    if (queries == 4) {
        sum_bytes(t, m, d, 0, 2, queries, kind, width, sums);
        sum_bytes(t, m, d, 2, 2, queries, kind, width, sums);
    } else sum_bytes(t, m, d, 0, 4, queries, kind, width, sums);
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) {
        float *out = t->w->out[m + k] + d;
        const __m512 factor = set16(t->factor[m + k]), extra = set16(t->extra[m + k][r]);
        const __m512 quantum = set16(t->weights[m + k].quantum[r] * (float)(1 << shift));
        __m512i *s = sums[k];
        __m512i a = _mm512_shuffle_i32x4(s[0], s[1], 0x88), b = _mm512_shuffle_i32x4(s[2], s[3], 0x88);
        __m512i e = _mm512_shuffle_i32x4(s[0], s[1], 0xdd), f = _mm512_shuffle_i32x4(s[2], s[3], 0xdd);
        __m512i y[4] = {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(e, f, 0x88),
                        _mm512_shuffle_i32x4(a, b, 0xdd), _mm512_shuffle_i32x4(e, f, 0xdd)};
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++)
            put16(out + 16 * n, _mm512_fmadd_ps(_mm512_cvtepi32_ps(y[n]), quantum,
                                                _mm512_fmadd_ps(read16(out + 16 * n), factor, extra)));
    }
}

INLINE AVX512_VNNI void add_bytes_by(strip_walk *t, int m, const int queries) {
    const coding *c = &t->a->value_coding;
    for (int d = 0; d < c->dim; d += BLOCK_CHANNELS) {
        if (c->kind == INT8_CODES) add_byte_block(t, m, d, queries, INT8_CODES, 64);
        else if (c->vector_bytes >= 64) add_byte_block(t, m, d, queries, BIT_CODES, 64);
        else if (c->vector_bytes == 32) add_byte_block(t, m, d, queries, BIT_CODES, 32);
        else add_byte_block(t, m, d, queries, BIT_CODES, 16);
    }
}

static AVX512_VNNI void add_bytes_of_strip(strip_walk *t) {
    for (int m = 0; m < t->w->count && !t->weighed; m++) split_weights_of(t, m);
    for (int m = 0; m < t->w->count; m += 4) {
        int left = t->w->count - m;
        if (left > 3) add_bytes_by(t, m, 4);
        else if (left == 3) add_bytes_by(t, m, 3);
        else if (left == 2) add_bytes_by(t, m, 2);
        else add_bytes_by(t, m, 1);
    }
}

#endif
