/* Integer products of a strip, for bfloat16 queries. Included by strip.h, which defines TARGET, NAME,
 * LANES and DOT_WORDS.
 *
 * Codes are converted to int16, which needs half the vectors of float32, and one instruction adds two
 * products per lane. A query vector is stored as int16 times a power of two, which is exact for numbers
 * down to 1/128 of its largest; sums of int32 cannot overflow. Weights of a strip are int16 times a
 * factor per run: the error is at most 2^-16 of the strip's largest weight; a bfloat16 output has a
 * precision of 2^-9. Logits, and therefore column sums, do not have this error. Float32 queries use
 * float32 products.
 */
#define WORDS (2 * LANES) /* int16 of a vector */

/* Compute products of `queries` vectors from m on with run r of the strip's codes. */
INLINE TARGET void NAME(dots_of_run)(strip_walk *t, int m, int r, const int queries, const int slots,
                                     const int kind) {
    const int run = t->a->key_coding.run;
    const strip *s = t->here;
    const int16_t *query = (const int16_t *)t->w->packed + m * MAX_HEAD_DIM + r * run * 4;
    const V(units) bits = V(word_bits)(t->key_places.runs[r].bits);
    const int64_t at = t->key_shift + t->key_places.runs[r].at;
    for (int i = 0; i < s->count; i += slots) {
        V(units) sums[LANES];
        LINED float totals[LANES];
        const uint8_t *key[LANES];
        if (m == 0 && r == 0) prefetch_during_keys(t, i, slots);
#pragma GCC unroll 16
        for (int j = 0; j < slots; j++) key[j] = s->key[i + j] + at;
#pragma GCC unroll 16
        for (int n = 0; n < LANES; n++) sums[n] = V(no_units)();
        for (int64_t d = 0; d < run; d += WORDS) {
            V(units) x[LANES];
#pragma GCC unroll 16
            for (int j = 0; j < slots; j++) x[j] = V(code_words)(key[j] + d, kind, bits);
#pragma GCC unroll 4
            for (int k = 0; k < queries; k++) {
                V(units) q = V(read_units)(query + d * 4 + k * WORDS);
                IN_REGISTER(q);
#pragma GCC unroll 16
                for (int j = 0; j < slots; j++) {
                    sums[k * slots + j] = DOT_WORDS(sums[k * slots + j], q, x[j]);
                    IN_REGISTER(sums[k * slots + j]);
                }
            }
        }
        V(put)(totals, V(sums_of_units)(sums));
#pragma GCC unroll 4
        for (int k = 0; k < queries; k++)
            memcpy(t->dots + k * STRIP + i, totals + k * slots, slots * sizeof(float));
    }
}

/* As dots of strip_body.h. */
INLINE TARGET void NAME(integer_dots)(strip_walk *t, int m, const int queries, const int slots,
                                      const int kind) {
    const int num_runs = kind == BIT_CODES ? t->a->key_coding.num_runs : 1;
    for (int r = 0; r < num_runs; r++) {
        NAME(dots_of_run)(t, m, r, queries, slots, kind);
        for (int k = 0; k < queries; k++) {
            const float quantum = t->w->quantum[m + k], *dots = t->dots + k * STRIP;
            const float *scales = t->key_scales[r];
            float *logits = t->logits[m + k];
            if (kind != BIT_CODES)
                for (int i = 0; i < STRIP; i++) logits[i] = dots[i] * quantum;
            else if (r == 0)
                for (int i = 0; i < STRIP; i++) logits[i] = dots[i] * quantum * scales[i];
            else
                for (int i = 0; i < STRIP; i++) logits[i] += dots[i] * quantum * scales[i];
        }
    }
}

/* As add_codes of strip_body.h, to `units` times WORDS channels. */
INLINE TARGET void NAME(add_words)(strip_walk *t, int64_t at, int m, int r, int d, const int queries,
                                   const int units, const int kind) {
    const V(units) bits = V(word_bits)(t->value_places.runs[r].bits);
    V(units) sums[LANES];
#pragma GCC unroll 16
    for (int n = 0; n < queries * units * 2; n++) sums[n] = V(no_units)();
    const int32_t *pairs[4];
    const uint8_t *const *value = t->here->value;
    const int64_t end = (t->here->count + 1) / 2;
    if (m == 0) prefetch_next_values(t, d, d + units * WORDS);
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) pairs[k] = t->weights[m + k].pairs[r];
    for (int64_t i = 0; i < end; i++) {
        V(units) x[8];
#pragma GCC unroll 4
        for (int u = 0; u < units; u++) {
            V(units) a = V(code_words)(value[i * 2] + at + u * WORDS, kind, bits);
            V(units) b = V(code_words)(value[i * 2 + 1] + at + u * WORDS, kind, bits);
            x[u * 2] = V(low_words)(a, b), x[u * 2 + 1] = V(high_words)(a, b);
        }
#pragma GCC unroll 4
        for (int k = 0; k < queries; k++) {
            V(units) pair = V(bits)(pairs[k][i]);
#pragma GCC unroll 8
            for (int n = 0; n < units * 2; n++) {
                sums[k * units * 2 + n] = DOT_WORDS(sums[k * units * 2 + n], pair, x[n]);
                IN_REGISTER(sums[k * units * 2 + n]);
            }
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < queries; k++) {
        const V(vec) factor = V(set)(t->factor[m + k]), extra = V(set)(t->extra[m + k][r]);
        const V(vec) quantum = V(set)(t->weights[m + k].quantum[r]);
#pragma GCC unroll 4
        for (int u = 0; u < units; u++) {
            float *out = t->w->out[m + k] + d + u * WORDS;
            V(units) a = sums[(k * units + u) * 2], b = sums[(k * units + u) * 2 + 1];
            V(vec) first = V(first_of_words)(a, b), second = V(second_of_words)(a, b);
            V(put)(out, V(fma)(first, quantum, V(fma)(V(read)(out), factor, extra)));
            V(put)(out + LANES, V(fma)(second, quantum, V(fma)(V(read)(out + LANES), factor, extra)));
        }
    }
}

/* Add weights x codes to all channels. */
INLINE TARGET void NAME(add_strip_words)(strip_walk *t, int m, const int queries, const int units,
                                         const int kind) {
    const coding *c = &t->a->value_coding;
    for (int r = 0; r < c->num_runs; r++) {
        int64_t at = t->value_shift + t->value_places.runs[r].at;
        int d = 0, first = r * c->run;
        for (; d + units * WORDS <= c->run; d += units * WORDS)
            NAME(add_words)(t, at + d, m, r, first + d, queries, units, kind);
        for (; d < c->run; d += WORDS) NAME(add_words)(t, at + d, m, r, first + d, queries, 1, kind);
    }
}

/* Slots and units at a time: as many sums as registers hold, beside the operands. */
INLINE TARGET void NAME(integer_dots_by)(strip_walk *t, const int kind) {
    for (int m = 0; m < t->w->count; m += 4) {
        int left = t->w->count - m;
        if (left > 3) NAME(integer_dots)(t, m, 4, LANES / 4, kind);
        else if (left == 3) NAME(integer_dots)(t, m, 3, LANES / 4, kind);
        else if (left == 2) NAME(integer_dots)(t, m, 2, LANES / 2, kind);
        else NAME(integer_dots)(t, m, 1, LANES, kind);
    }
}

INLINE TARGET void NAME(add_integers_by)(strip_walk *t, const int kind) {
    for (int m = 0; m < t->w->count; m += 4) {
        int left = t->w->count - m;
        if (left > 3) NAME(add_strip_words)(t, m, 4, LANES / 8, kind);
        else if (left == 3) NAME(add_strip_words)(t, m, 3, LANES / 8, kind);
        else if (left == 2) NAME(add_strip_words)(t, m, 2, 2, kind);
        else NAME(add_strip_words)(t, m, 1, 4, kind);
    }
}

static TARGET void NAME(integer_dots_of)(strip_walk *t) {
    if (t->a->key_coding.kind == INT8_CODES) NAME(integer_dots_by)(t, INT8_CODES);
    else NAME(integer_dots_by)(t, BIT_CODES);
}

static TARGET void NAME(add_integers_of_strip)(strip_walk *t) {
    for (int m = 0; m < t->w->count; m++) round_weights(t, m);
    if (t->a->value_coding.kind == INT8_CODES) NAME(add_integers_by)(t, INT8_CODES);
    else NAME(add_integers_by)(t, BIT_CODES);
}

#undef WORDS
