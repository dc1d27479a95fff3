/* Included twice by blocked.h, which says what TARGET, NAME and PAIRS are. */

#if PAIRS
#define STEP 2 /* numbers in a unit */
#else
#define STEP 1
#endif

INLINE TARGET __m512 NAME(add_product)(__m512 sum, uint32_t left, __m512i right) {
#if PAIRS
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)left), (__m512bh)right);
#else
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32((int)left)),
                           _mm512_castsi512_ps(right), sum);
#endif
}

/* out [SIDE, 16 vectors] = out * factor (0 without) + left [SIDE, steps] x right [steps, 16 vectors]. */
INLINE TARGET void NAME(multiply)(const uint32_t *left, int64_t left_stride, const uint32_t *right,
                                  int64_t right_stride, int steps, float *out, int64_t out_stride,
                                  const float *factor, int vectors) {
    __m512 sums[SIDE][4];
#pragma GCC unroll 6
    for (int m = 0; m < SIDE; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            sums[m][n] = factor ? _mm512_mul_ps(_mm512_set1_ps(factor[m]),
                                                _mm512_loadu_ps(out + m * out_stride + n * 16))
                                : _mm512_setzero_ps();
    for (int k = 0; k < steps; k++) {
        __m512i columns[4];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            columns[n] = _mm512_loadu_si512(right + k * right_stride + n * 16);
#pragma GCC unroll 6
        for (int m = 0; m < SIDE; m++)
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++)
                sums[m][n] = NAME(add_product)(sums[m][n], left[m * left_stride + k], columns[n]);
    }
#pragma GCC unroll 6
    for (int m = 0; m < SIDE; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) _mm512_storeu_ps(out + m * out_stride + n * 16, sums[m][n]);
}

/* Sixteen units of a slot's vector, from number `d` on. */
INLINE TARGET __m512i NAME(load_units)(const uint8_t *vector, int d, int dim, int dtype) {
#if PAIRS
    (void)dtype;
    return _mm512_maskz_loadu_epi32(between16(0, (dim - d) / 2), (const uint16_t *)vector + d);
#else
    return _mm512_castps_si512(load16(vector, d, dtype, between16(0, dim - d)));
#endif
}

/* Keys of slots first + skip .. first + count - 1; zeros for the others up to a multiple of COLUMNS. */
static TARGET void NAME(pack_keys)(const attention_args *a, block *b, const lane *l, int64_t first,
                                   int skip, int count) {
    for (int group = 0; group < count; group += COLUMNS)
        for (int i = group; i < group + COLUMNS; i += 16) {
            const uint8_t *vectors[16];
            for (int j = 0; j < 16; j++)
                vectors[j] = i + j >= skip && i + j < count ? a->key + slot_at(a, l, first + i + j) : NULL;
            uint32_t *packed = b->key + (int64_t)group * b->units + i - group;
            for (int unit = 0; unit < b->units; unit += 16) {
                __m512i rows[16];
                for (int j = 0; j < 16; j++)
                    rows[j] = vectors[j] ? NAME(load_units)(vectors[j], unit * STEP, a->head_dim, a->dtype)
                                         : _mm512_setzero_si512();
                transpose16(rows);
                for (int j = 0; j < 16 && unit + j < b->units; j++)
                    _mm512_storeu_si512(packed + (int64_t)(unit + j) * COLUMNS, rows[j]);
            }
        }
}

/* Likewise their values, up to a multiple of 16 slots. */
static TARGET void NAME(pack_values)(const attention_args *a, block *b, const lane *l, int64_t first,
                                     int skip, int count) {
    for (int i = 0; i < (count + 15) / 16 * 16; i += STEP) {
        uint32_t *packed = b->value + (int64_t)(i / STEP) * a->head_dim;
        const uint8_t *one = i >= skip && i < count ? a->value + slot_at(a, l, first + i) : NULL;
#if PAIRS
        const uint8_t *two = i + 1 >= skip && i + 1 < count ? a->value + slot_at(a, l, first + i + 1) : NULL;
#endif
        for (int d = 0; d < a->head_dim; d += 16) {
            __m512i units = _mm512_setzero_si512();
#if PAIRS
            if (one) units = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(one + 2 * d)));
            if (two) {
                __m256i above = _mm256_loadu_si256((const void *)(two + 2 * d));
                units = _mm512_or_si512(units, _mm512_slli_epi32(_mm512_cvtepu16_epi32(above), 16));
            }
#else
            if (one) units = NAME(load_units)(one, d, a->head_dim, a->dtype);
#endif
            _mm512_storeu_si512(packed + d, units);
        }
    }
}

/* Query vectors first .. first + count - 1 of the row and head; zeros up to a multiple of SIDE. */
static TARGET void NAME(load_block)(const attention_args *a, block *b, const lane *l, int row, int head,
                                    int first, int count) {
    int whole = (count + SIDE - 1) / SIDE * SIDE, dim = a->head_dim;
    for (int m = 0; m < whole; m++) {
        int pair = first + m;
        b->high[m] = b->low[m] = 0;
        memset(b->query + (int64_t)m * b->units, 0, (size_t)b->units * 4);
        if (m >= count) continue;
        b->high[m] = l->slots - a->tokens[row] + pair / a->group + 1;
        b->low[m] = a->window && b->high[m] > a->window ? b->high[m] - a->window : 0;
        const uint8_t *vector = (const uint8_t *)a->query + query_at(a, row, head, pair) * itemsize(a);
        for (int d = 0; d < dim; d += 16 * STEP)
            _mm512_mask_storeu_epi32(b->query + (int64_t)m * b->units + d / STEP,
                                     between16(0, (dim - d) / STEP),
                                     NAME(load_units)(vector, d, dim, a->dtype));
    }
}

/* Logits of SIDE vectors from m on with the packed slots base .. base + width - 1: scaled, capped,
 * -inf where a vector does not see the slot. */
INLINE TARGET void NAME(logits_of)(const attention_args *a, block *b, int m, int64_t base, int width) {
    const uint32_t *query = b->query + (int64_t)m * b->units;
    for (int i = 0; i < width; i += COLUMNS)
        NAME(multiply)(query, b->units, b->key + (int64_t)i * b->units, COLUMNS, b->units,
                       b->logits[0] + i, BLOCK_SLOTS, NULL, 4);
    __m512 scale = _mm512_set1_ps(a->scale);
    for (int s = 0; s < SIDE; s++)
        for (int i = 0; i < width; i += 16) {
            __m512 x = _mm512_mul_ps(_mm512_loadu_ps(b->logits[s] + i), scale);
            if (a->softcap > 0) x = softcap16(x, a->softcap);
            __mmask16 seen = between16(b->low[m + s] - base - i, b->high[m + s] - base - i);
            _mm512_storeu_ps(b->logits[s] + i, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), x));
        }
}

/* Logits become weights relative to the new maximum; the factor on what was there is kept. */
INLINE TARGET void NAME(weigh)(block *b, int m, int width) {
    for (int s = 0; s < SIDE; s++) {
        __m512 top = _mm512_set1_ps(b->maximum[m + s]), sum = _mm512_setzero_ps();
        for (int i = 0; i < width; i += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(b->logits[s] + i));
        float maximum = _mm512_reduce_max_ps(top);
        b->factor[s] = 1;
        if (maximum == -INFINITY) {
            memset(b->weights[s], 0, (size_t)(width / STEP) * 4);
            continue;
        }
        top = _mm512_set1_ps(maximum);
        for (int i = 0; i < width; i += 16) {
            __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(b->logits[s] + i), top));
            sum = _mm512_add_ps(sum, e);
#if PAIRS
            _mm256_storeu_si256((void *)(b->weights[s] + i / 2), (__m256i)_mm512_cvtneps_pbh(e));
#else
            _mm512_storeu_ps(b->weights[s] + i, e);
#endif
        }
        b->factor[s] = expf(b->maximum[m + s] - maximum);
        b->maximum[m + s] = maximum;
        b->sum[m + s] = b->sum[m + s] * b->factor[s] + _mm512_reduce_add_ps(sum);
    }
}

INLINE TARGET void NAME(add_values)(const attention_args *a, block *b, int m, int width) {
    int dim = a->head_dim, d = 0;
    float *out = b->out + (int64_t)m * dim;
    for (; d + COLUMNS <= dim; d += COLUMNS)
        NAME(multiply)(b->weights[0], BLOCK_SLOTS, b->value + d, dim, width / STEP, out + d, dim,
                       b->factor, 4);
    for (; d < dim; d += 16)
        NAME(multiply)(b->weights[0], BLOCK_SLOTS, b->value + d, dim, width / STEP, out + d, dim,
                       b->factor, 1);
}

static TARGET void NAME(store_block)(const attention_args *a, block *b, int row, int head, int first,
                                     int count) {
    for (int m = 0; m < count; m++) {
        int pair = first + m;
        int64_t at = (a->starts[row] + pair / a->group) * num_heads(a) + head + pair % a->group;
        float over = 1 / b->sum[m];
        for (int d = 0; d < a->head_dim; d += 16) {
            __m512 x = _mm512_mul_ps(_mm512_loadu_ps(b->out + (int64_t)m * a->head_dim + d),
                                     _mm512_set1_ps(over));
            if (a->dtype == F32) _mm512_storeu_ps((float *)a->out + at * a->head_dim + d, x);
            else {
                uint16_t *target = (uint16_t *)a->out + at * a->head_dim + d;
#if PAIRS
                _mm256_storeu_si256((void *)target, (__m256i)_mm512_cvtneps_pbh(x));
#else
                if (a->dtype == F16) _mm256_storeu_si256((void *)target, _mm512_cvtps_ph(x, 0));
                else {
                    float numbers[16];
                    _mm512_storeu_ps(numbers, x);
                    for (int i = 0; i < 16; i++) target[i] = to_bf16(numbers[i]);
                }
#endif
            }
        }
        if (a->normalisers) {
            a->normalisers[2 * at] = b->maximum[m];
            a->normalisers[2 * at + 1] = over;
        }
    }
}

/* Part `p` of the query vectors of a KV head: count of them from first on. */
static TARGET void NAME(attend_block)(const attention_args *a, const part *p, int kv_head,
                                      uint8_t *scratch) {
    block *b = lay_out_block(scratch, a->head_dim, a->head_dim / STEP);
    lane l = lane_of(a, p->row, kv_head);
    int head = kv_head * a->group, count = p->count;
    NAME(load_block)(a, b, &l, p->row, head, p->first, count);
    for (int m = 0; m < (count + SIDE - 1) / SIDE * SIDE; m++) {
        b->maximum[m] = a->sinks ? a->sinks[head + (p->first + m) % a->group] : -INFINITY;
        b->sum[m] = a->sinks ? 1 : 0;
    }
    memset(b->out, 0, (size_t)(count + SIDE - 1) / SIDE * SIDE * a->head_dim * sizeof(float));
    int64_t end = b->high[count - 1];
    for (int64_t base = b->low[0] / BLOCK_SLOTS * BLOCK_SLOTS; base < end; base += BLOCK_SLOTS) {
        int packed = end - base < BLOCK_SLOTS ? (int)(end - base) : BLOCK_SLOTS;
        int skip = b->low[0] > base ? (int)(b->low[0] - base) : 0; /* pages there may be gone */
        NAME(pack_keys)(a, b, &l, base, skip, packed);
        NAME(pack_values)(a, b, &l, base, skip, packed);
        for (int m = 0; m < count; m += SIDE) {
            int last = m + SIDE < count ? m + SIDE - 1 : count - 1;
            if (b->high[last] <= base || b->low[m] >= base + packed) continue;
            int64_t seen = b->high[last] - base;
            int width = seen < packed ? (int)seen : packed;
            width = (width + 15) / 16 * 16;
            NAME(logits_of)(a, b, m, base, width);
            NAME(weigh)(b, m, width);
            NAME(add_values)(a, b, m, width);
        }
    }
    NAME(store_block)(a, b, p->row, head, p->first, count);
}

/* Column sums of the slots of part `p`, for the query heads of a KV head: logits once more, and the
 * normalisers that the outputs were divided by. */
static TARGET void NAME(sum_columns)(const attention_args *a, const part *p, int kv_head,
                                     uint8_t *scratch) {
    block *b = lay_out_block(scratch, a->head_dim, a->head_dim / STEP);
    lane l = lane_of(a, p->row, kv_head);
    int head = kv_head * a->group, pairs = a->tokens[p->row] * a->group;
    int64_t high = l.slots - a->tokens[p->row] + 1, low = a->window && high > a->window ? high - a->window : 0;
    int packed = l.slots - p->first < p->count ? (int)(l.slots - p->first) : p->count;
    int skip = low > p->first ? (int)(low - p->first) : 0;
    if (packed <= skip) return;
    NAME(pack_keys)(a, b, &l, p->first, skip, packed);
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
                __m512 top = _mm512_set1_ps(a->normalisers[2 * at]);
                __m512 over = _mm512_set1_ps(a->normalisers[2 * at + 1]);
                int64_t target = (int64_t)p->row * num_heads(a) + head + pair % a->group;
                float *sums = a->column_sums + target * a->sums_stride + p->first;
                for (int i = 0; i < packed; i += 16) {
                    __mmask16 inside = between16(0, packed - i);
                    __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(b->logits[s] + i), top));
                    __m512 sum = _mm512_maskz_loadu_ps(inside, sums + i);
                    _mm512_mask_storeu_ps(sums + i, inside, _mm512_fmadd_ps(e, over, sum));
                }
            }
        }
    }
}

#undef STEP
