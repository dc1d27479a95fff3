/* Row-wise functions of a decoder layer. The argument structures are mirrored in linear_args.py. */
#ifndef QUIRE_ROWS_H
#define QUIRE_ROWS_H

#include "linear.h"

/* out = x / sqrt(mean(x^2) + eps) * weight */
typedef struct {
    const float *x; /* [rows, width] */
    const float *weight;
    void *out; /* [rows, width] contiguous, out_dtype */
    int64_t x_row;
    int32_t rows, width, out_dtype, path;
    float eps;
} norm_args;

/* Split the output of a joint product into queries, keys and values; normalise and rotate them. */
typedef struct {
    const float *x; /* [rows, x_row]: queries, keys, values at the three columns */
    int64_t x_row, column[3];
    const float *cosine, *sine; /* [rows, rotary_dim]; elements i and i + rotary_dim / 2 are a pair */
    const float *norm[2];       /* [head_dim] weights of the norms of query and key heads, or NULL */
    void *out[3];               /* [rows, heads, head_dim] contiguous, out_dtype */
    int32_t heads[3], rows, head_dim, rotary_dim, out_dtype, path;
    float eps;
} rope_args;

/* Quantize activations: codes, scale and sum of each group of GROUP_CODES. */
typedef struct {
    const void *x; /* [rows, x_row], x_dtype */
    int64_t x_row;
    int8_t *codes; /* [rows, width] contiguous */
    float *scales; /* [rows, groups] */
    int32_t *sums;
    int32_t rows, width, x_dtype, path;
} code_args;

/* Convert rows between float32 and bfloat16 or float16; the other type of the two is float32. */
typedef struct {
    const void *x; /* [rows, width] contiguous, x_dtype */
    void *out;     /* [rows, width] contiguous, out_dtype */
    int32_t rows, width, x_dtype, out_dtype, path, unused;
} convert_args;

/* One call of a chain: functions that follow each other without Python between them. `part` is the index of
 * the component of the model that the time of the call is added to. */
enum { CALL_LINEAR = 0, CALL_NORM, CALL_ROPE, CALL_CODES, CALL_CONVERT, CALL_WRITE, CALL_ATTEND };

typedef struct {
    const void *args;
    int32_t kind, part;
    int32_t num_threads, unused; /* 0 threads: those of the chain */
} chain_call;

#endif
