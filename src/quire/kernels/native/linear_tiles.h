/* Included by linear.c, which defines TARGET, NAME, LANES and FORM: tiles of packed rows; see linear_packed.h.
 *
 *     FORM_F32     float32 words
 *     FORM_PAIRS   words of two bfloat16
 *     FORM_BYTES   words of four codes; those of the weight have an offset of 128
 *     FORM_NIBBLES the same with an offset of 8
 */

#define WIDTH (LANES == 16 ? 4 : 2) /* vectors of a tile: registers hold TILE_ROWS x WIDTH sums */

#if FORM == FORM_F32 || FORM == FORM_PAIRS
#define SUM V(vec)
#else
#define SUM V(units)
#define OFFSET (FORM == FORM_NIBBLES ? 8 : LANES == 16 ? 128 : 0)
#endif

INLINE TARGET SUM NAME(add_word)(SUM sum, V(units) x, V(units) weight) {
#if FORM == FORM_F32
    return V(fma)((V(vec))x, (V(vec))weight, sum);
#elif FORM == FORM_PAIRS
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weight);
#else
    return V(add_four)(sum, weight, x, FORM == FORM_BYTES);
#endif
}

/* Prefetch the same bytes of the next tile. */
INLINE void NAME(prefetch_next)(const packed_block *b, const uint8_t *x, const float *sums, int u) {
    __builtin_prefetch(x + b->tile_bytes, 0, 3);
    __builtin_prefetch(sums + TILE_ROWS * (PANEL_COLUMNS + u), 1, 3);
}

/* Sums of one tile and WIDTH vectors of columns. */
INLINE TARGET void NAME(packed_tile)(const packed_block *b, int tile, int column) {
    const uint8_t *x = b->x + tile * b->tile_bytes, *unit = b->unit + column * 4;
    float *sums = b->sums + tile * TILE_ROWS * PANEL_COLUMNS + column;
    SUM sum[TILE_ROWS][WIDTH];
#pragma GCC unroll 6
    for (int m = 0; m < TILE_ROWS; m++)
#pragma GCC unroll 4
        for (int n = 0; n < WIDTH; n++)
#ifdef OFFSET
            sum[m][n] = V(set_units)(-OFFSET * b->x_sums[tile * TILE_ROWS + m]);
#else
            sum[m][n] = b->first ? V(zero)() : V(read)(sums + m * PANEL_COLUMNS + n * LANES);
#endif
    for (int u = 0; u < b->units; u++, unit += UNIT_ROW_BYTES, x += TILE_WORD_BYTES) {
        V(units) columns[WIDTH];
        NAME(prefetch_next)(b, x, b->sums + tile * TILE_ROWS * PANEL_COLUMNS, u);
#pragma GCC unroll 4
        for (int n = 0; n < WIDTH; n++) columns[n] = V(read_units)(unit + n * LANES * 4);
#pragma GCC unroll 6
        for (int m = 0; m < TILE_ROWS; m++) {
            V(units) one = V(set_units)(((const int32_t *)x)[m]);
#pragma GCC unroll 4
            for (int n = 0; n < WIDTH; n++) sum[m][n] = NAME(add_word)(sum[m][n], one, columns[n]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < TILE_ROWS; m++) {
#ifdef OFFSET
        V(vec) scale = V(set)(b->x_scales[tile * TILE_ROWS + m]);
#endif
#pragma GCC unroll 4
        for (int n = 0; n < WIDTH; n++) {
            float *to = sums + m * PANEL_COLUMNS + n * LANES;
#ifdef OFFSET
            V(vec) both = b->scales ? V(mul)(scale, V(read)(b->scales + column + n * LANES)) : scale;
            V(put)(to, V(fma)(V(numbers_of)(sum[m][n]), both, b->first ? V(zero)() : V(read)(to)));
#else
            V(put)(to, sum[m][n]);
#endif
        }
    }
}

static TARGET void NAME(packed_tiles)(const packed_block *b) {
    for (int tile = 0; tile < b->tiles; tile++) {
        prefetch_ahead(b, tile);
        for (int column = 0; column < PANEL_COLUMNS; column += WIDTH * LANES) NAME(packed_tile)(b, tile, column);
    }
}

#undef WIDTH
#undef SUM
#undef OFFSET
