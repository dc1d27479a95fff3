/* Strips: up to 64 slots of a lane, attended in their stored form, as codes or plain numbers.
 *
 * In logits = q . k with k = scale * codes + zero, scale and zero are factored out of the sum:
 * scale * (q . codes) + zero * sum(q), run by run. For values, the scale is multiplied into the weight,
 * and the zeros contribute one number per run. So a code costs one conversion to float32, shared by the
 * query heads of a KV head, and one product per query head. Each strip has one softmax. The next
 * strip's keys are prefetched while logits are computed, and its values while values are added: into
 * the second cache level, which can wait for more cache lines at a time than the first.
 */
#ifndef QUIRE_STRIP_H
#define QUIRE_STRIP_H

#include "codes.h"
#include "walk.h"

#define STRIP 64

typedef struct {
    int64_t slot; /* number of the first in the lane */
    int count, num_pieces;
    const uint8_t *key[STRIP], *value[STRIP]; /* vectors; after `count` the last one is repeated */
    struct {
        place at; /* location of its first slot */
        int count;
    } piece[STRIP]; /* slots of one page */
} strip;

/* Locate the slots of a strip, from `slot` on and below `end`. Strips begin at the first slot that is visible: that of
 * a window has another number when earlier pages are freed, and the order of the sums must not change. */
static void point_strip(const attention_args *a, const lane *l, int64_t slot, int64_t end, strip *s) {
    int64_t key_bytes = a->key_coding.vector_bytes, value_bytes = a->value_coding.vector_bytes;
    int64_t last = slot + STRIP < end ? slot + STRIP : end;
    s->slot = slot, s->count = (int)(last - slot), s->num_pieces = 0;
    for (int i = 0; i < s->count; s->num_pieces++) {
        place p = s->piece[s->num_pieces].at = place_of(a, l, slot + i);
        const uint8_t *key = vector_at(a->key, &a->key_coding, p);
        const uint8_t *value = vector_at(a->value, &a->value_coding, p);
        int64_t left = a->page_tokens - (p.record - l->first_record);
        int count = left < s->count - i ? (int)left : s->count - i;
        s->piece[s->num_pieces].count = count;
        for (; count; count--, i++, key += key_bytes, value += value_bytes)
            s->key[i] = key, s->value[i] = value;
    }
    for (int i = s->count; i < STRIP; i++)
        s->key[i] = s->key[s->count - 1], s->value[i] = s->value[s->count - 1];
}

/* Scales or zeros of a strip, [run][slot]. */
typedef float by_run[MAX_RUNS][STRIP];

/* Location of the codes of a run. Runs of one segment are adjacent, followed by the next segment. Codes
 * are masked but not shifted, and e4m3 bits are read as float16 with another exponent bias; the factor
 * on the scales corrects both. */
typedef struct {
    int bits, at; /* mask of a code in its byte; offset of the first byte in the vector */
    float factor;
} run_place;

typedef struct {
    run_place runs[MAX_RUNS];
    uint8_t run_of[MAX_HEAD_DIM]; /* channel to its run; for outliers only */
} code_places;

static void place_codes(const coding *c, code_places *places) {
    run_place *runs = places->runs;
    int segments = c->kind == BIT_CODES ? 8 / c->bits : 1, in_segment = c->num_runs / segments;
    for (int r = 0; r < c->num_runs; r++) {
        int shift = r / in_segment * c->bits;
        runs[r].at = r % in_segment * c->run;
        runs[r].bits = c->kind == BIT_CODES ? ((1 << c->bits) - 1) << shift : 0;
        runs[r].factor = c->kind == FP8_CODES ? 256 : 1.0f / (float)(1 << shift);
    }
    for (int d = 0; c->num_outliers && d < c->dim; d++) places->run_of[d] = (uint8_t)(d / c->run);
}

/* State of a walk over a strip of one KV head. */
typedef struct {
    const attention_args *a;
    walk *w;
    const strip *here, *next; /* next: the strip to prefetch, or NULL */
    int64_t key_shift, value_shift, next_key_shift, next_value_shift; /* byte offsets of heads in a page */
    code_places key_places, value_places;
    int64_t first_record; /* of this head, relative to the first head walked together */
    LINED by_run key_scales, key_zeros, value_scales, value_zeros;
    LINED float dots[STRIP * 4];              /* [slot][query], four queries at most */
    float logits[MAX_QUERIES][STRIP];   /* then weights */
    struct {
        by_run of;                           /* times scales of values */
        int32_t pairs[MAX_RUNS][STRIP / 2];  /* the same as pairs of int16 for two slots, in units of quantum */
        float quantum[MAX_RUNS], gap[4];     /* gap: puts the data of four vectors in different banks */
    } weights[MAX_QUERIES];
    int integer_keys, integer_values; /* whether products are computed in integers */
    int byte_keys, byte_values; /* and whether these have one byte per factor (strip_bytes.h) */
    int weighed;                /* whether the weights of this strip are bytes already */
    const uint8_t *ahead[2];    /* keys and values of a page of the next strip, for all heads, to prefetch */
    int64_t ahead_bytes;        /* of its keys; 0: prefetch the vectors of `next` instead */
    float extra[MAX_QUERIES][MAX_RUNS]; /* sums of weights times zeros of values */
    float factor[MAX_QUERIES];          /* on the earlier output */
} strip_walk;

static inline void prefetch(const uint8_t *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

/* Prefetch the next strip's keys during the products of `count` keys from the ith on. Most slots are
 * adjacent. */
static inline void prefetch_during_keys(const strip_walk *t, int i, int count) {
    if (t->next) prefetch(t->next->key[i] + t->next_key_shift, count * t->a->key_coding.vector_bytes);
}

/* Prefetch a share of the next strip's values, in proportion to channels first .. end - 1. */
static inline void prefetch_next_values(const strip_walk *t, int first, int end) {
    int dim = t->a->value_coding.dim, last = STRIP * end / dim;
    int64_t bytes = t->a->value_coding.vector_bytes;
    if (t->next == NULL) return;
    for (int i = STRIP * first / dim; i < last; i += 2)
        prefetch(t->next->value[i] + t->next_value_shift, 2 * bytes);
}

/* Prefetch a quarter of the keys (side 0) or values of the page ahead, in the order of addresses. */
static inline void prefetch_page_ahead(const strip_walk *t, int side, int quarter) {
    const coding *c = side ? &t->a->value_coding : &t->a->key_coding;
    int64_t bytes = t->ahead_bytes / t->a->key_coding.vector_bytes * c->vector_bytes / 4;
    prefetch(t->ahead[side] + quarter * bytes, bytes);
}

/* Prefetch scales and zeros of a strip, for all heads that are walked together. */
static void prefetch_scales(const attention_args *a, const coding *c, const strip *s, int heads) {
    int64_t each = c->scales ? 2 * (c->dim / c->channels) : 0;
    int64_t bytes = each * ((heads - 1) * a->page_tokens + 1);
    for (int n = 0; each && n < s->num_pieces; n++) {
        int64_t at = s->piece[n].at.page_at + s->piece[n].at.record * each;
        prefetch(c->scales + at, bytes + each * s->piece[n].count);
        if (c->zeros) prefetch(c->zeros + at, bytes + each * s->piece[n].count);
    }
}

#define MAX_OUTLIERS 8 /* per vector */

/* Differences of outliers from their decoded codes. */
typedef struct {
    int count;
    struct {
        int slot, channel;
        float beyond;
    } list[STRIP * MAX_OUTLIERS];
} strip_outliers;

/* Find the outliers of one slot, the `i`th of the strip, with codes at `codes`. */
static inline void find_in_slot(const coding *c, const code_places *places, place p,
                                const uint8_t *codes, int i, by_run scales, by_run zeros,
                                strip_outliers *found) {
    for (int o = 0; o < c->num_outliers; o++) {
        int channel;
        float value;
        if (!outlier_at(c, p, o, &channel, &value)) continue;
        int r = places->run_of[channel];
        int code = codes[places->runs[r].at + channel - r * c->run] & places->runs[r].bits;
        found->list[found->count].slot = i;
        found->list[found->count].channel = channel;
        found->list[found->count++].beyond = value - ((float)code * scales[r][i] + zeros[r][i]);
    }
}

static void find_outliers(const strip_walk *t, const coding *c, const code_places *places,
                          const uint8_t *const *vectors, int64_t shift, by_run scales, by_run zeros,
                          strip_outliers *found) {
    found->count = 0;
    for (int n = 0, i = 0; n < t->here->num_pieces; n++)
        for (int j = 0; j < t->here->piece[n].count; j++, i++) {
            place p = t->here->piece[n].at;
            p.record += t->first_record + j;
            find_in_slot(c, places, p, vectors[i] + shift, i, scales, zeros, found);
        }
}

#ifdef HAVE_X86
/* Process vectors in groups of four, two and one; a group of three is padded to four. */
#define FOR_QUERIES(what, ...)                                                 \
    for (int m = 0; m < t->w->count; m += 4) {                                 \
        int left = t->w->count - m;                                            \
        if (left > 2) what(t, m, 4, __VA_ARGS__);                              \
        else if (left == 2) what(t, m, 2, __VA_ARGS__);                        \
        else what(t, m, 1, __VA_ARGS__);                                       \
    }

#include "lane_codes.h"
#include "strip_words.h"
#include "strip_byte_values.h"

#define TARGET AVX512_VNNI
#define NAME(name) name##_vnni
#define LANES 16
#define DOT_WORDS(sum, a, b) _mm512_dpwssd_epi32(sum, a, b)
#include "strip_integers.h"
#undef TARGET
#undef NAME
#undef DOT_WORDS

#define TARGET AVX512
#define NAME(name) name##_avx512
#define DOT_WORDS(sum, a, b) _mm512_add_epi32(sum, _mm512_madd_epi16(a, b))
#include "strip_integers.h"
#define INTEGERS(name, t) ((t)->a->path == PATH_AVX512_BF16 ? name##_vnni(t) : name##_avx512(t))
#include "strip_body.h"
#undef TARGET
#undef NAME
#undef LANES
#undef DOT_WORDS
#undef INTEGERS

#define TARGET AVX2
#define NAME(name) name##_avx2
#define LANES 8
#define DOT_WORDS(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
#include "strip_integers.h"
#define INTEGERS(name, t) name##_avx2(t)
#include "strip_body.h"
#undef TARGET
#undef NAME
#undef LANES
#undef DOT_WORDS
#undef INTEGERS
#undef FOR_QUERIES
#endif

#endif
