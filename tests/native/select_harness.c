/* Runs select.c under the address and undefined-behaviour sanitizers.
 *
 * Selections of random shapes, with buffers of exactly the stated size. The retained slots of every code path are
 * compared with those of plain C, and counted. Exit code 0 if all agree.
 */
#include <stdio.h>
#include <stdlib.h>

#include "random_numbers.h"
#include "select.c"

enum { LARGEST = 140 };

typedef struct {
    int layers, per_layer, heads, slots, rows;
    float *score;
    uint8_t *live, *held;
    int64_t *keep, *positions;
} sequence;

static void *room(size_t bytes) { return malloc(bytes ? bytes : 1); }

static sequence drawn(void) {
    sequence s = {.layers = between(1, 3), .per_layer = between(1, 4), .heads = between(1, 16)};
    s.slots = between(0, LARGEST), s.rows = s.layers * s.per_layer;
    size_t all = (size_t)s.rows * s.slots;
    s.score = room(all * s.heads * sizeof(float)), s.live = room(all), s.held = room(all);
    s.keep = room(s.rows * sizeof(int64_t)), s.positions = room(all * sizeof(int64_t));
    int tied = between(0, 1);
    for (size_t i = 0; i < all * s.heads; i++) s.score[i] = tied ? (float)between(-3, 3) : number();
    for (int row = 0; row < s.rows; row++) {
        int held = between(0, s.slots), kept = between(0, held);
        s.keep[row] = kept;
        for (int slot = 0, position = -1; slot < s.slots; slot++) {
            size_t i = (size_t)row * s.slots + slot;
            position += between(1, 3);
            s.live[i] = slot < held, s.held[i] = slot < held && between(0, 9) == 0 && kept-- > 0;
            s.positions[i] = slot < held ? position : -1;
        }
    }
    return s;
}

static void discard(sequence *s) {
    free(s->score), free(s->live), free(s->held), free(s->keep), free(s->positions);
}

/* Retained slots of the sequence, [rows, slots]. */
static uint8_t *retained(const sequence *s, int path, const int64_t *count, int pick_best) {
    int rows = s->rows, columns;
    free_args f = {.live = s->live, .protected = s->held, .keep = s->keep, .rows = rows, .slots = s->slots, .path = path};
    f.free = room((size_t)(rows + 1) * s->slots), f.retained = room(rows * sizeof(int64_t));
    quire_free(&f);
    columns = (int)(f.columns[1] - f.columns[0]);
    uint64_t *words = room((size_t)rows * columns * sizeof(uint64_t));
    int32_t *keys = room(2 * (size_t)padded(columns) * sizeof(int32_t));
    best_args b = {.score = s->score + f.columns[0], .free = f.free, .wanted = f.retained, .words = words, .keys = keys,
                   .score_row = (int64_t)s->heads * s->slots, .score_head = s->slots, .free_row = columns,
                   .rows = rows, .heads = s->heads, .columns = columns, .rows_per_layer = s->per_layer, .path = path};
    quire_best(&b);
    align_args l = {.words = words, .positions = s->positions, .free = f.free, .past_end = 3 * LARGEST, .rows = rows,
                    .slots = s->slots, .first = (int)f.columns[0], .columns = columns, .rows_per_layer = s->per_layer,
                    .heads = s->heads};
    l.tokens = room(l.past_end * sizeof(uint64_t));
    quire_align(&l);
    int64_t *some = room(rows * sizeof(int64_t));
    for (int row = 0; row < rows; row++) some[row] = count[row] < f.retained[row] ? count[row] : f.retained[row];
    retain_args r = {.live = s->live, .free = f.free, .retained = f.retained, .count = some,
                     .score = s->score + f.columns[0], .words = words, .keys = keys, .score_row = b.score_row,
                     .rows = rows, .slots = s->slots, .first = (int)f.columns[0], .columns = columns, .unit_words = 1,
                     .pick_best = pick_best, .path = path};
    r.kept = room((size_t)rows * s->slots), r.marks = room(2 * (size_t)columns);
    r.represent = room(quire_represent_words(columns, 1) * sizeof(uint64_t));
    quire_retain(&r);
    free(f.free), free(f.retained), free(words), free(keys), free(l.tokens), free(some), free(r.marks), free(r.represent);
    return r.kept;
}

static int wrong_count(const sequence *s, const uint8_t *kept) {
    for (int row = 0; row < s->rows; row++) {
        int64_t count = 0, held = 0;
        for (int slot = 0; slot < s->slots; slot++) {
            size_t i = (size_t)row * s->slots + slot;
            if (kept[i] > s->live[i] || kept[i] < s->held[i]) return 1;
            count += kept[i], held += s->held[i];
        }
        if (count != (s->keep[row] > held ? s->keep[row] : held)) return 1;
    }
    return 0;
}

static int best_path(void) {
#ifdef HAVE_X86
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) return PATH_AVX512;
    if (__builtin_cpu_supports("avx2")) return PATH_AVX2;
#endif
    return PATH_PLAIN;
}

int main(void) {
    for (int round = 0; round < 400; round++) {
        sequence s = drawn();
        int64_t *count = room(s.rows * sizeof(int64_t));
        for (int row = 0; row < s.rows; row++) count[row] = between(0, s.slots);
        int pick_best = between(0, 1);
        uint8_t *plain = retained(&s, PATH_PLAIN, count, pick_best);
        int failed = wrong_count(&s, plain);
        for (int path = PATH_AVX2; path <= best_path(); path++) {
            uint8_t *kept = retained(&s, path, count, pick_best);
            failed |= memcmp(kept, plain, (size_t)s.rows * s.slots) != 0;
            free(kept);
        }
        if (failed) return printf("round %d: wrong slots\n", round), 1;
        free(plain), free(count), discard(&s);
    }
    return 0;
}
