/* Recurrent layers: tokens of rows, one after the other, on states in pages, which are changed in place. The
 * argument structures are mirrored in arguments.py. A row's result depends on no other row. */

#include <math.h>

#include "vectors.h"

/* States of float32 in a plane: page n at n * page_bytes. The vectors of a state are divided equally among its
 * pages, in order. */
typedef struct {
    uint8_t *plane;
    const int64_t *pages; /* [rows, per_row] */
    int64_t page_bytes;
    int32_t per_row, vectors; /* pages of a row, and vectors of a page */
} paged_states;

/* An array [rows, tokens, ...] in which the numbers of a token are contiguous. */
typedef struct {
    const uint8_t *numbers;
    int64_t row, token; /* elements between rows, and between tokens */
    int32_t dtype, unused;
} row_numbers;

/* A causal convolution of each channel, for one token. A state is [channels, length]: the newest inputs. */
typedef struct {
    paged_states states;
    row_numbers x;       /* [rows, 1, channels] */
    const float *weight; /* [channels, taps] */
    const float *bias;   /* [channels], or NULL */
    void *out;           /* [rows, channels] contiguous, of the type of x */
    int32_t rows, channels, length, taps, silu, path;
} convolve_args;

/* The gated delta rule: S = exp(decay) S; S += k (beta (v - S^T k))^T; out = S^T q. A state is
 * [heads, key_dim, value_dim]. */
typedef struct {
    paged_states states;
    row_numbers query, key; /* [rows, tokens, key_heads, key_dim] */
    row_numbers value;      /* [rows, tokens, heads, value_dim] */
    row_numbers decay;      /* [rows, tokens, heads, decays]: one of a head, or of each of its key_dim */
    row_numbers beta;       /* [rows, tokens, heads] */
    void *out;              /* [rows, tokens, heads, value_dim] contiguous, of the type of value */
    int32_t rows, tokens, heads, key_heads, key_dim, value_dim, decays, normalize, path, unused;
} delta_args;

/* Mamba 2: S = exp(step decay) S + step x key^T; out = S query + skip x. A state is [heads, dim, state]. */
typedef struct {
    paged_states states;
    row_numbers x;             /* [rows, tokens, heads, dim] */
    row_numbers step;          /* [rows, tokens, heads] */
    row_numbers key, query;    /* [rows, tokens, groups, state] */
    const float *decay, *skip; /* [heads]; skip may be NULL */
    void *out;                 /* [rows, tokens, heads, dim] contiguous, out_dtype */
    int32_t rows, tokens, heads, groups, dim, state, out_dtype, path;
} space_args;

typedef void (*parallel_function)(int64_t begin, int64_t end, void *context);
typedef int32_t (*parallel_for)(int64_t, int64_t, int64_t, parallel_function, void *);

#ifdef HAVE_X86
#define NUMBERS_A_THREAD 16384
#define CHANNELS 64 /* of a convolution that one call computes */
#define TOGETHER 16 /* tokens that are computed while a part of a state is in registers or in the first cache */

/* The vector `number` of the state of a row; vectors have `width` numbers. */
static inline float *state_vector(const paged_states *of, int64_t row, int number, int width) {
    int page = number / of->vectors, within = number - page * of->vectors;
    return (float *)(of->plane + of->pages[row * of->per_row + page] * of->page_bytes) + (int64_t)within * width;
}

static inline float number_of(const row_numbers *of, int64_t row, int64_t token, int64_t i) {
    return load_number(of->numbers, row * of->row + token * of->token + i, of->dtype);
}

static inline void read_numbers(float *to, const row_numbers *of, int64_t row, int64_t token, int64_t first,
                                int count) {
    for (int i = 0; i < count; i++) to[i] = number_of(of, row, token, first + i);
}

/* Multiply a vector by `factor`; first divide it by its length, if `normalize`. */
static void scale(float *x, int count, int normalize, float factor) {
    float sum = 1e-6f;
    for (int i = 0; normalize && i < count; i++) sum += x[i] * x[i];
    factor = normalize ? factor / sqrtf(sum) : factor;
    for (int i = 0; i < count; i++) x[i] *= factor;
}

#define LANES 16
#define TARGET AVX512
#define NAME(name) name##_512
#include "recurrent_body.h"
#undef NAME
#undef TARGET
#undef LANES

#define LANES 8
#define TARGET AVX2
#define NAME(name) name##_256
#include "recurrent_body.h"
#undef NAME
#undef TARGET
#undef LANES

/* A function of a range of (row, part): parts are heads, or blocks of channels. */
#define PARTS(name, type, parts)                                                \
    static void name##_parts(int64_t begin, int64_t end, void *context) {       \
        const type *a = context;                                                \
        for (int64_t i = begin; i < end; i++)                                   \
            if (a->path == PATH_AVX2) name##_256(a, i / (parts), i % (parts));  \
            else name##_512(a, i / (parts), i % (parts));                       \
    }

#define BLOCKS(a) (((a)->channels + CHANNELS - 1) / CHANNELS)
PARTS(convolve, convolve_args, BLOCKS(a))
PARTS(delta, delta_args, a->heads)
PARTS(space, space_args, a->heads)

static int for_parts(parallel_for run, int64_t parts, int64_t numbers, parallel_function what, const void *args) {
    int64_t together = 1 + NUMBERS_A_THREAD / numbers;
    if (run == NULL || parts <= together) what(0, parts, (void *)args);
    else return run(0, parts, together, what, (void *)args) != 0;
    return 0;
}
#define RUN(name, parts, numbers)                 \
    if (args->path == PATH_PLAIN) return 2;       \
    return for_parts(run, (int64_t)args->rows * (parts), numbers, name##_parts, args)
#else
#define RUN(name, parts, numbers) \
    (void)args, (void)run;        \
    return 2
#endif

/* Each returns 0 on success, 2 if this machine has no code for it. */
int quire_convolve(const convolve_args *args, parallel_for run) { RUN(convolve, BLOCKS(args), CHANNELS * 8); }
int quire_delta(const delta_args *args, parallel_for run) {
    RUN(delta, args->heads, (int64_t)args->tokens * args->key_dim * args->value_dim);
}
int quire_space(const space_args *args, parallel_for run) {
    RUN(space, args->heads, (int64_t)args->tokens * args->dim * args->state);
}

int64_t quire_convolve_args_size(void) { return sizeof(convolve_args); }
int64_t quire_delta_args_size(void) { return sizeof(delta_args); }
int64_t quire_space_args_size(void) { return sizeof(space_args); }
