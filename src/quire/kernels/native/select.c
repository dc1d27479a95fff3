/* Selection of tokens to retain; see select.h. The same code is compiled for each instruction set. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "select.h"

#define BLOCK 32 /* columns are padded to a multiple of this, so that loops have no remainder */
static inline int padded(int columns) { return (columns + BLOCK - 1) / BLOCK * BLOCK; }

#define EIGHTH 0x0101010101010101ull /* every eighth bit */

/* Scratch of a lane; slots are by position unless stated otherwise. */
typedef struct {
    int32_t *position, *slot, *stored; /* [slots]; stored: the positions in the order of slots */
    int32_t *bits, *keys, *masks;      /* [slots, padded] */
    int64_t *wide;                     /* [slots] */
    uint8_t *kept, *marks;             /* [slots]; marks: in the order of slots */
    uint64_t *words;                   /* a bit for each position of the lane, if they are not ascending */
    int64_t num_words;
} lane_scratch;

#define TARGET
#define NAME(name) name##_plain
#include "select_body.h"
#undef NAME
#undef TARGET

#ifdef HAVE_X86
#define TARGET __attribute__((target("avx2,popcnt")))
#define NAME(name) name##_256
#include "select_body.h"
#undef NAME
#undef TARGET

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt,prefer-vector-width=512")))
#define NAME(name) name##_512
#include "select_body.h"
#undef NAME
#undef TARGET

#define CALL(name, path, ...)                                \
    switch (path) {                                          \
    case PATH_PLAIN: name##_plain(__VA_ARGS__); break;       \
    case PATH_AVX2: name##_256(__VA_ARGS__); break;          \
    default: name##_512(__VA_ARGS__);                        \
    }
#else
#define CALL(name, path, ...) name##_plain(__VA_ARGS__)
#endif

/* Each returns 0. */
int quire_best(const best_args *a) {
    if (a->words) memset(a->words, 0, sizeof(uint64_t) * a->rows * a->columns);
    for (int row = 0; row < a->rows; row++) CALL(best_of_row, a->path, a, row)
    return 0;
}

int quire_represent(const represent_args *a) {
    for (int row = 0; row < a->rows; row++) CALL(represent_row, a->path, a, row)
    return 0;
}

/* The best free slots of a row and the representatives of the rest; all slots that are not free stay. */
static void retain_row(const retain_args *a, int64_t row) {
    int columns = a->columns;
    const uint8_t *free = a->free + row * columns, *live = a->live + row * a->slots + a->first;
    const float *score = a->score + row * a->score_row;
    uint8_t *marks = a->marks, *rest = a->marks + columns, *kept = a->kept + row * a->slots;
    int64_t wanted = a->retained[row] - a->count[row];
    best_args best = {.score = score, .free = free, .wanted = &wanted, .best = marks, .keys = a->keys, .rows = 1,
                      .heads = 1, .columns = columns, .rows_per_layer = 1, .path = a->path};
    quire_best(&best);
    CALL(without, a->path, free, marks, columns, rest)
    represent_args others = {.words = a->words + row * columns * a->unit_words, .grouped = rest,
                             .count = a->count + row, .score = a->pick_best ? score : NULL, .chosen = marks,
                             .scratch = a->represent, .rows = 1, .units = columns, .unit_words = a->unit_words,
                             .path = a->path};
    if (a->anchor) others.anchor = a->anchor + row * a->unit_words;
    quire_represent(&others); /* adds marks */
    memcpy(kept, a->live + row * a->slots, a->slots);
    CALL(without, a->path, free, marks, columns, rest)
    CALL(without, a->path, live, rest, columns, kept + a->first)
}

int quire_retain(const retain_args *a) {
    for (int row = 0; row < a->rows; row++) retain_row(a, row);
    return 0;
}

int quire_free(free_args *a) {
    uint8_t *any = a->free + (int64_t)a->rows * a->slots;
    memset(any, 0, a->slots);
    for (int row = 0; row < a->rows; row++) CALL(free_of_row, a->path, a, row, any)
    int first = 0, end = a->slots;
    while (first < end && !any[first]) first++;
    while (first < end && !any[end - 1]) end--;
    if (first == end) first = end = 0;
    for (int64_t row = 0, columns = end - first; row < a->rows; row++)
        memmove(a->free + row * columns, a->free + row * a->slots + first, columns);
    a->columns[0] = first, a->columns[1] = end;
    return 0;
}

/* The range of positions that the columns of a layer's rows hold; [0, 0) if they hold none. */
static void range_of(const align_args *a, const int64_t *positions, int64_t *low, int64_t *end) {
    *low = INT64_MAX, *end = 0;
    for (int r = 0; r < a->rows_per_layer; r++) {
        const int64_t *own = positions + (int64_t)r * a->slots + a->first;
        int last = a->columns - 1;
        while (last >= 0 && own[last] < 0) last--;
        if (last < 0) continue;
        if (own[0] < *low) *low = own[0];
        if (own[last] + 1 > *end) *end = own[last] + 1;
    }
    if (*end == 0) *low = 0;
}

/* The first slot with a position of at least `least`; empty slots, -1, are above all positions. */
static int first_at(const int64_t *positions, int slots, int64_t least) {
    int low = 0, high = slots;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if ((uint64_t)positions[middle] < (uint64_t)least) low = middle + 1;
        else high = middle;
    }
    return low;
}

static inline void add_to(const align_args *a, int64_t position, uint64_t bits) {
    if ((uint64_t)position < (uint64_t)a->past_end) a->tokens[position] |= bits;
}

/* Add the own bits of a row's tokens, from the slot `from` to before the slot `to`. */
static void add_bits(const align_args *a, int row, const int64_t *positions, int from, int to, uint64_t ones) {
    const uint64_t *words = a->words + (int64_t)row * a->columns;
    const uint8_t *free = a->free + (int64_t)row * a->columns;
    int first = a->first, end = a->first + a->columns, slot = from;
    for (; slot < to && slot < first; slot++) add_to(a, positions[slot], ones);
    for (; slot < to && slot < end; slot++)
        add_to(a, positions[slot], free[slot - first] ? words[slot - first] : ones);
    for (; slot < to; slot++) add_to(a, positions[slot], ones);
}

static void align_layer(const align_args *a, int first_row) {
    const int64_t *positions = a->positions + (int64_t)first_row * a->slots;
    uint64_t past_end = (uint64_t)a->past_end;
    int64_t low, end;
    range_of(a, positions, &low, &end);
    for (int r = 0; r < a->rows_per_layer; r++) {
        const int64_t *own = positions + (int64_t)r * a->slots + a->first;
        for (int column = 0; column < a->columns; column++)
            if ((uint64_t)own[column] < past_end) a->tokens[own[column]] = 0;
    }
    for (int r = 0; r < a->rows_per_layer; r++) {
        const int64_t *own = positions + (int64_t)r * a->slots;
        uint64_t ones = (a->heads == 64 ? 0 : 1ull << a->heads) - 1;
        int from = first_at(own, a->slots, low), to = first_at(own, a->slots, end);
        add_bits(a, first_row + r, own, from, to, ones << r * a->heads);
    }
    for (int r = 0; r < a->rows_per_layer; r++) {
        uint64_t *words = a->words + (int64_t)(first_row + r) * a->columns;
        const int64_t *own = positions + (int64_t)r * a->slots + a->first;
        for (int column = 0; column < a->columns; column++)
            words[column] = (uint64_t)own[column] < past_end ? a->tokens[own[column]] : 0;
    }
}

int quire_align(const align_args *a) {
    for (int row = 0; row < a->rows; row += a->rows_per_layer) align_layer(a, row);
    return 0;
}

int quire_sign(sign_args *a) {
    quire_free(&a->free);
    int first = (int)a->free.columns[0], columns = (int)(a->free.columns[1] - first), rows = a->free.rows;
    best_args *best = &a->best;
    best->score += first, best->free = a->free.free, best->free_row = columns, best->wanted = a->free.retained;
    best->words = a->align.words, best->rows = rows, best->columns = columns;
    quire_best(best);
    if (best->rows_per_layer == 1) return 0;
    align_args *align = &a->align;
    align->free = a->free.free, align->rows = rows, align->slots = a->free.slots, align->first = first;
    align->columns = columns, align->rows_per_layer = best->rows_per_layer, align->heads = best->heads;
    return quire_align(align);
}

/* Words of scratch: signatures, the anchor, then 32-bit numbers; see select_body.h. */
int64_t quire_represent_words(int units, int unit_words) {
    int64_t numbers = 3 * (int64_t)units + 64 * (int64_t)unit_words + 2;
    return (int64_t)units * unit_words + unit_words + (numbers + 1) / 2;
}

/* ---- slots of lanes --------------------------------------------------------------------------------------------- */

/* Order the slots of a lane by position; 0 on success. */
static int order_lane(const lane_args *a, int64_t lane, lane_scratch *s) {
    int held = a->held[lane], tokens = a->page_tokens, ascending = 1;
    const int32_t *pages = a->pages + lane * a->columns;
    int32_t *stored = s->stored, low = INT32_MAX, high = 0;
    for (int at = 0, column = 0; at < held; at += tokens, column++) {
        int count = held - at < tokens ? held - at : tokens;
        memcpy(stored + at, a->positions + pages[column] * a->page_bytes, sizeof(int32_t) * count);
    }
    for (int i = 1; i < held; i++) ascending &= stored[i - 1] < stored[i];
    if (ascending) {
        memcpy(s->position, stored, sizeof(int32_t) * held);
        for (int i = 0; i < held; i++) s->slot[i] = i;
        return 0;
    }
    for (int i = 0; i < held; i++) {
        low = stored[i] < low ? stored[i] : low;
        high = stored[i] > high ? stored[i] : high;
    }
    /* a bit for each position, then the number of positions before each word */
    int64_t num_words = ((int64_t)high - low) / 64 + 1;
    if (low < 0) return 1;
    if (num_words > s->num_words) {
        free(s->words);
        s->words = malloc(num_words * (sizeof(uint64_t) + sizeof(int32_t)));
        s->num_words = s->words ? num_words : 0;
        if (s->words == NULL) return 1;
    }
    int32_t *before = (int32_t *)(s->words + num_words), sum = 0;
    memset(s->words, 0, num_words * sizeof(uint64_t));
    for (int i = 0; i < held; i++) s->words[(stored[i] - low) / 64] |= 1ull << (stored[i] - low) % 64;
    for (int64_t i = 0; i < num_words; i++) {
        before[i] = sum;
        sum += __builtin_popcountll(s->words[i]);
    }
    if (sum != held) return 1; /* two slots with one position */
    for (int i = 0; i < held; i++) {
        int32_t bit = stored[i] - low;
        int rank = before[bit / 64] + __builtin_popcountll(s->words[bit / 64] & ((1ull << bit % 64) - 1));
        s->position[rank] = stored[i], s->slot[rank] = i;
    }
    return 0;
}

/* The evicted positions of a lane, and the moves that fill the holes before the retained slots' number. */
static void list_lane(const lane_args *a, int64_t lane, const lane_scratch *s, int breach) {
    int held = a->held[lane], keep = a->keep[lane], moves = 0, hole = 0;
    int32_t *evicted = a->evicted + lane * (2 + a->max_evicted), *found = evicted + 2;
    int32_t *source = a->moves + lane * 2 * a->max_moves, *target = source + a->max_moves;
    for (int i = 0; i < held; i++) {
        s->marks[s->slot[i]] = s->kept[i];
        if (!s->kept[i]) *found++ = s->position[i];
    }
    for (int slot = keep; slot < held; slot++) {
        if (!s->marks[slot]) continue;
        while (s->marks[hole]) hole++;
        source[moves] = slot, target[moves++] = hole++;
    }
    evicted[0] = breach, evicted[1] = moves;
}

static int select_lane(const lane_args *a, int64_t lane, lane_scratch *s) {
    int held = a->held[lane], slots = a->slots, breach = 0;
    if (order_lane(a, lane, s)) return 1;
    if (a->keep == NULL) { /* only the order is wanted; it has no address if no lane holds a slot */
        int64_t *position = a->by_position + lane * slots, *slot = a->slot + lane * slots;
        for (int i = 0; i < held; i++) position[i] = s->position[i], slot[i] = s->slot[i];
        for (int i = held; i < slots; i++) position[i] = -1, slot[i] = i;
        return 0;
    }
#ifdef HAVE_X86
    switch (a->path) {
    case PATH_PLAIN: breach = mark_retained_plain(a, lane, s); break;
    case PATH_AVX2: breach = mark_retained_256(a, lane, s); break;
    default: breach = mark_retained_512(a, lane, s);
    }
#else
    breach = mark_retained_plain(a, lane, s);
#endif
    if (breach) /* the number of retained slots is known elsewhere */
        for (int i = 0; i < held; i++) s->kept[i] = i >= held - a->keep[lane];
    list_lane(a, lane, s, breach);
    return 0;
}

typedef struct {
    const lane_args *args;
    _Atomic int failed;
} lane_work;

static void select_lanes(int64_t begin, int64_t end, void *context) {
    lane_work *work = context;
    size_t slots = (size_t)padded(work->args->slots);
    uint8_t *memory = malloc(slots * (8 + 6 * 4 + 2) + 64);
    lane_scratch s = {.wide = (int64_t *)memory};
    int failed = memory == NULL;
    if (memory) {
        int32_t **arrays[] = {&s.position, &s.slot, &s.stored, &s.bits, &s.keys, &s.masks};
        int32_t *next = (int32_t *)(s.wide + slots);
        for (int i = 0; i < 6; i++, next += slots) *arrays[i] = next;
        s.kept = (uint8_t *)next, s.marks = s.kept + slots;
    }
    for (int64_t lane = begin; lane < end && !failed; lane++) failed = select_lane(work->args, lane, &s);
    if (failed) work->failed = 1;
    free(s.words);
    free(memory);
}

typedef int32_t (*parallel_for)(int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void *), void *);

#define SLOTS_A_THREAD 16384

/* Order the slots of lanes, or select those to retain; 0 on success. `run` is torch's parallel_for, or NULL. */
int quire_lanes(const lane_args *args, parallel_for run) {
    lane_work work = {args, 0};
    int64_t together = 1 + SLOTS_A_THREAD / (args->slots + 1);
    if (run == NULL || args->lanes <= together) select_lanes(0, args->lanes, &work);
    else if (run(0, args->lanes, together, select_lanes, &work)) return 1;
    return work.failed;
}

int64_t quire_lane_args_size(void) { return sizeof(lane_args); }
int64_t quire_free_args_size(void) { return sizeof(free_args); }
int64_t quire_best_args_size(void) { return sizeof(best_args); }
int64_t quire_align_args_size(void) { return sizeof(align_args); }
int64_t quire_sign_args_size(void) { return sizeof(sign_args); }
int64_t quire_represent_args_size(void) { return sizeof(represent_args); }
int64_t quire_retain_args_size(void) { return sizeof(retain_args); }
