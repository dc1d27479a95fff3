/* Selection of the pages that decode rows read, by bounds of their keys; see quire.kernels.sparse.
 *
 * The score of a page for a KV head is one product of its bounds with weights of the query heads. Scores are
 * stored as integers in the order of the floats. The selected pages of a head become its page table.
 */
#ifndef QUIRE_SPARSE_H
#define QUIRE_SPARSE_H

#include "encode.h"

#define BLOCK_PAGES 256 /* pages that a thread scores one after the other */
#define ORDER_PADDING 16

/* Bytes of the bounds of a KV head. */
static inline int64_t bound_bytes(const attention_args *a) {
    return 2 * (int64_t)a->key_coding.dim * (a->sparse->dtype == F32 ? 4 : 2);
}

/* The bounds of a column of a lane. */
static inline const uint8_t *bounds_at(const attention_args *a, const uint8_t *const *at, const int32_t *table, int64_t c) {
    return at ? at[c] : a->sparse->bounds + (int64_t)table[c] * a->page_bytes;
}

static inline float *weights_of(const attention_args *a, int64_t row, int kv_head) {
    return a->sparse->weights + (row * num_kv_heads(a) + kv_head) * 2 * a->key_coding.dim;
}

static inline int32_t *scores_of(const attention_args *a, int64_t row, int kv_head) {
    return a->sparse->scores + (row * num_kv_heads(a) + kv_head) * a->sparse->columns;
}

/* Factors of the minima and the maxima: sums of the negative and of the positive elements of the query heads. */
static void weigh_queries(int64_t begin, int64_t end, void *context) {
    const attention_args *a = context;
    int dim = a->key_coding.dim;
    for (int64_t row = begin; row < end; row++)
        for (int kv_head = 0; kv_head < num_kv_heads(a); kv_head++) {
            float *low = weights_of(a, row, kv_head), *high = low + dim;
            if (!a->sparse->counts[row * a->num_lanes + kv_head / a->heads_per_page]) continue;
            memset(low, 0, 2 * dim * sizeof(float));
            for (int m = 0; m < a->group; m++) {
                int64_t at = query_at(a, (int)row, kv_head * a->group, m);
                for (int d = 0; d < dim; d++) {
                    float x = load_number(a->query, at + d, a->dtype);
                    low[d] += x < 0 ? x : 0, high[d] += x > 0 ? x : 0;
                }
            }
        }
}

INLINE float product_plain(const float *weights, const uint8_t *numbers, int count, int dtype) {
    float sum = 0;
    for (int i = 0; i < count; i++) sum += weights[i] * load_number(numbers, i, dtype);
    return sum;
}
#ifdef HAVE_X86
INLINE AVX2 float product_256(const float *weights, const uint8_t *numbers, int count, int dtype) {
    __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    int i = 0;
    for (; i + 16 <= count; i += 16)
        for (int k = 0; k < 2; k++)
            sums[k] = _mm256_fmadd_ps(_mm256_loadu_ps(weights + i + 8 * k), load8(numbers, i + 8 * k, dtype), sums[k]);
    __m256 all = _mm256_add_ps(sums[0], sums[1]);
    float parts[8], rest = 0;
    _mm256_storeu_ps(parts, all);
    for (int k = 0; k < 8; k++) rest += parts[k];
    for (; i < count; i++) rest += weights[i] * load_number(numbers, i, dtype);
    return rest;
}
INLINE AVX512 float product_512(const float *weights, const uint8_t *numbers, int count, int dtype) {
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int i = 0, k = 0; i < count; i += 16, k ^= 1) {
        __mmask16 inside = count - i >= 16 ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
        sums[k] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(inside, weights + i), load16(numbers, i, dtype, inside), sums[k]);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
}
#endif

/* Score BLOCK_PAGES pages of a lane for the KV heads of its pages. Heads are the inner loop: their bounds are
 * adjacent in a page. */
#define SCORE_PAGES(name, target, product)                                                                       \
    static target void name(int64_t begin, int64_t end, void *context) {                                         \
        const attention_args *a = context;                                                                       \
        const sparse_args *s = a->sparse;                                                                        \
        int64_t blocks = (s->columns + BLOCK_PAGES - 1) / BLOCK_PAGES, bytes = bound_bytes(a);                    \
        for (int64_t item = begin; item < end; item++) {                                                         \
            int64_t row = item / blocks / a->num_lanes, block = item % blocks;                                   \
            int number = (int)(item / blocks % a->num_lanes), kv_head = number * a->heads_per_page;              \
            int64_t held = s->held[row * a->num_lanes + number];                                                 \
            int64_t pages = (held + a->page_tokens - 1) / a->page_tokens, last = (block + 1) * BLOCK_PAGES;      \
            const int32_t *table = table_of(a, (int)row, number);                                                \
            const uint8_t *const *at = s->at ? s->at + (row * a->num_lanes + number) * s->columns : NULL;        \
            if (!s->counts[row * a->num_lanes + number]) continue;                                               \
            for (int64_t c = block * BLOCK_PAGES; c < last && c < pages; c++) {                                  \
                const uint8_t *bounds = bounds_at(a, at, table, c);                                              \
                if (c + 1 < pages)                                                                               \
                    for (int64_t i = 0; i < a->heads_per_page * bytes; i += 64)                                  \
                        __builtin_prefetch(bounds_at(a, at, table, c + 1) + i);                                  \
                int always = c < s->sinks[row] || c >= pages - s->recent[row];                                   \
                for (int h = 0; h < a->heads_per_page; h++) {                                                    \
                    const float *weights = weights_of(a, row, kv_head + h);                                      \
                    float score = product(weights, bounds + h * bytes, 2 * a->key_coding.dim, s->dtype) + 0.0f;  \
                    scores_of(a, row, kv_head + h)[c] = always ? INT32_MAX : in_order(bits_of(score));           \
                }                                                                                                \
            }                                                                                                    \
        }                                                                                                        \
    }

SCORE_PAGES(score_pages_plain, , product_plain)
#ifdef HAVE_X86
SCORE_PAGES(score_pages_256, AVX2, product_256)
SCORE_PAGES(score_pages_512, AVX512, product_512)
#endif

INLINE int64_t count_from(const int32_t *scores, int64_t count, int32_t least) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++) found += scores[i] >= least;
    return found;
}

/* The pages with the best scores of each KV head, in their order; of equal scores the first. */
INLINE void pick_pages(int64_t begin, int64_t end, const attention_args *a) {
    const sparse_args *s = a->sparse;
    for (int64_t item = begin; item < end; item++) {
        int64_t row = item / num_kv_heads(a), lane_at;
        int kv_head = (int)(item % num_kv_heads(a)), number = kv_head / a->heads_per_page;
        lane_at = row * a->num_lanes + number;
        int32_t wanted = s->counts[lane_at], *scores = scores_of(a, row, kv_head);
        if (!wanted) continue;
        int64_t pages = (s->held[lane_at] + a->page_tokens - 1) / a->page_tokens, low = INT32_MIN, high = INT32_MAX;
        int64_t padded = (pages + ORDER_PADDING - 1) / ORDER_PADDING * ORDER_PADDING;
        for (int64_t i = pages; i < padded; i++) scores[i] = INT32_MIN;
        while (low < high) { /* the largest score that enough pages have */
            int64_t middle = low + (high - low + 1) / 2;
            if (count_from(scores, padded, (int32_t)middle) >= wanted) low = middle;
            else high = middle - 1;
        }
        int64_t equal = wanted - (low == INT32_MAX ? 0 : count_from(scores, padded, (int32_t)low + 1)), found = 0;
        const int32_t *table = table_of(a, (int)row, number);
        int32_t *picked = s->picks + item * 2 * s->picked, *columns = picked + s->picked;
        for (int64_t c = 0; c < pages; c++) {
            if (scores[c] < low || (scores[c] == low && equal-- <= 0)) continue;
            picked[found] = table[c], columns[found++] = (int32_t)c;
        }
    }
}

static void pick_pages_plain(int64_t begin, int64_t end, void *context) { pick_pages(begin, end, context); }
#ifdef HAVE_X86
static AVX2 void pick_pages_256(int64_t begin, int64_t end, void *context) { pick_pages(begin, end, context); }
static AVX512 void pick_pages_512(int64_t begin, int64_t end, void *context) { pick_pages(begin, end, context); }
#endif

#endif
