/* Included by rows.c, which defines TARGET, NAME, LANES. Widths are multiples of LANES. */

static TARGET float NAME(inverse_size)(const float *x, int width, float eps) {
    V(vec) squares = V(zero)();
    for (int i = 0; i < width; i += LANES) squares = V(fma)(V(read)(x + i), V(read)(x + i), squares);
    return 1.0f / sqrtf(V(total)(squares) / (float)width + eps);
}

INLINE TARGET void NAME(put_numbers)(void *out, int64_t at, V(vec) x, int dtype) {
    if (dtype == F32) V(put)((float *)out + at, x);
    else V(narrow)((uint16_t *)out + at, x, dtype);
}

static TARGET void NAME(norm_row)(const norm_args *a, int64_t row) {
    const float *x = a->x + row * a->x_row;
    V(vec) factor = V(set)(NAME(inverse_size)(x, a->width, a->eps));
    for (int i = 0; i < a->width; i += LANES)
        NAME(put_numbers)(a->out, row * a->width + i,
                          V(mul)(V(mul)(V(read)(x + i), factor), V(read)(a->weight + i)), a->out_dtype);
}

/* One head of queries, keys or values. */
static TARGET void NAME(rope_head)(const rope_args *a, int64_t row, int part, int head) {
    float numbers[MAX_HEAD_DIM];
    const float *x = a->x + row * a->x_row + a->column[part] + (int64_t)head * a->head_dim;
    int64_t at = (row * a->heads[part] + head) * a->head_dim;
    int dim = a->head_dim, half = a->rotary_dim / 2;
    if (part < 2 && a->norm[part]) {
        V(vec) factor = V(set)(NAME(inverse_size)(x, dim, a->eps));
        for (int i = 0; i < dim; i += LANES)
            V(put)(numbers + i, V(mul)(V(mul)(V(read)(x + i), factor), V(read)(a->norm[part] + i)));
        x = numbers;
    }
    int first = 0;
    if (part < 2) {
        const float *cosine = a->cosine + row * a->rotary_dim, *sine = a->sine + row * a->rotary_dim;
        for (int i = 0; i < half; i += LANES) {
            V(vec) low = V(read)(x + i), high = V(read)(x + half + i);
            V(vec) turned = V(sub)(V(mul)(low, V(read)(cosine + i)), V(mul)(high, V(read)(sine + i)));
            V(vec) other = V(fma)(high, V(read)(cosine + half + i), V(mul)(low, V(read)(sine + half + i)));
            NAME(put_numbers)(a->out[part], at + i, turned, a->out_dtype);
            NAME(put_numbers)(a->out[part], at + half + i, other, a->out_dtype);
        }
        first = a->rotary_dim;
    }
    for (int i = first; i < dim; i += LANES)
        NAME(put_numbers)(a->out[part], at + i, V(read)(x + i), a->out_dtype);
}

static TARGET void NAME(code_row)(const code_args *a, int64_t row) {
    int groups = (a->width + GROUP_CODES - 1) / GROUP_CODES;
    int size = a->x_dtype == F32 ? 4 : 2;
    const uint8_t *x = (const uint8_t *)a->x + row * a->x_row * size;
    for (int group = 0; group < groups; group++) {
        int first = group * GROUP_CODES, end = first + GROUP_CODES < a->width ? first + GROUP_CODES : a->width;
        V(vec) most = V(zero)();
        for (int i = first; i < end; i += LANES) most = V(max)(most, V(size_of)(V(numbers)(x, i, a->x_dtype)));
        float scale = V(top)(most) / 127.0f;
        V(vec) factor = V(set)(scale > 0 ? 1.0f / scale : 0.0f);
        int32_t sum = 0;
        for (int i = first; i < end; i += LANES)
            sum += V(put_codes)(a->codes + row * a->width + i, V(mul)(V(numbers)(x, i, a->x_dtype), factor));
        a->scales[row * groups + group] = scale;
        a->sums[row * groups + group] = sum;
    }
}

static TARGET void NAME(convert_row)(const convert_args *a, int64_t row) {
    for (int64_t i = row * a->width, end = i + a->width; i < end; i += LANES)
        NAME(put_numbers)(a->out, i, V(numbers)((const uint8_t *)a->x, i, a->x_dtype), a->out_dtype);
}
