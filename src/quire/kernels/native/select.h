/* Selection of tokens to retain. arguments.py mirrors the structures.
 *
 * A row is a retained set. All results are exact: no sum of floats, so they do not depend on the code path. */
#ifndef QUIRE_SELECT_H
#define QUIRE_SELECT_H

#include "args.h"

/* Slots that may be evicted one by one, and the number of them to retain. */
typedef struct {
    const uint8_t *live, *protected; /* [rows, slots] 0 or 1 */
    const int64_t *keep;             /* [rows] slots to retain */
    uint8_t *free;                   /* [rows, columns] live slots that are not protected; has room for
                                      * [rows + 1, slots] */
    int64_t *retained;               /* [rows] number of free slots to retain */
    int64_t columns[2];              /* result: the range of slots from the first to the last free one of any row */
    int32_t rows, slots, path, unused;
} free_args;

/* The best free columns of each head of each row: highest score first, ties to the lower column. */
typedef struct {
    const float *score;              /* row, head and column at row * score_row + head * score_head + column */
    const uint8_t *free;             /* [rows, free_row] columns to select from; their scores are finite */
    const int64_t *wanted;           /* [rows] number of columns, of each head; all free ones if there are fewer */
    uint8_t *best;                   /* [rows, heads, columns], or NULL */
    uint64_t *words;                 /* [rows, columns] one bit for each head, or NULL */
    int32_t *keys;                   /* scratch [2, columns], columns padded to a multiple of 32 */
    int64_t score_row, score_head, free_row;
    int32_t rows, heads, columns;
    int32_t rows_per_layer;          /* bits of row r of a layer start at r * heads */
    int32_t path, unused;
} best_args;

/* Bits of all heads of a layer by token: rows of a layer hold different tokens. A row without a token adds no bits. */
typedef struct {
    uint64_t *words;          /* [rows, columns] bits of the row's own heads; replaced by those of the layer */
    const int64_t *positions; /* [rows, slots] of tokens, ascending; -1 for the empty slots at the end */
    const uint8_t *free;      /* [rows, columns] slots with these bits; the own bits of all other tokens are 1 */
    uint64_t *tokens;         /* scratch [past_end] */
    int64_t past_end;         /* above all positions; tokens at others have no bits */
    int32_t rows, slots, first, columns; /* columns are slots first to first + columns */
    int32_t rows_per_layer, heads;
} align_args;

/* Free slots, the best of them for each head, and the bits of all heads of a layer: the calls above in turn. */
typedef struct {
    free_args free;   /* all fields */
    best_args best;   /* score of the first slot, keys, strides, heads, rows_per_layer, path */
    align_args align; /* words, positions, tokens, past_end */
} sign_args;

/* One unit of each slice of the grouped ones, in the order of (distance to the anchor, unit). */
typedef struct {
    const uint64_t *words;  /* [rows, units, unit_words] signatures */
    const uint64_t *anchor; /* [rows, unit_words], or NULL: majority of the grouped signatures */
    const uint8_t *grouped; /* [rows, units] 0 or 1 */
    const int64_t *count;   /* [rows] slices; all grouped units are chosen if there are fewer */
    const float *score;     /* [rows, score_row], the highest of a slice is chosen; NULL: its middle unit */
    uint8_t *chosen;        /* [rows, units] zeroed */
    uint64_t *scratch;      /* quire_represent_words(units, unit_words) */
    int64_t score_row;
    int32_t rows, units, unit_words, path;
} represent_args;

/* The retained slots of rows whose slots are evicted one by one: the best ones, and representatives of the rest. */
typedef struct {
    const uint8_t *live;     /* [rows, slots] */
    const uint8_t *free;     /* [rows, columns] slots that may be evicted, as from quire_free */
    const int64_t *retained; /* [rows] number of free slots to retain */
    const int64_t *count;    /* [rows] how many of these are representatives */
    const float *score;      /* [rows, score_row] */
    const uint64_t *words;   /* [rows, columns, unit_words] signatures */
    const uint64_t *anchor;  /* as of represent_args */
    uint8_t *kept;           /* [rows, slots] */
    uint64_t *represent;     /* scratch of quire_represent */
    int32_t *keys;           /* scratch of quire_best */
    uint8_t *marks;          /* scratch [2, columns] */
    int64_t score_row;
    int32_t rows, slots, first, columns; /* columns are slots first to first + columns */
    int32_t unit_words, pick_best, path, unused;
} retain_args;

/* What decides between the slots of a lane that are not protected. */
enum { BY_POSITION = 0, BY_NUMBER = 1, BY_FLOAT = 2, BY_DOUBLE = 3, BY_MARK = 4 };
enum { NOT_FINITE = 1, OVER_PROTECTED = 2, WRONG_COUNT = 4 };

/* Slots of lanes in pages: their order by position, and which of them an eviction retains. Lanes of several sequences
 * follow one another. Live slots are the first slots of their lanes and have different positions. */
typedef struct {
    const uint8_t *positions;  /* plane: page n at n * page_bytes, in it int32 [page_tokens] */
    const int32_t *pages;      /* [lanes, columns] */
    const int32_t *held;       /* [lanes] live slots, at most `slots` */
    int64_t *by_position;      /* [lanes, slots] ascending positions, then -1; or NULL: slots are selected */
    int64_t *slot;             /* [lanes, slots] their slots, then the others */
    const int32_t *keep;       /* [lanes] slots to retain */
    const int32_t *newest;     /* [lanes] newest slots that are protected, besides positions below `sinks` */
    const uint8_t *protected;  /* [lanes, slots] protected slots by position; or NULL: `newest` and `sinks` */
    const void *score;         /* [rows of lanes_per_score lanes, slots] by position; type of `rank`; or NULL */
    const uint8_t *numbers;    /* BY_NUMBER: plane of float32 numbers, as `positions` */
    const int32_t *number_pages; /* [lanes, number_columns] */
    const int32_t *next;       /* [lanes] position after the last token; or NULL: numbers are not divided */
    int32_t *moves;            /* [lanes, 2, max_moves] sources and targets that fill the holes before `keep` */
    int32_t *evicted;          /* [lanes, 2 + max_evicted] breaches of the contract, number of moves, positions */
    int64_t page_bytes, number_page_bytes;
    int32_t lanes, slots, columns, number_columns, page_tokens, number_tokens;
    int32_t rank, lanes_per_score, sinks, max_moves, max_evicted, path;
} lane_args;

#endif
