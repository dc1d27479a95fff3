/* Writes the keys and values of a step's tokens to their slots, as they are or as codes.
 *
 * The slots of decode rows are scattered and rarely in a cache. All cache lines of several tokens are
 * prefetched before they are written, so that their latencies overlap.
 *
 * Bounds of a page's keys are widened after that, head by head, so that the tokens of a page are in order. The
 * first slot of a page begins new bounds.
 */
#ifndef QUIRE_WRITE_H
#define QUIRE_WRITE_H

#include <string.h>

#include "encode.h"

#define TOKENS_AHEAD 16

/* WriteArgs in arguments.py mirrors this. Strides are in bytes. */
typedef struct {
    uint8_t *plane[2]; /* keys, values: page n at n * page_bytes */
    const uint8_t *fresh[2]; /* [tokens, lanes * heads_per_page, dim] */
    int64_t token_stride[2], head_stride[2];
    int64_t page_bytes;
    const int64_t *pages, *offsets; /* [tokens, lanes] */
    int32_t num_tokens, num_lanes, heads_per_page, page_tokens;
    int32_t dtype, path, coded, bounds_dtype; /* dtype of `fresh`; coded: slots store codes */
    coding codings[2]; /* also of plain pages */
    uint8_t *bounds;   /* plane of [heads_per_page, 2, dim]: minima and maxima of a page's keys; or NULL */
} write_args;

INLINE place new_place(const write_args *a, int64_t token, int head) {
    int64_t index = token * a->num_lanes + head / a->heads_per_page;
    place p = {a->pages[index] * a->page_bytes,
               (int64_t)(head % a->heads_per_page) * a->page_tokens + a->offsets[index]};
    return p;
}

static uint8_t *slot_of(const write_args *a, int which, int64_t token, int head) {
    place p = new_place(a, token, head);
    return a->plane[which] + p.page_at + p.record * a->codings[which].vector_bytes;
}

INLINE void encode_tokens(const write_args *a, int64_t begin, int64_t end) {
    int heads = a->num_lanes * a->heads_per_page;
    for (int64_t token = begin; token < end; token++)
        for (int head = 0; head < heads; head++) {
            place p = new_place(a, token, head);
            for (int which = 0; which < 2; which++)
                encode_vector(&a->codings[which],
                              a->fresh[which] + token * a->token_stride[which] + head * a->head_stride[which],
                              a->dtype, a->plane[which], p);
        }
}

static void encode_tokens_plain(int64_t begin, int64_t end, void *context) { encode_tokens(context, begin, end); }
#ifdef HAVE_X86
static AVX2 void encode_tokens_256(int64_t begin, int64_t end, void *context) { encode_tokens(context, begin, end); }
static AVX512 void encode_tokens_512(int64_t begin, int64_t end, void *context) { encode_tokens(context, begin, end); }
#endif

static void write_tokens(int64_t begin, int64_t end, void *context) {
    const write_args *a = context;
    int heads = a->num_lanes * a->heads_per_page;
    for (int64_t first = begin; first < end; first += TOKENS_AHEAD) {
        int64_t last = first + TOKENS_AHEAD < end ? first + TOKENS_AHEAD : end;
        for (int64_t token = first; token < last; token++)
            for (int head = 0; head < heads; head++)
                for (int which = 0; which < 2; which++)
                    for (int64_t i = 0; i < a->codings[which].vector_bytes; i += 64)
                        __builtin_prefetch(slot_of(a, which, token, head) + i, 1);
        for (int64_t token = first; token < last; token++)
            for (int head = 0; head < heads; head++)
                for (int which = 0; which < 2; which++)
                    memcpy(slot_of(a, which, token, head),
                           a->fresh[which] + token * a->token_stride[which] + head * a->head_stride[which],
                           (size_t)a->codings[which].vector_bytes);
    }
}

INLINE void widen_bounds(const write_args *a, int64_t begin, int64_t end) {
    const coding *c = &a->codings[0];
    int dim = c->dim, dtype = a->bounds_dtype;
    float key[MAX_HEAD_DIM];
    for (int64_t head = begin; head < end; head++)
        for (int64_t token = 0; token < a->num_tokens; token++) {
            place p = new_place(a, token, (int)head);
            int64_t first = head % a->heads_per_page * 2 * dim;
            int begins = p.record % a->page_tokens == 0;
            float *wide = (float *)(a->bounds + p.page_at) + first;
            uint16_t *half = (uint16_t *)(a->bounds + p.page_at) + first;
            decode_vector(c, a->plane[0], p, key);
            for (int d = 0; d < dim; d++) {
                int lower = begins || key[d] < load_number(dtype == F32 ? (void *)wide : half, d, dtype);
                int higher = begins || key[d] > load_number(dtype == F32 ? (void *)wide : half, dim + d, dtype);
                if (lower && dtype == F32) wide[d] = key[d];
                else if (lower) half[d] = dtype == BF16 ? to_bf16(key[d]) : half_below(key[d]);
                if (higher && dtype == F32) wide[dim + d] = key[d];
                else if (higher) half[dim + d] = dtype == BF16 ? to_bf16(key[d]) : half_above(key[d]);
            }
        }
}

static void widen_plain(int64_t begin, int64_t end, void *context) { widen_bounds(context, begin, end); }
#ifdef HAVE_X86
static AVX512 void widen_512(int64_t begin, int64_t end, void *context) { widen_bounds(context, begin, end); }
#endif

#endif
