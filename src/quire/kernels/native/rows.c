/* Row-wise functions of a decoder layer; see rows.h. A row's result depends on no other row. */

#include <math.h>
#include <time.h>

#include "rows.h"
#include "vectors.h"

typedef void (*parallel_function)(int64_t begin, int64_t end, void *context);
typedef int32_t (*parallel_for)(int64_t, int64_t, int64_t, parallel_function, void *);

#ifdef HAVE_X86
INLINE AVX512 vec16 size_of16(vec16 x) { return _mm512_abs_ps(x); }
INLINE AVX512 vec16 numbers16(const uint8_t *from, int64_t i, int dtype) {
    return load16(from, i, dtype, 0xffff);
}
INLINE AVX512 int32_t put_codes16(int8_t *to, vec16 x) {
    __m512i codes = _mm512_cvtps_epi32(x);
    _mm_storeu_si128((void *)to, _mm512_cvtepi32_epi8(codes));
    return _mm512_reduce_add_epi32(codes);
}

INLINE AVX2 vec8 size_of8(vec8 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE AVX2 vec8 numbers8(const uint8_t *from, int64_t i, int dtype) { return load8(from, i, dtype); }
INLINE AVX2 int32_t put_codes8(int8_t *to, vec8 x) {
    int32_t codes[8], sum = 0;
    _mm256_storeu_si256((void *)codes, _mm256_cvtps_epi32(x));
    for (int i = 0; i < 8; i++) to[i] = (int8_t)codes[i], sum += codes[i];
    return sum;
}

#define LANES 16
#define TARGET AVX512
#define NAME(name) name##_512
#include "rows_body.h"
#undef NAME
#undef TARGET
#undef LANES

#define LANES 8
#define TARGET AVX2
#define NAME(name) name##_256
#include "rows_body.h"
#undef NAME
#undef TARGET
#undef LANES

/* A function of a range of rows, for each argument structure. */
#define ROWS(name, type, call_512, call_256)                                          \
    static void name(int64_t begin, int64_t end, void *context) {                     \
        const type *a = context;                                                      \
        for (int64_t row = begin; row < end; row++)                                   \
            if (a->path == PATH_AVX2) call_256;                                       \
            else call_512;                                                            \
    }

static void rope_row(const rope_args *a, int64_t row) {
    for (int part = 0; part < 3; part++)
        for (int head = 0; head < a->heads[part]; head++)
            if (a->path == PATH_AVX2) rope_head_256(a, row, part, head);
            else rope_head_512(a, row, part, head);
}

ROWS(norm_rows, norm_args, norm_row_512(a, row), norm_row_256(a, row))
ROWS(rope_rows, rope_args, rope_row(a, row), rope_row(a, row))
ROWS(code_rows, code_args, code_row_512(a, row), code_row_256(a, row))
ROWS(convert_rows, convert_args, convert_row_512(a, row), convert_row_256(a, row))

#define NUMBERS_A_THREAD 16384

static int for_rows(parallel_for run, int64_t rows, int64_t width, parallel_function what, const void *args) {
    int64_t together = 1 + NUMBERS_A_THREAD / width;
    if (run == NULL || rows <= together) what(0, rows, (void *)args);
    else return run(0, rows, together, what, (void *)args) != 0;
    return 0;
}
#define RUN(what, width)                            \
    if (args->path == PATH_PLAIN) return 2;         \
    return for_rows(run, args->rows, width, what, args)
#else
#define RUN(what, width)            \
    (void)args, (void)run; \
    return 2
#endif

/* Each returns 0 on success, 2 if this machine has no code for it. */
int quire_norm(const norm_args *args, parallel_for run) { RUN(norm_rows, args->width); }
int quire_rope(const rope_args *args, parallel_for run) {
    RUN(rope_rows, (int64_t)(args->heads[0] + args->heads[1] + args->heads[2]) * args->head_dim);
}
int quire_code_rows(const code_args *args, parallel_for run) { RUN(code_rows, args->width); }
int quire_convert(const convert_args *args, parallel_for run) { RUN(convert_rows, args->width); }

int64_t quire_norm_args_size(void) { return sizeof(norm_args); }
int64_t quire_rope_args_size(void) { return sizeof(rope_args); }
int64_t quire_code_args_size(void) { return sizeof(code_args); }
int64_t quire_convert_args_size(void) { return sizeof(convert_args); }
int64_t quire_chain_call_size(void) { return sizeof(chain_call); }

int quire_linear(const linear_args *args, parallel_for run, int num_threads);
int quire_attend(const attention_args *args, parallel_for run, int num_threads);
int quire_write(const void *args, parallel_for run);

static int64_t nanoseconds_now(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Make calls in order; the status of the first that fails, or 0. If `nanoseconds` is not NULL, add the time of
 * each call to the number at its part. */
int quire_chain(const chain_call *calls, int count, parallel_for run, int num_threads, int64_t *nanoseconds) {
    int status = 0;
    for (int i = 0; i < count && !status; i++) {
        const void *args = calls[i].args;
        int threads = calls[i].num_threads ? calls[i].num_threads : num_threads;
        int64_t started = nanoseconds ? nanoseconds_now() : 0;
        switch (calls[i].kind) {
        case CALL_LINEAR: status = quire_linear(args, run, threads); break;
        case CALL_NORM: status = quire_norm(args, run); break;
        case CALL_ROPE: status = quire_rope(args, run); break;
        case CALL_CODES: status = quire_code_rows(args, run); break;
        case CALL_CONVERT: status = quire_convert(args, run); break;
        case CALL_WRITE: status = quire_write(args, run); break;
        default: status = quire_attend(args, run, threads);
        }
        if (nanoseconds) nanoseconds[calls[i].part] += nanoseconds_now() - started;
    }
    return status;
}
