/* Adds the attention of a step's queries to the statistics of slots.
 *
 * Column sums of a row with one token are that query's weights. The query heads of a KV head are
 * reduced first, then weights are measured; the statistics of new slots are overwritten. Column sums of
 * a head are contiguous, so weights are processed RUN slots at a time. Statistics are contiguous only
 * inside a page, so the pages of a run are prefetched.
 */
#ifndef QUIRE_TALLY_H
#define QUIRE_TALLY_H

#include <string.h>

#include "numbers.h"

#define RUN 256
#ifndef INLINE
#define INLINE static inline
#endif

enum { COUNT_SUM = 0, COUNT_SQUARES = 1, COUNT_LOW = 2 };

/* Reduce over the heads of a group, for consecutive slots. */
INLINE void reduce_heads(const tally_args *a, const float *restrict sums, int run, float *restrict weights) {
    memcpy(weights, sums, run * sizeof(float));
    for (int g = 1; g < a->group; g++) {
        const float *restrict more = sums + g * a->sums_stride;
        if (a->heads == HEADS_MAX)
            for (int i = 0; i < run; i++) weights[i] = more[i] > weights[i] ? more[i] : weights[i];
        else
            for (int i = 0; i < run; i++) weights[i] += more[i];
    }
    if (a->heads == HEADS_MEAN && a->group > 1)
        for (int i = 0; i < run; i++) weights[i] /= (float)a->group;
}

INLINE void measure_weights(const tally_args *a, float *weights, int run, int64_t seen) {
    float low = 1.0f / (float)seen;
    if (a->count == COUNT_SQUARES)
        for (int i = 0; i < run; i++) weights[i] *= weights[i];
    if (a->count == COUNT_LOW)
        for (int i = 0; i < run; i++) weights[i] = weights[i] < low ? 1.0f : 0.0f;
}

/* Add weights to the statistics of slots of one page; slots from `old` on are new and overwritten. */
INLINE void add_weights(float *restrict numbers, const float *restrict weights, int64_t run, int64_t old) {
    if (run == 16 && old >= 16) {
        for (int i = 0; i < 16; i++) numbers[i] += weights[i];
        return;
    }
    for (int64_t i = 0; i < run; i++) numbers[i] = (i < old ? numbers[i] : 0) + weights[i];
}

INLINE float *numbers_at(const tally_args *a, const int32_t *pages, int head, int64_t slot) {
    float *page = (float *)(a->numbers + pages[slot / a->page_tokens] * a->page_bytes);
    return page + (int64_t)head * a->page_tokens + slot % a->page_tokens;
}

/* Prefetch the statistics of a lane, which are scattered over its pages. */
INLINE void prefetch_numbers(const tally_args *a, int row, int kv_head) {
    int number = kv_head / a->heads_per_page, head = kv_head % a->heads_per_page;
    int64_t slots = a->slots[(int64_t)row * a->num_lanes + number], tokens = a->page_tokens;
    const int32_t *pages = a->table + a->table_rows[row] * a->table_row_stride +
                           (a->first_lane + number) * a->table_lane_stride;
    for (int64_t slot = 0; slot < slots; slot += tokens) {
        const uint8_t *page = a->numbers + *pages++ * a->page_bytes + head * tokens * (int64_t)sizeof(float);
        for (int64_t at = 0; at < tokens * (int64_t)sizeof(float); at += 64) __builtin_prefetch(page + at, 1);
    }
}

/* Add the column sums of slots first .. end - 1, at most RUN, of row `row` of `step_rows`. */
INLINE void tally_run_by(const tally_args *a, int row, int kv_head, int64_t first, int64_t end) {
    int number = kv_head / a->heads_per_page, head = kv_head % a->heads_per_page;
    int64_t slots = a->slots[(int64_t)row * a->num_lanes + number], old = slots - a->fresh[row], run;
    const int32_t *pages = a->table + a->table_rows[row] * a->table_row_stride +
                           (a->first_lane + number) * a->table_lane_stride;
    int64_t num_heads = (int64_t)a->num_lanes * a->heads_per_page * a->group;
    const float *sums = a->sums + (a->step_rows[row] * num_heads + kv_head * a->group) * a->sums_stride;
    float weights[RUN];
    reduce_heads(a, sums + first, (int)(end - first), weights);
    measure_weights(a, weights, (int)(end - first), slots);
    for (int64_t slot = first; slot < end; slot += run) {
        run = a->page_tokens - slot % a->page_tokens;
        if (run > end - slot) run = end - slot;
        add_weights(numbers_at(a, pages, head, slot), weights + slot - first, run, old - slot);
    }
}

static void tally_run_plain(const tally_args *a, int row, int kv_head, int64_t first, int64_t end) {
    tally_run_by(a, row, kv_head, first, end);
}
#ifdef HAVE_X86
static AVX2 void tally_run_avx2(const tally_args *a, int row, int kv_head, int64_t first, int64_t end) {
    tally_run_by(a, row, kv_head, first, end);
}
static AVX512 void tally_run_avx512(const tally_args *a, int row, int kv_head, int64_t first, int64_t end) {
    tally_run_by(a, row, kv_head, first, end);
}
#endif

static void tally_run(const tally_args *a, int row, int kv_head, int64_t first, int64_t end) {
#ifdef HAVE_X86
    if (a->path >= PATH_AVX512) tally_run_avx512(a, row, kv_head, first, end);
    else if (a->path >= PATH_AVX2) tally_run_avx2(a, row, kv_head, first, end);
    else
#endif
        tally_run_plain(a, row, kv_head, first, end);
}

static void tally_lanes(int64_t begin, int64_t end, void *context) {
    const tally_args *a = context;
    int heads = a->num_lanes * a->heads_per_page;
    for (int64_t item = begin; item < end; item++) {
        int row = (int)(item / heads), kv_head = (int)(item % heads);
        int64_t slots = a->slots[(int64_t)row * a->num_lanes + kv_head / a->heads_per_page];
        if (a->number && a->fresh[row] == 1) continue; /* attention has added them */
        prefetch_numbers(a, row, kv_head);
        for (int64_t first = 0; first < slots; first += RUN)
            tally_run(a, row, kv_head, first, first + RUN < slots ? first + RUN : slots);
    }
}

/* Store queries after RoPE. */
static void store_queries(const attention_args *a, const ring_args *r) {
    int kv_heads = r->num_lanes * r->heads_per_page, group = num_heads(a) / kv_heads;
    for (int64_t item = 0; item < (int64_t)r->num_records * kv_heads; item++) {
        int64_t record = item / kv_heads, kv_head = item % kv_heads, head = kv_head % r->heads_per_page;
        float *page = (float *)(r->numbers + r->pages[record * r->num_lanes + kv_head / r->heads_per_page] * r->page_bytes);
        float *target = page + (head * r->page_tokens + r->offsets[record]) * r->width;
        for (int g = 0; g < group; g++) {
            int64_t at = r->tokens[record] * a->query_token_stride + (kv_head * group + g) * a->query_head_stride;
            for (int d = 0; d < a->head_dim; d++) target[g * a->head_dim + d] = load_number(a->query, at + d, a->dtype);
        }
        target[r->width - 1] = r->marks[record];
    }
}

#endif
