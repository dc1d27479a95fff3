/* Random numbers of the harnesses: the same in every run. */
#ifndef RANDOM_NUMBERS_H
#define RANDOM_NUMBERS_H

#include <stdint.h>

static uint64_t state = 88172645463325252ull;

static uint64_t random_bits(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static int between(int low, int high) { return low + (int)(random_bits() % (uint64_t)(high - low + 1)); }
static float number(void) { return (float)(random_bits() >> 40) / 8388608.0f - 1.0f; }

#endif
