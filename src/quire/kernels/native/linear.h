/* Products of activations and packed weights: out [rows, outer] = x [rows, inner] x weight [outer, inner]^T.
 *
 * A packed weight is a sequence of panels of PANEL_COLUMNS output columns. A panel is a matrix
 * [units][PANEL_COLUMNS] of 32-bit units, so a panel is read from its first byte to its last:
 *
 *     float32   a unit is one number
 *     bfloat16  a unit is two numbers, adjacent on the inner axis
 *     int8      a unit is four codes plus 128
 *     int4      a unit is eight codes plus 8: low halves of the bytes 0 .. 3, then high halves
 *
 * Columns beyond `outer` are zeros (the code of zero). LinearArgs in linear_args.py mirrors `linear_args`.
 */
#ifndef QUIRE_LINEAR_H
#define QUIRE_LINEAR_H

#include "args.h"

#define PANEL_COLUMNS 64
#define UNIT_ROW_BYTES (PANEL_COLUMNS * 4)
#define GROUP_CODES 128 /* codes with one scale: of activations, and of int4 weights */
#define CHUNK_ROWS 120  /* rows whose sums a thread holds */
#define GATE_COLUMNS 32 /* a panel of a gated product: 32 columns of the gate, 32 of the other factor */

enum { WEIGHT_F32 = 0, WEIGHT_BF16 = 1, WEIGHT_INT8 = 2, WEIGHT_INT4 = 3 };
enum { STORE = 0, ADD = 1, GATE_SILU = 2 };

typedef struct {
    const uint8_t *x;      /* float32; bfloat16 if the path multiplies it; codes for coded weights */
    int64_t x_row_bytes;
    const float *x_scales; /* [rows, groups] of codes; else NULL */
    const int32_t *x_sums; /* [rows, groups] sums of codes; else NULL */
    const uint8_t *weight; /* panels */
    const float *scales;   /* int8: [panels, PANEL_COLUMNS]; int4: [panels, groups, PANEL_COLUMNS] */
    const float *bias;     /* [panels * PANEL_COLUMNS] or NULL */
    void *out;
    int64_t out_row; /* numbers from one row of `out` to the next */
    int32_t rows, inner, outer;
    int32_t weight_kind, x_dtype, out_dtype, finish, path;
} linear_args;

static inline int num_panels(const linear_args *a) { return (a->outer + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }
static inline int num_groups(const linear_args *a) { return (a->inner + GROUP_CODES - 1) / GROUP_CODES; }

/* Numbers of the inner axis in a unit. */
static inline int unit_numbers(int kind) { return 1 << kind; }

static inline int64_t panel_bytes(const linear_args *a) {
    return (int64_t)(a->inner / unit_numbers(a->weight_kind)) * UNIT_ROW_BYTES;
}

#endif
