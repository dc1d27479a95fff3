/* Products with packed weights; see linear.h. Threads are torch's, as in attention.c.
 *
 * A thread takes one panel and up to CHUNK_ROWS rows at a time. It passes over the panel in blocks that
 * stay in its first-level cache: each block is read from memory once, for all rows. Meanwhile it
 * prefetches the next block. From MIN_PACKED_ROWS rows on, rows are packed; see linear_packed.h. A row's sums do not depend on the other rows or on the number of threads:
 * every kind of tile adds the inner axis in the same order.
 */

#include <stdatomic.h>
#include <string.h>

#include "linear_packed.h"
#include "vectors.h"

typedef void (*parallel_function)(int64_t begin, int64_t end, void *context);
typedef int32_t (*parallel_for)(int64_t, int64_t, int64_t, parallel_function, void *);

#define BLOCK_UNITS 64 /* 16 KiB of a panel: half of a first-level cache */
#define AHEAD_UNITS 16 /* distance of prefetches if there is one pass over each block */
#define PREFETCH(address) __builtin_prefetch(address, 0, 2) /* second level: the first holds the block */

#define FORM_F32 1
#define FORM_WIDE 2
#define FORM_PAIRS 3
#define FORM_BYTES 4
#define FORM_NIBBLES 5

#ifdef HAVE_X86
#define AVX512_VNNI \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,avx512vnni")))

INLINE AVX512 vec16 low_half16(units16 pair) { return (vec16)_mm512_slli_epi32(pair, 16); }
INLINE AVX512 vec16 high_half16(units16 pair) {
    return (vec16)_mm512_and_si512(pair, _mm512_set1_epi32((int)0xffff0000));
}
INLINE AVX512 units16 read_units16(const uint8_t *from) { return _mm512_loadu_si512(from); }
INLINE AVX512 units16 set_units16(int unit) { return _mm512_set1_epi32(unit); }
INLINE AVX512 vec16 numbers_of16(units16 x) { return _mm512_cvtepi32_ps(x); }
INLINE AVX512 units16 low_codes16(units16 x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE AVX512 units16 high_codes16(units16 x) { return low_codes16(_mm512_srli_epi32(x, 4)); }

INLINE AVX512 vec16 divide16(vec16 a, vec16 b) { return _mm512_div_ps(a, b); }
INLINE AVX512 vec16 minus_size16(vec16 x) { return _mm512_or_ps(x, _mm512_set1_ps(-0.0f)); }
INLINE AVX512 mask16 below_zero16(vec16 x) { return _mm512_cmp_ps_mask(x, zero16(), _CMP_LT_OQ); }

INLINE AVX2 vec8 low_half8(units8 pair) { return (vec8)_mm256_slli_epi32(pair, 16); }
INLINE AVX2 vec8 high_half8(units8 pair) {
    return (vec8)_mm256_and_si256(pair, _mm256_set1_epi32((int)0xffff0000));
}
INLINE AVX2 units8 read_units8(const uint8_t *from) { return _mm256_loadu_si256((const void *)from); }
INLINE AVX2 units8 set_units8(int unit) { return _mm256_set1_epi32(unit); }
INLINE AVX2 vec8 numbers_of8(units8 x) { return _mm256_cvtepi32_ps(x); }
INLINE AVX2 units8 low_codes8(units8 x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE AVX2 units8 high_codes8(units8 x) { return low_codes8(_mm256_srli_epi32(x, 4)); }
INLINE AVX2 vec8 divide8(vec8 a, vec8 b) { return _mm256_div_ps(a, b); }
INLINE AVX2 vec8 minus_size8(vec8 x) { return _mm256_or_ps(x, set8(-0.0f)); }
INLINE AVX2 mask8 below_zero8(vec8 x) { return (mask8)_mm256_cmp_ps(x, zero8(), _CMP_LT_OQ); }

#define LANES 16
#define TARGET AVX512
#define NAME(name) name##_f32_512
#define FORM FORM_F32
#include "linear_floats.h"
#include "linear_tiles.h"
#undef NAME
#undef FORM
#define NAME(name) name##_wide_512
#define FORM FORM_WIDE
#include "linear_floats.h"
#undef NAME
#undef FORM
#undef TARGET
#define TARGET AVX512_BF16
#define NAME(name) name##_pairs_512
#define FORM FORM_PAIRS
#include "linear_floats.h"
#include "linear_tiles.h"
#undef NAME
#undef FORM
#undef TARGET
#define TARGET AVX512_VNNI
#define NAME(name) name##_512
#include "linear_codes.h"
#undef NAME
#define NAME(name) name##_bytes_512
#define FORM FORM_BYTES
#include "linear_tiles.h"
#undef NAME
#undef FORM
#define NAME(name) name##_nibbles_512
#define FORM FORM_NIBBLES
#include "linear_tiles.h"
#undef NAME
#undef FORM
#undef TARGET
#define TARGET AVX512
#define NAME(name) name##_512
#include "linear_finish.h"
#undef NAME
#undef TARGET
#undef LANES

#define LANES 8
#define TARGET AVX2
#define NAME(name) name##_f32_256
#define FORM FORM_F32
#include "linear_floats.h"
#include "linear_tiles.h"
#undef NAME
#undef FORM
#define NAME(name) name##_wide_256
#define FORM FORM_WIDE
#include "linear_floats.h"
#undef NAME
#undef FORM
#define NAME(name) name##_256
#include "linear_codes.h"
#undef NAME
#define NAME(name) name##_bytes_256
#define FORM FORM_BYTES
#include "linear_tiles.h"
#undef NAME
#undef FORM
#define NAME(name) name##_nibbles_256
#define FORM FORM_NIBBLES
#include "linear_tiles.h"
#undef NAME
#undef FORM
#define NAME(name) name##_256
#include "linear_finish.h"
#undef NAME
#undef TARGET
#undef LANES

/* ---- one panel ---------------------------------------------------------------------------------- */

static int has_vnni(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static void sum_panel(const linear_args *a, int first_row, int rows, int number, float *sums) {
    const uint8_t *x = a->x + first_row * a->x_row_bytes, *panel = a->weight + number * panel_bytes(a);
    int wide = a->path != PATH_AVX2;
    if (a->weight_kind >= WEIGHT_INT8) {
        if (wide && has_vnni()) code_panel_512(a, first_row, rows, number, sums);
        else code_panel_256(a, first_row, rows, number, sums);
    } else if (a->weight_kind == WEIGHT_F32) {
        if (wide) panel_f32_512(a, x, rows, panel, sums);
        else panel_f32_256(a, x, rows, panel, sums);
    } else if (a->x_dtype == BF16) panel_pairs_512(a, x, rows, panel, sums);
    else if (wide) panel_wide_512(a, x, rows, panel, sums);
    else panel_wide_256(a, x, rows, panel, sums);
}

static void finish(const linear_args *a, int64_t row, int rows, int number, const float *sums) {
    if (a->path == PATH_AVX2) finish_rows_256(a, row, rows, number, sums);
    else finish_rows_512(a, row, rows, number, sums);
}

#include "linear_chunks.h"

typedef struct {
    const linear_args *args;
    int32_t chunks;
    atomic_llong next;
} panel_work;

static void take_panels(int64_t begin, int64_t end, void *context) {
    panel_work *work = context;
    const linear_args *a = work->args;
    float sums[CHUNK_ROWS * PANEL_COLUMNS] __attribute__((aligned(64)));
    int64_t items = (int64_t)num_panels(a) * work->chunks, item;
    (void)begin, (void)end;
    while ((item = atomic_fetch_add(&work->next, 1)) < items) {
        int number = (int)(item / work->chunks), chunk = (int)(item % work->chunks);
        int first = (int)((int64_t)a->rows * chunk / work->chunks);
        int rows = (int)((int64_t)a->rows * (chunk + 1) / work->chunks) - first;
        sum_panel(a, first, rows, number, sums);
        finish(a, first, rows, number, sums);
    }
}

static int share_work(parallel_for run, int threads, parallel_function what, void *work) {
    if (threads > 1) return run(0, threads, 1, what, work) != 0;
    what(0, 1, work);
    return 0;
}
#endif

/* Multiply; 0 on success, 2 if this machine has no code for it. */
int quire_linear(const linear_args *args, parallel_for run, int num_threads) {
#ifdef HAVE_X86
    int threads = run == NULL || num_threads < 2 ? 1 : num_threads;
    if (args->path == PATH_PLAIN) return 2;
    if (args->rows == 0) return 0;
    if (args->rows >= MIN_PACKED_ROWS && max_chunk_rows(args)) {
        chunk_work work = divide_chunks(args, threads);
        return share_work(run, threads, take_chunks, &work);
    }
    panel_work work = {args, (args->rows + CHUNK_ROWS - 1) / CHUNK_ROWS, 0};
    return share_work(run, threads, take_panels, &work);
#else
    (void)args, (void)run, (void)num_threads;
    return 2;
#endif
}

int64_t quire_linear_args_size(void) { return sizeof(linear_args); }
