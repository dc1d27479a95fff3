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

#include "args.h"

#define RUN 256
#ifndef INLINE
#define INLINE static inline
#endif

enum { HEADS_MEAN = 0, HEADS_MAX = 1, HEADS_SUM = 2 };
enum { COUNT_SUM = 0, COUNT_SQUARES = 1, COUNT_LOW = 2 };

/* TallyArgs in arguments.py mirrors this. */
typedef struct {
    uint8_t *numbers; /* plane: page n at n * page_bytes, in it [heads_per_page, page_tokens] */
    int64_t page_bytes;
    const int32_t *table; /* [all rows, all lanes, capacity] */
    int64_t table_row_stride, table_lane_stride;
    const int64_t *step_rows, *table_rows; /* [num_rows] */
    const int32_t *slots;                  /* [num_rows, num_lanes] live slots */
    const int32_t *fresh;                  /* [num_rows] number of new slots */
    const float *sums;                     /* [rows of the step, num_heads, sums_stride] */
    int64_t sums_stride;
    int32_t num_rows, num_lanes, heads_per_page, group, first_lane, page_tokens;
    int32_t heads, count, path;
} tally_args;

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

INLINE void tally_lane_by(const tally_args *a, int row, int kv_head) {
    int number = kv_head / a->heads_per_page, head = kv_head % a->heads_per_page;
    int64_t slots = a->slots[(int64_t)row * a->num_lanes + number], old = slots - a->fresh[row];
    const int32_t *pages = a->table + a->table_rows[row] * a->table_row_stride +
                           (a->first_lane + number) * a->table_lane_stride;
    int64_t num_heads = (int64_t)a->num_lanes * a->heads_per_page * a->group;
    const float *sums = a->sums + (a->step_rows[row] * num_heads + kv_head * a->group) * a->sums_stride;
    for (int64_t first = 0; first < slots; first += RUN) {
        float weights[RUN];
        int64_t end = first + RUN < slots ? first + RUN : slots, run;
        for (int64_t slot = first; slot < end; slot += a->page_tokens)
            __builtin_prefetch(numbers_at(a, pages, head, slot), 1);
        reduce_heads(a, sums + first, (int)(end - first), weights);
        measure_weights(a, weights, (int)(end - first), slots);
        for (int64_t slot = first; slot < end; slot += run) {
            run = a->page_tokens - slot % a->page_tokens;
            if (run > end - slot) run = end - slot;
            add_weights(numbers_at(a, pages, head, slot), weights + slot - first, run, old - slot);
        }
    }
}

static void tally_lane_plain(const tally_args *a, int row, int kv_head) { tally_lane_by(a, row, kv_head); }
#ifdef HAVE_X86
static AVX2 void tally_lane_avx2(const tally_args *a, int row, int kv_head) { tally_lane_by(a, row, kv_head); }
static AVX512 void tally_lane_avx512(const tally_args *a, int row, int kv_head) { tally_lane_by(a, row, kv_head); }
#endif

static void tally_lanes(int64_t begin, int64_t end, void *context) {
    const tally_args *a = context;
    int heads = a->num_lanes * a->heads_per_page;
    void (*tally_lane)(const tally_args *, int, int) = tally_lane_plain;
#ifdef HAVE_X86
    if (a->path >= PATH_AVX2) tally_lane = tally_lane_avx2;
    if (a->path >= PATH_AVX512) tally_lane = tally_lane_avx512;
#endif
    for (int64_t item = begin; item < end; item++) tally_lane(a, (int)(item / heads), (int)(item % heads));
}

#endif
