/* Arguments of a call. AttentionArgs in arguments.py mirrors `attention_args`, field by field. */
#ifndef QUIRE_ARGS_H
#define QUIRE_ARGS_H

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define AVX512_VNNI \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,avx512vnni")))
#define AVX512_BF16 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,avx512bf16")))
#endif

#define MAX_HEAD_DIM 512

enum { F32 = 0, BF16 = 1, F16 = 2 };
enum { PLAIN_NUMBERS = 0, INT8_CODES = 1, BIT_CODES = 2, FP8_CODES = 3 };
enum { PATH_PLAIN = 0, PATH_AVX2 = 1, PATH_AVX512 = 2, PATH_AVX512_BF16 = 3 };

/* A unit of work, executed for every KV head.
 *
 * list     first, count are      partial
 * walks    slots of the lane     index of its partial result to merge, or -1 if it is the whole row;
 *                                with joined keys, walked by a block of the query heads of the KV head
 * blocks   query vectors         1: has all of the row's vectors, and computes its column sums if requested
 * merges   not used              index of the first partial result; count is their number
 * sums     slots of the lane     not used
 */
typedef struct {
    int32_t row, first, count, partial;
} part;

/* A part, and a KV head or group of heads. */
typedef struct {
    const part *of;
    int number;
} item;

/* Storage of keys or values in pages; see quire.codecs. CodingArgs in arguments.py mirrors this.
 *
 * A run is a range of channels that are adjacent in the packed bytes and share a scale. */
typedef struct {
    const uint8_t *scales, *zeros, *indices, *outliers; /* planes with the pages of the codes; or NULL */
    int64_t vector_bytes;                               /* bytes of the codes of a vector */
    int32_t kind, dtype;                                /* dtype of plain numbers */
    int32_t bits, channels;                             /* bits of a code; channels per scale */
    int32_t run, num_runs;
    int32_t num_outliers, index_bytes;
    int32_t dim, unused; /* elements of a vector */
} coding;

/* One number per slot, accumulated from its attention weights (tally.h). TallyArgs in arguments.py mirrors this. */
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
    const int32_t *number; /* [rows of the step] index of the row in `step_rows`, or -1; for attention only */
    int32_t num_rows, num_lanes, heads_per_page, group, first_lane, page_tokens;
    int32_t heads, count, path;
} tally_args;

/* Queries that are stored as they are: float32 records of a KV head's queries and a mark. RingArgs mirrors this. */
typedef struct {
    uint8_t *numbers; /* plane: page n at n * page_bytes, in it [heads_per_page, page_tokens, width] */
    int64_t page_bytes;
    const int64_t *pages;            /* [num_records, num_lanes] */
    const int64_t *offsets, *tokens; /* [num_records] in the page; in the flat batch */
    const float *marks;              /* [num_records] last number of a record */
    int32_t num_records, num_lanes, heads_per_page, page_tokens, width, unused;
} ring_args;

/* Rows that read only some pages of their lanes (sparse.h). SparseArgs in arguments.py mirrors this. */
typedef struct {
    const uint8_t *bounds;         /* plane: page n at n * page_bytes, in it [heads_per_page, 2, dim]: minima, maxima */
    const int32_t *held;           /* [num_rows, num_lanes] live slots; `slots` counts those of the pages that are read */
    const int32_t *counts;         /* [num_rows, num_lanes] pages that each KV head of a lane reads; 0: all */
    const int32_t *sinks, *recent; /* [num_rows] first and last pages that are read in any case */
    float *weights;                /* [num_rows, kv heads, 2, dim] factors of the bounds */
    int32_t *scores;               /* [num_rows, kv heads, columns] columns: a multiple of 16 */
    int32_t *picks;                /* [num_rows, kv heads, 2, picked] page numbers, and their columns of the table */
    const uint8_t *const *at;      /* [num_rows, num_lanes, columns] bounds of each page, or NULL: as `bounds` */
    int32_t num_rows, columns, picked, dtype;
    int32_t only, unused; /* only: 0, or part of the work: SPARSE_SELECT, SPARSE_ATTEND to pages selected before */
} sparse_args;

enum { SPARSE_SELECT = 1, SPARSE_ATTEND = 2 };

typedef struct {
    const uint8_t *key, *value; /* planes: page n at n * page_bytes */
    int64_t page_bytes;
    const int32_t *table; /* [all rows, all lanes, capacity] */
    int64_t table_row_stride, table_lane_stride;
    const int64_t *rows;   /* [num_rows] row of the table */
    const int32_t *slots;  /* [num_rows, num_lanes] live slots, including new tokens */
    const int64_t *starts; /* [num_rows] first token of the row in the flat batch */
    const int32_t *tokens; /* [num_rows] new tokens */
    const void *query;     /* [tokens, num_heads, head_dim] by strides, head_dim (of keys) contiguous */
    int64_t query_token_stride, query_head_stride;
    void *out;          /* [tokens, num_heads, dim of values] contiguous */
    const float *sinks; /* [num_heads] or NULL */
    const float *bias;  /* added to logits (see bias_of), or NULL; 16 numbers more than slots can be read */
    int64_t bias_row_stride, bias_head_stride;
    int64_t bias_end;         /* 0: biases are indexed by slot; else the last slot of any lane has number bias_end - 1 */
    const int64_t *bias_rows; /* [num_rows] rows of the biases, or NULL: those of the step */
    float *column_sums; /* [num_rows, num_heads, sums_stride] zeroed, or NULL */
    int64_t sums_stride;
    const tally_args *tallies; /* statistics of the column sums; the sums themselves are not computed then */
    const ring_args *rings;
    float *tops; /* [tokens, num_heads, sums_stride / 16 rounded up] if column sums are requested, for walks */
    float *normalisers; /* [tokens, num_heads, 2] if column sums are requested: maximum, 1 / sum */
    float *partials;    /* [kv heads, partials, group, dim of values + 2]: output, maximum, sum */
    uint8_t *scratch;   /* scratch_bytes for each thread */
    int64_t scratch_bytes;
    const part *walks, *blocks, *merges, *sums;
    int32_t num_walks, num_blocks, num_merges, num_sums, num_partials;
    int32_t num_lanes, heads_per_page, group, first_lane;
    int32_t heads_together; /* KV heads of a page walked by one thread; divides heads_per_page */
    int32_t head_dim, page_tokens, dtype, window; /* window 0: none */
    float scale, softcap;                         /* softcap 0: none; below 0: none, but biases */
    int32_t num_tallies, num_rings;
    int32_t path, coded; /* coded: pages store vectors as in the two codings, not as `dtype` */
    int32_t joined, unused; /* joined: the key of a slot is its value, followed by its stored key */
    coding key_coding, value_coding; /* also of plain pages */
    const sparse_args *sparse; /* rows that read only some pages, or NULL */
} attention_args;

/* Reductions over the query heads of a KV head. */
enum { HEADS_MEAN = 0, HEADS_MAX = 1, HEADS_SUM = 2 };

/* What is computed of the keys or values of a lane, by slot. */
enum { WINDOW_SUMS = 0, MEAN_COSINES = 1, NORMS = 2 };

/* Scores of cached tokens, for eviction. Lanes are sequences' lanes, one after the other; ScoreArgs mirrors this. */
typedef struct {
    attention_args vectors;            /* pages in `key` and `key_coding`, and what describes them; no other field */
    const int32_t *pages;              /* [num_lanes, columns] */
    const int64_t *order, *positions;  /* [num_lanes, slots] slots by position, and these positions, ascending */
    const int64_t *held;               /* [num_lanes] number of slots */
    const float *records;              /* [num_lanes, heads_per_page, window, group * head_dim + 1] queries of a KV
                                          head's query heads after RoPE, and the position after theirs; 0: no query */
    const float *scales;               /* [num_lanes, heads_per_page] factors on products */
    float *out;                        /* [num_lanes, heads_per_page, group (1 without a window, or with `kernel`), slots] */
    uint8_t *scratch;                  /* scratch_bytes for each thread */
    int64_t scratch_bytes, columns, slots;
    int32_t num_lanes, window, score;
    int32_t kernel;                    /* not 0: the sums are pooled over this number of slots, and reduced over `heads` */
    int32_t pool_max, heads, newest;   /* the newest slots count as 0; without a query, scores are not finite */
    int32_t unused;
} score_args;

static inline int num_kv_heads(const attention_args *a) { return a->num_lanes * a->heads_per_page; }
static inline int num_heads(const attention_args *a) { return num_kv_heads(a) * a->group; }
static inline int itemsize(const attention_args *a) { return a->dtype == F32 ? 4 : 2; }

/* A lane: location of the slots of one KV head of one row. */
typedef struct {
    const int32_t *pages;
    int64_t slots;
    int64_t first_record; /* of the KV head in its page; each plane has one record per slot */
} lane;

static inline const int32_t *table_of(const attention_args *a, int row, int number) {
    return a->table + a->rows[row] * a->table_row_stride + (a->first_lane + number) * a->table_lane_stride;
}

static inline lane lane_of(const attention_args *a, int row, int kv_head) {
    int number = kv_head / a->heads_per_page;
    const sparse_args *s = a->sparse;
    int is_sparse = s && s->counts[row * a->num_lanes + number];
    lane l = {
        is_sparse ? s->picks + ((int64_t)row * num_kv_heads(a) + kv_head) * 2 * s->picked : table_of(a, row, number),
        a->slots[row * a->num_lanes + number],
        (int64_t)(kv_head % a->heads_per_page) * a->page_tokens,
    };
    return l;
}

/* Offset of a page in every plane, and index of a slot's record in the page. */
typedef struct {
    int64_t page_at, record;
} place;

static inline place place_of(const attention_args *a, const lane *l, int64_t slot) {
    place p = {(int64_t)l->pages[slot / a->page_tokens] * a->page_bytes,
               l->first_record + slot % a->page_tokens};
    return p;
}

/* The vector of a slot in the plane of keys or values. */
static inline const uint8_t *vector_at(const uint8_t *plane, const coding *c, place p) {
    return plane + p.page_at + p.record * c->vector_bytes;
}

/* Biases of a query head's logits, by slot of a lane with this number of slots; NULL: none. */
static inline const float *bias_of(const attention_args *a, int row, int head, int64_t slots) {
    if (a->bias == NULL) return NULL;
    int64_t at = (a->bias_rows ? a->bias_rows[row] : row) * a->bias_row_stride + head * a->bias_head_stride;
    return a->bias + at + (a->bias_end ? a->bias_end - slots : 0);
}

/* Query vectors of a (row, KV head) are numbered token by token, then head by head. */
static inline int64_t query_at(const attention_args *a, int row, int head, int pair) {
    return (a->starts[row] + pair / a->group) * a->query_token_stride +
           (head + pair % a->group) * a->query_head_stride;
}

#endif
