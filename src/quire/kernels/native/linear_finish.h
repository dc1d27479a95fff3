/* Included by linear.c, which defines TARGET, NAME, LANES: from the sums of a row and a panel to `out`. */

/* x * sigmoid(x), with e^-|x|, which cannot overflow. */
INLINE TARGET V(vec) NAME(silu)(V(vec) x) {
    V(vec) e = V(exp)(V(minus_size)(x)), one = V(set)(1.0f);
    return V(mul)(x, V(divide)(V(choose)(V(below_zero)(x), one, e), V(add)(one, e)));
}

/* A vector of sums from column n of the panel on, with scale and bias. */
INLINE TARGET V(vec) NAME(scaled)(const linear_args *a, int64_t first, const float *sums, int n) {
    V(vec) x = V(read)(sums + n);
    if (a->weight_kind == WEIGHT_INT8) x = V(mul)(x, V(read)(a->scales + first + n));
    return a->bias ? V(add)(x, V(read)(a->bias + first + n)) : x;
}

/* Store or add the first `columns` numbers of a vector. */
INLINE TARGET void NAME(put_columns)(const linear_args *a, int64_t at, V(vec) x, int64_t columns) {
    float *out = (float *)a->out + at, numbers[LANES];
    if (columns < LANES) {
        V(put)(numbers, x);
        for (int n = 0; n < columns; n++)
            store_number(a->out, at + n, a->out_dtype, a->finish == ADD ? out[n] + numbers[n] : numbers[n]);
    } else if (a->out_dtype != F32) V(narrow)((uint16_t *)a->out + at, x, a->out_dtype);
    else V(put)(out, a->finish == ADD ? V(add)(V(read)(out), x) : x);
}

/* Scale, add the bias, apply the gate, and store or add. */
static TARGET void NAME(finish_rows)(const linear_args *a, int64_t row, int rows, int number, const float *sums) {
    int64_t first = (int64_t)number * PANEL_COLUMNS, left = a->outer - first;
    for (int64_t at = row * a->out_row; rows > 0; rows--, at += a->out_row, sums += PANEL_COLUMNS)
        if (a->finish == GATE_SILU) {
            for (int n = 0; n < GATE_COLUMNS; n += LANES) {
                V(vec) gate = NAME(silu)(NAME(scaled)(a, first, sums, n));
                V(vec) both = V(mul)(gate, NAME(scaled)(a, first, sums, GATE_COLUMNS + n));
                NAME(put_columns)(a, at + first / 2 + n, both, left / 2 - n);
            }
        } else {
            for (int n = 0; n < PANEL_COLUMNS; n += LANES)
                NAME(put_columns)(a, at + first + n, NAME(scaled)(a, first, sums, n), left - n);
        }
}
