/* Included by blocked.h, which defines TARGET, NAME, PAIRS, LANES and VECTORS. */

#if PAIRS
#define STEP 2 /* numbers in a unit */
#else
#define STEP 1
#endif
#define COLUMNS (LANES * VECTORS)

INLINE TARGET V(vec) NAME(add_product)(V(vec) sum, uint32_t left, V(units) right) {
#if PAIRS
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)left), (__m512bh)right);
#else
    float number;
    memcpy(&number, &left, 4);
    return V(fma)(V(set)(number), (V(vec))right, sum);
#endif
}

/* out [SIDE, vectors] = out * factor (0 without) + left [SIDE, steps] x right [steps, vectors]. */
INLINE TARGET void NAME(multiply)(const uint32_t *left, int64_t left_stride, const uint32_t *right,
                                  int64_t right_stride, int steps, float *out, int64_t out_stride,
                                  const float *factor, int vectors) {
    V(vec) sums[SIDE][VECTORS];
#pragma GCC unroll 6
    for (int m = 0; m < SIDE; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            sums[m][n] = factor ? V(mul)(V(set)(factor[m]), V(read)(out + m * out_stride + n * LANES))
                                : V(zero)();
    for (int k = 0; k < steps; k++) {
        V(units) columns[VECTORS];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            columns[n] = V(as_units)(V(read)(right + k * right_stride + n * LANES));
#pragma GCC unroll 6
        for (int m = 0; m < SIDE; m++)
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++)
                sums[m][n] = NAME(add_product)(sums[m][n], left[m * left_stride + k], columns[n]);
    }
#pragma GCC unroll 6
    for (int m = 0; m < SIDE; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) V(put)(out + m * out_stride + n * LANES, sums[m][n]);
}

/* Load LANES units of a slot's vector, from element `d` on. */
INLINE TARGET V(units) NAME(load_units)(const uint8_t *vector, int d, int dim, int dtype) {
#if PAIRS
    (void)dtype;
    return _mm512_maskz_loadu_epi32(between16(0, (dim - d) / 2), (const uint16_t *)vector + d);
#else
    (void)dim; /* a multiple of LANES */
    return V(units_of)(vector, d, dtype);
#endif
}

/* Return the numbers of a slot, or its codes decoded in `decoded`: to bfloat16 for pairs, else to float32. */
INLINE TARGET const uint8_t *NAME(slot_numbers)(const attention_args *a, const uint8_t *plane, const coding *c,
                                                const lane *l, int64_t slot, float *decoded) {
    place p = place_of(a, l, slot);
    const uint8_t *codes = vector_at(plane, c, p);
    if (c->kind == PLAIN_NUMBERS) return codes;
    if (has_bytes(c)) {
        V(vec) scale = V(set)(half_at(c->scales, p.page_at, p.record));
        for (int d = 0; d < c->dim; d += LANES) {
            V(vec) x = V(mul)(V(bytes)(codes + d), scale);
#if PAIRS
            _mm256_storeu_si256((void *)((uint16_t *)decoded + d), (__m256i)_mm512_cvtneps_pbh(x));
#else
            V(put)(decoded + d, x);
#endif
        }
    } else decode_vector(c, plane, p, decoded);
    return (const uint8_t *)decoded;
}

/* Pack vectors of one plane as units `at` .. of the keys of slots first + skip .. first + count - 1; zeros for others
 * up to a multiple of COLUMNS. `order`, or NULL, has the slots with these numbers. */
static TARGET void NAME(pack_plane)(const attention_args *a, block *b, const uint8_t *plane, const coding *c, int at,
                                    const lane *l, const int64_t *order, int64_t first, int skip, int count) {
    float decoded[LANES][MAX_HEAD_DIM];
    int dtype = numbers_type(c), units = c->dim / STEP;
    for (int group = 0; group < count; group += COLUMNS)
        for (int i = group; i < group + COLUMNS; i += LANES) {
            const uint8_t *vectors[LANES];
            for (int j = 0; j < LANES; j++) {
                int inside = i + j >= skip && i + j < count;
                int64_t slot = inside && order ? order[first + i + j] : first + i + j;
                vectors[j] = inside ? NAME(slot_numbers)(a, plane, c, l, slot, decoded[j]) : NULL;
            }
            for (int j = 0; order && j < LANES && i + j + COLUMNS < count; j++)
                prefetch_vector(a, l, order[first + i + j + COLUMNS]);
            uint32_t *packed = b->key + (int64_t)group * b->units + (int64_t)at * COLUMNS + i - group;
            for (int unit = 0; unit < units; unit += LANES) {
                V(units) rows[LANES];
                for (int j = 0; j < LANES; j++)
                    rows[j] = vectors[j] ? NAME(load_units)(vectors[j], unit * STEP, c->dim, dtype)
                                         : V(no_units)();
                V(transpose)(rows);
                for (int j = 0; j < LANES && unit + j < units; j++)
                    V(put_units)(packed + (int64_t)(unit + j) * COLUMNS, rows[j]);
            }
        }
}

static TARGET void NAME(pack_keys)(const attention_args *a, block *b, const lane *l, const int64_t *order,
                                   int64_t first, int skip, int count) {
    const coding *key = &a->key_coding, *value = &a->value_coding;
    if (a->joined) NAME(pack_plane)(a, b, a->value, value, 0, l, order, first, skip, count);
    NAME(pack_plane)(a, b, a->key, key, a->joined ? value->dim / STEP : 0, l, order, first, skip, count);
}

/* Pack values of the same slots; zeros for others up to a multiple of 16 slots. */
static TARGET void NAME(pack_values)(const attention_args *a, block *b, const lane *l, int64_t first,
                                     int skip, int count) {
    const coding *c = &a->value_coding;
    int dim = c->dim;
    float decoded[STEP][MAX_HEAD_DIM];
#if !PAIRS
    int dtype = numbers_type(c);
#endif
    for (int i = 0; i < (count + 15) / 16 * 16; i += STEP) {
        uint32_t *packed = b->value + (int64_t)(i / STEP) * dim;
#if PAIRS
        const uint8_t *two = NULL;
        if (i + 1 >= skip && i + 1 < count) two = NAME(slot_numbers)(a, a->value, c, l, first + i + 1, decoded[1]);
#endif
        const uint8_t *one = NULL;
        if (i >= skip && i < count) one = NAME(slot_numbers)(a, a->value, c, l, first + i, decoded[0]);
        for (int d = 0; d < dim; d += LANES) {
            V(units) units = V(no_units)();
#if PAIRS
            if (one) units = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(one + 2 * d)));
            if (two) {
                __m256i above = _mm256_loadu_si256((const void *)(two + 2 * d));
                units = _mm512_or_si512(units, _mm512_slli_epi32(_mm512_cvtepu16_epi32(above), 16));
            }
#else
            if (one) units = NAME(load_units)(one, d, dim, dtype);
#endif
            V(put_units)(packed + d, units);
        }
    }
}

/* Load query vectors first .. first + count - 1 of a row and head; zeros up to a multiple of SIDE. */
static TARGET void NAME(load_block)(const attention_args *a, block *b, const lane *l, int row, int head,
                                    int first, int count) {
    int whole = (count + SIDE - 1) / SIDE * SIDE, dim = a->head_dim;
    for (int m = 0; m < whole; m++) {
        int pair = first + m;
        b->high[m] = b->low[m] = 0;
        b->bias[m] = NULL;
        memset(b->query + (int64_t)m * b->units, 0, (size_t)b->units * 4);
        if (m >= count) continue;
        b->high[m] = l->slots - a->tokens[row] + pair / a->group + 1;
        b->low[m] = a->window && b->high[m] > a->window ? b->high[m] - a->window : 0;
        b->bias[m] = bias_of(a, row, head + pair % a->group, l->slots);
        const uint8_t *vector = (const uint8_t *)a->query + query_at(a, row, head, pair) * itemsize(a);
        prefetch_output(a, row, head, pair);
        for (int d = 0; d < dim; d += LANES * STEP) {
            uint32_t *units = b->query + (int64_t)m * b->units + d / STEP;
#if PAIRS
            _mm512_mask_storeu_epi32(units, between16(0, (dim - d) / STEP),
                                     NAME(load_units)(vector, d, dim, a->dtype));
#else
            V(put_units)(units, NAME(load_units)(vector, d, dim, a->dtype));
#endif
        }
    }
}

/* Scale and cap `width` products of vector m, the s-th of the tile; -inf for slots it does not see. Stores their
 * maximum. */
INLINE TARGET void NAME(scale_logits)(const attention_args *a, block *b, int m, int s, int64_t base, int width) {
    int64_t low = b->low[m] - base, high = b->high[m] - base;
    V(vec) scale = V(set)(a->scale), nothing = V(set)(-INFINITY), top = nothing;
    for (int i = 0; i < width; i += LANES) {
        V(vec) x = V(mul)(V(read)(b->logits[s] + i), scale);
        if (a->softcap != 0) x = V(adjust)(x, a->softcap, b->bias[m], base + i);
        if (i < low || i + LANES > high) x = V(choose)(V(between)(low - i, high - i), nothing, x);
        V(put)(b->logits[s] + i, x);
        top = V(max)(top, x);
    }
    b->top[s] = V(top)(top);
}

/* Compute logits of SIDE vectors from m on with the packed slots base .. base + width - 1. */
INLINE TARGET void NAME(logits_of)(const attention_args *a, block *b, int m, int64_t base, int width) {
    const uint32_t *query = b->query + (int64_t)m * b->units;
    int i = 0;
    for (; i + COLUMNS <= width; i += COLUMNS)
        NAME(multiply)(query, b->units, b->key + (int64_t)i * b->units, COLUMNS, b->units,
                       b->logits[0] + i, BLOCK_SLOTS, NULL, VECTORS);
    for (int n = 0; i + n < width; n += LANES)
        NAME(multiply)(query, b->units, b->key + (int64_t)i * b->units + n, COLUMNS, b->units,
                       b->logits[0] + i + n, BLOCK_SLOTS, NULL, 1);
    for (int s = 0; s < SIDE; s++) NAME(scale_logits)(a, b, m + s, s, base, width);
}

/* Update the maxima, and store the factors for earlier output. */
INLINE TARGET void NAME(raise_maxima)(block *b, int m) {
    float change[16];
    for (int s = 0; s < SIDE; s++) {
        float maximum = b->maximum[m + s] > b->top[s] ? b->maximum[m + s] : b->top[s];
        change[s] = maximum == -INFINITY ? 0 : b->maximum[m + s] - maximum;
        b->maximum[m + s] = maximum;
    }
    for (int s = SIDE; s < LANES; s++) change[s] = 0;
    V(put)(change, V(exp)(V(read)(change)));
    memcpy(b->factor, change, sizeof(b->factor));
}

/* Convert logits to weights relative to the new maximum. */
INLINE TARGET void NAME(weigh)(block *b, int m, int width) {
    NAME(raise_maxima)(b, m);
    for (int s = 0; s < SIDE; s++) {
        V(vec) top = V(set)(b->maximum[m + s]), sum = V(zero)();
        if (b->maximum[m + s] == -INFINITY) {
            memset(b->weights[s], 0, (size_t)(width / STEP) * 4);
            continue;
        }
        for (int i = 0; i < width; i += LANES) {
            V(vec) e = V(exp)(V(sub)(V(read)(b->logits[s] + i), top));
            sum = V(add)(sum, e);
#if PAIRS
            _mm256_storeu_si256((void *)(b->weights[s] + i / 2), (__m256i)_mm512_cvtneps_pbh(e));
#else
            V(put)(b->weights[s] + i, e);
#endif
        }
        b->sum[m + s] = b->sum[m + s] * b->factor[s] + V(total)(sum);
    }
}

INLINE TARGET void NAME(add_values)(const attention_args *a, block *b, const lane *l, int m, int width) {
    int dim = a->value_coding.dim, d = 0;
    float *out = b->out + (int64_t)m * dim;
    for (; d + COLUMNS <= dim; d += COLUMNS) {
        prefetch_ahead(a, b, l);
        NAME(multiply)(b->weights[0], BLOCK_SLOTS, b->value + d, dim, width / STEP, out + d, dim,
                       b->factor, VECTORS);
    }
    for (; d < dim; d += LANES)
        NAME(multiply)(b->weights[0], BLOCK_SLOTS, b->value + d, dim, width / STEP, out + d, dim,
                       b->factor, 1);
}

static TARGET void NAME(store_block)(const attention_args *a, block *b, int row, int head, int first,
                                     int count) {
    int dim = a->value_coding.dim;
    for (int m = 0; m < count; m++) {
        int pair = first + m;
        int64_t at = (a->starts[row] + pair / a->group) * num_heads(a) + head + pair % a->group;
        float over = 1 / b->sum[m];
        for (int d = 0; d < dim; d += LANES) {
            V(vec) x = V(mul)(V(read)(b->out + (int64_t)m * dim + d), V(set)(over));
            if (a->dtype == F32) {
                V(put)((float *)a->out + at * dim + d, x);
                continue;
            }
            uint16_t *target = (uint16_t *)a->out + at * dim + d;
#if PAIRS
            _mm256_storeu_si256((void *)target, (__m256i)_mm512_cvtneps_pbh(x));
#else
            V(narrow)(target, x, a->dtype);
#endif
        }
        if (a->normalisers) {
            a->normalisers[2 * at] = b->maximum[m];
            a->normalisers[2 * at + 1] = over;
        }
    }
}

/* Store logits of SIDE vectors from m on with `width` slots from `base` on that they see, for column sums. */
INLINE TARGET void NAME(keep_logits)(block *b, int m, int64_t base, int width) {
    for (int s = 0; s < SIDE; s++) {
        float *kept = b->kept + (int64_t)(m + s) * b->kept_stride + base;
        for (int64_t i = 0, low = b->low[m + s] - base, high = b->high[m + s] - base; i < width; i += LANES)
            V(put_some)(kept + i, V(between)(low - i, high - i), V(read)(b->logits[s] + i));
    }
}

/* Compute column sums of the slots from `start` on, for a block with all query vectors of the KV head. */
static TARGET void NAME(sum_kept)(const attention_args *a, const block *b, const part *p, int head,
                                  int64_t start, int64_t end) {
    for (int m = 0; m < p->count; m++) {
        V(vec) top = V(set)(b->maximum[m]), over = V(set)(1 / b->sum[m]);
        int64_t target = (int64_t)p->row * num_heads(a) + head + m % a->group;
        float *sums = a->column_sums + target * a->sums_stride + start;
        const float *kept = b->kept + (int64_t)m * b->kept_stride + start;
        for (int64_t i = 0; i < end - start; i += LANES) {
            V(mask) inside = V(between)(0, end - start - i);
            V(vec) e = V(exp)(V(sub)(V(read)(kept + i), top));
            V(put_some)(sums + i, inside, V(fma)(e, over, V(read_some)(inside, sums + i)));
        }
    }
}

/* Load `count` query vectors of a row and head, without output. Sinks are logits without values. */
INLINE TARGET void NAME(begin_block)(const attention_args *a, block *b, const lane *l, int row, int head, int first,
                                     int count, const float *sinks) {
    NAME(load_block)(a, b, l, row, head, first, count);
    for (int m = 0; m < (count + SIDE - 1) / SIDE * SIDE; m++) {
        b->maximum[m] = sinks ? sinks[head + (first + m) % a->group] : -INFINITY;
        b->sum[m] = sinks ? 1 : 0;
    }
    memset(b->out, 0, (size_t)(count + SIDE - 1) / SIDE * SIDE * a->value_coding.dim * sizeof(float));
}

/* Attend to slots start .. end - 1, and store logits if `sums`. */
static TARGET void NAME(attend_slots)(const attention_args *a, block *b, const lane *l, int count, int64_t start,
                                      int64_t end, int sums) {
    int step = a->joined ? JOINED_SLOTS : BLOCK_SLOTS;
    int products = (count + SIDE - 1) / SIDE * (a->value_coding.dim / COLUMNS);
    b->ahead_step = a->joined ? step / (products + 1) + 1 : 0;
    for (int64_t base = start; base < end; base += step) {
        int packed = end - base < step ? (int)(end - base) : step;
        b->ahead = base + packed, b->ahead_end = b->ahead + step < end ? b->ahead + step : end;
        int skip = b->low[0] > base ? (int)(b->low[0] - base) : 0; /* their pages may have been freed */
        NAME(pack_keys)(a, b, l, NULL, base, skip, packed);
        NAME(pack_values)(a, b, l, base, skip, packed);
        for (int m = 0; m < count; m += SIDE) {
            int last = m + SIDE < count ? m + SIDE - 1 : count - 1;
            if (b->high[last] <= base || b->low[m] >= base + packed) continue;
            int64_t seen = b->high[last] - base;
            int width = seen < packed ? (int)seen : packed;
            width = (width + 15) / 16 * 16;
            NAME(logits_of)(a, b, m, base, width);
            if (sums) NAME(keep_logits)(b, m, base, width);
            NAME(weigh)(b, m, width);
            NAME(add_values)(a, b, l, m, width);
        }
    }
}

/* Compute attention of part `p`: `count` query vectors of a KV head from `first` on. */
static TARGET void NAME(attend_block)(const attention_args *a, const part *p, int kv_head,
                                      uint8_t *scratch) {
    block *b = lay_out_block(scratch, a, a->head_dim / STEP);
    lane l = lane_of(a, p->row, kv_head);
    int head = kv_head * a->group, count = p->count;
    NAME(begin_block)(a, b, &l, p->row, head, p->first, count, a->sinks);
    int64_t start = b->low[0] / BLOCK_SLOTS * BLOCK_SLOTS, end = b->high[count - 1];
    int sums = a->column_sums && p->partial > 0, whole = (count + SIDE - 1) / SIDE * SIDE;
    float *kept = b->kept;
    b->kept_stride = (end - start + 15) / 16 * 16;
    for (int64_t i = 0; sums && i < whole * b->kept_stride; i++) kept[i] = -INFINITY;
    b->kept = kept - start; /* by slot */
    NAME(attend_slots)(a, b, &l, count, start, end, sums);
    NAME(store_block)(a, b, p->row, head, p->first, count);
    if (sums) NAME(sum_kept)(a, b, p, head, start, end);
}

/* Compute attention of the query heads of a KV head over the slots of part `p`, for a row with one token. Logits are
 * stored in its column sums. The caller finishes the block. */
static TARGET void NAME(walk_block)(const attention_args *a, const part *p, int kv_head, int sums, uint8_t *scratch) {
    block *b = lay_out_block(scratch, a, a->head_dim / STEP);
    lane l = lane_of(a, p->row, kv_head);
    int head = kv_head * a->group;
    int64_t end = (int64_t)p->first + p->count;
    NAME(begin_block)(a, b, &l, p->row, head, 0, a->group, p->first == 0 ? a->sinks : NULL);
    int64_t start = b->low[0] / BLOCK_SLOTS * BLOCK_SLOTS;
    if (sums) b->kept = a->column_sums + ((int64_t)p->row * num_heads(a) + head) * a->sums_stride;
    b->kept_stride = a->sums_stride;
    NAME(attend_slots)(a, b, &l, a->group, start < p->first ? p->first : start, end < b->high[0] ? end : b->high[0], sums);
}

/* Compute column sums of the slots of part `p`, for the query heads of a KV head, from recomputed
 * logits and the normalisers of the outputs. */
static TARGET void NAME(sum_columns)(const attention_args *a, const part *p, int kv_head,
                                     uint8_t *scratch) {
    block *b = lay_out_block(scratch, a, a->head_dim / STEP);
    lane l = lane_of(a, p->row, kv_head);
    int head = kv_head * a->group, pairs = a->tokens[p->row] * a->group;
    int64_t high = l.slots - a->tokens[p->row] + 1, low = a->window && high > a->window ? high - a->window : 0;
    int packed = l.slots - p->first < p->count ? (int)(l.slots - p->first) : p->count;
    int skip = low > p->first ? (int)(low - p->first) : 0;
    if (packed <= skip) return;
    NAME(pack_keys)(a, b, &l, NULL, p->first, skip, packed);
    for (int first = 0; first < pairs; first += BLOCK_QUERIES) {
        int count = pairs - first < BLOCK_QUERIES ? pairs - first : BLOCK_QUERIES;
        NAME(load_block)(a, b, &l, p->row, head, first, count);
        for (int m = 0; m < count; m += SIDE) {
            int last = m + SIDE < count ? m + SIDE - 1 : count - 1;
            if (b->high[last] <= p->first || b->low[m] >= p->first + packed) continue;
            NAME(logits_of)(a, b, m, p->first, (packed + 15) / 16 * 16);
            for (int s = 0; m + s <= last; s++) {
                int pair = first + m + s;
                int64_t at = (a->starts[p->row] + pair / a->group) * num_heads(a) + head + pair % a->group;
                V(vec) top = V(set)(a->normalisers[2 * at]), over = V(set)(a->normalisers[2 * at + 1]);
                int64_t target = (int64_t)p->row * num_heads(a) + head + pair % a->group;
                float *sums = a->column_sums + target * a->sums_stride + p->first;
                for (int i = 0; i < packed; i += LANES) {
                    V(mask) inside = V(between)(0, packed - i);
                    V(vec) e = V(exp)(V(sub)(V(read)(b->logits[s] + i), top));
                    V(put_some)(sums + i, inside, V(fma)(e, over, V(read_some)(inside, sums + i)));
                }
            }
        }
    }
}

/* ---- scores of cached tokens; slots are in the order of positions -------------------------------- */

/* Load the queries of a window as units, zeros up to a multiple of SIDE, and count the slots that each sees. */
static TARGET void NAME(load_window)(const score_args *s, const float *records, const int64_t *positions,
                                     int64_t held, uint32_t *query, int64_t *seen) {
    const attention_args *a = &s->vectors;
    int dim = a->head_dim, units = dim / STEP, count = s->window * a->group, width = a->group * dim + 1;
    memset(query, 0, (size_t)(count + SIDE) * units * 4);
    for (int m = 0; m < count; m++) { /* head by head */
        const float *record = records + (int64_t)(m % s->window) * width, *vector = record + m / s->window * dim;
        int64_t low = 0, high = held; /* of the first position that is newer than the query */
        while (low < high) {
            int64_t middle = (low + high) / 2;
            if (positions[middle] < (int64_t)record[width - 1]) low = middle + 1;
            else high = middle;
        }
        seen[m] = low;
        uint32_t *target = query + (int64_t)m * units;
#if PAIRS
        for (int d = 0; d < dim; d++) ((uint16_t *)target)[d] = to_bf16(vector[d]);
#else
        memcpy(target, vector, (size_t)dim * 4);
#endif
    }
}

/* Add the weights of one query over the slots that it sees to `sums`, from its products with all keys. */
INLINE TARGET void NAME(add_weights_of)(float *products, int64_t seen, float factor, float *sums) {
    V(vec) scale = V(set)(factor * 1.44269504f), nothing = V(set)(-INFINITY), top = nothing, total = V(zero)();
    int64_t whole = seen / LANES * LANES;
    V(mask) rest = V(between)(0, seen - whole);
    for (int64_t i = 0; i < whole; i += LANES) top = V(max)(top, V(mul)(V(read)(products + i), scale));
    if (whole < seen) top = V(max)(top, V(choose)(rest, nothing, V(mul)(V(read)(products + whole), scale)));
    top = V(set)(-V(top)(top));
    for (int64_t i = 0; i < seen; i += LANES) {
        V(vec) e = V(power)(V(fma)(V(read)(products + i), scale, top));
        if (i == whole) e = V(choose)(rest, V(zero)(), e);
        total = V(add)(total, e);
        V(put)(products + i, e);
    }
    V(vec) over = V(set)(1 / V(total)(total));
    for (int64_t i = 0; i < seen; i += LANES)
        V(put)(sums + i, V(fma)(V(read)(products + i), over, V(read)(sums + i)));
}

/* Pool the sums of a query head over neighbouring slots, and add them to the scores of its KV head. */
static TARGET void NAME(finish_head)(const score_args *s, int64_t slots, int head, float *restrict sums,
                                     float *restrict pooled, float *restrict out) {
    int64_t half = s->kernel / 2, old = slots > s->newest ? slots - s->newest : 0;
    float over = s->pool_max ? 1 : s->kernel;
    memset(sums + old, 0, (slots - old) * sizeof(float));
    memset(pooled, 0, slots * sizeof(float)); /* no sum is less */
    for (int64_t shift = -half; shift <= half; shift++) {
        int64_t from = shift < 0 ? -shift : 0, end = shift > 0 ? slots - shift : slots;
        const float *near = sums + shift;
        if (s->pool_max)
            for (int64_t i = from; i < end; i++) pooled[i] = near[i] > pooled[i] ? near[i] : pooled[i];
        else
            for (int64_t i = from; i < end; i++) pooled[i] += near[i];
    }
    for (int64_t i = 0; i < slots; i++) {
        float score = pooled[i] / over, before = head ? out[i] : 0;
        out[i] = s->heads != HEADS_MAX ? before + score : score > before ? score : before;
    }
    if (s->heads == HEADS_MEAN && head == s->vectors.group - 1)
        for (int64_t i = 0; i < slots; i++) out[i] /= s->vectors.group;
}

/* Sum, per query head of a KV head, the weights of the window's queries over the cached slots. */
static TARGET void NAME(sum_window)(const score_args *s, const lane *l, const int64_t *order,
                                    const int64_t *positions, int64_t item, uint8_t *scratch) {
    const attention_args *a = &s->vectors;
    int units = a->head_dim / STEP, count = s->window * a->group, width = a->group * a->head_dim + 1;
    int64_t room = (l->slots + COLUMNS - 1) / COLUMNS * COLUMNS;
    block *b = (block *)scratch;
    b->units = units, b->key = (uint32_t *)(scratch + (sizeof(block) + 63) / 64 * 64);
    float *products = (float *)(b->key + room * units), *sums = products + SIDE * room;
    int64_t *seen = (int64_t *)(sums + room);
    uint32_t *query = (uint32_t *)(seen + count);
    NAME(load_window)(s, s->records + item * s->window * width, positions, l->slots, query, seen);
    NAME(pack_keys)(a, b, l, order, 0, 0, (int)l->slots);
    memset(sums, 0, room * sizeof(float));
    for (int m = 0; m < count; m += SIDE) {
        const uint32_t *left = query + (int64_t)m * units;
        for (int64_t i = 0; i < room; i += COLUMNS)
            NAME(multiply)(left, units, b->key + i * units, COLUMNS, units, products + i, room, NULL, VECTORS);
        for (int n = m; n < m + SIDE && n < count; n++) {
            if (seen[n]) NAME(add_weights_of)(products + (n - m) * room, seen[n], s->scales[item], sums);
            if ((n + 1) % s->window) continue; /* the last query of this head */
            int head = n / s->window;
            float *out = s->out + (s->kernel ? item : item * a->group + head) * s->slots;
            if (s->kernel) NAME(finish_head)(s, l->slots, head, sums, products + (n - m) * room, out);
            else memcpy(out, sums, l->slots * sizeof(float));
            memset(out + l->slots, 0, (s->slots - l->slots) * sizeof(float));
            memset(sums, 0, room * sizeof(float));
        }
    }
    int recorded = !s->kernel;
    for (int n = 1; n <= s->window; n++) recorded |= s->records[(item * s->window + n) * width - 1] > 0;
    for (int64_t i = 0; !recorded && i < l->slots; i++) s->out[item * s->slots + i] = NAN;
}

#if !PAIRS
INLINE TARGET float NAME(product)(const uint8_t *numbers, const float *other, int dim, int dtype) {
    V(vec) sum = V(zero)();
    for (int d = 0; d < dim; d += LANES) {
        V(vec) x = (V(vec))V(units_of)(numbers, d, dtype);
        sum = V(fma)(x, other ? V(read)(other + d) : x, sum);
    }
    return V(total)(sum);
}

/* Norms of the vectors of a lane, or their cosines with the mean of the unit vectors. */
static TARGET void NAME(measure_vectors)(const score_args *s, const lane *l, const int64_t *order, int64_t item) {
    const attention_args *a = &s->vectors;
    int dim = a->head_dim, dtype = numbers_type(&a->key_coding);
    float decoded[MAX_HEAD_DIM], anchor[MAX_HEAD_DIM] = {0}, *out = s->out + item * s->slots;
    memset(out + l->slots, 0, (s->slots - l->slots) * sizeof(float));
    for (int64_t i = 0; i < l->slots; i++) {
        if (i + LANES < l->slots) prefetch_vector(a, l, order[i + LANES]);
        const uint8_t *numbers = NAME(slot_numbers)(a, a->key, &a->key_coding, l, order[i], decoded);
        out[i] = sqrtf(NAME(product)(numbers, NULL, dim, dtype));
        if (s->score == NORMS) continue;
        float over = 1 / (out[i] > MIN_NORM ? out[i] : MIN_NORM);
        for (int d = 0; d < dim; d += LANES)
            V(put)(anchor + d, V(fma)(V(set)(over), (V(vec))V(units_of)(numbers, d, dtype), V(read)(anchor + d)));
        out[i] = over;
    }
    if (s->score == NORMS) return;
    float length = sqrtf(NAME(product)((const uint8_t *)anchor, NULL, dim, F32));
    for (int64_t i = 0; i < l->slots; i++) {
        const uint8_t *numbers = NAME(slot_numbers)(a, a->key, &a->key_coding, l, order[i], decoded);
        out[i] *= NAME(product)(numbers, anchor, dim, dtype) / (length > MIN_NORM ? length : MIN_NORM);
    }
}
#endif

#undef STEP
#undef COLUMNS
