/* Attention over pages, for decoding rows and small chunks.
 *
 * Plain C, no Python and no torch headers; threads are torch's own, through the address of its
 * exported `torch_parallel_for`. One work item is one KV head of one row. A work item walks its
 * pages once for up to MAX_QUERIES query vectors that share the head (the heads of a group, several
 * tokens of a chunk), with an online softmax per tile of 16 slots:
 *
 *     logits [queries, 16] = q k^T * scale      from the page, never copied
 *     new maximum -> rescale the sums and the output
 *     output [queries, head_dim] += p v
 *
 * Slots nobody sees are left out of every product: free slots may hold anything, NaN included.
 * Column sums keep the logits and run a second pass once the normaliser is known; the output is
 * computed by the same code with and without them.
 */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_X86 1
#endif

#define MAX_QUERIES 8
#define TILE 16
#define MAX_HEAD_DIM 512

enum { F32 = 0, BF16 = 1, F16 = 2 };
enum { PATH_PLAIN = 0, PATH_AVX512 = 1, PATH_AVX512_BF16 = 2 };

typedef struct {
    const uint8_t *key, *value; /* planes: page n at n * page_bytes */
    int64_t page_bytes;
    const int32_t *table; /* [all rows, all lanes, capacity] */
    int64_t table_row_stride, table_lane_stride;
    const int64_t *rows;   /* [num_rows] row of the table */
    const int32_t *slots;  /* [num_rows, num_lanes] live slots, new tokens included */
    const int64_t *starts; /* [num_rows] first token of the row in the flat batch */
    const int32_t *tokens; /* [num_rows] new tokens */
    const void *query;     /* [tokens, num_heads, head_dim] by strides, head_dim contiguous */
    int64_t query_token_stride, query_head_stride;
    void *out;         /* [tokens, num_heads, head_dim] contiguous */
    const float *sinks; /* [num_heads] or NULL */
    float *column_sums; /* [num_rows, kv heads, sums_stride] zeroed, or NULL */
    int64_t sums_stride;
    int32_t num_rows, num_lanes, heads_per_page, group, first_lane;
    int32_t head_dim, page_tokens, dtype, window; /* window 0: none */
    float scale, softcap;                         /* softcap 0: none */
    int32_t path;
} attention_args;

typedef void (*parallel_function)(int64_t begin, int64_t end, void *context);
typedef int32_t (*parallel_for)(int64_t, int64_t, int64_t, parallel_function, void *);

/* Query vectors of one work item that walk the pages together. */
typedef struct {
    int count, head_dim;
    int64_t low[MAX_QUERIES], high[MAX_QUERIES]; /* slots seen: low <= slot < high */
    float query[MAX_QUERIES][MAX_HEAD_DIM];      /* times scale unless there is a bf16 copy */
    uint16_t half[MAX_QUERIES][MAX_HEAD_DIM];    /* as stored, for bf16 products */
    float out[MAX_QUERIES][MAX_HEAD_DIM];
    float maximum[MAX_QUERIES], sum[MAX_QUERIES];
    float *logits; /* [count, logits_stride], for column sums; or NULL */
    int64_t logits_stride;
} walk;

/* ---- numbers ---------------------------------------------------------------------------------- */

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &wide, 4);
    return number;
}

static inline uint16_t to_bf16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float from_f16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 0x1f;
    uint32_t mantissa = bits & 0x3ff, wide;
    float number;
    if (exponent == 0) {
        number = (float)mantissa * 0x1p-24f;
        return sign ? -number : number;
    }
    wide = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (mantissa << 13);
    memcpy(&number, &wide, 4);
    return number;
}

static inline uint16_t to_f16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) { /* subnormal: rounded to even by the addition of a power of two */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return (uint16_t)(sign | ((bits - 0x38000000) >> 13));
}

static inline float load_number(const void *numbers, int64_t i, int dtype) {
    if (dtype == F32) return ((const float *)numbers)[i];
    uint16_t bits = ((const uint16_t *)numbers)[i];
    return dtype == BF16 ? from_bf16(bits) : from_f16(bits);
}

static inline void store_number(void *numbers, int64_t i, int dtype, float number) {
    if (dtype == F32) ((float *)numbers)[i] = number;
    else ((uint16_t *)numbers)[i] = dtype == BF16 ? to_bf16(number) : to_f16(number);
}

/* ---- a tile: up to 16 slots of one page --------------------------------------------------------- */

typedef struct {
    const uint8_t *key, *value; /* first slot of the tile */
    int64_t slot;               /* its number in the lane */
    int count;                  /* slots of the tile that somebody sees */
} tile;

static void cap_and_mask(walk *w, const tile *t, int m, float softcap, float *logits) {
    for (int i = 0; i < TILE; i++) {
        int64_t slot = t->slot + i;
        if (i >= t->count || slot < w->low[m] || slot >= w->high[m]) logits[i] = -INFINITY;
        else if (softcap > 0) logits[i] = softcap * tanhf(logits[i] / softcap);
    }
}

/* Update maximum and sum of query m; logits become weights. Returns the factor on what was there. */
static float take_in(walk *w, int m, float *logits) {
    float top = w->maximum[m], sum = 0;
    for (int i = 0; i < TILE; i++) top = logits[i] > top ? logits[i] : top;
    if (top == -INFINITY) {
        memset(logits, 0, TILE * sizeof(float));
        return 1;
    }
    float factor = expf(w->maximum[m] - top);
    for (int i = 0; i < TILE; i++) {
        logits[i] = expf(logits[i] - top);
        sum += logits[i];
    }
    w->maximum[m] = top;
    w->sum[m] = w->sum[m] * factor + sum;
    return factor;
}

static void keep_logits(walk *w, const tile *t, int m, const float *logits) {
    if (w->logits)
        memcpy(w->logits + m * w->logits_stride + t->slot, logits, t->count * sizeof(float));
}

static void walk_tile_plain(walk *w, const tile *t, int dtype, float softcap) {
    float key[TILE][MAX_HEAD_DIM], logits[TILE];
    int dim = w->head_dim;
    for (int i = 0; i < t->count; i++)
        for (int d = 0; d < dim; d++) key[i][d] = load_number(t->key, (int64_t)i * dim + d, dtype);
    for (int m = 0; m < w->count; m++) {
        for (int i = 0; i < t->count; i++) {
            float product = 0;
            for (int d = 0; d < dim; d++) product += w->query[m][d] * key[i][d];
            logits[i] = product;
        }
        cap_and_mask(w, t, m, softcap, logits);
        keep_logits(w, t, m, logits);
        float factor = take_in(w, m, logits);
        if (factor != 1)
            for (int d = 0; d < dim; d++) w->out[m][d] *= factor;
        for (int i = 0; i < t->count; i++) {
            if (logits[i] == 0) continue;
            for (int d = 0; d < dim; d++)
                w->out[m][d] += logits[i] * load_number(t->value, (int64_t)i * dim + d, dtype);
        }
    }
}

#ifdef HAVE_X86
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")))
#define AVX512_BF16 \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,avx512bf16")))
#define INLINE static inline __attribute__((always_inline))

INLINE AVX512 __m512 load16(const uint8_t *numbers, int64_t i, int dtype, __mmask16 mask) {
    if (dtype == F32) return _mm512_maskz_loadu_ps(mask, (const float *)numbers + i);
    __m256i bits = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)numbers + i);
    if (dtype == F16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* The sums of 16 vectors as one vector, sum r in lane r: four rounds of pairwise additions. */
INLINE AVX512 __m512 sums_of(const __m512 *a) {
    __m512 b[8], c[4], d[2];
    for (int i = 0; i < 8; i++)
        b[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                             _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 4; i++) {
        __m512d low = _mm512_castps_pd(b[2 * i]), high = _mm512_castps_pd(b[2 * i + 1]);
        c[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    for (int i = 0; i < 2; i++)
        d[i] = _mm512_add_ps(_mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(c[2 * i], c[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(d[0], d[1], 0x88),
                         _mm512_shuffle_f32x4(d[0], d[1], 0xdd));
}

/* e^x for x <= 0, relative error below 3e-7: 2^n times a polynomial on [-ln2/2, ln2/2]. */
INLINE AVX512 __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f)); /* e^-104 rounds to 0 */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

INLINE AVX512 __m512 logits_f32(const walk *w, const tile *t, int m, int dtype, int dim) {
    __m512 sums[TILE];
    for (int i = 0; i < TILE; i++) sums[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16) {
        __mmask16 mask = dim - d >= 16 ? 0xffff : (__mmask16)((1 << (dim - d)) - 1);
        __m512 q = _mm512_maskz_loadu_ps(mask, w->query[m] + d);
        for (int i = 0; i < t->count; i++)
            sums[i] = _mm512_fmadd_ps(q, load16(t->key, (int64_t)i * dim + d, dtype, mask), sums[i]);
    }
    return sums_of(sums);
}

/* Sixteen whole slots: the loop over slots unrolls and the sums stay in registers. */
INLINE AVX512 __m512 logits_f32_full(const walk *w, const tile *t, int m, int dtype, int dim) {
    __m512 sums[TILE];
    for (int i = 0; i < TILE; i++) sums[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 16) {
        __m512 q = _mm512_loadu_ps(w->query[m] + d);
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++)
            sums[i] = _mm512_fmadd_ps(q, load16(t->key, (int64_t)i * dim + d, dtype, 0xffff), sums[i]);
    }
    return sums_of(sums);
}

INLINE AVX512_BF16 __m512 logits_bf16_full(const walk *w, const tile *t, int m, int dim) {
    __m512 sums[TILE];
    const uint16_t *key = (const uint16_t *)t->key;
    for (int i = 0; i < TILE; i++) sums[i] = _mm512_setzero_ps();
    for (int d = 0; d < dim; d += 32) {
        __m512bh q = (__m512bh)_mm512_loadu_si512(w->half[m] + d);
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++)
            sums[i] = _mm512_dpbf16_ps(sums[i], q, (__m512bh)_mm512_loadu_si512(key + i * dim + d));
    }
    return sums_of(sums);
}

/* Cap, mask, update maximum and sum; write the weights. Returns the factor on what was there. */
INLINE AVX512 float take_in16(walk *w, const tile *t, int m, __m512 logits, float softcap,
                              float *weights) {
    __m512i slot = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t low = w->low[m] - t->slot, high = w->high[m] - t->slot;
    low = low < 0 ? 0 : low > TILE ? TILE : low;
    high = high < 0 ? 0 : high > t->count ? t->count : high;
    __mmask16 seen = _mm512_cmpge_epi32_mask(slot, _mm512_set1_epi32((int)low)) &
                     _mm512_cmplt_epi32_mask(slot, _mm512_set1_epi32((int)high));
    if (softcap > 0) {
        float plain[TILE];
        _mm512_storeu_ps(plain, logits);
        for (int i = 0; i < TILE; i++) plain[i] = softcap * tanhf(plain[i] / softcap);
        logits = _mm512_loadu_ps(plain);
    }
    logits = _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), logits);
    if (w->logits)
        _mm512_mask_storeu_ps(w->logits + m * w->logits_stride + t->slot,
                              (__mmask16)((1u << t->count) - 1), logits);
    if (!seen) {
        _mm512_storeu_ps(weights, _mm512_setzero_ps());
        return 1;
    }
    float top = _mm512_reduce_max_ps(logits), factor = 1;
    if (top > w->maximum[m]) {
        factor = expf(w->maximum[m] - top);
        w->maximum[m] = top;
    }
    __m512 p = _mm512_maskz_mov_ps(
        seen, exp16(_mm512_sub_ps(logits, _mm512_set1_ps(w->maximum[m]))));
    w->sum[m] = w->sum[m] * factor + _mm512_reduce_add_ps(p);
    _mm512_storeu_ps(weights, p);
    return factor;
}

/* out[m] = out[m] * factor[m] + weights[m] * values, for a constant number of queries. */
INLINE AVX512 void add_values(walk *w, const tile *t, int dtype, int dim, int count,
                              const float (*weights)[TILE], const float *factor) {
    for (int d = 0; d < dim; d += 16) {
        __mmask16 mask = dim - d >= 16 ? 0xffff : (__mmask16)((1 << (dim - d)) - 1);
        __m512 sums[MAX_QUERIES];
#pragma GCC unroll 8
        for (int m = 0; m < count; m++)
            sums[m] = _mm512_mul_ps(_mm512_loadu_ps(w->out[m] + d), _mm512_set1_ps(factor[m]));
        for (int i = 0; i < t->count; i++) {
            __m512 v = load16(t->value, (int64_t)i * dim + d, dtype, mask);
#pragma GCC unroll 8
            for (int m = 0; m < count; m++)
                sums[m] = _mm512_fmadd_ps(_mm512_set1_ps(weights[m][i]), v, sums[m]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < count; m++) _mm512_storeu_ps(w->out[m] + d, sums[m]);
    }
}

INLINE AVX512 void add_values_of(walk *w, const tile *t, int dtype, const float (*weights)[TILE],
                                 const float *factor) {
    int dim = w->head_dim;
    switch (w->count) {
    case 1: add_values(w, t, dtype, dim, 1, weights, factor); break;
    case 2: add_values(w, t, dtype, dim, 2, weights, factor); break;
    case 3: add_values(w, t, dtype, dim, 3, weights, factor); break;
    case 4: add_values(w, t, dtype, dim, 4, weights, factor); break;
    case 5: add_values(w, t, dtype, dim, 5, weights, factor); break;
    case 6: add_values(w, t, dtype, dim, 6, weights, factor); break;
    case 7: add_values(w, t, dtype, dim, 7, weights, factor); break;
    default: add_values(w, t, dtype, dim, 8, weights, factor); break;
    }
}

INLINE AVX512 void walk_tile_wide(walk *w, const tile *t, int dtype, float softcap) {
    float weights[MAX_QUERIES][TILE], factor[MAX_QUERIES];
    int dim = w->head_dim, full = t->count == TILE && dim % 16 == 0;
    for (int m = 0; m < w->count; m++) {
        __m512 logits = full ? logits_f32_full(w, t, m, dtype, dim) : logits_f32(w, t, m, dtype, dim);
        factor[m] = take_in16(w, t, m, logits, softcap, weights[m]);
    }
    add_values_of(w, t, dtype, (const float(*)[TILE])weights, factor);
}

static AVX512 void walk_tile_avx512(walk *w, const tile *t, int dtype, float softcap) {
    if (dtype == F32) walk_tile_wide(w, t, F32, softcap);
    else if (dtype == BF16) walk_tile_wide(w, t, BF16, softcap);
    else walk_tile_wide(w, t, F16, softcap);
}

static AVX512_BF16 void walk_tile_bf16(walk *w, const tile *t, float scale, float softcap) {
    float weights[MAX_QUERIES][TILE], factor[MAX_QUERIES];
    int dim = w->head_dim;
    for (int m = 0; m < w->count; m++) {
        __m512 logits = _mm512_mul_ps(logits_bf16_full(w, t, m, dim), _mm512_set1_ps(scale));
        factor[m] = take_in16(w, t, m, logits, softcap, weights[m]);
    }
    add_values_of(w, t, BF16, (const float(*)[TILE])weights, factor);
}
#endif

/* ---- a walk over a lane ------------------------------------------------------------------------- */

static void walk_tile(const attention_args *a, walk *w, const tile *t) {
#ifdef HAVE_X86
    if (a->path == PATH_AVX512_BF16 && a->dtype == BF16 && t->count == TILE && w->head_dim % 32 == 0) {
        walk_tile_bf16(w, t, a->scale, a->softcap);
        return;
    }
    if (a->path != PATH_PLAIN) {
        walk_tile_avx512(w, t, a->dtype, a->softcap);
        return;
    }
#endif
    walk_tile_plain(w, t, a->dtype, a->softcap);
}

static void walk_lane(const attention_args *a, walk *w, const int32_t *pages, int head) {
    int itemsize = a->dtype == F32 ? 4 : 2, tokens = a->page_tokens;
    int64_t low = w->low[0], high = w->high[0];
    for (int m = 1; m < w->count; m++) {
        low = w->low[m] < low ? w->low[m] : low;
        high = w->high[m] > high ? w->high[m] : high;
    }
    int64_t vector_bytes = (int64_t)a->head_dim * itemsize;
    for (int64_t page = low / tokens; page * tokens < high; page++) {
        int64_t base = (int64_t)pages[page] * a->page_bytes + head * tokens * vector_bytes;
        if ((page + 1) * tokens < high) {
            int64_t next = (int64_t)pages[page + 1] * a->page_bytes + head * tokens * vector_bytes;
            for (int64_t i = 0; i < tokens * vector_bytes && i < 4096; i += 64) {
                __builtin_prefetch(a->key + next + i);
                __builtin_prefetch(a->value + next + i);
            }
        }
        for (int first = 0; first < tokens && page * tokens + first < high; first += TILE) {
            tile t = {a->key + base + first * vector_bytes, a->value + base + first * vector_bytes,
                      page * tokens + first, TILE};
            if (tokens - first < t.count) t.count = tokens - first;
            if (high - t.slot < t.count) t.count = (int)(high - t.slot);
            walk_tile(a, w, &t);
        }
    }
}

static void load_queries(const attention_args *a, walk *w, int64_t token, int head, int first,
                         int64_t own_slot) {
    for (int m = 0; m < w->count; m++) {
        int pair = first + m; /* tokens of the chunk first, then heads of the group */
        int64_t offset = (token + pair / a->group) * a->query_token_stride +
                         (head + pair % a->group) * a->query_head_stride;
        for (int d = 0; d < a->head_dim; d++) {
            w->query[m][d] = load_number(a->query, offset + d, a->dtype) * a->scale;
            w->out[m][d] = 0;
        }
        for (int d = a->head_dim; d < (a->head_dim + 15) / 16 * 16; d++) w->out[m][d] = 0;
        if (a->dtype == BF16)
            memcpy(w->half[m], (const uint16_t *)a->query + offset, 2 * (size_t)a->head_dim);
        w->high[m] = own_slot + pair / a->group + 1;
        w->low[m] = a->window && w->high[m] > a->window ? w->high[m] - a->window : 0;
        w->maximum[m] = -INFINITY;
        w->sum[m] = 0;
        if (a->sinks) {
            w->maximum[m] = a->sinks[head + pair % a->group];
            w->sum[m] = 1;
        }
    }
}

static void store_outputs(const attention_args *a, walk *w, int64_t token, int head, int first) {
    int num_heads = a->num_lanes * a->heads_per_page * a->group;
    for (int m = 0; m < w->count; m++) {
        int pair = first + m;
        int64_t offset = ((token + pair / a->group) * num_heads + head + pair % a->group) *
                         (int64_t)a->head_dim;
        float over = 1 / w->sum[m];
        for (int d = 0; d < a->head_dim; d++)
            store_number(a->out, offset + d, a->dtype, w->out[m][d] * over);
    }
}

static void add_column_sums(walk *w, float *sums) {
    for (int m = 0; m < w->count; m++) {
        float over = 1 / w->sum[m];
        const float *logits = w->logits + m * w->logits_stride;
        for (int64_t slot = w->low[m]; slot < w->high[m]; slot++)
            sums[slot] += expf(logits[slot] - w->maximum[m]) * over;
    }
}

/* One KV head of one row: all its query vectors, MAX_QUERIES at a time. */
static void attend_head(const attention_args *a, walk *w, int64_t item) {
    int heads = a->num_lanes * a->heads_per_page;
    int64_t row = item / heads;
    int kv_head = (int)(item % heads), lane = kv_head / a->heads_per_page;
    int64_t slots = a->slots[row * a->num_lanes + lane];
    const int32_t *pages = a->table + a->rows[row] * a->table_row_stride +
                           (a->first_lane + lane) * a->table_lane_stride;
    int pairs = a->tokens[row] * a->group, head = kv_head * a->group;
    for (int first = 0; first < pairs; first += MAX_QUERIES) {
        w->count = pairs - first < MAX_QUERIES ? pairs - first : MAX_QUERIES;
        w->head_dim = a->head_dim;
        load_queries(a, w, a->starts[row], head, first, slots - a->tokens[row]);
        walk_lane(a, w, pages, kv_head % a->heads_per_page);
        store_outputs(a, w, a->starts[row], head, first);
        if (w->logits) add_column_sums(w, a->column_sums + item * a->sums_stride);
    }
}

typedef struct {
    const attention_args *args;
    atomic_llong next;
    atomic_int failed;
} work;

static void take_items(int64_t begin, int64_t end, void *context) {
    work *shared = context;
    const attention_args *a = shared->args;
    int64_t items = (int64_t)a->num_rows * a->num_lanes * a->heads_per_page, item;
    (void)begin;
    (void)end;
    walk *w = aligned_alloc(64, (sizeof(walk) + 63) / 64 * 64);
    float *logits = NULL;
    if (a->column_sums) logits = malloc(MAX_QUERIES * (size_t)a->sums_stride * sizeof(float));
    if (!w || (a->column_sums && !logits)) {
        atomic_store(&shared->failed, 1);
    } else {
        w->logits = logits;
        w->logits_stride = a->sums_stride;
        while ((item = atomic_fetch_add(&shared->next, 1)) < items) attend_head(a, w, item);
    }
    free(logits);
    free(w);
}

/* Best path of this CPU. */
int quire_best_path(void) {
#ifdef HAVE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return __builtin_cpu_supports("avx512bf16") ? PATH_AVX512_BF16 : PATH_AVX512;
#endif
    return PATH_PLAIN;
}

int64_t quire_args_size(void) { return sizeof(attention_args); }
int quire_max_head_dim(void) { return MAX_HEAD_DIM; }

/* Attend; 0 on success. `run` is torch's parallel_for, or NULL for one thread. */
int quire_attend(const attention_args *args, parallel_for run, int num_threads) {
    work shared = {args, 0, 0};
    if (run == NULL || num_threads < 2) take_items(0, 1, &shared);
    else if (run(0, num_threads, 1, take_items, &shared)) return 2;
    return atomic_load(&shared.failed);
}
