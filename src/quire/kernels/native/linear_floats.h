/* Included by linear.c, which defines TARGET, NAME, LANES and FORM: one kind of float product.
 *
 *     FORM_F32    float32 weights and activations
 *     FORM_WIDE   bfloat16 weights, converted in registers; float32 activations
 *     FORM_PAIRS  bfloat16 weights and activations, by dot products of pairs
 */

#define VECTORS (PANEL_COLUMNS / LANES)

#if FORM == FORM_WIDE
/* The first or second numbers of the units of a vector, as float32. */
INLINE TARGET V(vec) NAME(half_of)(const uint8_t *unit, int half) {
    V(units) pair = V(as_units)(V(read)(unit));
    return half ? V(high_half)(pair) : V(low_half)(pair);
}
#endif

/* sums [height][width] += x [height][units] x unit rows; `width` vectors of the panel's columns. */
INLINE TARGET void NAME(tile)(int height, int width, const uint8_t *x, int64_t x_row_bytes,
                              const uint8_t *unit, int units, float *sums, int first, const uint8_t *ahead,
                              int phase, int phases) {
    V(vec) sum[6][VECTORS];
#pragma GCC unroll 6
    for (int m = 0; m < height; m++)
#pragma GCC unroll 8
        for (int n = 0; n < width; n++)
            sum[m][n] = first ? V(zero)() : V(read)(sums + m * PANEL_COLUMNS + n * LANES);
    for (int u = 0; u < units; u++, unit += UNIT_ROW_BYTES, ahead += UNIT_ROW_BYTES) {
        if ((u & (phases - 1)) == phase) {
            PREFETCH(ahead);
            PREFETCH(ahead + 64);
            PREFETCH(ahead + 128);
            PREFETCH(ahead + 192);
        }
#if FORM == FORM_WIDE
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            V(vec) column[VECTORS], one[6];
            if (height <= 3) { /* few rows: hold their numbers, and convert column by column */
#pragma GCC unroll 6
                for (int m = 0; m < height; m++)
                    one[m] = V(set)(((const float *)(x + m * x_row_bytes))[2 * u + half]);
#pragma GCC unroll 8
                for (int n = 0; n < width; n++) {
                    V(vec) weight = NAME(half_of)(unit + n * LANES * 4, half);
#pragma GCC unroll 6
                    for (int m = 0; m < height; m++) sum[m][n] = V(fma)(one[m], weight, sum[m][n]);
                }
                continue;
            }
#pragma GCC unroll 8
            for (int n = 0; n < width; n++) column[n] = NAME(half_of)(unit + n * LANES * 4, half);
#pragma GCC unroll 6
            for (int m = 0; m < height; m++) {
                V(vec) number = V(set)(((const float *)(x + m * x_row_bytes))[2 * u + half]);
#pragma GCC unroll 8
                for (int n = 0; n < width; n++) sum[m][n] = V(fma)(number, column[n], sum[m][n]);
            }
        }
#else
        V(vec) column[VECTORS];
#pragma GCC unroll 8
        for (int n = 0; n < width; n++) column[n] = V(read)(unit + n * LANES * 4);
#pragma GCC unroll 6
        for (int m = 0; m < height; m++) {
            V(vec) one = V(set)(((const float *)(x + m * x_row_bytes))[u]);
#pragma GCC unroll 8
            for (int n = 0; n < width; n++)
#if FORM == FORM_PAIRS
                sum[m][n] = _mm512_dpbf16_ps(sum[m][n], (__m512bh)one, (__m512bh)column[n]);
#else
                sum[m][n] = V(fma)(one, column[n], sum[m][n]);
#endif
        }
#endif
    }
#pragma GCC unroll 6
    for (int m = 0; m < height; m++)
#pragma GCC unroll 8
        for (int n = 0; n < width; n++) V(put)(sums + m * PANEL_COLUMNS + n * LANES, sum[m][n]);
}

#if LANES == 16
#define WIDTH_1 4
#define WIDTH_2 4
#define WIDTH_4 4
#else
#define WIDTH_1 8 /* sixteen registers: height x width sums, and the columns */
#define WIDTH_2 4
#define WIDTH_4 2
#endif

/* Passes over the columns of a panel by each tile. */
#define PASSES(rows) (VECTORS / ((rows) > 3 ? WIDTH_4 : (rows) > 1 ? WIDTH_2 : WIDTH_1))

#define TILE(height, width)                                                                             \
    for (int n = 0; n < VECTORS; n += width)                                                            \
        NAME(tile)(height, width, x, x_row_bytes, unit + n * LANES * 4, units, sums + n * LANES, first, \
                   ahead, phase + n / width, phases)

static TARGET void NAME(rows)(int height, const uint8_t *x, int64_t x_row_bytes, const uint8_t *unit,
                              int units, float *sums, int first, const uint8_t *ahead, int phase,
                              int phases) {
    switch (height) {
    case 1: TILE(1, WIDTH_1); break;
    case 2: TILE(2, WIDTH_2); break;
    case 3: TILE(3, WIDTH_2); break;
    case 4: TILE(4, WIDTH_4); break;
    case 5: TILE(5, WIDTH_4); break;
    default: TILE(6, WIDTH_4);
    }
}

/* Sums of `rows` rows of x and one panel. */
static TARGET void NAME(panel)(const linear_args *a, const uint8_t *x, int rows, const uint8_t *panel,
                               float *sums) {
    int units = a->inner / unit_numbers(a->weight_kind), tiles = (rows + 5) / 6;
    int passes = tiles * PASSES(rows); /* over each block of the panel */
    int phases = passes >= 8 ? 8 : passes >= 4 ? 4 : passes >= 2 ? 2 : 1;
    int64_t unit_bytes = FORM == FORM_WIDE ? 8 : 4; /* of x */
    for (int first = 0; first < units; first += BLOCK_UNITS) {
        int count = units - first < BLOCK_UNITS ? units - first : BLOCK_UNITS;
        const uint8_t *unit = panel + (int64_t)first * UNIT_ROW_BYTES;
        const uint8_t *ahead = unit + (passes > 1 ? BLOCK_UNITS : AHEAD_UNITS) * UNIT_ROW_BYTES;
        for (int tile = 0, row = 0; tile < tiles; tile++) {
            int left = tiles - tile, height = (rows - row + left - 1) / left;
            NAME(rows)(height, x + row * a->x_row_bytes + first * unit_bytes, a->x_row_bytes, unit, count,
                       sums + row * PANEL_COLUMNS, first == 0, ahead, tile * PASSES(rows), phases);
            row += height;
        }
    }
}

#undef TILE
#undef PASSES
#undef WIDTH_1
#undef WIDTH_2
#undef WIDTH_4
#undef VECTORS
