/* Included by linear.c, which defines TARGET, NAME, LANES: from the sums of a row and a panel to `out`. */

/* x * sigmoid(x), with e^-|x|, which cannot overflow. */
INLINE TARGET V(vec) NAME(silu)(V(vec) x) {
    V(vec) e = V(exp)(V(minus_size)(x)), one = V(set)(1.0f);
    return V(mul)(x, V(divide)(V(choose)(V(below_zero)(x), one, e), V(add)(one, e)));
}

INLINE TARGET void NAME(put_row)(const linear_args *a, int64_t at, const float *done, int columns) {
    int n = 0;
    if (a->out_dtype != F32) {
        uint16_t *out = (uint16_t *)a->out + at;
        for (; n + LANES <= columns; n += LANES) V(narrow)(out + n, V(read)(done + n), a->out_dtype);
        for (; n < columns; n++) store_number(a->out, at + n, a->out_dtype, done[n]);
        return;
    }
    float *out = (float *)a->out + at;
    for (; n + LANES <= columns; n += LANES) {
        V(vec) x = V(read)(done + n);
        V(put)(out + n, a->finish == ADD ? V(add)(V(read)(out + n), x) : x);
    }
    for (; n < columns; n++) out[n] = a->finish == ADD ? out[n] + done[n] : done[n];
}

/* Scale, add the bias, apply the gate, and store or add. */
static TARGET void NAME(finish_row)(const linear_args *a, int64_t row, int number, float *sums) {
    int64_t first = (int64_t)number * PANEL_COLUMNS;
    int columns = PANEL_COLUMNS, left = a->outer - (int)first;
    for (int n = 0; n < PANEL_COLUMNS; n += LANES) {
        V(vec) x = V(read)(sums + n);
        if (a->weight_kind == WEIGHT_INT8) x = V(mul)(x, V(read)(a->scales + first + n));
        if (a->bias) x = V(add)(x, V(read)(a->bias + first + n));
        V(put)(sums + n, x);
    }
    if (a->finish == GATE_SILU) {
        columns = GATE_COLUMNS, left /= 2, first /= 2;
        for (int n = 0; n < GATE_COLUMNS; n += LANES)
            V(put)(sums + n, V(mul)(NAME(silu)(V(read)(sums + n)), V(read)(sums + GATE_COLUMNS + n)));
    }
    NAME(put_row)(a, row * a->out_row + first, sums, left < columns ? left : columns);
}
