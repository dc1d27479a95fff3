/* Sampling of one token per row; equal to kernels/sampling.py, which explains the operations.
 *
 * Weights of tokens are integers, so their sums do not depend on the order, on vector widths or threads.
 * Tokens are not sorted: a histogram over distances from the largest logit finds the few tokens around a
 * limit. Source of the random numbers: Salmon et al. 2011 (Philox), as in numpy.random.Philox.
 */

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "sample.h"
#include "vectors.h"

typedef void (*parallel_function)(int64_t begin, int64_t end, void *context);
typedef int32_t (*parallel_for)(int64_t, int64_t, int64_t, parallel_function, void *);

#define BUCKETS 2048
#define FARTHEST 32.0f /* a token this far below the largest logit has weight 0 */
#define BLOCK 256      /* tokens whose weights are summed before the drawn token is searched */

#ifdef HAVE_X86

/* ---- random numbers ----------------------------------------------------------------------------- */

/* Uniform number in [0, 1): the first output of Philox 4x64 with 10 rounds and this key. */
static double uniform_of(uint64_t seed, uint64_t position) {
    uint64_t c[4] = {1, 0, 0, 0};
    for (int round = 0; round < 10; round++) {
        unsigned __int128 first = (unsigned __int128)0xD2E7470EE14C6C93u * c[0];
        unsigned __int128 second = (unsigned __int128)0xCA5A826395121157u * c[2];
        c[0] = (uint64_t)(second >> 64) ^ c[1] ^ seed;
        c[1] = (uint64_t)second;
        c[2] = (uint64_t)(first >> 64) ^ c[3] ^ position;
        c[3] = (uint64_t)first;
        seed += 0x9E3779B97F4A7C15u;
        position += 0xBB67AE8584CAA73Bu;
    }
    return (double)(c[0] >> 11) * 0x1p-53;
}

/* ---- limits ------------------------------------------------------------------------------------- */

typedef struct {
    float scaled; /* logit divided by the temperature */
    int32_t id;
} token;

/* Memory of one row. */
typedef struct {
    float *scaled;    /* [padded] -infinity after the last token */
    int64_t *weights; /* [2 * padded] e^(scaled - top) in units of 2^-44, for the draw; then `masses` */
    int64_t *masses;  /* [padded] the same for top-p, whose difference is not rounded to float32 */
    int32_t *near;    /* [padded] tokens within the reach of the top, which are in the buckets */
    token *found;     /* [padded] tokens of one bucket; later the weights of blocks */
    int32_t counts[BUCKETS];
    int64_t sums[BUCKETS];
    int padded; /* tokens, rounded up to a multiple of BLOCK */
    int num_near;
    float top, lowest, reach, per_bucket;
} row_memory;

static int64_t sum_near(const row_memory *m) {
    int64_t sum = 0;
    for (int i = 0; i < m->num_near; i++) sum += m->masses[m->near[i]];
    return sum;
}

static int bucket_of(const row_memory *m, float scaled) {
    float distance = m->top - scaled;
    return (int)((distance < m->reach ? distance : m->reach) * m->per_bucket);
}

/* Count and weigh the tokens of each bucket. */
static void fill_buckets(row_memory *m, float reach) {
    m->reach = fminf(fminf(reach, FARTHEST), m->top - m->lowest);
    m->per_bucket = m->reach > 0 ? (BUCKETS - 1) / m->reach : 0;
    memset(m->counts, 0, sizeof(m->counts));
    memset(m->sums, 0, sizeof(m->sums));
    for (int i = 0; i < m->num_near; i++) {
        int id = m->near[i], bucket = bucket_of(m, m->scaled[id]);
        m->counts[bucket]++;
        m->sums[bucket] += m->masses[id];
    }
}

static int descending(const void *left, const void *right) {
    float a = ((const token *)left)->scaled, b = ((const token *)right)->scaled;
    return (a < b) - (a > b);
}

/* Collect the tokens of a bucket in descending order; returns their number. */
static int collect(row_memory *m, int bucket) {
    int found = 0;
    for (int i = 0; i < m->num_near; i++) {
        float scaled = m->scaled[m->near[i]];
        if (bucket_of(m, scaled) == bucket) m->found[found++] = (token){scaled, m->near[i]};
    }
    qsort(m->found, (size_t)found, sizeof(token), descending);
    return found;
}

/* The k-th largest logit. Sums of the buckets are reduced to the tokens at or above it. */
static float largest(row_memory *m, int k) {
    int bucket = 0, before = 0;
    while (before + m->counts[bucket] < k) before += m->counts[bucket++];
    int found = collect(m, bucket);
    float limit = m->found[k - before - 1].scaled;
    m->sums[bucket] = 0;
    for (int i = 0; i < found && m->found[i].scaled >= limit; i++) m->sums[bucket] += m->masses[m->found[i].id];
    for (int i = bucket + 1; i < BUCKETS; i++) m->sums[i] = 0;
    return limit;
}

/* The smallest logit such that the larger ones have less weight than `target`. */
static float nucleus(row_memory *m, double target) {
    int bucket = 0;
    int64_t sum = 0;
    while (bucket < BUCKETS - 1 && (double)(sum + m->sums[bucket]) < target) sum += m->sums[bucket++];
    int found = collect(m, bucket);
    float limit = m->top;
    for (int i = 0; i < found && (double)sum < target; i++) {
        limit = m->found[i].scaled;
        sum += m->masses[m->found[i].id];
    }
    return (double)sum < target ? -INFINITY : limit;
}

/* The smallest float32 that is not below a bound. */
static float at_least(double bound) {
    float near = (float)bound;
    return (double)near < bound ? nextafterf(near, INFINITY) : near;
}

/* ---- vectors ------------------------------------------------------------------------------------ */

typedef __m512d double16; /* half of sixteen lanes */
typedef __m256d double8;

INLINE AVX512 vec16 least16(vec16 a, vec16 b) { return _mm512_min_ps(a, b); }
INLINE AVX512 vec16 over16(vec16 a, vec16 b) { return _mm512_div_ps(a, b); }
INLINE AVX512 uint32_t are_nan16(vec16 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
INLINE AVX512 uint32_t equal16(vec16 x, vec16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ); }
INLINE AVX512 uint32_t not_above16(vec16 x, vec16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_LE_OQ); }
/* Store the numbers of the lanes in the mask, from `first` on; may write sixteen. */
INLINE AVX512 void put_ids16(int32_t *to, uint32_t lanes, int first) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i ids = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32((__mmask16)lanes, ids));
}
INLINE AVX512 vec16 some_or16(mask16 mask, const float *from, float other) {
    return _mm512_mask_loadu_ps(set16(other), mask, from);
}
INLINE AVX512 double16 low_doubles16(vec16 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
INLINE AVX512 double16 high_doubles16(vec16 x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
INLINE AVX512 double16 double_set16(double x) { return _mm512_set1_pd(x); }
INLINE AVX512 double16 double_mul16(double16 a, double16 b) { return _mm512_mul_pd(a, b); }
INLINE AVX512 double16 double_fma16(double16 a, double16 b, double16 c) { return _mm512_fmadd_pd(a, b, c); }
INLINE AVX512 double16 double_sub16(double16 a, double16 b) { return _mm512_sub_pd(a, b); }
INLINE AVX512 double16 double_least16(double16 a, double16 b) { return _mm512_max_pd(a, b); }
INLINE AVX512 double16 nearest16(double16 x) { return _mm512_roundscale_pd(x, 8); }
INLINE AVX512 double16 times_power16(double16 x, double16 n) { return _mm512_scalef_pd(x, n); }
/* Round numbers from 0 to 2^52 and store them as integers. */
INLINE AVX512 void put_integers16(int64_t *to, double16 x) {
    const double16 big = _mm512_set1_pd(0x1p52);
    __m512i bits = _mm512_castpd_si512(_mm512_add_pd(x, big));
    _mm512_storeu_si512(to, _mm512_xor_si512(bits, _mm512_castpd_si512(big)));
}

INLINE AVX2 vec8 least8(vec8 a, vec8 b) { return _mm256_min_ps(a, b); }
INLINE AVX2 vec8 over8(vec8 a, vec8 b) { return _mm256_div_ps(a, b); }
INLINE AVX2 uint32_t are_nan8(vec8 x) { return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
INLINE AVX2 uint32_t equal8(vec8 x, vec8 y) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_EQ_OQ));
}
INLINE AVX2 uint32_t not_above8(vec8 x, vec8 y) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_LE_OQ));
}
INLINE AVX2 void put_ids8(int32_t *to, uint32_t lanes, int first) {
    for (; lanes; lanes &= lanes - 1) *to++ = first + __builtin_ctz(lanes);
}
INLINE AVX2 vec8 some_or8(mask8 mask, const float *from, float other) {
    return choose8(mask, set8(other), read_some8(mask, from));
}
INLINE AVX2 double8 low_doubles8(vec8 x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
INLINE AVX2 double8 high_doubles8(vec8 x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
INLINE AVX2 double8 double_set8(double x) { return _mm256_set1_pd(x); }
INLINE AVX2 double8 double_mul8(double8 a, double8 b) { return _mm256_mul_pd(a, b); }
INLINE AVX2 double8 double_fma8(double8 a, double8 b, double8 c) { return _mm256_fmadd_pd(a, b, c); }
INLINE AVX2 double8 double_sub8(double8 a, double8 b) { return _mm256_sub_pd(a, b); }
INLINE AVX2 double8 double_least8(double8 a, double8 b) { return _mm256_max_pd(a, b); }
INLINE AVX2 double8 nearest8(double8 x) {
    return _mm256_round_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE AVX2 double8 times_power8(double8 x, double8 n) {
    __m256i exponent = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(n)), 52);
    return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(x), exponent));
}
INLINE AVX2 void put_integers8(int64_t *to, double8 x) {
    const double8 big = _mm256_set1_pd(0x1p52);
    __m256i bits = _mm256_castpd_si256(_mm256_add_pd(x, big));
    _mm256_storeu_si256((void *)to, _mm256_xor_si256(bits, _mm256_castpd_si256(big)));
}

#define LANES 16
#define TARGET AVX512
#define NAME(name) name##_512
#include "sample_body.h"
#undef NAME
#undef TARGET
#undef LANES

#define LANES 8
#define TARGET AVX2
#define NAME(name) name##_256
#include "sample_body.h"
#undef NAME
#undef TARGET
#undef LANES

/* ---- rows --------------------------------------------------------------------------------------- */

static int padded_tokens(int vocab) { return (vocab + BLOCK - 1) / BLOCK * BLOCK; }

static row_memory *memory_at(uint8_t *scratch, int vocab) {
    row_memory *m = (row_memory *)scratch;
    m->padded = padded_tokens(vocab);
    m->weights = (int64_t *)(m + 1);
    m->found = (token *)(m->weights + 2 * m->padded);
    m->scaled = (float *)(m->found + m->padded);
    m->near = (int32_t *)(m->scaled + m->padded);
    return m;
}

static int64_t likeliest(const sample_args *a, const float *logits, float top) {
    return a->path == PATH_AVX2 ? first_equal_256(logits, a->vocab, top) : first_equal_512(logits, a->vocab, top);
}

static int sample(const sample_args *a, int64_t row, uint8_t *scratch) {
    const float *logits = a->logits + row * a->logits_row;
    const sample_row *options = a->options ? a->options + row : NULL;
    int wide = a->path != PATH_AVX2;
    float lowest, top = wide ? top_of_512(logits, a->vocab, &lowest) : top_of_256(logits, a->vocab, &lowest);
    if (!isfinite(top)) return NOT_FINITE;
    if (options == NULL || options->temperature == 0) {
        a->token_ids[row] = likeliest(a, logits, top);
        return SAMPLED;
    }
    row_memory *m = memory_at(scratch, a->vocab);
    m->top = top / options->temperature;
    m->lowest = lowest / options->temperature;
    if (!isfinite(m->top)) return TOO_LARGE;
    a->token_ids[row] = wide ? draw_512(a, m, logits, options) : draw_256(a, m, logits, options);
    return SAMPLED;
}

typedef struct {
    const sample_args *args;
    atomic_llong next;
} row_work;

static void take_rows(int64_t begin, int64_t end, void *context) {
    row_work *work = context;
    const sample_args *a = work->args;
    uint8_t *scratch = a->scratch + begin * a->scratch_bytes;
    int64_t row;
    (void)end;
    while ((row = atomic_fetch_add(&work->next, 1)) < a->rows) a->status[row] = sample(a, row, scratch);
}
#endif

/* Bytes of scratch memory of a thread, a multiple of 64; none if no row is drawn. */
int64_t quire_sample_bytes(int vocab) {
#ifdef HAVE_X86
    int64_t of_token = sizeof(float) + 2 * sizeof(int64_t) + sizeof(token) + sizeof(int32_t);
    int64_t bytes = sizeof(row_memory) + padded_tokens(vocab) * of_token;
    return (bytes + 63) / 64 * 64;
#else
    return (void)vocab, 0;
#endif
}

/* Sample a token of each row; 0 on success, 1 if threads failed, 2 if this machine has no code for it. */
int quire_sample(const sample_args *args, parallel_for run, int num_threads) {
#ifdef HAVE_X86
    row_work work = {args, 0};
    if (args->path == PATH_PLAIN) return 2;
    if (num_threads > args->rows) num_threads = args->rows;
    if (run == NULL || num_threads < 2) take_rows(0, 1, &work);
    else return run(0, num_threads, 1, take_rows, &work) != 0;
    return 0;
#else
    (void)args, (void)run, (void)num_threads;
    return 2;
#endif
}

int64_t quire_sample_args_size(void) { return sizeof(sample_args); }
int64_t quire_sample_row_size(void) { return sizeof(sample_row); }
