/* Copies slots of a plane to other slots, for compaction.
 *
 * A slot can be source and target in the same call: all sources are read before any target is written.
 * The slots are scattered and rarely in a cache, so they are prefetched some moves ahead.
 *
 * `move_lanes` moves slots within lanes whose holes are filled from their ends: no slot is source and target, so that
 * it copies without scratch memory, in all planes of a page class.
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

/* LaneMoveArgs in arguments.py mirrors these. */
typedef struct {
    uint8_t *plane; /* as of move_args */
    int64_t vector_bytes;
    int32_t heads_per_page, unused;
} moved_plane;

typedef struct {
    const moved_plane *planes;
    const int32_t *pages;  /* [lanes, columns] */
    const int32_t *moves;  /* [lanes, 2, max_moves] source and target slots */
    const int32_t *counts; /* number of moves of lane n at n * count_stride */
    int64_t page_bytes;
    int32_t num_planes, lanes, columns, max_moves, count_stride, page_tokens;
} lane_move_args;

static uint8_t *lane_slot(const lane_move_args *a, const moved_plane *p, int64_t lane, int32_t slot) {
    int32_t column = slot / a->page_tokens;
    int64_t page = a->pages[lane * a->columns + column];
    return p->plane + page * a->page_bytes + (slot - column * a->page_tokens) * p->vector_bytes;
}

static void move_lanes(int64_t begin, int64_t end, void *context) {
    const lane_move_args *a = context;
    for (int64_t lane = begin; lane < end; lane++) {
        const int32_t *source = a->moves + lane * 2 * a->max_moves, *target = source + a->max_moves;
        int32_t count = a->counts[lane * a->count_stride];
        for (const moved_plane *p = a->planes; p < a->planes + a->num_planes; p++)
            for (int32_t move = 0; move < count; move++) {
                if (move + MOVES_AHEAD < count) {
                    __builtin_prefetch(lane_slot(a, p, lane, source[move + MOVES_AHEAD]));
                    __builtin_prefetch(lane_slot(a, p, lane, target[move + MOVES_AHEAD]), 1);
                }
                const uint8_t *from = lane_slot(a, p, lane, source[move]);
                uint8_t *to = lane_slot(a, p, lane, target[move]);
                for (int32_t head = 0; head < p->heads_per_page; head++)
                    memcpy(to + head * a->page_tokens * p->vector_bytes,
                           from + head * a->page_tokens * p->vector_bytes, (size_t)p->vector_bytes);
            }
    }
}

#endif
