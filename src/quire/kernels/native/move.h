/* Copies slots of a plane to other slots, for compaction.
 *
 * A slot can be source and target in the same call: all sources are read before any target is written.
 * The slots are scattered and rarely in a cache, so they are prefetched some moves ahead.
 */
#ifndef QUIRE_MOVE_H
#define QUIRE_MOVE_H

#include <string.h>

#include "args.h"

#define MOVES_AHEAD 16

/* MoveArgs in arguments.py mirrors this. */
typedef struct {
    uint8_t *plane; /* page n at n * page_bytes, in it [heads_per_page, page_tokens] vectors */
    int64_t page_bytes, vector_bytes;
    const int64_t *pages[2], *offsets[2]; /* [num_moves] of sources and targets */
    uint8_t *scratch;                     /* [num_moves, heads_per_page] vectors */
    int64_t num_moves;
    int32_t heads_per_page, page_tokens;
} move_args;

static uint8_t *moved_slot(const move_args *a, int end, int64_t move, int head) {
    int64_t slot = (int64_t)head * a->page_tokens + a->offsets[end][move];
    return a->plane + a->pages[end][move] * a->page_bytes + slot * a->vector_bytes;
}

static void prefetch_slot(const move_args *a, int end, int64_t move) {
    for (int head = 0; head < a->heads_per_page; head++)
        for (int64_t i = 0; i < a->vector_bytes; i += 64)
            if (end) __builtin_prefetch(moved_slot(a, end, move, head) + i, 1);
            else __builtin_prefetch(moved_slot(a, end, move, head) + i);
}

static void copy_slots(const move_args *a, int end, int64_t first, int64_t last) {
    for (int64_t move = first; move < first + MOVES_AHEAD && move < last; move++) prefetch_slot(a, end, move);
    for (int64_t move = first; move < last; move++) {
        if (move + MOVES_AHEAD < last) prefetch_slot(a, end, move + MOVES_AHEAD);
        for (int head = 0; head < a->heads_per_page; head++) {
            uint8_t *kept = a->scratch + (move * a->heads_per_page + head) * a->vector_bytes;
            uint8_t *slot = moved_slot(a, end, move, head);
            memcpy(end ? slot : kept, end ? kept : slot, (size_t)a->vector_bytes);
        }
    }
}

static void read_moves(int64_t begin, int64_t end, void *context) { copy_slots(context, 0, begin, end); }
static void write_moves(int64_t begin, int64_t end, void *context) { copy_slots(context, 1, begin, end); }

#endif
