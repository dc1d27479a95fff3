/* Products of a strip with plain numbers. Included by strip.h, which defines TARGET, NAME and LANES.
 *
 * Two vectors of LANES numbers are loaded at a time. A pair of bfloat16 is one 32-bit unit: shifting it
 * gives its even number and masking its odd one, without a shuffle. Such vectors hold the even and the
 * odd numbers (`paired` order); queries are packed in the same order. Registers hold the sums of
 * `queries` query vectors, so each loaded number is converted once and used by all of them.
 */

/* Load the first (half 0) or second vector of 2 * LANES numbers at `at`. */
INLINE TARGET V(vec) NAME(load_half)(const uint8_t *at, const int half, const int dtype) {
    if (dtype == BF16) return half ? V(odd_bf16_)(at) : V(even_bf16_)(at);
    return V(load_numbers)(at + half * LANES * (dtype == F32 ? 4 : 2), dtype);
}

/* Compute logits of `queries` vectors from m on, `slots` slots at a time; slots divides STRIP. */
INLINE TARGET void NAME(plain_dots)(strip_walk *t, int m, const int queries, const int slots,
                                    const int dtype, const int dim) {
    const int item = dtype == F32 ? 4 : 2;
    const strip *s = t->here;
    const float *query = t->w->packed + m * MAX_HEAD_DIM;
    for (int i = 0; i < s->count; i += slots) {
        V(vec) sums[16];
        LINED float totals[16];
        const uint8_t *key[16];
        if (m == 0) prefetch_during_keys(t, i, slots);
#pragma GCC unroll 16
        for (int j = 0; j < slots; j++) key[j] = s->key[i + j] + t->key_shift;
#pragma GCC unroll 16
        for (int n = 0; n < 16; n++) sums[n] = V(zero)();
#pragma GCC unroll 1
        for (int64_t d = 0; d < dim; d += 2 * LANES)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                V(vec) q[4];
#pragma GCC unroll 4
                for (int k = 0; k < queries; k++)
                    q[k] = V(read)(query + (d + half * LANES) * 4 + k * LANES);
#pragma GCC unroll 16
                for (int j = 0; j < slots; j++) {
                    V(vec) x = NAME(load_half)(key[j] + d * item, half, dtype);
#pragma GCC unroll 4
                    for (int k = 0; k < queries; k++)
                        sums[k * slots + j] = V(fma)(q[k], x, sums[k * slots + j]);
                }
            }
#pragma GCC unroll 2
        for (int n = 0; n < queries * slots; n += LANES) V(put)(totals + n, V(sums)(sums + n));
#pragma GCC unroll 4
        for (int k = 0; k < queries; k++)
            memcpy(t->logits[m + k] + i, totals + k * slots, slots * sizeof(float));
    }
}

/* Add weights x values to 2 * `vectors` * LANES channels from d on. */
INLINE TARGET void NAME(add_numbers)(strip_walk *t, int m, int d, const int queries, const int vectors,
                                     const int dtype) {
    const int item = dtype == F32 ? 4 : 2;
    if (m == 0) prefetch_next_values(t, d, d + 2 * vectors * LANES);
    const strip *s = t->here;
    const int64_t at = t->value_shift + (int64_t)d * item;
    const float *weights[4];
    V(vec) sums[16];
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) weights[k] = t->weights[m + k].of[0];
#pragma GCC unroll 16
    for (int n = 0; n < 16; n++) sums[n] = V(zero)();
    for (int i = 0; i < s->count; i++) {
        const uint8_t *value = s->value[i] + at;
        V(vec) w[4];
#pragma GCC unroll 4
        for (int k = 0; k < queries; k++) w[k] = V(set)(weights[k][i]);
#pragma GCC unroll 8
        for (int n = 0; n < 2 * vectors; n++) {
            V(vec) x = NAME(load_half)(value + n / 2 * 2 * LANES * item, n % 2, dtype);
#pragma GCC unroll 4
            for (int k = 0; k < queries; k++)
                sums[k * 2 * vectors + n] = V(fma)(w[k], x, sums[k * 2 * vectors + n]);
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) {
        float *out = t->w->out[m + k] + d;
        V(vec) factor = V(set)(t->factor[m + k]);
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++, out += 2 * LANES) {
            V(vec) a = sums[(k * vectors + n) * 2], b = sums[(k * vectors + n) * 2 + 1];
            V(vec) first = dtype == BF16 ? V(first_of_pairs)(a, b) : a;
            V(vec) second = dtype == BF16 ? V(second_of_pairs)(a, b) : b;
            V(put)(out, V(fma)(V(read)(out), factor, first));
            V(put)(out + LANES, V(fma)(V(read)(out + LANES), factor, second));
        }
    }
}

INLINE TARGET void NAME(add_plain)(strip_walk *t, int m, const int queries, const int vectors,
                                   const int dtype) {
    int d = 0, dim = t->a->value_coding.dim;
    for (; d + 2 * vectors * LANES <= dim; d += 2 * vectors * LANES)
        NAME(add_numbers)(t, m, d, queries, vectors, dtype);
    for (; d < dim; d += 2 * LANES) NAME(add_numbers)(t, m, d, queries, 1, dtype);
}

/* Slots and vectors at a time: as many sums as registers hold, beside the operands. */
INLINE TARGET void NAME(plain_dots_by)(strip_walk *t, const int dtype, const int dim) {
    const int wide = LANES == 16;
    for (int m = 0; m < t->w->count; m += 4) {
        int left = t->w->count - m;
        if (left > 3) NAME(plain_dots)(t, m, 4, wide ? 4 : 2, dtype, dim);
        else if (left == 3) NAME(plain_dots)(t, m, 3, 4, dtype, dim);
        else if (left == 2) NAME(plain_dots)(t, m, 2, wide ? 8 : 4, dtype, dim);
        else NAME(plain_dots)(t, m, 1, wide ? 16 : 8, dtype, dim);
    }
}

/* A constant head_dim saves address arithmetic. */
INLINE TARGET void NAME(plain_dots_of)(strip_walk *t, const int dtype) {
    if (dtype == BF16 && t->a->head_dim == 64) NAME(plain_dots_by)(t, dtype, 64);
    else if (dtype == BF16 && t->a->head_dim == 128) NAME(plain_dots_by)(t, dtype, 128);
    else NAME(plain_dots_by)(t, dtype, t->a->head_dim);
}

INLINE TARGET void NAME(add_plain_of)(strip_walk *t, const int dtype) {
    for (int m = 0; m < t->w->count; m += 4) {
        int left = t->w->count - m;
        if (left > 3) NAME(add_plain)(t, m, 4, LANES == 16 ? 2 : 1, dtype);
        else if (left == 3) NAME(add_plain)(t, m, 3, 2, dtype);
        else if (left == 2) NAME(add_plain)(t, m, 2, 2, dtype);
        else NAME(add_plain)(t, m, 1, 4, dtype);
    }
}
