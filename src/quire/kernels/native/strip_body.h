/* Included by strip.h, which defines TARGET, NAME and LANES. */

/* Load scales of a strip from a plane of float16, or zeros if `runs` is NULL. */
static TARGET void NAME(load_by_run)(const strip_walk *t, const coding *c, const uint8_t *plane,
                                     const run_place *runs, by_run out) {
    const strip *s = t->here;
    LINED float flat[STRIP * MAX_RUNS + MAX_RUNS];
    int groups = c->dim / c->channels, n = 0;
    if (groups == 1) {
        for (int k = 0; k < s->num_pieces; k++) {
            place p = s->piece[k].at;
            const uint16_t *from = (const uint16_t *)(plane + p.page_at) + p.record + t->first_record;
            int j = 0;
            for (; j + LANES <= s->piece[k].count; j += LANES) {
                V(vec) x = V(halves)(from + j);
                for (int r = 0; r < c->num_runs; r++) V(put)(out[r] + n + j, V(mul)(x, V(set)(runs ? runs[r].factor : 1)));
            }
            for (; j < s->piece[k].count; j++)
                for (int r = 0; r < c->num_runs; r++) out[r][n + j] = from_f16(from[j]) * (runs ? runs[r].factor : 1);
            n += s->piece[k].count;
        }
        return;
    }
    for (int k = 0; k < s->num_pieces; k++) {
        place p = s->piece[k].at;
        const uint16_t *from = (const uint16_t *)(plane + p.page_at) + (p.record + t->first_record) * groups;
        int count = s->piece[k].count * groups, j = 0;
        for (; j + LANES <= count; j += LANES) V(put)(flat + n + j, V(halves)(from + j));
        for (; j < count; j++) flat[n + j] = from_f16(from[j]);
        n += count;
    }
    for (int r = 0; r < c->num_runs; r++) {
        const float *from = flat + r * c->run / c->channels;
        const float factor = runs ? runs[r].factor : 1;
        if (groups == 1)
            for (int i = 0; i < STRIP; i++) out[r][i] = from[i] * factor;
        else if (groups == 2)
            for (int i = 0; i < STRIP; i++) out[r][i] = from[i * 2] * factor;
        else
            for (int i = 0; i < s->count; i++) out[r][i] = from[i * groups] * factor;
    }
}

/* Compute products of `queries` query vectors from m on with the strip's codes; includes the scales if
 * a vector has several. */
INLINE TARGET void NAME(dots)(strip_walk *t, int m, const int queries, const int kind, const int dtype) {
    const coding *c = &t->a->key_coding;
    const int item = kind != PLAIN_NUMBERS ? 1 : dtype == F32 ? 4 : 2, grouped = kind == BIT_CODES;
    const int slots = LANES / queries;
    const strip *s = t->here;
    int num_runs = grouped ? c->num_runs : 1, run = c->run;
    for (int i = 0; i < s->count; i += slots) {
        V(vec) totals[LANES];
#pragma GCC unroll 16
        for (int n = 0; n < LANES; n++) totals[n] = V(zero)();
        if (m == 0) prefetch_during_keys(t, i, slots);
        for (int r = 0; r < num_runs; r++) {
            V(vec) sums[LANES];
            V(units) bits = V(bits)(t->key_places.runs[r].bits);
            const float *query = t->w->packed + m * MAX_HEAD_DIM + r * run * 4;
            int64_t at = t->key_shift + t->key_places.runs[r].at;
#pragma GCC unroll 16
            for (int n = 0; n < LANES; n++) sums[n] = V(zero)();
            for (int d = 0; d < run; d += LANES) {
                V(vec) x[LANES];
#pragma GCC unroll 16
                for (int j = 0; j < slots; j++)
                    x[j] = V(code)(s->key[i + j] + at + d * item, kind, dtype, bits);
#pragma GCC unroll 16
                for (int k = 0; k < queries; k++) {
                    V(vec) q = V(read)(query + d * 4 + k * LANES);
#pragma GCC unroll 16
                    for (int j = 0; j < slots; j++)
                        sums[j * queries + k] = V(fma)(q, x[j], sums[j * queries + k]);
                }
            }
#pragma GCC unroll 16
            for (int n = 0; n < LANES; n++)
                totals[n] = grouped ? V(fma)(sums[n], V(set)(t->key_scales[r][i + n / queries]), totals[n])
                                    : sums[n];
        }
        V(put)(t->dots + i * queries, V(sums)(totals));
    }
    for (int k = 0; k < queries; k++)
        for (int i = 0; i < s->count; i++) t->logits[m + k][i] = t->dots[i * queries + k];
}

/* Add weights x codes to `vectors` times LANES channels of `queries` outputs, from channel d on. */
INLINE TARGET void NAME(add_codes)(strip_walk *t, int64_t at, int m, int r, int d, const int queries,
                                   const int vectors, const int kind, const int dtype) {
    const int item = kind != PLAIN_NUMBERS ? 1 : dtype == F32 ? 4 : 2;
    V(units) bits = V(bits)(t->value_places.runs[r].bits);
    V(vec) sums[LANES];
    float *out = t->w->out[m] + d;
    if (m == 0) prefetch_next_values(t, d, d + vectors * LANES);
#pragma GCC unroll 16
    for (int k = 0; k < queries; k++)
#pragma GCC unroll 16
        for (int n = 0; n < vectors; n++)
            sums[k * vectors + n] = V(fma)(V(read)(out + k * MAX_HEAD_DIM + n * LANES),
                                           V(set)(t->factor[m + k]), V(set)(t->extra[m + k][r]));
    for (int i = 0; i < t->here->count; i++) {
        V(vec) x[LANES];
#pragma GCC unroll 16
        for (int n = 0; n < vectors; n++)
            x[n] = V(code)(t->here->value[i] + at + n * LANES * item, kind, dtype, bits);
#pragma GCC unroll 16
        for (int k = 0; k < queries; k++) {
            V(vec) weight = V(set)(t->weights[m + k].of[r][i]);
#pragma GCC unroll 16
            for (int n = 0; n < vectors; n++)
                sums[k * vectors + n] = V(fma)(weight, x[n], sums[k * vectors + n]);
        }
    }
#pragma GCC unroll 16
    for (int k = 0; k < queries; k++)
#pragma GCC unroll 16
        for (int n = 0; n < vectors; n++)
            V(put)(out + k * MAX_HEAD_DIM + n * LANES, sums[k * vectors + n]);
}

/* Add weights x codes to all channels. */
INLINE TARGET void NAME(add_strip)(strip_walk *t, int m, const int queries, const int kind,
                                   const int dtype) {
    const coding *c = &t->a->value_coding;
    const int item = kind != PLAIN_NUMBERS ? 1 : dtype == F32 ? 4 : 2, many = LANES / queries;
    for (int r = 0; r < c->num_runs; r++) {
        int64_t at = t->value_shift + t->value_places.runs[r].at;
        int d = 0, first = r * c->run;
        for (; d + many * LANES <= c->run; d += many * LANES)
            NAME(add_codes)(t, at + d * item, m, r, first + d, queries, many, kind, dtype);
        for (; queries < 4 && d + 2 * LANES <= c->run; d += 2 * LANES)
            NAME(add_codes)(t, at + d * item, m, r, first + d, queries, 2, kind, dtype);
        for (; d < c->run; d += LANES)
            NAME(add_codes)(t, at + d * item, m, r, first + d, queries, 1, kind, dtype);
    }
}

#include "strip_plain.h"

/* Whether these plain numbers are read two vectors at a time. */
static inline int NAME(in_pairs)(const coding *c) {
    return c->kind == PLAIN_NUMBERS && c->dim % (2 * LANES) == 0;
}

static TARGET void NAME(dots_of)(strip_walk *t) {
    const coding *c = &t->a->key_coding;
    if (NAME(in_pairs)(c)) {
        if (c->dtype == F32) NAME(plain_dots_of)(t, F32);
        else if (c->dtype == BF16) NAME(plain_dots_of)(t, BF16);
        else NAME(plain_dots_of)(t, F16);
    } else if (c->kind == INT8_CODES) FOR_QUERIES(NAME(dots), INT8_CODES, F32)
    else if (c->kind == BIT_CODES) FOR_QUERIES(NAME(dots), BIT_CODES, F32)
    else if (c->kind == FP8_CODES) FOR_QUERIES(NAME(dots), FP8_CODES, F32)
    else if (c->dtype == F32) FOR_QUERIES(NAME(dots), PLAIN_NUMBERS, F32)
    else if (c->dtype == BF16) FOR_QUERIES(NAME(dots), PLAIN_NUMBERS, BF16)
    else FOR_QUERIES(NAME(dots), PLAIN_NUMBERS, F16)
}

static TARGET void NAME(add_values_of_strip)(strip_walk *t) {
    const coding *c = &t->a->value_coding;
    if (NAME(in_pairs)(c)) {
        if (c->dtype == F32) NAME(add_plain_of)(t, F32);
        else if (c->dtype == BF16) NAME(add_plain_of)(t, BF16);
        else NAME(add_plain_of)(t, F16);
    } else if (c->kind == INT8_CODES) FOR_QUERIES(NAME(add_strip), INT8_CODES, F32)
    else if (c->kind == BIT_CODES) FOR_QUERIES(NAME(add_strip), BIT_CODES, F32)
    else if (c->kind == FP8_CODES) FOR_QUERIES(NAME(add_strip), FP8_CODES, F32)
    else if (c->dtype == F32) FOR_QUERIES(NAME(add_strip), PLAIN_NUMBERS, F32)
    else if (c->dtype == BF16) FOR_QUERIES(NAME(add_strip), PLAIN_NUMBERS, BF16)
    else FOR_QUERIES(NAME(add_strip), PLAIN_NUMBERS, F16)
}

/* Convert products of vector m to logits, store these for column sums, and convert them to weights. If
 * the vector sees all slots (`all`), no mask is needed. */
INLINE TARGET void NAME(weigh_slots)(strip_walk *t, int m, const int all) {
    const coding *c = &t->a->key_coding, *v = &t->a->value_coding;
    walk *w = t->w;
    const int count = t->here->count;
    int64_t low = w->low[m] - t->here->slot, high = w->high[m] - t->here->slot;
    float *logits = t->logits[m], *kept = w->logits[m] ? w->logits[m] + t->here->slot : NULL;
    V(vec) top = V(set)(w->maximum[m]), sum = V(zero)();
    high = high < count ? high : count;
    for (int i = 0; i < count; i += LANES) {
        V(vec) x = V(read)(logits + i);
        if (c->scales && c->kind != BIT_CODES) x = V(mul)(x, V(read)(t->key_scales[0] + i));
        for (int r = 0; c->zeros && r < c->num_runs; r++)
            x = V(fma)(V(set)(w->query_sums[m][r]), V(read)(t->key_zeros[r] + i), x);
        if (t->a->softcap != 0) x = V(adjust)(x, t->a->softcap, w->bias[m], t->here->slot + i);
        if (!all) x = V(choose)(V(between)(low - i, high - i), V(set)(-INFINITY), x);
        if (kept && all) V(put)(kept + i, x);
        else if (kept) V(put_some)(kept + i, V(between)(low - i, high - i), x);
        V(put)(logits + i, x);
        top = V(max)(top, x);
    }
    float maximum = V(top)(top);
    t->factor[m] = maximum == w->maximum[m] ? 1 : expf(w->maximum[m] - maximum);
    top = V(set)(maximum == -INFINITY ? 0 : maximum);
    for (int i = 0; i < count; i += LANES) {
        V(vec) e = V(exp)(V(sub)(V(read)(logits + i), top));
        sum = V(add)(sum, e);
        V(put)(logits + i, e);
    }
    w->maximum[m] = maximum;
    w->sum[m] = w->sum[m] * t->factor[m] + V(total)(sum);
    for (int r = 0; r < v->num_runs; r++) {
        V(vec) extra = V(zero)();
        for (int i = 0; i < count; i += LANES) {
            V(vec) e = V(read)(logits + i), x = e, y = V(zero)();
            if (v->scales) x = V(mul)(e, V(read)(t->value_scales[r] + i));
            if (v->zeros) y = V(mul)(e, V(read)(t->value_zeros[r] + i));
            if (!all) { /* scales of unseen slots may hold NaN */
                V(mask) seen = V(between)(low - i, high - i);
                x = V(choose)(seen, V(zero)(), x), y = V(choose)(seen, V(zero)(), y);
            }
            V(put)(t->weights[m].of[r] + i, x);
            extra = V(add)(extra, y);
        }
        t->extra[m][r] = v->zeros ? V(total)(extra) : 0;
    }
}

static TARGET void NAME(weigh_strip)(strip_walk *t, int m) {
    const walk *w = t->w;
    int whole = t->here->count % LANES == 0 && w->low[m] <= t->here->slot;
    if (whole && w->high[m] >= t->here->slot + t->here->count) NAME(weigh_slots)(t, m, 1);
    else NAME(weigh_slots)(t, m, 0);
}

static TARGET void NAME(walk_strip)(strip_walk *t) {
    const attention_args *a = t->a;
    const coding *k = &a->key_coding, *v = &a->value_coding;
    strip_outliers found;
    if (k->scales) NAME(load_by_run)(t, k, k->scales, t->key_places.runs, t->key_scales);
    if (k->zeros) NAME(load_by_run)(t, k, k->zeros, NULL, t->key_zeros);
    if (v->scales) NAME(load_by_run)(t, v, v->scales, t->value_places.runs, t->value_scales);
    if (v->zeros) NAME(load_by_run)(t, v, v->zeros, NULL, t->value_zeros);
    if (LANES == 16 && t->byte_keys) byte_dots_of(t);
    else if (t->integer_keys) INTEGERS(integer_dots_of, t);
    else NAME(dots_of)(t);
    if (k->num_outliers) {
        find_outliers(t, k, &t->key_places, t->here->key, t->key_shift, t->key_scales, t->key_zeros, &found);
        for (int n = 0; n < found.count; n++)
            for (int m = 0; m < t->w->count; m++)
                t->logits[m][found.list[n].slot] +=
                    t->w->query[m][found.list[n].channel] * found.list[n].beyond;
    }
    t->weighed = LANES == 16 && is_whole(t);
    for (int m = 0; m < t->w->count; m++)
        if (t->weighed) weigh_whole(t, m);
        else NAME(weigh_strip)(t, m);
    if (LANES == 16 && t->byte_values) add_bytes_of_strip(t);
    else if (t->integer_values) INTEGERS(add_integers_of_strip, t);
    else NAME(add_values_of_strip)(t);
    if (v->num_outliers) {
        find_outliers(t, v, &t->value_places, t->here->value, t->value_shift, t->value_scales, t->value_zeros, &found);
        for (int n = 0; n < found.count; n++)
            for (int m = 0; m < t->w->count; m++)
                t->w->out[m][found.list[n].channel] += t->logits[m][found.list[n].slot] * found.list[n].beyond;
    }
}
