/* Walks by strips over coded pages, pages with one coded side, and plain pages without a faster walk
 * (walk_wide.h); in portable C without vector instructions. */
#ifndef QUIRE_WALK_CODED_H
#define QUIRE_WALK_CODED_H

#include "strip.h"
#include "walk_wide.h"

/* At most sixteen slots, decoded one by one. */
static void walk_tile_decoded(const attention_args *a, walk *w, const lane *l, int64_t slot, int count) {
    float weights[MAX_QUERIES][TILE];
    tile_vectors vectors;
    tile t = {NULL, NULL, slot, count};
    for (int i = 0; i < count; i++)
        decode_vector(&a->key_coding, a->key, place_of(a, l, slot + i), vectors[i]);
    weigh_tile(w, &t, a->softcap, vectors, weights);
    for (int i = 0; i < count; i++)
        decode_vector(&a->value_coding, a->value, place_of(a, l, slot + i), vectors[i]);
    add_tile(w, &t, vectors, weights);
}

#ifdef HAVE_X86
/* Number of vector lanes that divides the runs of both sides; 0: none. */
static int strip_lanes(const attention_args *a) {
    int runs = a->key_coding.run | a->value_coding.run;
    if (a->path >= PATH_AVX512 && runs % 16 == 0) return 16;
    return a->path >= PATH_AVX2 && runs % 8 == 0 ? 8 : 0;
}

/* Interleave four query vectors, `lanes` numbers of each; of two such runs, the even numbers come first
 * if keys are read in `pairs` (strip_plain.h). */
static void pack_queries(walk *w, int lanes, int pairs) {
    for (int m = 0; m < w->count; m++) {
        float *packed = w->packed + m / 4 * 4 * MAX_HEAD_DIM + m % 4 * lanes;
        for (int d = 0; d < w->head_dim; d++) {
            int within = d % (2 * lanes), at = within % 2 * lanes + within / 2;
            at = pairs ? d - within + at : d;
            packed[at / lanes * 4 * lanes + at % lanes] = w->query[m][d];
        }
    }
}

/* Compute the sums of the runs of query vectors. */
static void sum_queries(const coding *c, walk *w) {
    for (int m = 0; c->zeros && m < w->count; m++)
        for (int r = 0; r < c->num_runs; r++) {
            float sum = 0;
            for (int d = 0; d < c->run; d++) sum += w->query[m][r * c->run + d];
            w->query_sums[m][r] = sum;
        }
}

/* Select the page of the next strip that is prefetched beside head h, if each head has one; in pages of
 * fewer slots or more heads, the vectors of the next head are prefetched. */
static void select_page_ahead(strip_walk *t, const strip *then, int h, int heads) {
    const int tokens = t->a->page_tokens;
    t->ahead_bytes = 0;
    if (then == NULL || !t->byte_keys || !t->byte_values || heads == 1) return;
    if (then->count < STRIP || tokens * heads != STRIP || then->slot % tokens) return;
    t->ahead[0] = then->key[h * tokens], t->ahead[1] = then->value[h * tokens];
    t->ahead_bytes = STRIP * t->a->key_coding.vector_bytes;
}

/* Alternate over strips of neighbouring heads of a page, whose vectors are adjacent. */
static void walk_strips(const attention_args *a, walk *const *walks, int heads, const lane *l,
                        int64_t slot, int64_t end, int lanes) {
    strip strips[2];
    strip_walk t;
    int64_t key_head = a->page_tokens * a->key_coding.vector_bytes;
    int64_t value_head = a->page_tokens * a->value_coding.vector_bytes;
    t.a = a;
    place_codes(&a->key_coding, &t.key_places);
    place_codes(&a->value_coding, &t.value_places);
    int pairs = a->key_coding.kind == PLAIN_NUMBERS && a->key_coding.dtype == BF16 &&
                (lanes == 16 ? in_pairs_avx512(&a->key_coding) : in_pairs_avx2(&a->key_coding));
    t.integer_keys = in_integers(a, &a->key_coding, lanes);
    t.integer_values = in_integers(a, &a->value_coding, lanes);
    t.byte_keys = lanes == 16 && in_bytes(a, &a->key_coding);
    t.byte_values = lanes == 16 && in_bytes(a, &a->value_coding);
    for (int h = 0; h < heads; h++) {
        if (t.byte_keys) pack_bytes(walks[h], a->scale);
        else if (t.integer_keys) pack_integers(walks[h], a->scale, 2 * lanes);
        else pack_queries(walks[h], lanes, pairs);
        sum_queries(&a->key_coding, walks[h]);
    }
    point_strip(a, l, slot, end, &strips[0]);
    for (int now = 0; slot < end; now = 1 - now) {
        strip *here = &strips[now], *then = &strips[1 - now];
        slot += here->count;
        if (slot < end) point_strip(a, l, slot, end, then);
        for (int h = 0; h < heads; h++) {
            int next_head = (h + 1) % heads;
            t.w = walks[h], t.here = here, t.next = next_head ? here : slot < end ? then : NULL;
            t.key_shift = h * key_head, t.next_key_shift = next_head * key_head;
            t.value_shift = h * value_head, t.next_value_shift = next_head * value_head;
            t.first_record = h * a->page_tokens;
            if (h == 0 && slot < end) {
                prefetch_scales(a, &a->key_coding, then, heads);
                prefetch_scales(a, &a->value_coding, then, heads);
            }
            select_page_ahead(&t, slot < end ? then : NULL, h, heads);
            if (lanes == 16) walk_strip_avx512(&t);
            else walk_strip_avx2(&t);
        }
    }
}
#endif

/* Whether the slots of plain pages are walked by strips. */
static int in_strips(const attention_args *a) {
#ifdef HAVE_X86
    int wide = a->path == PATH_AVX512_BF16 && a->dtype == BF16 && has_wide(a->head_dim, a->value_coding.dim);
    return a->coded || (strip_lanes(a) && !(wide && a->page_tokens % TILE == 0));
#else
    return a->coded;
#endif
}

/* Process slots slot .. end - 1 for neighbouring heads of a page; `l` is the first head's lane. */
static void walk_codes(const attention_args *a, walk *const *walks, int heads, const lane *l,
                       int64_t slot, int64_t end) {
    int64_t high = walks[0]->high[walks[0]->count - 1]; /* the same for all heads */
    end = high < end ? high : end;
    if (slot >= end) return;
#ifdef HAVE_X86
    int lanes = strip_lanes(a);
    if (lanes) {
        walk_strips(a, walks, heads, l, slot, end, lanes);
        return;
    }
#endif
    for (int h = 0; h < heads; h++) {
        lane own = *l;
        own.first_record += h * a->page_tokens;
        for (int64_t at = slot, next; at < end; at = next) {
            next = at + TILE < end ? at + TILE : end;
            walk_tile_decoded(a, walks[h], &own, at, (int)(next - at));
        }
    }
}

#endif
