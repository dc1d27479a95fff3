/* Included by linear.c, which defines TARGET, NAME, LANES: products of int8 or int4 weights and int8
 * activations.
 *
 * Activations have one scale for each row and group of GROUP_CODES; so do int4 weights, for each column.
 * Codes of a group are summed in int32, exactly; then scaled and added in float32. Weight codes are
 * stored with an offset (128 or 8), because vector instructions multiply unsigned by signed bytes: the
 * offset times the sum of the activation's codes is subtracted.
 */

#define VECTORS (PANEL_COLUMNS / LANES)

/* Sum + the products of four unsigned and four signed bytes in each lane. */
INLINE TARGET V(units) V(add_four)(V(units) sum, V(units) weight, V(units) x, int wide) {
#if LANES == 16
    (void)wide;
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x)); /* GCC 12 spills sums of the intrinsic */
    return sum;
#else
    if (wide) { /* codes beyond 127: pairs would overflow int16, so signs are moved to x */
        weight = _mm256_xor_si256(weight, _mm256_set1_epi8((char)0x80));
        x = _mm256_sign_epi8(x, weight);
        weight = _mm256_abs_epi8(weight);
    }
    __m256i pairs = _mm256_maddubs_epi16(weight, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

/* sums [height][width] += one group's products; `scales` of the columns, or NULL. */
INLINE TARGET void NAME(code_tile)(int height, int width, int kind, const uint8_t *x, int64_t x_row_bytes,
                                   const float *x_scales, const int32_t *x_sums, int groups,
                                   const uint8_t *unit, int units, const float *scales, float *sums,
                                   int first, const uint8_t *ahead, int phase, int phases) {
    V(units) sum[6][VECTORS];
    int offset = kind == WEIGHT_INT4 ? 8 : LANES == 16 ? 128 : 0;
#pragma GCC unroll 6
    for (int m = 0; m < height; m++)
#pragma GCC unroll 8
        for (int n = 0; n < width; n++) sum[m][n] = V(set_units)(-offset * x_sums[m * groups]);
    for (int u = 0; u < units; u++, unit += UNIT_ROW_BYTES, ahead += UNIT_ROW_BYTES) {
        if ((u & (phases - 1)) == phase) {
            PREFETCH(ahead);
            PREFETCH(ahead + 64);
            PREFETCH(ahead + 128);
            PREFETCH(ahead + 192);
        }
        V(units) column[VECTORS];
#pragma GCC unroll 8
        for (int n = 0; n < width; n++) column[n] = V(read_units)(unit + n * LANES * 4);
#pragma GCC unroll 6
        for (int m = 0; m < height; m++) {
            const int32_t *four = (const int32_t *)(x + m * x_row_bytes);
            if (kind == WEIGHT_INT8) {
                V(units) one = V(set_units)(four[u]);
#pragma GCC unroll 8
                for (int n = 0; n < width; n++) sum[m][n] = V(add_four)(sum[m][n], column[n], one, 1);
            } else {
                V(units) one = V(set_units)(four[2 * u]), other = V(set_units)(four[2 * u + 1]);
#pragma GCC unroll 8
                for (int n = 0; n < width; n++) {
                    sum[m][n] = V(add_four)(sum[m][n], V(low_codes)(column[n]), one, 0);
                    sum[m][n] = V(add_four)(sum[m][n], V(high_codes)(column[n]), other, 0);
                }
            }
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < height; m++) {
        V(vec) scale = V(set)(x_scales[m * groups]);
#pragma GCC unroll 8
        for (int n = 0; n < width; n++) {
            float *to = sums + m * PANEL_COLUMNS + n * LANES;
            V(vec) both = scales ? V(mul)(scale, V(read)(scales + n * LANES)) : scale;
            V(put)(to, V(fma)(V(numbers_of)(sum[m][n]), both, first ? V(zero)() : V(read)(to)));
        }
    }
}

#if LANES == 16
#define WIDTH_1 4
#define WIDTH_2 4
#define WIDTH_4 4
#else
#define WIDTH_1 4
#define WIDTH_2 4
#define WIDTH_4 2
#endif

/* Passes over the columns of a panel by each tile. */
#define PASSES(rows) (VECTORS / ((rows) > 3 ? WIDTH_4 : (rows) > 1 ? WIDTH_2 : WIDTH_1))

#define TILE(height, width)                                                                               \
    for (int n = 0; n < VECTORS; n += width)                                                              \
        NAME(code_tile)(height, width, kind, x, x_row_bytes, x_scales, x_sums, groups, unit + n * LANES * 4, \
                        units, scales ? scales + n * LANES : NULL, sums + n * LANES, first, ahead,       \
                        phase + n / width, phases)

#define CODE_ROWS(name, the_kind)                                                                         \
    static TARGET void NAME(name)(int height, const uint8_t *x, int64_t x_row_bytes, const float *x_scales, \
                                  const int32_t *x_sums, int groups, const uint8_t *unit, int units,     \
                                  const float *scales, float *sums, int first, const uint8_t *ahead,     \
                                  int phase, int phases) {                                                \
        const int kind = the_kind;                                                                        \
        switch (height) {                                                                                 \
        case 1: TILE(1, WIDTH_1); break;                                                                  \
        case 2: TILE(2, WIDTH_2); break;                                                                  \
        case 3: TILE(3, WIDTH_2); break;                                                                  \
        case 4: TILE(4, WIDTH_4); break;                                                                  \
        case 5: TILE(5, WIDTH_4); break;                                                                  \
        default: TILE(6, WIDTH_4);                                                                        \
        }                                                                                                 \
    }

CODE_ROWS(int8_rows, WEIGHT_INT8)
CODE_ROWS(int4_rows, WEIGHT_INT4)

/* Sums of `rows` rows of codes and one panel; int8 sums without the scales of the columns. */
static TARGET void NAME(code_panel)(const linear_args *a, int first_row, int rows, int number, float *sums) {
    int numbers = unit_numbers(a->weight_kind), units = a->inner / numbers, groups = num_groups(a);
    int block = GROUP_CODES / numbers, tiles = (rows + 5) / 6;
    int passes = tiles * PASSES(rows); /* over each block of the panel */
    int phases = passes >= 8 ? 8 : passes >= 4 ? 4 : passes >= 2 ? 2 : 1;
    const uint8_t *panel = a->weight + number * panel_bytes(a);
    for (int group = 0; group < groups; group++) {
        int first = group * block, count = units - first < block ? units - first : block;
        const uint8_t *unit = panel + (int64_t)first * UNIT_ROW_BYTES;
        const uint8_t *ahead = unit + (passes > 1 ? block : AHEAD_UNITS) * UNIT_ROW_BYTES;
        const float *scales = NULL;
        if (a->weight_kind == WEIGHT_INT4) scales = a->scales + ((int64_t)number * groups + group) * PANEL_COLUMNS;
        for (int tile = 0, row = 0; tile < tiles; tile++) {
            int left = tiles - tile, height = (rows - row + left - 1) / left;
            int64_t at = first_row + row;
            const uint8_t *x = a->x + at * a->x_row_bytes + (int64_t)group * GROUP_CODES;
            int phase = tile * PASSES(rows);
            if (a->weight_kind == WEIGHT_INT4)
                NAME(int4_rows)(height, x, a->x_row_bytes, a->x_scales + at * groups + group,
                                a->x_sums + at * groups + group, groups, unit, count, scales,
                                sums + row * PANEL_COLUMNS, group == 0, ahead, phase, phases);
            else
                NAME(int8_rows)(height, x, a->x_row_bytes, a->x_scales + at * groups + group,
                                a->x_sums + at * groups + group, groups, unit, count, scales,
                                sums + row * PANEL_COLUMNS, group == 0, ahead, phase, phases);
            row += height;
        }
    }
}

#undef CODE_ROWS
#undef TILE
#undef PASSES
#undef WIDTH_1
#undef WIDTH_2
#undef WIDTH_4
#undef VECTORS
