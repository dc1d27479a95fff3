/* Walks over the pages of a row: selects tiles and code path, and stores the results. */
#ifndef QUIRE_WALKING_H
#define QUIRE_WALKING_H

#include "tally.h"
#include "walk_avx2.h"
#include "walk_coded.h"

static void walk_tile(const attention_args *a, walk *w, const tile *t) {
#ifdef HAVE_X86
    int dim = w->head_dim;
    if (a->path == PATH_AVX512_BF16 && a->dtype == BF16 && t->count == TILE && dim % 32 == 0) {
        walk_tile_bf16(w, t, a->scale, a->softcap);
        return;
    }
    if (a->path >= PATH_AVX512) {
        walk_tile_avx512(w, t, a->dtype, a->softcap);
        return;
    }
    if (a->path == PATH_AVX2 && (dim | w->value_dim) % 8 == 0) {
        walk_tile_avx2(w, t, a->dtype, a->softcap);
        return;
    }
#endif
    walk_tile_plain(w, t, a->dtype, a->softcap);
}

/* The lane that a thread is likely to walk next, from slot `first` on; without slots: not known. */
typedef struct {
    lane lane;
    int64_t first;
} next_lane;

static void prefetch_page(const attention_args *a, const uint8_t *plane, const coding *c, place p) {
    const uint8_t *vectors = vector_at(plane, c, p);
    for (int64_t i = 0; i < a->page_tokens * c->vector_bytes && i < 4096; i += 64) __builtin_prefetch(vectors + i);
}

/* Whether 32 slots at a time can be walked from `slot` on, by vectors that see all of them. */
static int is_wide(const attention_args *a, const walk *w, int64_t slot) {
#ifdef HAVE_X86
    return a->path == PATH_AVX512_BF16 && a->dtype == BF16 && has_wide(w->head_dim, w->value_dim) &&
           a->page_tokens % TILE == 0 && slot % TILE == 0 && w->low[w->count - 1] <= slot;
#else
    (void)a, (void)w, (void)slot;
    return 0;
#endif
}

#ifdef HAVE_X86
#define MAX_AHEAD 2

/* Locate the 32 slots at `slot` + 32 * `tiles`. After the end of the lane these are the first slots of the
 * lane that this thread is likely to walk next; without one, the last 32 slots. */
static void point_to(const attention_args *a, const lane *l, const next_lane *next, int64_t slot, int64_t end,
                     int tiles, const uint8_t *(*at)[2]) {
    int64_t wanted = slot + tiles * WIDE;
    if (wanted + WIDE > end) {
        int64_t after = next->first + wanted - (slot + (end - slot) / WIDE * WIDE);
        if (after + WIDE <= next->lane.slots) l = &next->lane, wanted = after;
        else wanted = end - WIDE;
    }
    for (int g = 0; g < WIDE_TILES; g++) {
        place p = place_of(a, l, wanted + g * TILE);
        at[g][0] = vector_at(a->key, &a->key_coding, p), at[g][1] = vector_at(a->value, &a->value_coding, p);
    }
}
#endif

/* Process multiples of 32 slots from `slot` on that every vector of these heads sees. Heads are the
 * inner loop, because their vectors are adjacent in a page. Returns the next slot. */
static int64_t walk_wide_tiles(const attention_args *a, walk *const *w, int heads, const lane *l,
                               const next_lane *next, int64_t slot, int64_t end) {
#ifdef HAVE_X86
    int64_t key_head = a->page_tokens * a->key_coding.vector_bytes;
    int64_t value_head = a->page_tokens * a->value_coding.vector_bytes;
    const uint8_t *at[1 + MAX_AHEAD][WIDE_TILES][2]; /* keys and values of these 32 slots, and of the following ones */
    int ahead = a->head_dim > 96 ? 1 : MAX_AHEAD; /* short vectors need less time than memory */
    int tiles = (heads - 1 + ahead) / heads;
    end = w[0]->high[0] < end ? w[0]->high[0] : end;
    if (slot + WIDE > end) return slot;
    for (int64_t n = slot / a->page_tokens; n < end / a->page_tokens; n += 16) __builtin_prefetch(l->pages + n);
    for (int k = 0; k <= tiles; k++) point_to(a, l, next, slot, end, k, at[k]);
    for (; slot + WIDE <= end; slot += WIDE) {
        for (int h = 0; h < heads; h++) {
            wide_tile t = {.slot = slot};
            int next_head = (h + ahead) % heads;
            for (int g = 0; g < WIDE_TILES; g++) {
                const uint8_t *const *then = at[(h + ahead) / heads][g];
                t.key[g] = at[0][g][0] + h * key_head, t.value[g] = at[0][g][1] + h * value_head;
                t.next_key[g] = then[0] + next_head * key_head, t.next_value[g] = then[1] + next_head * value_head;
            }
            walk_wide(w[h], &t, a->scale, a->softcap);
        }
        memmove(at[0], at[1], tiles * sizeof(at[0]));
        point_to(a, l, next, slot + WIDE, end, tiles, at[tiles]);
    }
#else
    (void)a, (void)w, (void)heads, (void)l, (void)next, (void)end;
#endif
    return slot;
}

/* Process the slots first .. end - 1 that any of the vectors sees. */
static void walk_lane(const attention_args *a, walk *w, const lane *l, const next_lane *next, int64_t first,
                      int64_t end) {
    int tokens = a->page_tokens;
    int64_t slot = w->low[0], high = w->high[w->count - 1]; /* both increase with the token */
    slot = slot < first ? first : slot;
    high = high > end ? end : high;
    while (slot < high) {
        if (is_wide(a, w, slot)) slot = walk_wide_tiles(a, &w, 1, l, next, slot, high);
        if (slot >= high) break;
        place p = place_of(a, l, slot);
        int64_t left = tokens - slot % tokens; /* of the page */
        if (slot % tokens == 0 && slot + tokens < high) {
            place then = place_of(a, l, slot + tokens);
            prefetch_page(a, a->key, &a->key_coding, then);
            prefetch_page(a, a->value, &a->value_coding, then);
        }
        tile t = {vector_at(a->key, &a->key_coding, p), vector_at(a->value, &a->value_coding, p), slot,
                  TILE - (int)(slot % TILE)};
        if (left < t.count) t.count = (int)left;
        if (high - slot < t.count) t.count = (int)(high - slot);
        walk_tile(a, w, &t);
        slot += t.count;
    }
}

static void load_queries(const attention_args *a, walk *w, const lane *l, int row, int head, int first) {
    int whole = (a->value_coding.dim + 15) / 16 * 16;
    w->head_dim = a->head_dim, w->value_dim = a->value_coding.dim;
    for (int m = 0; m < w->count; m++) {
        int64_t at = query_at(a, row, head, first + m);
        for (int d = 0; d < a->head_dim; d++)
            w->query[m][d] = load_number(a->query, at + d, a->dtype) * a->scale;
        memset(w->out[m], 0, whole * sizeof(float));
        if (a->dtype == BF16)
            memcpy(w->half[m], (const uint16_t *)a->query + at, 2 * (size_t)a->head_dim);
        w->high[m] = l->slots - a->tokens[row] + (first + m) / a->group + 1;
        w->low[m] = a->window && w->high[m] > a->window ? w->high[m] - a->window : 0;
        w->logits[m] = w->tops[m] = NULL;
        w->bias[m] = bias_of(a, row, head + (first + m) % a->group, l->slots);
        w->maximum[m] = -INFINITY;
        w->sum[m] = 0;
    }
}

/* Initialize the softmax with the sinks, which are logits without values. */
static void add_sinks(const attention_args *a, walk *w, int head, int first) {
    for (int m = 0; a->sinks && m < w->count; m++) {
        w->maximum[m] = a->sinks[head + (first + m) % a->group];
        w->sum[m] = 1;
    }
}

static float *sums_of_head(const attention_args *a, int row, int head) {
    return a->column_sums + ((int64_t)row * num_heads(a) + head) * a->sums_stride;
}

static void store_output(const attention_args *a, int row, int head, int pair, const float *out,
                         float over) {
    int dim = a->value_coding.dim;
    int64_t at = ((a->starts[row] + pair / a->group) * num_heads(a) + head + pair % a->group) * dim;
    for (int d = 0; d < dim; d++) store_number(a->out, at + d, a->dtype, out[d] * over);
}

/* Convert logits of slots low .. high - 1 to weights, and add them to the sums (or replace them). */
static void weigh_columns(const float *logits, float *sums, int64_t low, int64_t high, float maximum,
                          float over) {
    for (int64_t slot = low; slot < high; slot++) {
        float weight = expf(logits[slot] - maximum) * over;
        sums[slot] = sums == logits ? weight : sums[slot] + weight;
    }
}
#ifdef HAVE_X86
static AVX512 void weigh_columns_avx512(const float *logits, float *sums, int64_t low, int64_t high,
                                        float maximum, float over) {
    __m512 top = _mm512_set1_ps(maximum), factor = _mm512_set1_ps(over);
    for (int64_t slot = low; slot < high; slot += 16) {
        __mmask16 inside = high - slot >= 16 ? 0xffff : between16(0, high - slot);
        __m512 x = _mm512_maskz_loadu_ps(inside, logits + slot);
        x = _mm512_mul_ps(exp16(_mm512_sub_ps(x, top)), factor);
        if (sums != logits) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(inside, sums + slot));
        _mm512_mask_storeu_ps(sums + slot, inside, x);
    }
}

/* Finish the weights of slots first .. end - 1, at most RUN, that were stored relative to `tops`. */
static AVX512 void rescale_weights(float *weights, const float *tops, int64_t first, int64_t end, float maximum,
                                   float over) {
    LINED float factors[TILE];
    __m512 top = _mm512_maskz_loadu_ps(between16(0, (end - first + TILE - 1) / TILE), tops + first / TILE);
    top = exp16(_mm512_sub_ps(top, _mm512_set1_ps(maximum)));
    _mm512_store_ps(factors, _mm512_mul_ps(top, _mm512_set1_ps(over)));
    for (int64_t slot = first, i = 0; slot < end; slot += TILE, i++) {
        __mmask16 inside = end - slot >= TILE ? 0xffff : between16(0, end - slot);
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(inside, weights + slot), _mm512_set1_ps(factors[i]));
        _mm512_mask_storeu_ps(weights + slot, inside, x);
    }
}
#endif

/* Whether walks of rows with one token store weights, so that no e^x is computed twice. Each 16 slots must
 * then be one tile. */
static int stores_weights(const attention_args *a) {
    return a->tops && !a->joined && !in_strips(a) && !a->window && a->path >= PATH_AVX512 && a->page_tokens % TILE == 0;
}

static float *tops_of(const attention_args *a, int row, int head) {
    return a->tops + (a->starts[row] * num_heads(a) + head) * ((a->sums_stride + TILE - 1) / TILE);
}

static void finish_columns(const attention_args *a, const float *logits, float *sums, int64_t low,
                           int64_t high, float maximum, float over) {
#ifdef HAVE_X86
    if (a->path >= PATH_AVX512) {
        weigh_columns_avx512(logits, sums, low, high, maximum, over);
        return;
    }
#endif
    weigh_columns(logits, sums, low, high, maximum, over);
}

static float *partial_of(const attention_args *a, int kv_head, int64_t number, int m) {
    int64_t result = ((int64_t)kv_head * a->num_partials + number) * a->group + m;
    return a->partials + result * (a->value_coding.dim + 2);
}

static int is_tallied(const attention_args *a, int row) {
    for (int i = 0; i < a->num_tallies; i++)
        if (a->tallies[i].number[row] >= 0) return 1;
    return 0;
}

/* Prefetch the statistics of a KV head. */
static void prefetch_tallies(const attention_args *a, int row, int kv_head) {
    for (int i = 0; i < a->num_tallies; i++) {
        const tally_args *t = a->tallies + i;
        int apart = a->group / t->group; /* statistics of a KV head */
        for (int h = 0; t->number[row] >= 0 && h < apart; h++)
            prefetch_numbers(t, t->number[row], kv_head * apart + h);
    }
}

/* Finish the weights of slots low .. high - 1 of a row with one token, in the sums of a head. */
static void finish_row(const attention_args *a, int row, int head, int64_t low, int64_t high, float maximum,
                       float over) {
    float *sums = sums_of_head(a, row, head);
#ifdef HAVE_X86
    if (stores_weights(a)) {
        const float *tops = tops_of(a, row, head);
        for (int64_t first = low; first < high; first += RUN)
            rescale_weights(sums, tops, first, first + RUN < high ? first + RUN : high, maximum, over);
        return;
    }
#endif
    finish_columns(a, sums, sums, low, high, maximum, over);
}

/* Store the maxima and factors of the heads of a row with one token, for `tally_row`. */
static void keep_normaliser(const attention_args *a, int row, int head, float maximum, float over) {
    float *kept = a->normalisers + 2 * (a->starts[row] * num_heads(a) + head);
    kept[0] = maximum, kept[1] = over;
}

/* Convert the logits of a row with one token to weights and add them to the statistics, RUN slots at a time:
 * the weights of a run are read from the cache. */
static void tally_row(const attention_args *a, int row, int kv_head) {
    int64_t slots = lane_of(a, row, kv_head).slots, end;
    const float *norm = a->normalisers + 2 * (a->starts[row] * num_heads(a) + kv_head * a->group);
    for (int64_t first = 0; first < slots; first = end) {
        end = first + RUN < slots ? first + RUN : slots;
        for (int m = 0; m < a->group; m++) {
            finish_row(a, row, kv_head * a->group + m, first, end, norm[2 * m], norm[2 * m + 1]);
        }
        for (int i = 0; i < a->num_tallies; i++) {
            const tally_args *t = a->tallies + i;
            int apart = a->group / t->group; /* statistics of a KV head */
            for (int h = 0; t->number[row] >= 0 && h < apart; h++)
                tally_run(t, t->number[row], kv_head * apart + h, first, end);
        }
    }
}

/* Select where logits are stored until the normaliser is known: in the column sums themselves for a row
 * with one token (vector m is then a head), else in scratch after the walk. */
static void keep_for_sums(const attention_args *a, walk *w, int row, int head) {
    float *kept = (float *)((uint8_t *)w + walk_bytes());
    if (a->column_sums == NULL || (a->num_tallies && !is_tallied(a, row))) return;
    for (int m = 0; m < w->count; m++)
        w->logits[m] = a->tokens[row] == 1 ? sums_of_head(a, row, head + m) : kept + m * a->sums_stride;
    for (int m = 0; a->tokens[row] == 1 && stores_weights(a) && m < w->count; m++)
        w->tops[m] = tops_of(a, row, head + m);
}

/* The result of a query vector over the slots of a part. */
typedef struct {
    const float *out, *logits; /* logits by slot, for column sums; or NULL */
    float maximum, sum;
    int64_t low, high;
} vector_result;

/* Store the result of query vector `pair` of a KV head: in part for a merge, or its output and column sums. */
static void finish_vector(const attention_args *a, const part *p, int kv_head, int pair, vector_result r) {
    int head = kv_head * a->group, dim = a->value_coding.dim;
    if (p->partial >= 0) {
        float *result = partial_of(a, kv_head, p->partial, pair);
        memcpy(result, r.out, dim * sizeof(float));
        result[dim] = r.maximum, result[dim + 1] = r.sum;
        return;
    }
    float over = 1 / r.sum;
    store_output(a, p->row, head, pair, r.out, over);
    if (r.logits && a->num_tallies && a->tokens[p->row] == 1) keep_normaliser(a, p->row, head + pair, r.maximum, over);
    else if (r.logits && a->tokens[p->row] == 1) finish_row(a, p->row, head + pair, r.low, r.high, r.maximum, over);
    else if (r.logits)
        finish_columns(a, r.logits, sums_of_head(a, p->row, head + pair % a->group), r.low, r.high, r.maximum, over);
}

static void finish_walk(const attention_args *a, const part *p, int kv_head, walk *w, int first) {
    for (int m = 0; m < w->count; m++) {
        vector_result r = {w->out[m], w->logits[m], w->maximum[m], w->sum[m], w->low[m], w->high[m]};
        finish_vector(a, p, kv_head, first + m, r);
    }
    int whole = p->partial < 0 && a->tokens[p->row] == 1 && first + w->count == a->group;
    if (whole && a->num_tallies && w->logits[0]) tally_row(a, p->row, kv_head);
}

static void begin_walk(const attention_args *a, const part *p, int kv_head, walk *w, int first) {
    int left = a->tokens[p->row] * a->group - first, head = kv_head * a->group;
    lane l = lane_of(a, p->row, kv_head);
    w->count = left < MAX_QUERIES ? left : MAX_QUERIES;
    load_queries(a, w, &l, p->row, head, first);
    if (p->first == 0) add_sinks(a, w, head, first);
    keep_for_sums(a, w, p->row, head + first);
}

/* Walk a part of a row for `heads` neighbouring KV heads of a page together. */
static void walk_heads(const attention_args *a, const part *p, int kv_head, int heads, const next_lane *next,
                       uint8_t *scratch) {
    int64_t end = (int64_t)p->first + p->count;
    int strips = in_strips(a);
    walk *walks[MAX_TOGETHER];
    for (int h = 0; h < heads; h++) walks[h] = (walk *)(scratch + h * walk_bytes());
    for (int first = 0; first < a->tokens[p->row] * a->group; first += MAX_QUERIES) {
        for (int h = 0; h < heads; h++) begin_walk(a, p, kv_head + h, walks[h], first);
        lane l = lane_of(a, p->row, kv_head);
        int64_t slot = walks[0]->low[0] < p->first ? p->first : walks[0]->low[0];
        if (strips) walk_codes(a, walks, heads, &l, slot, end);
        else if (heads > 1 && is_wide(a, walks[0], slot))
            slot = walk_wide_tiles(a, walks, heads, &l, next, slot, end < l.slots ? end : l.slots);
        int tallied = p->partial < 0 && a->tokens[p->row] == 1;
        if (tallied) prefetch_tallies(a, p->row, kv_head);
        for (int h = 0; h < heads; h++) {
            l = lane_of(a, p->row, kv_head + h);
            if (tallied && h + 1 < heads) prefetch_tallies(a, p->row, kv_head + h + 1);
            if (!strips) walk_lane(a, walks[h], &l, next, slot, end);
            finish_walk(a, p, kv_head + h, walks[h], first);
        }
    }
}

static void do_walk(const attention_args *a, const item *now, const item *after, uint8_t *scratch) {
    const part *p = now->of;
    int heads = a->heads_together, kv_head = now->number * heads;
    next_lane next = {{NULL}, 0};
    /* logits of several tokens are stored after the walk, which has space for one head */
    int side = a->column_sums && a->tokens[p->row] > 1 ? 1 : heads;
    if (after && side == heads && !a->window) {
        next.lane = lane_of(a, after->of->row, after->number * heads), next.first = after->of->first;
        __builtin_prefetch(next.lane.pages + next.first / a->page_tokens);
    }
    for (int h = 0; h < heads; h += side) walk_heads(a, p, kv_head + h, side, &next, scratch);
}

/* Merge the walks of a long row with one token, relative to the largest maximum. */

static void do_merge(const attention_args *a, const item *now, const item *next, uint8_t *scratch) {
    const part *p = now->of;
    int kv_head = now->number;
    (void)next;
    float *out = (float *)scratch;
    int head = kv_head * a->group, dim = a->value_coding.dim;
    int64_t high = lane_of(a, p->row, kv_head).slots;
    int64_t low = a->window && high > a->window ? high - a->window : 0;
    int tallied = is_tallied(a, p->row);
    prefetch_tallies(a, p->row, kv_head);
    for (int m = 0; m < a->group; m++) {
        float maximum = -INFINITY, sum = 0;
        memset(out, 0, dim * sizeof(float));
        for (int i = 0; i < p->count; i++)
            maximum = fmaxf(maximum, partial_of(a, kv_head, p->partial + i, m)[dim]);
        for (int i = 0; i < p->count; i++) {
            const float *result = partial_of(a, kv_head, p->partial + i, m);
            float factor = expf(result[dim] - maximum);
            sum += factor * result[dim + 1];
            for (int d = 0; d < dim; d++) out[d] += factor * result[d];
        }
        store_output(a, p->row, head, m, out, 1 / sum);
        if (tallied) keep_normaliser(a, p->row, head + m, maximum, 1 / sum);
        if (!a->column_sums || a->num_tallies) continue;
        finish_row(a, p->row, head + m, low, high, maximum, 1 / sum);
    }
    if (tallied) tally_row(a, p->row, kv_head);
}

#endif
