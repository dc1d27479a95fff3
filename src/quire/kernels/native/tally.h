/* Adding what slots got from a step's queries to the numbers kept of them.
 *
 * Column sums of a row with one token are that query's weights. The query heads of a KV head are
 * reduced first, then looks are counted; slots that are new have no number yet and are written over.
 * A page's numbers of one head are neighbours, and so are their column sums: all goes over runs of
 * at most RUN slots.
 */
#ifndef QUIRE_TALLY_H
#define QUIRE_TALLY_H

#include <string.h>

#include "args.h"

#define RUN 64

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
    const int32_t *fresh;                  /* [num_rows] of them new */
    const float *sums;                     /* [rows of the step, num_heads, sums_stride] */
    int64_t sums_stride;
    int32_t num_rows, num_lanes, heads_per_page, group, first_lane, page_tokens;
    int32_t heads, count;
} tally_args;

/* One number for the heads of a group, for slots side by side. */
static void reduce_heads(const tally_args *a, const float *sums, int run, float *looks) {
    memcpy(looks, sums, run * sizeof(float));
    for (int g = 1; g < a->group; g++) {
        const float *more = sums + g * a->sums_stride;
        if (a->heads == HEADS_MAX)
            for (int i = 0; i < run; i++) looks[i] = more[i] > looks[i] ? more[i] : looks[i];
        else
            for (int i = 0; i < run; i++) looks[i] += more[i];
    }
    if (a->heads == HEADS_MEAN)
        for (int i = 0; i < run; i++) looks[i] /= a->group;
}

static void count_looks(const tally_args *a, float *looks, int run, int64_t seen) {
    float low = 1.0f / (float)seen;
    if (a->count == COUNT_SQUARES)
        for (int i = 0; i < run; i++) looks[i] *= looks[i];
    if (a->count == COUNT_LOW)
        for (int i = 0; i < run; i++) looks[i] = looks[i] < low ? 1.0f : 0.0f;
}

static void tally_lane(const tally_args *a, int row, int kv_head) {
    int number = kv_head / a->heads_per_page;
    int64_t slots = a->slots[(int64_t)row * a->num_lanes + number], old = slots - a->fresh[row];
    const int32_t *pages = a->table + a->table_rows[row] * a->table_row_stride +
                           (a->first_lane + number) * a->table_lane_stride;
    int64_t num_heads = (int64_t)a->num_lanes * a->heads_per_page * a->group;
    const float *sums = a->sums + (a->step_rows[row] * num_heads + kv_head * a->group) * a->sums_stride;
    int64_t head_at = (int64_t)(kv_head % a->heads_per_page) * a->page_tokens;
    for (int64_t slot = 0; slot < slots;) {
        float looks[RUN];
        int64_t offset = slot % a->page_tokens, run = a->page_tokens - offset;
        if (run > RUN) run = RUN;
        if (run > slots - slot) run = slots - slot;
        if (slot < old && run > old - slot) run = old - slot; /* old ones and new ones apart */
        float *numbers = (float *)(a->numbers + pages[slot / a->page_tokens] * a->page_bytes) + head_at + offset;
        reduce_heads(a, sums + slot, (int)run, looks);
        count_looks(a, looks, (int)run, slots);
        if (slot < old)
            for (int64_t i = 0; i < run; i++) numbers[i] += looks[i];
        else
            memcpy(numbers, looks, run * sizeof(float));
        slot += run;
    }
}

static void tally_lanes(int64_t begin, int64_t end, void *context) {
    const tally_args *a = context;
    int heads = a->num_lanes * a->heads_per_page;
    for (int64_t item = begin; item < end; item++) tally_lane(a, (int)(item / heads), (int)(item % heads));
}

#endif
