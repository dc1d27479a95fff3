/* Attention over pages for decode rows and prefill chunks; also writes new slots (write.h), accumulates
 * attention statistics (tally.h) and moves slots (move.h).
 *
 * Plain C without Python or torch headers. Threads are torch's, through the address of its exported
 * `torch_parallel_for`. The caller divides the work (see `part`):
 *
 *     walks   few query vectors over many slots, read directly from the pages (walk.h); a long row is
 *             divided into several walks, whose results are merged
 *     blocks  many query vectors, as matrix products over packed slots (blocked.h); with joined keys, all
 *             query heads of a KV head, also in walks
 *
 * and, after all of these, the parts that need their results:
 *
 *     merges  of the walks of a long row
 *     sums    column sums of long rows and of rows with several blocks; their logits are recomputed
 *
 * Slots that no query sees are excluded from every product, because free slots may hold NaN. How a row
 * is cut depends on the row only, so its output does not depend on other rows, on the number of
 * threads, or on column sums.
 */

#include <stdatomic.h>

#include "blocked.h"
#include "move.h"
#include "sparse.h"
#include "tally.h"
#include "walking.h"
#include "write.h"

static void do_block(const attention_args *a, const item *now, const item *next, uint8_t *scratch) {
    const part *p = now->of;
    int kv_head = now->number;
    (void)next;
#ifdef HAVE_X86
    if (a->path == PATH_AVX2) attend_block_avx2(a, p, kv_head, scratch);
    else if (multiplies_pairs(a)) attend_block_bf16(a, p, kv_head, scratch);
    else attend_block_f32(a, p, kv_head, scratch);
#endif
}

/* A walk with joined keys: each number that is read is multiplied by those of all query heads. */
static void do_joined_walk(const attention_args *a, const item *now, const item *next, uint8_t *scratch) {
    const part *p = now->of;
    int kv_head = now->number;
    (void)next;
#ifdef HAVE_X86
    int sums = a->column_sums && (a->num_tallies == 0 || is_tallied(a, p->row));
    const block *b = (block *)scratch;
    if (a->path == PATH_AVX2) walk_block_avx2(a, p, kv_head, sums, scratch);
    else if (multiplies_pairs(a)) walk_block_bf16(a, p, kv_head, sums, scratch);
    else walk_block_f32(a, p, kv_head, sums, scratch);
    for (int m = 0; m < a->group; m++) {
        const float *out = b->out + (int64_t)m * a->value_coding.dim, *logits = sums ? b->kept : NULL;
        vector_result r = {out, logits, b->maximum[m], b->sum[m], b->low[m], b->high[m]};
        finish_vector(a, p, kv_head, m, r);
    }
    if (sums && a->num_tallies && p->partial < 0) tally_row(a, p->row, kv_head);
#endif
}

static void do_sums(const attention_args *a, const item *now, const item *next, uint8_t *scratch) {
    const part *p = now->of;
    int kv_head = now->number;
    (void)next;
#ifdef HAVE_X86
    if (a->path == PATH_AVX2) sum_columns_avx2(a, p, kv_head, scratch);
    else if (multiplies_pairs(a)) sum_columns_bf16(a, p, kv_head, scratch);
    else sum_columns_f32(a, p, kv_head, scratch);
#endif
}

/* ---- scheduling --------------------------------------------------------------------------------- */

typedef void (*doing)(const attention_args *, const item *now, const item *next, uint8_t *scratch);
typedef void (*parallel_function)(int64_t begin, int64_t end, void *context);
typedef int32_t (*parallel_for)(int64_t, int64_t, int64_t, parallel_function, void *);

/* Two lists of parts, each executed for every KV head (or group of heads); threads take the next item. */
typedef struct {
    const attention_args *args;
    const part *list[2];
    int32_t length[2], heads[2];
    doing what[2];
    int num_threads;
    atomic_llong next;
} work;

static item item_of(const work *shared, int64_t number, int which) {
    item found = {shared->list[which] + number / shared->heads[which], (int)(number % shared->heads[which])};
    return found;
}

static void take_items(int64_t begin, int64_t end, void *context) {
    work *shared = context;
    const attention_args *a = shared->args;
    int64_t first = (int64_t)shared->length[0] * shared->heads[0];
    int64_t items = first + (int64_t)shared->length[1] * shared->heads[1], taken;
    (void)end;
    while ((taken = atomic_fetch_add(&shared->next, 1)) < items) {
        int which = taken >= first;
        int64_t number = which ? taken - first : taken, likely = number + shared->num_threads;
        item now = item_of(shared, number, which), next = item_of(shared, likely, which);
        int is_last = likely >= (int64_t)shared->length[which] * shared->heads[which];
        shared->what[which](a, &now, is_last ? NULL : &next, a->scratch + begin * a->scratch_bytes);
    }
}

static int share_out(work *shared, parallel_for run, int num_threads) {
    if (shared->length[0] + shared->length[1] == 0) return 0;
    shared->num_threads = run == NULL || num_threads < 2 ? 1 : num_threads;
    if (shared->num_threads == 1) take_items(0, 1, shared);
    else if (run(0, num_threads, 1, take_items, shared)) return 1;
    return 0;
}

#ifdef HAVE_X86
/* Whether products of pairs of bfloat16 are exact: pages and queries have no more digits. */
static int in_pairs(const score_args *s, const float *records) {
    int numbers = s->vectors.group * s->vectors.head_dim;
    uint32_t digits = 0;
    if (s->vectors.path != PATH_AVX512_BF16 || s->vectors.dtype != BF16 || s->vectors.coded) return 0;
    for (int n = 0; n < s->window; n++, records += numbers + 1)
        for (int i = 0; i < numbers; i++) {
            uint32_t bits;
            memcpy(&bits, records + i, 4);
            digits |= bits;
        }
    return (digits & 0xffff) == 0;
}

static void score_lane(const score_args *s, int64_t item, uint8_t *scratch) {
    const attention_args *a = &s->vectors;
    int64_t number = item / a->heads_per_page, head = item % a->heads_per_page;
    const int64_t *order = s->order + number * s->slots, *positions = s->positions + number * s->slots;
    lane l = {s->pages + number * s->columns, s->held[number], head * a->page_tokens};
    if (s->score != WINDOW_SUMS) (a->path == PATH_AVX2 ? measure_vectors_avx2 : measure_vectors_f32)(s, &l, order, item);
    else if (a->path == PATH_AVX2) sum_window_avx2(s, &l, order, positions, item, scratch);
    else if (in_pairs(s, s->records + item * s->window * (a->group * a->head_dim + 1)))
        sum_window_bf16(s, &l, order, positions, item, scratch);
    else sum_window_f32(s, &l, order, positions, item, scratch);
}

typedef struct {
    const score_args *args;
    atomic_llong next;
} scoring;

static void score_items(int64_t begin, int64_t end, void *context) {
    scoring *shared = context;
    const score_args *s = shared->args;
    int64_t items = (int64_t)s->num_lanes * s->vectors.heads_per_page, item;
    (void)end;
    while ((item = atomic_fetch_add(&shared->next, 1)) < items) score_lane(s, item, s->scratch + begin * s->scratch_bytes);
}
#endif

/* ---- exported functions ------------------------------------------------------------------------- */

/* Best code path of this CPU. */
int quire_best_path(void) {
#ifdef HAVE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")
                   ? PATH_AVX512_BF16 : PATH_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return PATH_AVX2;
#endif
    return PATH_PLAIN;
}

#ifdef HAVE_X86
#define TIMED_ROUNDS 64

/* Cycles of TIMED_ROUNDS x 16 independent products; `sum` keeps them from being removed. */
#define CYCLES(name, target, product)                                    \
    static target uint64_t name(float *sum) {                            \
        __m512 sums[16], x = _mm512_set1_ps(*sum);                       \
        for (int n = 0; n < 16; n++) sums[n] = x;                        \
        uint64_t begin = __builtin_ia32_rdtsc();                         \
        for (int round = 0; round < TIMED_ROUNDS; round++)               \
            _Pragma("GCC unroll 16") for (int n = 0; n < 16; n++)        \
                sums[n] = product;                                       \
        uint64_t cycles = __builtin_ia32_rdtsc() - begin;                \
        for (int n = 1; n < 16; n++) sums[0] = _mm512_add_ps(sums[0], sums[n]); \
        *sum += _mm512_reduce_add_ps(sums[0]);                           \
        return cycles;                                                   \
    }
CYCLES(cycles_of_pairs, AVX512_BF16, _mm512_dpbf16_ps(sums[n], (__m512bh)x, (__m512bh)x))
CYCLES(cycles_of_floats, AVX512, _mm512_fmadd_ps(x, x, sums[n]))
#endif

/* The best path whose products are also fast. A dot product of bfloat16 pairs does the work of two float32
 * products; Emerald Rapids needs the time of four for it (docs/log.md). */
int quire_fast_path(void) {
    int best = quire_best_path();
#ifdef HAVE_X86
    if (best == PATH_AVX512_BF16) {
        uint64_t pairs = UINT64_MAX, floats = UINT64_MAX;
        float sum = 0;
        for (int i = 0; i < 32; i++) { /* minima: an interrupt or a rising clock is no property of the CPU */
            uint64_t one = cycles_of_pairs(&sum), other = cycles_of_floats(&sum);
            pairs = one < pairs ? one : pairs, floats = other < floats ? other : floats;
        }
        if (pairs > 2 * floats && sum == 0) return PATH_AVX512;
    }
#endif
    return best;
}

int64_t quire_args_size(void) { return sizeof(attention_args); }
int quire_max_head_dim(void) { return MAX_HEAD_DIM; }

/* Query vectors of a block; 0 if this path has no blocks for keys or values of this dim. */
int quire_block_queries(int path, int head_dim) {
#ifdef HAVE_X86
    if (path != PATH_PLAIN && head_dim % (path == PATH_AVX2 ? 8 : 16) == 0) return BLOCK_QUERIES;
#endif
    (void)path, (void)head_dim;
    return 0;
}

int quire_max_runs(void) { return MAX_RUNS; }
int quire_max_outliers(void) { return MAX_OUTLIERS; }
int quire_max_together(void) { return MAX_TOGETHER; }
/* Number of logits (query vectors times slots) up to which a block computes its own column sums. */
int quire_kept_logits(void) {
#ifdef HAVE_X86
    return KEPT_LOGITS;
#else
    return 0;
#endif
}

int quire_sum_slots(void) {
#ifdef HAVE_X86
    return BLOCK_SLOTS;
#else
    return 0;
#endif
}

/* Scratch of one thread: for walks, for one walk and its logits if column sums of several tokens are
 * requested, or for a block. */
int64_t quire_scratch_bytes(int head_dim, int value_dim, int64_t sums_stride, int heads_together) {
    size_t walks = walk_bytes() * (size_t)heads_together;
    size_t bytes = walk_bytes() + MAX_QUERIES * (size_t)sums_stride * sizeof(float);
    if (walks > bytes) bytes = walks;
#ifdef HAVE_X86
    size_t blocks = block_bytes(head_dim, value_dim, sums_stride > 0);
    if (blocks > bytes) bytes = blocks;
#endif
    return (int64_t)((bytes + 63) / 64 * 64);
}

#define NUMBERS_A_THREAD 65536

/* Tally; 0 on success. */
int quire_tally(const tally_args *args, parallel_for run) {
    int64_t items = (int64_t)args->num_rows * args->num_lanes * args->heads_per_page;
    int64_t each = args->group * args->sums_stride + 1, grain_size = 1 + NUMBERS_A_THREAD / each;
    if (run == NULL || items <= grain_size) tally_lanes(0, items, (void *)args);
    else return run(0, items, grain_size, tally_lanes, (void *)args) != 0;
    return 0;
}

int64_t quire_tally_args_size(void) { return sizeof(tally_args); }
int64_t quire_ring_args_size(void) { return sizeof(ring_args); }

/* Set the column sums of rows with several tokens to 0. */
static void clear_sums(const attention_args *a) {
    int64_t numbers = num_heads(a) * a->sums_stride;
    for (int i = 0; i < a->num_tallies; i++)
        for (int n = 0; n < a->tallies[i].num_rows; n++)
            if (a->tallies[i].fresh[n] > 1)
                memset(a->column_sums + a->tallies[i].step_rows[n] * numbers, 0, (size_t)numbers * sizeof(float));
}

/* Accumulate the column sums of rows with several tokens, and store queries. */
static int record(const attention_args *a, parallel_for run) {
    for (int i = 0; i < a->num_rings; i++) store_queries(a, a->rings + i);
    for (int i = 0; i < a->num_tallies; i++) {
        const tally_args *t = a->tallies + i;
        int chunks = 0;
        for (int n = 0; n < t->num_rows; n++) chunks |= t->fresh[n] > 1;
        if (chunks && quire_tally(t, run)) return 1;
    }
    return 0;
}

/* Select the pages that sparse rows read. */
static int select_pages(const attention_args *a, parallel_for run) {
    const sparse_args *s = a->sparse;
    int64_t blocks = (s->columns + BLOCK_PAGES - 1) / BLOCK_PAGES, lanes = (int64_t)s->num_rows * a->num_lanes;
    parallel_function score = score_pages_plain, pick = pick_pages_plain;
    void *context = (void *)a;
#ifdef HAVE_X86
    if (a->path == PATH_AVX2) score = score_pages_256, pick = pick_pages_256;
    else if (a->path != PATH_PLAIN) score = score_pages_512, pick = pick_pages_512;
#endif
    weigh_queries(0, s->num_rows, context);
    if (run != NULL)
        return run(0, lanes * blocks, 1, score, context) ||
               run(0, s->num_rows * (int64_t)num_kv_heads(a), 1, pick, context);
    score(0, lanes * blocks, context);
    pick(0, s->num_rows * (int64_t)num_kv_heads(a), context);
    return 0;
}

int64_t quire_sparse_args_size(void) { return sizeof(sparse_args); }

/* Compute attention; 0 on success. `run` is torch's parallel_for, or NULL for one thread. */
int quire_attend(const attention_args *args, parallel_for run, int num_threads) {
    int heads = num_kv_heads(args);
    work first = {args, {args->blocks, args->walks}, {args->num_blocks, args->num_walks},
                  {heads, heads / args->heads_together}, {do_block, args->joined ? do_joined_walk : do_walk}, 1, 0};
    work then = {args, {args->merges, args->sums}, {args->num_merges, args->num_sums},
                 {heads, heads}, {do_merge, do_sums}, 1, 0};
    int only = args->sparse ? args->sparse->only : 0;
    if (only != SPARSE_SELECT) clear_sums(args);
    if (args->sparse && only != SPARSE_ATTEND && select_pages(args, num_threads > 1 ? run : NULL)) return 1;
    if (only == SPARSE_SELECT) return 0;
    return share_out(&first, run, num_threads) || share_out(&then, run, num_threads) || record(args, run);
}

/* Score the cached tokens of lanes; 0 on success. Only for paths and head_dims that have blocks. */
int quire_score(const score_args *args, parallel_for run, int num_threads) {
#ifdef HAVE_X86
    scoring shared = {args, 0};
    if (run != NULL && num_threads > 1) return run(0, num_threads, 1, score_items, &shared) != 0;
    score_items(0, 1, &shared);
#else
    (void)args, (void)run, (void)num_threads;
#endif
    return 0;
}

int64_t quire_score_args_size(void) { return sizeof(score_args); }
int64_t quire_score_bytes(const score_args *args) {
#ifdef HAVE_X86
    return (int64_t)((score_bytes(args) + 63) / 64 * 64);
#else
    return (void)args, 0;
#endif
}

#define TOKENS_A_THREAD 8

static parallel_function writing(const write_args *args) {
    if (!args->coded) return write_tokens;
#ifdef HAVE_X86
    if (args->path != PATH_PLAIN) return args->path == PATH_AVX2 ? encode_tokens_256 : encode_tokens_512;
#endif
    return encode_tokens_plain;
}

static int bound(const write_args *args, parallel_for run) {
    int heads = args->num_lanes * args->heads_per_page;
    parallel_function widen = widen_plain;
#ifdef HAVE_X86
    if (args->path >= PATH_AVX512) widen = widen_512;
#endif
    if (run == NULL || args->num_tokens <= TOKENS_A_THREAD) widen(0, heads, (void *)args);
    else return run(0, heads, 1, widen, (void *)args) != 0;
    return 0;
}

/* Write; 0 on success. */
int quire_write(const write_args *args, parallel_for run) {
    parallel_function write = writing(args);
    if (run == NULL || args->num_tokens <= TOKENS_A_THREAD) write(0, args->num_tokens, (void *)args);
    else if (run(0, args->num_tokens, TOKENS_A_THREAD, write, (void *)args)) return 1;
    return args->bounds != NULL && bound(args, run);
}

int64_t quire_write_args_size(void) { return sizeof(write_args); }

#define MOVES_A_THREAD 1024

/* Move; 0 on success. */
int quire_move(const move_args *args, parallel_for run) {
    void *context = (void *)args;
    if (run == NULL || args->num_moves <= MOVES_A_THREAD) {
        read_moves(0, args->num_moves, context);
        write_moves(0, args->num_moves, context);
        return 0;
    }
    return run(0, args->num_moves, MOVES_A_THREAD, read_moves, context) ||
           run(0, args->num_moves, MOVES_A_THREAD, write_moves, context);
}

int64_t quire_move_args_size(void) { return sizeof(move_args); }

#define LANES_A_THREAD 64

/* Move slots within lanes; 0 on success. */
int quire_move_lanes(const lane_move_args *args, parallel_for run) {
    if (run == NULL || args->lanes <= LANES_A_THREAD) move_lanes(0, args->lanes, (void *)args);
    else return run(0, args->lanes, LANES_A_THREAD, move_lanes, (void *)args) != 0;
    return 0;
}

int64_t quire_lane_move_args_size(void) { return sizeof(lane_move_args); }
int64_t quire_moved_plane_size(void) { return sizeof(moved_plane); }
