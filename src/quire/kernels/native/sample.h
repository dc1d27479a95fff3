/* Sampling of one token per row of logits. SampleRow and SampleArgs in linear_args.py mirror the structures. */
#ifndef QUIRE_SAMPLE_H
#define QUIRE_SAMPLE_H

#include "args.h"

enum { SAMPLED = 0, NOT_FINITE = 1, TOO_LARGE = 2 }; /* status of a row */

/* Options of a row, in the order of their use. */
typedef struct {
    uint64_t seed, position; /* key of the random number */
    double top_p;            /* 1: all tokens */
    double log_total;        /* logarithm of the sum of e^scaled, after top-k; used for top-p */
    double log_min_p;        /* -infinity: all tokens */
    float temperature;       /* 0: the likeliest token; the other options are not used */
    int32_t top_k;           /* 0: all tokens */
} sample_row;

typedef struct {
    const float *logits; /* [rows, logits_row] */
    int64_t logits_row;
    const sample_row *options; /* [rows], or NULL: the likeliest token of every row */
    int64_t *token_ids;        /* [rows] */
    int32_t *status;           /* [rows] */
    uint8_t *scratch;          /* scratch_bytes for each thread; NULL if no row is drawn */
    int64_t scratch_bytes;
    int32_t rows, vocab, path, unused;
} sample_args;

#endif
