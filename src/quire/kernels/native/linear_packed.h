/* Products of many rows: activations are packed for tiles of TILE_ROWS rows.
 *
 * A thread packs a chunk of rows once, into its second-level cache, and multiplies it by one panel after the
 * other:
 *
 *     words           [tile][word][TILE_ROWS] words of 32 bits; missing rows are zeros
 *     scales, sums    of codes: [group][row of the chunk]
 *
 * A block of a panel stays in the first-level cache for all tiles. bfloat16 weights that the path does not
 * multiply are widened, and int4 weights unpacked to bytes, once per block. Sums are equal to those of few rows:
 * the inner axis is added in the same order.
 */
#ifndef QUIRE_LINEAR_PACKED_H
#define QUIRE_LINEAR_PACKED_H

#include "linear.h"

#ifndef MIN_PACKED_ROWS
#define MIN_PACKED_ROWS 33 /* for fewer, packing costs more than it saves */
#endif
#define TILE_ROWS 6
#define TILE_WORD_BYTES (TILE_ROWS * 4)
#define BLOCK_WORDS 64 /* 16 KiB of a panel: half of a first-level cache */
#define GROUP_WORDS (GROUP_CODES / 4)
#define PACKED_WORDS (1 << 17)      /* of a chunk: half of a second-level cache */
#define MAX_PACKED_WORDS (1 << 18) /* of a chunk with up to MIN_CHUNK_ROWS rows */
#define MIN_CHUNK_ROWS 48
#define MAX_GROUPS (MAX_PACKED_WORDS / GROUP_WORDS + CHUNK_ROWS) /* of all rows of a chunk */

typedef struct {
    uint32_t words[MAX_PACKED_WORDS] __attribute__((aligned(64)));
    uint32_t block[BLOCK_WORDS * PANEL_COLUMNS] __attribute__((aligned(64))); /* a widened block */
    float sums[CHUNK_ROWS * PANEL_COLUMNS] __attribute__((aligned(64)));
    float x_scales[MAX_GROUPS];
    int32_t x_sums[MAX_GROUPS];
} packed_chunk;

/* A block of a panel and all tiles of a chunk. */
typedef struct {
    const uint8_t *x; /* the first tile, from the block's first word on */
    int64_t tile_bytes;
    const float *x_scales; /* of the group, [row of the chunk], if the weights are codes */
    const int32_t *x_sums;
    const uint8_t *unit; /* rows of units of one word */
    const float *scales; /* of the columns, if the weights are int4; else NULL */
    float *sums;         /* [row of the chunk][PANEL_COLUMNS] */
    const uint8_t *ahead; /* the next block; ahead_bytes are prefetched for each tile */
    int32_t ahead_bytes, units, tiles, first;
} packed_block;

/* Words of a row of x. */
static inline int row_words(const linear_args *a) {
    return a->weight_kind >= WEIGHT_INT8 ? a->inner / 4 : a->x_dtype == BF16 ? a->inner / 2 : a->inner;
}

/* Most rows of a chunk; a multiple of TILE_ROWS, or 0 if rows are too long. */
static inline int max_chunk_rows(const linear_args *a) {
    int words = row_words(a), few = PACKED_WORDS / words < MIN_CHUNK_ROWS;
    int rows = (few ? MAX_PACKED_WORDS : PACKED_WORDS) / words, most = few ? MIN_CHUNK_ROWS : CHUNK_ROWS;
    return (rows < most ? rows : most) / TILE_ROWS * TILE_ROWS;
}

static void pack_tile(const linear_args *a, int64_t first_row, int rows, uint64_t *to) {
    const uint32_t *row[TILE_ROWS], nothing = 0;
    int words = row_words(a), step[TILE_ROWS];
    for (int m = 0; m < TILE_ROWS; m++) {
        row[m] = m < rows ? (const uint32_t *)(a->x + (first_row + m) * a->x_row_bytes) : &nothing;
        step[m] = m < rows;
    }
    for (int word = 0; word < words; word++)
        for (int m = 0; m < TILE_ROWS; m += 2, to++)
            *to = row[m][word * step[m]] | (uint64_t)row[m + 1][word * step[m + 1]] << 32;
}

static void pack_chunk(const linear_args *a, int64_t first_row, int rows, packed_chunk *to) {
    int words = row_words(a), groups = num_groups(a), whole = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    for (int row = 0; row < rows; row += TILE_ROWS)
        pack_tile(a, first_row + row, rows - row, (uint64_t *)(to->words + (int64_t)row * words));
    for (int group = 0; group < groups && a->weight_kind >= WEIGHT_INT8; group++)
        for (int row = 0; row < whole; row++) {
            int64_t at = (first_row + row) * groups + group;
            to->x_scales[group * whole + row] = row < rows ? a->x_scales[at] : 0;
            to->x_sums[group * whole + row] = row < rows ? a->x_sums[at] : 0;
        }
}

/* Prefetch the tile's part of the next block. */
static inline void prefetch_ahead(const packed_block *b, int tile) {
    const uint8_t *ahead = b->ahead + tile * b->ahead_bytes;
    for (int at = 0; at < b->ahead_bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
}

#endif
