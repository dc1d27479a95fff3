/* Included by sample.c, which defines TARGET, NAME, LANES. */

/* The largest and the smallest logit; NaN if any is NaN. */
static TARGET float NAME(top_of)(const float *logits, int tokens, float *lowest) {
    V(vec) top = V(set)(-INFINITY), low = V(set)(INFINITY);
    uint32_t nan = 0;
    int i = 0;
    for (; i + LANES <= tokens; i += LANES) {
        V(vec) x = V(read)(logits + i);
        top = V(max)(top, x), low = V(least)(low, x), nan |= V(are_nan)(x);
    }
    float last[LANES], most = V(top)(top);
    for (; i < tokens; i++) {
        if (logits[i] > most) most = logits[i];
        if (isnan(logits[i])) nan = 1;
        low = V(least)(low, V(set)(logits[i]));
    }
    V(put)(last, low);
    *lowest = last[0];
    for (int lane = 1; lane < LANES; lane++) *lowest = fminf(*lowest, last[lane]);
    return nan ? NAN : most;
}

static TARGET int64_t NAME(first_equal)(const float *logits, int tokens, float top) {
    int i = 0;
    for (; i + LANES <= tokens; i += LANES) {
        uint32_t equal = V(equal)(V(read)(logits + i), V(set)(top));
        if (equal) return i + __builtin_ctz(equal);
    }
    while (logits[i] != top) i++;
    return i;
}

/* round(e^x 2^44) for x <= 0: 2^n times a Taylor polynomial of 13th degree on [-ln2/2, ln2/2]. */
INLINE TARGET void NAME(put_weights)(int64_t *to, V(double) x) {
    static const double terms[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                   1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,     1.0 / 6,
                                   0.5,             1.0,            1.0};
    x = V(double_least)(x, V(double_set)(-FARTHEST));
    V(double) n = V(nearest)(V(double_mul)(x, V(double_set)(1.4426950408889634)));
    V(double) r = V(double_fma)(n, V(double_set)(-6.93147180369123816490e-01), x);
    r = V(double_fma)(n, V(double_set)(-1.90821492927058770002e-10), r);
    V(double) p = V(double_set)(1.0 / 6227020800);
    for (int i = 0; i < 13; i++) p = V(double_fma)(p, r, V(double_set)(terms[i]));
    V(put_integers)(to, V(times_power)(V(double_mul)(p, V(double_set)(0x1p44)), n));
}

/* Divide by the temperature and compute weights; and masses, if top-p uses them. */
static TARGET void NAME(weigh)(row_memory *m, const float *logits, int tokens, const sample_row *o) {
    V(double) top = V(double_set)(m->top);
    m->masses = o->top_p < 1 ? m->weights + m->padded : m->weights;
    for (int i = 0; i < m->padded; i += LANES) {
        V(vec) x = V(some_or)(V(between)(0, tokens - i), logits + (i < tokens ? i : 0), -INFINITY);
        V(vec) scaled = V(over)(x, V(set)(o->temperature)), distance = V(sub)(scaled, V(set)(m->top));
        V(put)(m->scaled + i, scaled);
        NAME(put_weights)(m->weights + i, V(low_doubles)(distance));
        NAME(put_weights)(m->weights + i + LANES / 2, V(high_doubles)(distance));
        if (o->top_p >= 1) continue;
        NAME(put_weights)(m->masses + i, V(double_sub)(V(low_doubles)(scaled), top));
        NAME(put_weights)(m->masses + i + LANES / 2, V(double_sub)(V(high_doubles)(scaled), top));
    }
}

/* List the tokens within a distance from the top. */
static TARGET void NAME(list_near)(row_memory *m, int tokens, float reach) {
    m->num_near = 0;
    for (int i = 0; i < m->padded; i += LANES) {
        V(vec) distance = V(sub)(V(set)(m->top), V(read)(m->scaled + i));
        uint32_t lanes = V(not_above)(distance, V(set)(reach));
        if (lanes) V(put_ids)(m->near + m->num_near, lanes, i);
        m->num_near += __builtin_popcount(lanes);
    }
    if (m->num_near > tokens) m->num_near = tokens; /* the padding, if the reach is infinite */
}

/* The smallest logit that top-k, top-p and min-p retain. */
static TARGET float NAME(limit_of)(row_memory *m, int tokens, const sample_row *o) {
    float limit = -INFINITY, reach = 1;
    int k = o->top_k < tokens ? o->top_k : tokens;
    double target = o->top_p < 1 ? o->top_p * exp(o->log_total - (double)m->top) * 0x1p44 : 0;
    if (k > 0 || o->top_p < 1) {
        NAME(list_near)(m, tokens, reach);
        while (reach < INFINITY && (m->num_near < k || (k == 0 && (double)sum_near(m) < target))) {
            reach = reach < FARTHEST ? 2 * reach : INFINITY;
            NAME(list_near)(m, tokens, reach);
        }
        fill_buckets(m, reach);
    }
    if (k > 0) limit = largest(m, k);
    if (o->top_p < 1) limit = fmaxf(limit, nucleus(m, target));
    return fmaxf(limit, at_least((double)m->top + o->log_min_p));
}

/* Sample a token: the first whose cumulative weight exceeds the random fraction of the whole. */
static TARGET int64_t NAME(draw)(const sample_args *a, row_memory *m, const float *logits, const sample_row *o) {
    NAME(weigh)(m, logits, a->vocab, o);
    float limit = NAME(limit_of)(m, a->vocab, o);
    int64_t sum = 0, before = 0;
    int64_t *blocks = (int64_t *)m->found;
    for (int block = 0; block < m->padded / BLOCK; block++) {
        const float *scaled = m->scaled + block * BLOCK;
        int64_t *weights = m->weights + block * BLOCK, of_block = 0;
        for (int i = 0; i < BLOCK; i++) {
            weights[i] = scaled[i] >= limit ? weights[i] : 0;
            of_block += weights[i];
        }
        blocks[block] = of_block;
    }
    for (int block = 0; block < m->padded / BLOCK; block++) sum += blocks[block];
    int64_t target = (int64_t)(uniform_of(o->seed, o->position) * (double)sum);
    if (target > sum - 1) target = sum - 1;
    int block = 0;
    while (before + blocks[block] <= target) before += blocks[block++];
    int i = block * BLOCK;
    while ((before += m->weights[i]) <= target) i++;
    return i;
}
