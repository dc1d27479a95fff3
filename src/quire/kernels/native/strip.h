/* Strips: up to 64 slots of a lane, read as they are stored, in codes or as plain numbers.
 *
 * Of logits = q . k with k = scale * codes + zero, the scale and the zero are taken out of the sum:
 * scale * (q . codes) + zero * sum(q), run by run. Of values the scale goes into the weight, and all
 * that the zeros give is one number for each run. So a code costs its conversion to float32, which
 * the query heads of a KV head share, and one product for each of them. One softmax a strip. While a
 * strip's logits are made, the next strip's lines are asked for; where products are made in integers
 * (strip_integers.h), which memory would not keep up with, the strip's own values, and the next keys
 * while values are added.
 */
#ifndef QUIRE_STRIP_H
#define QUIRE_STRIP_H

#include "codes.h"
#include "walk.h"

#define STRIP 64

typedef struct {
    int64_t slot; /* number of the first in the lane */
    int count, num_pieces;
    const uint8_t *key[STRIP], *value[STRIP]; /* vectors; behind `count` the last once more */
    struct {
        place at; /* of its first slot */
        int count;
    } piece[STRIP]; /* slots of one page */
} strip;

/* The slots from `slot` on that are in its strip of the lane, below `end`. */
static void point_strip(const attention_args *a, const lane *l, int64_t slot, int64_t end, strip *s) {
    int64_t key_bytes = a->key_coding.vector_bytes, value_bytes = a->value_coding.vector_bytes;
    int64_t last = (slot / STRIP + 1) * STRIP < end ? (slot / STRIP + 1) * STRIP : end;
    s->slot = slot, s->count = (int)(last - slot), s->num_pieces = 0;
    for (int i = 0; i < s->count; s->num_pieces++) {
        place p = s->piece[s->num_pieces].at = place_of(a, l, slot + i);
        const uint8_t *key = a->key + p.page_at + p.record * key_bytes;
        const uint8_t *value = a->value + p.page_at + p.record * value_bytes;
        int64_t left = a->page_tokens - (p.record - l->first_record);
        int count = left < s->count - i ? (int)left : s->count - i;
        s->piece[s->num_pieces].count = count;
        for (; count; count--, i++, key += key_bytes, value += value_bytes)
            s->key[i] = key, s->value[i] = value;
    }
    for (int i = s->count; i < STRIP; i++)
        s->key[i] = s->key[s->count - 1], s->value[i] = s->value[s->count - 1];
}

/* Scales or zeros of a strip: for each run, those of its slots. */
typedef float by_run[MAX_RUNS][STRIP];

/* Where the codes of a run are. Those of a stretch stand behind each other, then those of the next.
 * Codes are masked and not shifted, and float16 has another exponent than e4m3: the factor on their
 * scales makes up for that. */
typedef struct {
    int bits, at; /* of a code in its byte; byte of the first from the vector's beginning */
    float factor;
} run_place;

typedef struct {
    run_place runs[MAX_RUNS];
    uint8_t run_of[MAX_HEAD_DIM]; /* channel to its run; for outliers only */
} code_places;

static void place_codes(const coding *c, int dim, code_places *places) {
    run_place *runs = places->runs;
    int stretches = c->kind == BIT_CODES ? 8 / c->bits : 1, in_stretch = c->num_runs / stretches;
    for (int r = 0; r < c->num_runs; r++) {
        int shift = r / in_stretch * c->bits;
        runs[r].at = r % in_stretch * c->run;
        runs[r].bits = c->kind == BIT_CODES ? ((1 << c->bits) - 1) << shift : 0;
        runs[r].factor = c->kind == FP8_CODES ? 256 : 1.0f / (float)(1 << shift);
    }
    for (int d = 0; c->num_outliers && d < dim; d++) places->run_of[d] = (uint8_t)(d / c->run);
}

/* A strip of one KV head while it is walked. */
typedef struct {
    const attention_args *a;
    walk *w;
    const strip *here, *next; /* next: whose lines are asked for, or NULL */
    int64_t key_shift, value_shift, next_key_shift, next_value_shift; /* from head to head in a page */
    code_places key_places, value_places;
    int64_t first_record; /* of this head, from the first of those that are walked together */
    LINED by_run key_scales, key_zeros, value_scales, value_zeros;
    LINED float dots[STRIP * 4];              /* [slot][query], four queries at most */
    float logits[MAX_QUERIES][STRIP];   /* then weights */
    struct {
        by_run of;                           /* times scales of values */
        int32_t pairs[MAX_RUNS][STRIP / 2];  /* the same as int16 of two slots, times a quantum */
        float quantum[MAX_RUNS], gap[4];     /* so that those of four vectors lie in different banks */
    } weights[MAX_QUERIES];
    int integer_keys, integer_values; /* whose products are made in integers */
    float extra[MAX_QUERIES][MAX_RUNS]; /* sums of weights times zeros of values */
    float factor[MAX_QUERIES];          /* on the output so far */
} strip_walk;

static inline void ask_for(const uint8_t *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

/* While the products of `count` keys from the ith on are made: these slots' values where the next keys
 * are asked for beside the values, else the next keys and values. */
static inline void ask_beside_keys(const strip_walk *t, int i, int count) {
    int64_t key_bytes = count * t->a->key_coding.vector_bytes;
    int64_t value_bytes = count * t->a->value_coding.vector_bytes;
    if (t->integer_values) {
        ask_for(t->here->value[i] + t->value_shift, value_bytes);
    } else if (t->next) { /* most are neighbours */
        ask_for(t->next->key[i] + t->next_key_shift, key_bytes);
        ask_for(t->next->value[i] + t->next_value_shift, value_bytes);
    }
}

/* Ask for what decodes a strip, of all heads that are walked together. */
static void ask_for_scales(const attention_args *a, const coding *c, const strip *s, int heads) {
    int64_t each = c->scales ? 2 * (a->head_dim / c->channels) : 0;
    int64_t bytes = each * ((heads - 1) * a->page_tokens + 1);
    for (int n = 0; each && n < s->num_pieces; n++) {
        int64_t at = s->piece[n].at.page_at + s->piece[n].at.record * each;
        ask_for(c->scales + at, bytes + each * s->piece[n].count);
        if (c->zeros) ask_for(c->zeros + at, bytes + each * s->piece[n].count);
    }
}

#define MAX_OUTLIERS 8 /* of a vector */

/* What outliers are beyond what their codes decode to. */
typedef struct {
    int count;
    struct {
        int slot, channel;
        float beyond;
    } list[STRIP * MAX_OUTLIERS];
} strip_outliers;

/* Those of one slot, the `i`th of the strip, whose codes are at `codes`. */
static inline void find_in_slot(const strip_walk *t, const coding *c, const code_places *places, place p,
                                const uint8_t *codes, int i, by_run scales, by_run zeros,
                                strip_outliers *found) {
    for (int o = 0; o < c->num_outliers; o++) {
        int channel;
        float value;
        if (!outlier_at(c, t->a->head_dim, p, o, &channel, &value)) continue;
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
            find_in_slot(t, c, places, p, vectors[i] + shift, i, scales, zeros, found);
        }
}

#ifdef HAVE_X86
/* Of vectors in fours, twos and ones: three are four of which one is not used. */
#define FOR_QUERIES(what, ...)                                                 \
    for (int m = 0; m < t->w->count; m += 4) {                                 \
        int left = t->w->count - m;                                            \
        if (left > 2) what(t, m, 4, __VA_ARGS__);                              \
        else if (left == 2) what(t, m, 2, __VA_ARGS__);                        \
        else what(t, m, 1, __VA_ARGS__);                                       \
    }

#include "lane_codes.h"
#include "strip_integers.h"

#define TARGET AVX512
#define NAME(name) name##_avx512
#define LANES 16
#include "strip_body.h"
#undef TARGET
#undef NAME
#undef LANES

#define TARGET AVX2
#define NAME(name) name##_avx2
#define LANES 8
#include "strip_body.h"
#undef TARGET
#undef NAME
#undef LANES
#undef FOR_QUERIES
#endif

#endif
