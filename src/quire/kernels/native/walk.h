/* A walk: up to MAX_QUERIES query vectors that share a KV head attend to its slots together, with an
 * online softmax per tile of 16 slots. This file is the plain path in portable C. */
#ifndef QUIRE_WALK_H
#define QUIRE_WALK_H

#include <math.h>

#include "vectors.h"

#define MAX_QUERIES 8
#define TILE 16
#define MAX_RUNS 16 /* runs of a coded vector */
#define MAX_TOGETHER 8 /* KV heads of a page that one thread walks together */

#define LINED _Alignas(64) /* aligned to a cache line */

typedef struct {
    int count, head_dim, value_dim;
    int64_t low[MAX_QUERIES], high[MAX_QUERIES]; /* slots seen: low <= slot < high */
    float *logits[MAX_QUERIES];                  /* by slot, stored for column sums; or NULL */
    const float *bias[MAX_QUERIES];              /* by slot, added to logits; or NULL */
    float *tops[MAX_QUERIES]; /* by 16 slots: the maximum at which weights are stored, instead of logits; or NULL */
    float maximum[MAX_QUERIES], sum[MAX_QUERIES];
    LINED float query[MAX_QUERIES][MAX_HEAD_DIM]; /* times scale */
    LINED uint16_t half[MAX_QUERIES][MAX_HEAD_DIM]; /* as stored, for bfloat16 products */
    LINED float out[MAX_QUERIES][MAX_HEAD_DIM];
    LINED float packed[MAX_QUERIES * MAX_HEAD_DIM]; /* the query vectors in the layout that strips read */
    int32_t query_total[MAX_QUERIES]; /* sum of the numbers if `packed` holds bytes */
    float quantum[MAX_QUERIES]; /* value of 1 if `packed` holds int16 */
    float query_sums[MAX_QUERIES][MAX_RUNS]; /* sums of a run's numbers, for codes with zeros */
} walk;

static inline size_t walk_bytes(void) { return (sizeof(walk) + 63) / 64 * 64; }

/* Up to 16 slots of one page. Slots from `count` on are free and may hold NaN. */
typedef struct {
    const uint8_t *key, *value;
    int64_t slot; /* number of the first in the lane */
    int count;
} tile;

static inline float adjust1(float x, float cap, const float *bias, int64_t slot) {
    if (cap > 0) x = cap * tanhf(x / cap);
    return bias ? x + bias[slot] : x;
}

static void cap_and_mask(const walk *w, const tile *t, int m, float softcap, float *logits) {
    for (int i = 0; i < TILE; i++) {
        int64_t slot = t->slot + i;
        if (i >= t->count || slot < w->low[m] || slot >= w->high[m]) logits[i] = -INFINITY;
        else if (softcap != 0) logits[i] = adjust1(logits[i], softcap, w->bias[m], slot);
    }
}

/* Update maximum and sum of query m, and convert logits to weights. Returns the factor on the output. */
static float take_in(walk *w, int m, float *logits) {
    float top = w->maximum[m], sum = 0;
    for (int i = 0; i < TILE; i++) top = logits[i] > top ? logits[i] : top;
    if (top == -INFINITY) {
        memset(logits, 0, TILE * sizeof(float));
        return 1;
    }
    float factor = expf(w->maximum[m] - top);
    for (int i = 0; i < TILE; i++) {
        logits[i] = expf(logits[i] - top);
        sum += logits[i];
    }
    w->maximum[m] = top;
    w->sum[m] = w->sum[m] * factor + sum;
    return factor;
}

/* Store logits; entries of slots the vector does not see are not changed. */
static void keep_logits(const walk *w, const tile *t, int m, const float *logits) {
    for (int i = 0; w->logits[m] && i < t->count; i++)
        if (t->slot + i >= w->low[m] && t->slot + i < w->high[m]) w->logits[m][t->slot + i] = logits[i];
}

typedef float tile_vectors[TILE][MAX_HEAD_DIM];

/* Compute logits of the tile's keys, convert them to weights, and rescale the earlier output. */
static void weigh_tile(walk *w, const tile *t, float softcap, tile_vectors keys,
                       float (*weights)[TILE]) {
    for (int m = 0; m < w->count; m++) {
        for (int i = 0; i < t->count; i++) {
            float product = 0;
            for (int d = 0; d < w->head_dim; d++) product += w->query[m][d] * keys[i][d];
            weights[m][i] = product;
        }
        cap_and_mask(w, t, m, softcap, weights[m]);
        keep_logits(w, t, m, weights[m]);
        float factor = take_in(w, m, weights[m]);
        if (factor != 1)
            for (int d = 0; d < w->value_dim; d++) w->out[m][d] *= factor;
    }
}

static void add_tile(walk *w, const tile *t, tile_vectors values, float (*weights)[TILE]) {
    for (int m = 0; m < w->count; m++)
        for (int i = 0; i < t->count; i++)
            for (int d = 0; d < w->value_dim; d++) w->out[m][d] += weights[m][i] * values[i][d];
}

static void walk_tile_plain(walk *w, const tile *t, int dtype, float softcap) {
    float weights[MAX_QUERIES][TILE];
    tile_vectors vectors;
    int dim = w->head_dim, values = w->value_dim;
    for (int i = 0; i < t->count; i++)
        for (int d = 0; d < dim; d++) vectors[i][d] = load_number(t->key, (int64_t)i * dim + d, dtype);
    weigh_tile(w, t, softcap, vectors, weights);
    for (int i = 0; i < t->count; i++)
        for (int d = 0; d < values; d++) vectors[i][d] = load_number(t->value, (int64_t)i * values + d, dtype);
    add_tile(w, t, vectors, weights);
}

#endif
