/* Decodes single vectors in portable C, for packing in blocks and for walks without vector
 * instructions. A byte of several codes holds one code from each of several segments of the vector. */
#ifndef QUIRE_CODES_H
#define QUIRE_CODES_H

#include "numbers.h"

/* Convert an 8-bit float (e4m3). */
static inline float from_e4m3(uint8_t bits) {
    return from_f16((uint16_t)((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256;
}

static inline float half_at(const uint8_t *plane, int64_t page_at, int64_t number) {
    return from_f16(((const uint16_t *)(plane + page_at))[number]);
}

/* Read channel and value of a slot's outlier; return 0 if the channel is invalid. */
static inline int outlier_at(const coding *c, place p, int number, int *channel, float *value) {
    int64_t at = p.record * c->num_outliers + number;
    const uint8_t *indices = c->indices + p.page_at;
    *channel = c->index_bytes == 1 ? indices[at] : ((const int16_t *)indices)[at];
    *value = half_at(c->outliers, p.page_at, at);
    return *channel >= 0 && *channel < c->dim;
}

static inline void decode_bits(const coding *c, const uint8_t *codes, float *out) {
    int segment = c->dim * c->bits / 8, most = (1 << c->bits) - 1;
    for (int s = 0; s < 8 / c->bits; s++)
        for (int d = 0; d < segment; d++)
            out[s * segment + d] = (float)(codes[d] >> (s * c->bits) & most);
}

static inline void decode_vector(const coding *c, const uint8_t *plane, place p, float *out) {
    const uint8_t *codes = vector_at(plane, c, p);
    int dim = c->dim;
    if (c->kind == PLAIN_NUMBERS)
        for (int d = 0; d < dim; d++) out[d] = load_number(codes, d, c->dtype);
    else if (c->kind == INT8_CODES)
        for (int d = 0; d < dim; d++) out[d] = (float)(int8_t)codes[d];
    else if (c->kind == FP8_CODES)
        for (int d = 0; d < dim; d++) out[d] = from_e4m3(codes[d]);
    else decode_bits(c, codes, out);
    int groups = c->scales ? dim / c->channels : 0;
    for (int g = 0; g < groups; g++) {
        float scale = half_at(c->scales, p.page_at, p.record * groups + g);
        float zero = c->zeros ? half_at(c->zeros, p.page_at, p.record * groups + g) : 0;
        for (int d = g * c->channels; d < (g + 1) * c->channels; d++) out[d] = out[d] * scale + zero;
    }
    for (int o = 0; o < c->num_outliers; o++) {
        int channel;
        float value;
        if (outlier_at(c, p, o, &channel, &value)) out[channel] = value;
    }
}

#endif
