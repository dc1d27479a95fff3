/* Chunks: many query vectors of a (row, KV head) as blocked products over packed slots.
 *
 * A block of query vectors goes over its slots BLOCK_SLOTS at a time. Those are packed once:
 *
 *     keys    [slots / 64][units][64]   transposed, so that 64 logits grow side by side
 *     values  [slots / step][head_dim]  as they lie, `step` slots to a unit
 *
 * A unit is 32 bits: one float32, or two neighbouring bfloat16 for a dot product of pairs. Then six
 * query vectors at a time: logits = units x keys, softmax over the packed slots, output += weights x
 * values. Packing writes zeros for slots nobody may see, so free slots can hold NaN. The body of
 * these functions is blocked_body.h, compiled once for each kind of unit.
 */
#ifndef QUIRE_BLOCKED_H
#define QUIRE_BLOCKED_H

#include <math.h>

#include "numbers.h"

#ifdef HAVE_X86
#define BLOCK_SLOTS 256   /* packed at a time */
#define BLOCK_QUERIES 384 /* query vectors of a part: packing is shared, and still many parts */
#define SIDE 6            /* query vectors in registers: 6 x 4 sums, 4 columns, 1 broadcast */
#define COLUMNS 64        /* slots or dimensions in registers */

typedef struct {
    int64_t low[BLOCK_QUERIES], high[BLOCK_QUERIES]; /* slots seen: low <= slot < high */
    float maximum[BLOCK_QUERIES], sum[BLOCK_QUERIES], factor[SIDE];
    float logits[SIDE][BLOCK_SLOTS];
    uint32_t weights[SIDE][BLOCK_SLOTS];
    uint32_t *query; /* [vectors, units] */
    uint32_t *key, *value;
    float *out; /* [vectors, head_dim] */
    int units;
} block;

static size_t block_bytes(int head_dim) {
    size_t vectors = (size_t)head_dim * 4;
    return (sizeof(block) + 63) / 64 * 64 + 2 * vectors * (BLOCK_QUERIES + BLOCK_SLOTS);
}

static block *lay_out_block(uint8_t *scratch, int head_dim, int units) {
    block *b = (block *)scratch;
    size_t vector = (size_t)head_dim * 4;
    uint8_t *next = scratch + (sizeof(block) + 63) / 64 * 64;
    b->units = units;
    b->query = (uint32_t *)next;
    b->out = (float *)(next += vector * BLOCK_QUERIES);
    b->key = (uint32_t *)(next += vector * BLOCK_QUERIES);
    b->value = (uint32_t *)(next + vector * BLOCK_SLOTS);
    return b;
}

/* Sixteen rows of sixteen units become columns. */
INLINE AVX512 void transpose16(__m512i *r) {
    __m512i s[16];
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88);
        r[i + 4] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd);
        r[i + 12] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd);
    }
}

/* A function of blocked_body.h compiled for float32 units is `name_f32`, for pairs `name_bf16`. */
#define TARGET AVX512
#define NAME(name) name##_f32
#define PAIRS 0
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
#endif

#endif
