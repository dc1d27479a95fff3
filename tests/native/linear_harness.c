/* Runs linear.c under the address and undefined-behaviour sanitizers.
 *
 * Products of random shapes, with buffers that end at the end of their allocation, compared with sums in double
 * precision: every kind of weight, few and many rows, gates, additions and biases. Exit code 0 if all agree.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "linear.c"
#include "random_numbers.h"

int quire_best_path(void); /* of attention.c */

static int32_t one_by_one(int64_t begin, int64_t end, int64_t grain, parallel_function what, void *context) {
    (void)grain;
    for (; begin < end; begin++) what(begin, begin + 1, context);
    return 0;
}

static float *numbers(size_t count) {
    float *found = malloc(count * sizeof(float));
    for (size_t i = 0; i < count; i++) found[i] = number();
    return found;
}

static double weight_at(const linear_args *a, int column, int i) {
    int panel = column / PANEL_COLUMNS, each = unit_numbers(a->weight_kind), at = column % PANEL_COLUMNS;
    const uint8_t *unit = a->weight + panel * panel_bytes(a) + (int64_t)(i / each) * UNIT_ROW_BYTES + at * 4;
    if (a->weight_kind <= WEIGHT_BF16) return load_number(unit, i % each, a->weight_kind == WEIGHT_F32 ? F32 : BF16);
    if (a->weight_kind == WEIGHT_INT8) return (unit[i % 4] - 128) * (double)a->scales[column];
    const float *scales = a->scales + ((int64_t)panel * num_groups(a) + i / GROUP_CODES) * PANEL_COLUMNS;
    return ((i % each < 4 ? unit[i % 4] & 15 : unit[i % 4] >> 4) - 8) * (double)scales[at];
}

static double x_at(const linear_args *a, int row, int i) {
    const uint8_t *x = a->x + row * a->x_row_bytes;
    if (a->weight_kind < WEIGHT_INT8) return load_number(x, i, a->x_dtype);
    return (double)((const int8_t *)x)[i] * a->x_scales[row * num_groups(a) + i / GROUP_CODES];
}

static double sum_at(const linear_args *a, int row, int column) {
    double sum = a->bias ? a->bias[column] : 0;
    for (int i = 0; i < a->inner; i++) sum += x_at(a, row, i) * weight_at(a, column, i);
    return sum;
}

static double expected_at(const linear_args *a, int row, int n) {
    if (a->finish != GATE_SILU) return sum_at(a, row, n);
    int column = n / GATE_COLUMNS * PANEL_COLUMNS + n % GATE_COLUMNS;
    double gate = sum_at(a, row, column);
    return gate / (1 + exp(-gate)) * sum_at(a, row, column + GATE_COLUMNS);
}

static void fill_x(linear_args *a, uint8_t *x) {
    int size = a->weight_kind >= WEIGHT_INT8 ? 1 : a->x_dtype == BF16 ? 2 : 4, groups = num_groups(a);
    a->x = x, a->x_row_bytes = (int64_t)a->inner * size;
    for (int i = 0; i < a->rows * a->inner; i++)
        if (size == 1) ((int8_t *)x)[i] = (int8_t)between(-127, 127);
        else store_number(x, i, a->x_dtype, number());
    if (size != 1) return;
    a->x_scales = numbers((size_t)a->rows * groups);
    int32_t *sums = calloc((size_t)a->rows * groups, sizeof(int32_t));
    for (int row = 0; row < a->rows; row++)
        for (int i = 0; i < a->inner; i++) sums[row * groups + i / GROUP_CODES] += ((int8_t *)x)[row * a->inner + i];
    a->x_sums = sums;
}

static void fill_weight(linear_args *a, uint8_t *weight) {
    int64_t bytes = num_panels(a) * panel_bytes(a);
    a->weight = weight;
    for (int64_t i = 0; i < bytes; i++) weight[i] = (uint8_t)random_bits();
    if (a->weight_kind == WEIGHT_INT8) /* codes are 1 to 255 */
        for (int64_t i = 0; i < bytes; i++) weight[i] += !weight[i];
    for (int64_t i = 0; a->weight_kind == WEIGHT_F32 && i < bytes / 4; i++) ((float *)weight)[i] = number();
    for (int64_t i = 0; a->weight_kind == WEIGHT_BF16 && i < bytes / 2; i++) store_number(weight, i, BF16, number());
}

static int one_product(int path, int kind) {
    linear_args a = {.rows = between(0, 2) ? between(1, 140) : between(1, 12), .inner = 16 * between(1, 30),
                     .outer = between(1, 200), .weight_kind = kind, .finish = between(STORE, GATE_SILU), .path = path};
    if (!between(0, 9)) a.inner = 16 * between(130, 400), a.rows = between(33, 60), a.outer = between(1, 70);
    if (a.finish == GATE_SILU) a.outer += a.outer % 2;
    int columns = a.finish == GATE_SILU ? a.outer / 2 : a.outer, padded = num_panels(&a) * PANEL_COLUMNS;
    a.out_dtype = a.finish == ADD || between(0, 1) ? F32 : BF16, a.out_row = columns;
    a.x_dtype = kind == WEIGHT_BF16 && path == PATH_AVX512_BF16 ? BF16 : F32;
    uint8_t *x = malloc((size_t)a.rows * a.inner * 4), *weight = malloc((size_t)(num_panels(&a) * panel_bytes(&a)));
    size_t x_bytes = (size_t)a.rows * a.inner * (kind >= WEIGHT_INT8 ? 1 : a.x_dtype == BF16 ? 2 : 4);
    fill_x(&a, x = realloc(x, x_bytes)), fill_weight(&a, weight);
    if (kind >= WEIGHT_INT8) a.scales = numbers((size_t)padded * (kind == WEIGHT_INT4 ? num_groups(&a) : 1));
    if (between(0, 1)) a.bias = numbers(padded);
    size_t count = (size_t)a.rows * columns;
    float *before = numbers(count);
    a.out = malloc(count * (a.out_dtype == F32 ? 4 : 2));
    for (size_t i = 0; i < count; i++) store_number(a.out, (int64_t)i, a.out_dtype, before[i]);
    if (quire_linear(&a, between(0, 1) ? one_by_one : NULL, between(1, 4))) return 1;
    double worst = 0, largest = 1;
    for (int at = 0; at < 400; at++) { /* some elements, the last one included */
        int row = at ? between(0, a.rows - 1) : a.rows - 1, n = at ? between(0, columns - 1) : columns - 1;
        double expected = expected_at(&a, row, n) + (a.finish == ADD ? before[row * columns + n] : 0);
        double error = fabs(expected - load_number(a.out, (int64_t)row * columns + n, a.out_dtype));
        largest = fmax(largest, fabs(expected));
        if (!(error <= worst)) worst = error;
    }
    free(x), free(weight), free((void *)a.x_scales), free((void *)a.x_sums), free((void *)a.scales);
    free((void *)a.bias), free(a.out), free(before);
    if (worst <= largest * (a.out_dtype == F32 ? 1e-5 : 5e-3)) return 0;
    fprintf(stderr, "path %d kind %d rows %d inner %d outer %d finish %d: error %g of %g\n", path, kind, a.rows,
            a.inner, a.outer, a.finish, worst, largest);
    return 1;
}

int main(void) {
    int failures = 0;
    for (int path = PATH_AVX2; path <= quire_best_path(); path++)
        for (int kind = WEIGHT_F32; kind <= WEIGHT_INT4; kind++)
            for (int i = 0; i < 40; i++) failures += one_product(path, kind);
    printf("%d failures\n", failures);
    return failures != 0;
}
