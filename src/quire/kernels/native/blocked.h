/* Chunks: many query vectors of a (row, KV head) as blocked products over packed slots.
 *
 * A block of query vectors processes its slots BLOCK_SLOTS at a time. The slots are packed once:
 *
 *     keys    [slots / C][units][C]     transposed, so that C logits accumulate in parallel: 64, or 16
 *     values  [slots / step][dim]       not transposed, `step` slots per unit
 *
 * A unit is 32 bits: one float32, or two neighbouring bfloat16 for a dot product of pairs. Then six
 * query vectors at a time: logits = units x keys, softmax over the packed slots, output += weights x
 * values. Packing writes zeros for slots that no query may see, so free slots can hold NaN. The body
 * of these functions is blocked_body.h, compiled once for each kind of unit and of vector.
 */
#ifndef QUIRE_BLOCKED_H
#define QUIRE_BLOCKED_H

#include <math.h>

#include "codes.h"
#include "vectors.h"

#ifdef HAVE_X86
#define BLOCK_SLOTS 256   /* packed at a time */
#define JOINED_SLOTS 64   /* packed at a time with joined keys, which are long: they stay in a core's cache */
#define BLOCK_QUERIES 384 /* query vectors of a part: shares the packing, and leaves many parts */
#define KEPT_LOGITS (1 << 18) /* one MiB, which fits in a core's cache */
#define MIN_NORM 1e-12f   /* of a vector whose direction counts, as in torch's normalize */
#define SIDE 6            /* query vectors in registers: 6 x VECTORS sums, VECTORS columns, 1 query */

typedef struct {
    int64_t low[BLOCK_QUERIES], high[BLOCK_QUERIES]; /* slots seen: low <= slot < high */
    const float *bias[BLOCK_QUERIES];                /* by slot, added to logits; or NULL */
    float maximum[BLOCK_QUERIES], sum[BLOCK_QUERIES], factor[SIDE], top[SIDE];
    float logits[SIDE][BLOCK_SLOTS];
    uint32_t weights[SIDE][BLOCK_SLOTS];
    uint32_t *query; /* [vectors, units] */
    uint32_t *key, *value;
    float *out; /* [vectors, dim of values] */
    float *kept; /* logits [vectors, kept_stride], of blocks that compute column sums */
    int64_t kept_stride;
    int units;
    int64_t ahead, ahead_end; /* slots that are prefetched next, `ahead_step` before each product */
    int ahead_step;
} block;

/* Scratch of a block, including logits if column sums are requested. */
static size_t block_bytes(int head_dim, int value_dim, int sums) {
    size_t vectors = ((size_t)head_dim + value_dim) * 4;
    return (sizeof(block) + 63) / 64 * 64 + vectors * (BLOCK_QUERIES + BLOCK_SLOTS) +
           (sums ? KEPT_LOGITS * sizeof(float) : 0);
}

/* Scratch of the scores of a lane: its packed keys, products and sums; queries and the slots that each sees. */
static size_t score_bytes(const score_args *s) {
    size_t room = ((size_t)s->slots + 63) / 64 * 64, dim = s->vectors.head_dim;
    size_t queries = (size_t)s->window * s->vectors.group;
    return (sizeof(block) + 63) / 64 * 64 + 4 * room * (dim + SIDE + 1) + 8 * queries + 4 * dim * (queries + SIDE);
}

static block *lay_out_block(uint8_t *scratch, const attention_args *a, int units) {
    block *b = (block *)scratch;
    size_t key = (size_t)a->head_dim * 4, value = (size_t)a->value_coding.dim * 4;
    uint8_t *next = scratch + (sizeof(block) + 63) / 64 * 64;
    b->units = units;
    b->query = (uint32_t *)next;
    b->out = (float *)(next += key * BLOCK_QUERIES);
    b->key = (uint32_t *)(next += value * BLOCK_QUERIES);
    b->value = (uint32_t *)(next += key * BLOCK_SLOTS);
    b->kept = (float *)(next + value * BLOCK_SLOTS);
    return b;
}

/* Whether vectors are signed bytes with a scale each. */
static inline int has_bytes(const coding *c) {
    return c->kind == INT8_CODES && c->channels == c->dim && c->scales && !c->zeros && !c->num_outliers;
}

/* Whether vectors are read as pairs of bfloat16. */
static inline int pairs_of(const coding *c) { return (c->kind == PLAIN_NUMBERS && c->dtype == BF16) || has_bytes(c); }

/* Whether blocks multiply pairs of bfloat16. Codes are rounded to bfloat16 if keys are joined only. */
static inline int multiplies_pairs(const attention_args *a) {
    if (a->path != PATH_AVX512_BF16 || a->dtype != BF16) return 0;
    return !a->coded || (a->joined && pairs_of(&a->key_coding) && pairs_of(&a->value_coding));
}

/* Type of the numbers that are packed as float32. */
static inline int numbers_type(const coding *c) { return c->kind == PLAIN_NUMBERS ? c->dtype : F32; }

/* Prefetch some of the slots that are packed next: memory is read while products are computed. */
static inline void prefetch_ahead(const attention_args *a, block *b, const lane *l) {
    for (int n = 0; n < b->ahead_step && b->ahead < b->ahead_end; n++, b->ahead++) {
        place p = place_of(a, l, b->ahead);
        const uint8_t *value = vector_at(a->value, &a->value_coding, p), *key = vector_at(a->key, &a->key_coding, p);
        for (int64_t i = 0; i < a->value_coding.vector_bytes; i += 64) __builtin_prefetch(value + i, 0, 2);
        for (int64_t i = 0; i < a->key_coding.vector_bytes; i += 64) __builtin_prefetch(key + i, 0, 2);
    }
}

/* Prefetch the key of a slot; slots in the order of positions are scattered over pages. */
static inline void prefetch_vector(const attention_args *a, const lane *l, int64_t slot) {
    const uint8_t *vector = vector_at(a->key, &a->key_coding, place_of(a, l, slot));
    for (int64_t i = 0; i < a->key_coding.vector_bytes; i += 64) __builtin_prefetch(vector + i, 0, 2);
}

static inline int64_t output_at(const attention_args *a, int row, int head, int pair) {
    return (a->starts[row] + pair / a->group) * num_heads(a) + head + pair % a->group;
}

static inline void prefetch_output(const attention_args *a, int row, int head, int pair) {
    int64_t bytes = (int64_t)a->value_coding.dim * itemsize(a), at = output_at(a, row, head, pair) * bytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((uint8_t *)a->out + at + i, 1, 2);
}

/* A function of blocked_body.h compiled for float32 units is `name_f32`, or `name_avx2`; for pairs
 * `name_bf16`. COLUMNS slots or dimensions are held in VECTORS of 32 or 16 registers. */
#define TARGET AVX512
#define NAME(name) name##_f32
#define PAIRS 0
#define LANES 16
#define VECTORS 4
#include "blocked_body.h"
#undef TARGET
#undef NAME
#undef PAIRS

#define TARGET AVX512_BF16
#define NAME(name) name##_bf16
#define PAIRS 1
#include "blocked_body.h"
#undef TARGET
#undef NAME
#undef PAIRS
#undef LANES
#undef VECTORS

#define TARGET AVX2
#define NAME(name) name##_avx2
#define PAIRS 0
#define LANES 8
#define VECTORS 2
#include "blocked_body.h"
#undef TARGET
#undef NAME
#undef PAIRS
#undef LANES
#undef VECTORS
#endif

#endif
