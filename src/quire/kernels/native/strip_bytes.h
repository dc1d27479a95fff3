/* Products of bytes of a strip (VNNI), for bfloat16 queries and codes of at most eight bits whose scales
 * cover multiples of 64 channels.
 *
 * A query vector is int16 as in strip_integers.h, in two signed bytes; a weight is uint16 in two unsigned
 * bytes: scales are at least 0. One instruction adds four products of bytes per lane, and codes need no conversion. For keys,
 * four channels of sixteen slots are one vector (a transposition, shared by the query vectors), so sums
 * over lanes are not needed. For values, see strip_byte_values.h.
 */
#ifndef QUIRE_STRIP_BYTES_H
#define QUIRE_STRIP_BYTES_H

#define BLOCK_CHANNELS 64 /* channels of a vector of bytes */
#define MAX_IN_BYTES 32639 /* 127 * 256 + 127 */

/* Whether 64 channels share a scale, and their codes are adjacent or in whole segments of the vector. */
static int in_bytes(const attention_args *a, const coding *c) {
    if (a->path != PATH_AVX512_BF16 || a->dtype != BF16 || !c->scales || c->channels % BLOCK_CHANNELS) return 0;
    if (c->kind != BIT_CODES || (c->bits != 2 && c->bits != 4)) return c->kind == INT8_CODES;
    int segment = (int)c->vector_bytes;
    int whole = segment == 16 || segment == 32 || segment % BLOCK_CHANNELS == 0;
    return whole && (c->channels % segment == 0 || segment % c->channels == 0);
}

/* sum + unsigned bytes * signed bytes; GCC 12 spills sums of the intrinsic. */
INLINE AVX512_VNNI __m512i add_bytes(__m512i sum, __m512i of_unsigned, __m512i of_signed) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(of_unsigned), "v"(of_signed));
    return sum;
}
/* The same with four signed bytes for every lane. */
INLINE AVX512_VNNI __m512i add_bytes_of(__m512i sum, __m512i of_unsigned, const int32_t *of_signed) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(of_unsigned), "m"(*of_signed));
    return sum;
}

/* The high or low bytes of a query vector. */
INLINE int8_t *query_bytes(walk *w, int m, int low) {
    return (int8_t *)w->packed + (2 * m + low) * MAX_HEAD_DIM;
}

static AVX512_VNNI void pack_bytes(walk *w, float scale) {
    const int dim = w->head_dim;
    for (int m = 0; m < w->count; m++) {
        __m512 top = _mm512_setzero_ps(), odd = top;
        __m512i total = _mm512_setzero_si512();
        int exponent;
        for (int d = 0; d < dim; d += 16) {
            __m512 x = load16((const uint8_t *)w->half[m], d, BF16, 0xffff);
            top = _mm512_max_ps(top, _mm512_abs_ps(x));
            odd = _mm512_fmadd_ps(x, _mm512_setzero_ps(), odd); /* NaN if a number is not finite */
        }
        float most = top16(top);
        frexpf(most, &exponent); /* most < 2^exponent */
        exponent = exponent < -100 ? -100 : exponent;
        exponent += most > ldexpf(MAX_IN_BYTES, exponent - 15);
        int finite = total16(odd) == 0;
        w->quantum[m] = finite ? ldexpf(scale, exponent - 15) : NAN;
        __m512 over = set16(ldexpf(1, 15 - (finite ? exponent : 0)));
        for (int d = 0; d < dim; d += 16) {
            __m512 x = load16((const uint8_t *)w->half[m], d, BF16, 0xffff);
            __m512i q = finite ? _mm512_cvtps_epi32(_mm512_mul_ps(x, over)) : _mm512_setzero_si512();
            __m512i high = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
            total = _mm512_add_epi32(total, q);
            _mm_storeu_si128((void *)(query_bytes(w, m, 0) + d), _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128((void *)(query_bytes(w, m, 1) + d), _mm512_cvtepi32_epi8(q));
        }
        w->query_total[m] = _mm512_reduce_add_epi32(total);
    }
}

/* Sixteen bytes of each of sixteen slots: four vectors with four bytes of slot i in lane i. */
INLINE AVX512 void turn_bytes(const uint8_t *from, int64_t stride, __m512i *x) {
    __m512i row[4], pair[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        const uint8_t *at = from + r * stride;
        row[r] = _mm512_castsi128_si512(_mm_loadu_si128((const void *)at));
        row[r] = _mm512_mask_broadcast_i32x4(row[r], 0x00f0, _mm_loadu_si128((const void *)(at + 4 * stride)));
        row[r] = _mm512_mask_broadcast_i32x4(row[r], 0x0f00, _mm_loadu_si128((const void *)(at + 8 * stride)));
        row[r] = _mm512_mask_broadcast_i32x4(row[r], 0xf000, _mm_loadu_si128((const void *)(at + 12 * stride)));
    }
    pair[0] = _mm512_unpacklo_epi32(row[0], row[1]), pair[1] = _mm512_unpackhi_epi32(row[0], row[1]);
    pair[2] = _mm512_unpacklo_epi32(row[2], row[3]), pair[3] = _mm512_unpackhi_epi32(row[2], row[3]);
    x[0] = _mm512_unpacklo_epi64(pair[0], pair[2]), x[1] = _mm512_unpackhi_epi64(pair[0], pair[2]);
    x[2] = _mm512_unpacklo_epi64(pair[1], pair[3]), x[3] = _mm512_unpackhi_epi64(pair[1], pair[3]);
}

/* Sixteen keys one after the other, from the ith on; if they are not in one page, copies. */
INLINE const uint8_t *adjacent_keys(const strip_walk *t, int i, uint8_t *copies) {
    const int64_t bytes = t->a->key_coding.vector_bytes;
    const uint8_t *const *key = t->here->key + i;
    if (t->a->page_tokens % 16 == 0 && (t->here->slot + i) % 16 == 0 && i + 16 <= t->here->count)
        return key[0] + t->key_shift;
    for (int j = 0; j < 16; j++) memcpy(copies + j * bytes, key[j] + t->key_shift, (size_t)bytes);
    return copies;
}

/* Add the products with the channels that share a scale, from `first` on, to the logits of all vectors. A
 * byte has codes of `segments` such channels; keys are `stride` bytes apart. */
INLINE AVX512_VNNI void byte_dots(strip_walk *t, int first, const int queries, const int kind,
                                  const int segments, const int64_t stride) {
    const coding *c = &t->a->key_coding;
    const int segment = kind == INT8_CODES ? t->a->head_dim : (int)c->vector_bytes;
    const int bytes = c->channels / segments, run = first / c->run, shift = first / segment * c->bits;
    const __m512i mask = _mm512_set1_epi8((char)(kind == INT8_CODES ? 0x80 : (1 << c->bits) - 1));
    const float factor = kind == INT8_CODES ? 1 : (float)(1 << shift);
    LINED uint8_t copies[16 * MAX_HEAD_DIM];
    for (int i = 0; i < t->here->count; i += 16) {
        const uint8_t *key = adjacent_keys(t, i, copies) + first % segment;
        __m512i high[MAX_QUERIES], low[MAX_QUERIES];
        if (first == 0 && t->ahead_bytes) prefetch_page_ahead(t, 0, i / 16);
        else if (first == 0) prefetch_during_keys(t, i, 16);
#pragma GCC unroll 8
        for (int m = 0; m < queries; m++) {
            high[m] = _mm512_setzero_si512();
            low[m] = _mm512_set1_epi32(kind == INT8_CODES ? -128 * t->w->query_total[m] : 0);
        }
        for (int at = 0; at < bytes; at += 16) {
            __m512i x[4];
            turn_bytes(key + at, stride, x);
            for (int s = 0; s < segments; s++) {
                const int32_t *query = (const int32_t *)(query_bytes(t->w, 0, 0) + first + s * segment + at);
                const __m128i right = _mm_cvtsi32_si128(shift + s * c->bits);
#pragma GCC unroll 4
                for (int n = 0; n < 4; n++) {
                    __m512i y = kind == INT8_CODES ? _mm512_xor_si512(x[n], mask)
                                                   : _mm512_and_si512(_mm512_srl_epi32(x[n], right), mask);
#pragma GCC unroll 8
                    for (int m = 0; m < queries; m++) {
                        high[m] = add_bytes_of(high[m], y, query + (2 * m) * MAX_HEAD_DIM / 4 + n);
                        low[m] = add_bytes_of(low[m], y, query + (2 * m + 1) * MAX_HEAD_DIM / 4 + n);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < queries; m++) {
            __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[m], 8), low[m]));
            sum = _mm512_mul_ps(sum, set16(t->w->quantum[m] * factor));
            if (kind == BIT_CODES) sum = _mm512_mul_ps(sum, read16(t->key_scales[run] + i));
            if (first) sum = _mm512_add_ps(sum, read16(t->logits[m] + i));
            put16(t->logits[m] + i, sum);
        }
    }
}

INLINE AVX512_VNNI void byte_dots_for(strip_walk *t, const int queries) {
    const coding *c = &t->a->key_coding;
    const int64_t stride = c->vector_bytes;
    if (c->kind == INT8_CODES) {
        byte_dots(t, 0, queries, INT8_CODES, 1, stride);
        return;
    }
    for (int first = 0; first < t->a->head_dim; first += c->channels) {
        int segments = c->channels / (int)stride;
        if (segments <= 1) byte_dots(t, first, queries, BIT_CODES, 1, stride);
        else if (segments == 2) byte_dots(t, first, queries, BIT_CODES, 2, stride);
        else byte_dots(t, first, queries, BIT_CODES, 4, stride);
    }
}

/* Results of vectors after the last are not read. */
static AVX512_VNNI void byte_dots_of(strip_walk *t) {
    int queries = t->w->count;
    if (queries == 1) byte_dots_for(t, 1);
    else if (queries == 2) byte_dots_for(t, 2);
    else if (queries == 3) byte_dots_for(t, 3);
    else if (queries == 4) byte_dots_for(t, 4);
    else if (queries <= 6) byte_dots_for(t, 6);
    else byte_dots_for(t, MAX_QUERIES);
}

#endif
