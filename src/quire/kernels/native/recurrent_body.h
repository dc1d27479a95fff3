/* Included by recurrent.c, which defines TARGET, NAME, LANES. */

#define TILE 4 /* vectors of values that are updated together */

/* x / (1 + e^-x) */
static TARGET void NAME(silu)(float *x, int count) {
    float sizes[CHANNELS] = {0};
    for (int i = 0; i < count; i++) sizes[i] = -fabsf(x[i]);
    for (int i = 0; i < CHANNELS; i += LANES) V(put)(sizes + i, V(exp)(V(read)(sizes + i)));
    for (int i = 0; i < count; i++) x[i] *= (x[i] < 0 ? sizes[i] : 1.0f) / (1.0f + sizes[i]);
}

static TARGET void NAME(convolve)(const convolve_args *a, int64_t row, int64_t block) {
    int first = (int)block * CHANNELS, length = a->length, taps = a->taps;
    int count = a->channels - first < CHANNELS ? a->channels - first : CHANNELS;
    float sums[CHANNELS] = {0}, x[CHANNELS];
    const float *weight = a->weight + (int64_t)first * taps;
    read_numbers(x, &a->x, row, 0, first, count);
    float *own = NULL;
    for (int i = 0, left = 0; i < count; i++, own += length, left--) {
        if (!left) { /* of the channels in a page */
            own = state_vector(&a->states, row, first + i, length);
            left = a->states.vectors - (first + i) % a->states.vectors;
        }
        if (length == 4 && taps == 4) {
            __m128i old = _mm_loadu_si128((const void *)own);
            __m128i new = _mm_alignr_epi8(_mm_castps_si128(_mm_set_ss(x[i])), old, 4);
            _mm_storeu_si128((void *)own, new);
            __m128 products = _mm_mul_ps(_mm_castsi128_ps(new), _mm_loadu_ps(weight + 4 * i));
            products = _mm_add_ps(products, _mm_movehl_ps(products, products));
            sums[i] = _mm_cvtss_f32(_mm_add_ss(products, _mm_movehdup_ps(products)));
        } else {
            for (int t = 1; t < length; t++) own[t - 1] = own[t];
            own[length - 1] = x[i];
            for (int t = 0; t < taps; t++) sums[i] += own[length - taps + t] * weight[(int64_t)i * taps + t];
        }
    }
    for (int i = 0; a->bias && i < count; i++) sums[i] += a->bias[first + i];
    if (a->silu) NAME(silu)(sums, count);
    for (int i = 0; i < count; i++) store_number(a->out, row * a->channels + first + i, a->x.dtype, sums[i]);
}

/* What the tokens of one head need. */
typedef struct {
    float query[TOGETHER * MAX_HEAD_DIM], key[TOGETHER * MAX_HEAD_DIM];
    float decay[TOGETHER * MAX_HEAD_DIM], factor[TOGETHER * MAX_HEAD_DIM]; /* decay * key */
    float value[TOGETHER][MAX_HEAD_DIM + LANES], out[TOGETHER][MAX_HEAD_DIM + LANES], beta[TOGETHER];
} NAME(delta_tokens);

/* Update `vectors` vectors of registers, of the values of a state, by one token. They are read once: what the next token needs
 * of the state is computed with it. `some` is the mask of a vector that is not whole. */
INLINE TARGET void NAME(delta_token)(float *const *state, const delta_args *a, NAME(delta_tokens) *s, int t, int v,
                                     V(vec) *known, int vectors, V(mask) some, int whole, int more) {
    const float *query = s->query + t * a->key_dim, *key = s->key + t * a->key_dim;
    const float *decay = s->decay + t * a->key_dim, *factor = s->factor + (t + more) * a->key_dim;
    V(vec) change[TILE], found[TILE];
    for (int j = 0; j < vectors; j++) {
        V(vec) x = V(read)(s->value[t] + v + j * LANES); /* padded */
        change[j] = V(mul)(V(sub)(x, known[j]), V(set)(s->beta[t]));
        found[j] = known[j] = V(zero)();
    }
    for (int k = 0; k < a->key_dim; k++) {
        V(vec) retained = V(set)(decay[k]), added = V(set)(key[k]), read = V(set)(query[k]);
        float *numbers = state[k] + v;
        for (int j = 0; j < vectors; j++) {
            V(vec) x = whole ? V(read)(numbers + j * LANES) : V(read_some)(some, numbers);
            x = V(fma)(change[j], added, V(mul)(x, retained));
            if (whole) V(put)(numbers + j * LANES, x);
            else V(put_some)(numbers, some, x);
            found[j] = V(fma)(x, read, found[j]);
            if (more) known[j] = V(fma)(x, V(set)(factor[k]), known[j]);
        }
    }
    for (int j = 0; j < vectors; j++) V(put)(s->out[t] + v + j * LANES, found[j]);
}

INLINE TARGET void NAME(delta_tile)(float *const *state, const delta_args *a, NAME(delta_tokens) *s, int tokens, int v,
                                    int vectors, V(mask) some, int whole) {
    V(vec) known[TILE];
    for (int j = 0; j < vectors; j++) known[j] = V(zero)();
    for (int k = 0; k < a->key_dim; k++) {
        const float *numbers = state[k] + v;
        for (int j = 0; j < vectors; j++) {
            V(vec) x = whole ? V(read)(numbers + j * LANES) : V(read_some)(some, numbers);
            known[j] = V(fma)(x, V(set)(s->factor[k]), known[j]);
        }
    }
    for (int t = 0; t < tokens - 1; t++)
        NAME(delta_token)(state, a, s, t, v, known, vectors, some, whole, 1);
    NAME(delta_token)(state, a, s, tokens - 1, v, known, vectors, some, whole, 0);
}

static TARGET void NAME(delta)(const delta_args *a, int64_t row, int64_t head) {
    NAME(delta_tokens) s;
    int64_t first_key = head / (a->heads / a->key_heads) * a->key_dim;
    int dim = a->key_dim, values = a->value_dim;
    float *state[MAX_HEAD_DIM];
    for (int k = 0; k < dim; k++) state[k] = state_vector(&a->states, row, (int)head * dim + k, values);
    const V(mask) all = V(between)(0, LANES);
    for (int first = 0, tokens; first < a->tokens; first += tokens) {
        tokens = a->tokens - first < TOGETHER ? a->tokens - first : TOGETHER;
        for (int t = 0; t < tokens; t++) {
            float *query = s.query + t * dim, *key = s.key + t * dim, *decay = s.decay + t * dim;
            read_numbers(query, &a->query, row, first + t, first_key, dim);
            read_numbers(key, &a->key, row, first + t, first_key, dim);
            read_numbers(s.value[t], &a->value, row, first + t, head * values, values);
            for (int i = 0; i < LANES; i++) s.value[t][values + i] = 0;
            scale(query, dim, a->normalize, 1.0f / sqrtf((float)dim));
            scale(key, dim, a->normalize, 1.0f);
            s.beta[t] = number_of(&a->beta, row, first + t, head);
            for (int k = 0; k < dim; k++) {
                if (k < a->decays) decay[k] = expf(number_of(&a->decay, row, first + t, head * a->decays + k));
                else decay[k] = decay[0];
                s.factor[t * dim + k] = decay[k] * key[k];
            }
        }
        int v = 0;
        for (; v + TILE * LANES <= values; v += TILE * LANES)
            NAME(delta_tile)(state, a, &s, tokens, v, TILE, all, 1);
        for (; v + LANES <= values; v += LANES) NAME(delta_tile)(state, a, &s, tokens, v, 1, all, 1);
        if (v < values) NAME(delta_tile)(state, a, &s, tokens, v, 1, V(between)(0, values - v), 0);
        for (int t = 0; t < tokens; t++) {
            int64_t to = ((row * a->tokens + first + t) * a->heads + head) * values;
            for (int i = 0; i < values; i++) store_number(a->out, to + i, a->value.dtype, s.out[t][i]);
        }
    }
}

/* What the tokens of one head need; keys and queries are padded with zeros. */
typedef struct {
    float key[TOGETHER][MAX_HEAD_DIM + LANES], query[TOGETHER][MAX_HEAD_DIM + LANES];
    float x[TOGETHER][MAX_HEAD_DIM], step[TOGETHER], retained[TOGETHER];
} NAME(space_tokens);

/* Update `vectors` vectors of a row of a state by all tokens, and add what they read to `sums`. */
INLINE TARGET void NAME(space_part)(float *state, const NAME(space_tokens) *s, int tokens, int p, int n,
                                    V(vec) *sums, int vectors, V(mask) some, int whole) {
    V(vec) x[TILE];
    for (int j = 0; j < vectors; j++) x[j] = whole ? V(read)(state + j * LANES) : V(read_some)(some, state);
    for (int t = 0; t < tokens; t++) {
        V(vec) retained = V(set)(s->retained[t]), added = V(set)(s->step[t] * s->x[t][p]), sum = sums[t];
        for (int j = 0; j < vectors; j++) {
            x[j] = V(fma)(added, V(read)(s->key[t] + n + j * LANES), V(mul)(x[j], retained));
            sum = V(fma)(x[j], V(read)(s->query[t] + n + j * LANES), sum);
        }
        sums[t] = sum;
    }
    for (int j = 0; j < vectors; j++)
        if (whole) V(put)(state + j * LANES, x[j]);
        else V(put_some)(state, some, x[j]);
}

static TARGET void NAME(space)(const space_args *a, int64_t row, int64_t head) {
    NAME(space_tokens) s;
    int64_t first_key = head / (a->heads / a->groups) * a->state;
    float skip = a->skip ? a->skip[head] : 0.0f;
    const V(mask) all = V(between)(0, LANES);
    for (int first = 0, tokens; first < a->tokens; first += tokens) {
        tokens = a->tokens - first < TOGETHER ? a->tokens - first : TOGETHER;
        for (int t = 0; t < tokens; t++) {
            read_numbers(s.key[t], &a->key, row, first + t, first_key, a->state);
            read_numbers(s.query[t], &a->query, row, first + t, first_key, a->state);
            for (int i = 0; i < LANES; i++) s.key[t][a->state + i] = s.query[t][a->state + i] = 0;
            read_numbers(s.x[t], &a->x, row, first + t, head * a->dim, a->dim);
            s.step[t] = number_of(&a->step, row, first + t, head);
            s.retained[t] = expf(s.step[t] * a->decay[head]);
        }
        for (int p = 0; p < a->dim; p++) {
            float *own = state_vector(&a->states, row, (int)head * a->dim + p, a->state);
            V(vec) sums[TOGETHER];
            for (int t = 0; t < tokens; t++) sums[t] = V(zero)();
            int n = 0;
            for (; n + TILE * LANES <= a->state; n += TILE * LANES)
                NAME(space_part)(own + n, &s, tokens, p, n, sums, TILE, all, 1);
            for (; n + LANES <= a->state; n += LANES)
                NAME(space_part)(own + n, &s, tokens, p, n, sums, 1, all, 1);
            if (n < a->state)
                NAME(space_part)(own + n, &s, tokens, p, n, sums, 1, V(between)(0, a->state - n), 0);
            for (int t = 0; t < tokens; t++) {
                int64_t to = ((row * a->tokens + first + t) * a->heads + head) * a->dim + p;
                store_number(a->out, to, a->out_dtype, V(total)(sums[t]) + skip * s.x[t][p]);
            }
        }
    }
}

#undef TILE
