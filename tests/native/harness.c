/* Runs attention.c under the address and undefined-behaviour sanitizers.
 *
 * Random lanes in pages that end at the end of their allocation, compared with plain attention in double precision:
 * walks, merged walks, blocks, whole and partial rows, column sums. Free slots contain NaN. Then sample.c: tokens
 * within the limits of their rows. Exit code 0 if all agree.
 */
#include <stdio.h>
#include <stdlib.h>

#include "attention.c"
#include "sample.c"
#include "random_numbers.h"

static int one_case(int path, int dtype) {
    int dims[] = {8, 33, 64, 80, 128, 192, 256}, dim = dims[between(0, 6)], tokens = between(0, 1) ? 16 * between(1, 2) : between(1, 35);
    int lanes = between(1, 2), heads = between(1, 2), group = between(1, 5), rows = between(1, 3);
    int item = dtype == F32 ? 4 : 2, total = 0, widest = 0, width[2] = {dim, between(0, 1) ? dim : dims[between(0, 6)]};
    int64_t value_at = (int64_t)heads * tokens * dim, page_bytes = (int64_t)heads * tokens * (dim + width[1]) * item, row_ids[3], starts[3];
    int32_t slots[6], new_tokens[3];
    for (int r = 0; r < rows; r++) {
        row_ids[r] = r;
        starts[r] = total;
        total += new_tokens[r] = between(0, 1) ? 1 : between(2, 40);
        for (int l = 0; l < lanes; l++) {
            slots[r * lanes + l] = new_tokens[r] + between(0, 300);
            if (slots[r * lanes + l] > widest) widest = slots[r * lanes + l];
        }
    }
    int capacity = (widest + tokens - 1) / tokens, pages = rows * lanes * capacity;
    uint8_t *arena = malloc((size_t)(pages * page_bytes));
    int32_t *table = malloc(sizeof(int32_t) * pages);
    int has_blocks = quire_block_queries(path, dim) && quire_block_queries(path, width[1]);
    int joined = has_blocks && between(0, 1), num_heads = lanes * heads * group, wide = dim + joined * width[1];
    size_t query_count = (size_t)total * num_heads * wide;
    uint8_t *query = malloc(query_count * item), *out = malloc((size_t)total * num_heads * width[1] * item);
    float *sinks = between(0, 1) ? malloc(sizeof(float) * num_heads) : NULL;
    float *sums = between(0, 1) ? calloc((size_t)rows * num_heads * widest, sizeof(float)) : NULL;
    double *expected_sums = calloc((size_t)rows * num_heads * widest, sizeof(double));
    int window = between(0, 1) ? between(1, 60) : 0;
    part walks[60], blocks[12], merges[3], sum_parts[9];
    int num_walks = 0, num_blocks = 0, num_merges = 0, num_sums = 0, num_partials = 0;
    for (int r = 0; r < rows; r++) {
        if (new_tokens[r] > 1 && has_blocks && between(0, 1)) { /* in one part */
            blocks[num_blocks++] = (part){r, 0, new_tokens[r] * group, 1};
        } else if (new_tokens[r] > 1 && has_blocks) {
            for (int first = 0; first < new_tokens[r] * group; first += 50, num_blocks++) {
                int left = new_tokens[r] * group - first;
                blocks[num_blocks] = (part){r, first, left < 50 ? left : 50, -1};
            }
            for (int first = 0; first < widest; first += 256)
                sum_parts[num_sums++] = (part){r, first, 256, -1};
        } else if (new_tokens[r] == 1 && !window && between(0, 1)) { /* in several parts */
            merges[num_merges++] = (part){r, 0, (widest + 63) / 64, num_partials};
            for (int first = 0; first < widest; first += 64)
                walks[num_walks++] = (part){r, first, 64, num_partials++};
        } else {
            walks[num_walks++] = (part){r, 0, widest, -1};
        }
    }
    float *normalisers = malloc(sizeof(float) * 2 * total * num_heads);
    float *partials = malloc(sizeof(float) * num_heads * (num_partials + 1) * (width[1] + 2));
    int64_t scratch_bytes = quire_scratch_bytes(wide, width[1], sums ? widest : 0, heads);
    uint8_t *scratch = aligned_alloc(64, scratch_bytes);
    for (int64_t i = 0; i < pages * page_bytes / item; i++) store_number(arena, i, dtype, NAN);
    for (int i = 0; i < pages; i++) table[i] = pages - 1 - i;
    for (size_t i = 0; i < query_count; i++) store_number(query, (int64_t)i, dtype, number());
    for (int i = 0; sinks && i < num_heads; i++) sinks[i] = number();
    for (int r = 0; r < rows; r++)
        for (int l = 0; l < lanes; l++)
            for (int s = 0; s < slots[r * lanes + l]; s++)
                for (int h = 0; h < 2 * heads; h++)
                    for (int d = 0; d < width[h / heads]; d++) {
                        int64_t page = table[(r * lanes + l) * capacity + s / tokens] * page_bytes / item + h / heads * value_at;
                        store_number(arena, page + ((int64_t)(h % heads) * tokens + s % tokens) * width[h / heads] + d, dtype, number());
                    }
    coding plain[2];
    for (int k = 0; k < 2; k++)
        plain[k] = (coding){.vector_bytes = width[k] * item, .kind = PLAIN_NUMBERS, .dtype = dtype, .channels = width[k],
                            .run = width[k], .num_runs = 1, .dim = width[k]};
    attention_args a = {
        .key = arena, .value = arena + value_at * item, .page_bytes = page_bytes, .table = table,
        .table_row_stride = (int64_t)lanes * capacity, .table_lane_stride = capacity, .rows = row_ids,
        .slots = slots, .starts = starts, .tokens = new_tokens, .query = query,
        .query_token_stride = (int64_t)num_heads * wide, .query_head_stride = wide, .out = out, .joined = joined,
        .sinks = sinks, .column_sums = sums, .sums_stride = widest, .normalisers = sums ? normalisers : NULL,
        .partials = partials, .scratch = scratch, .scratch_bytes = scratch_bytes, .walks = walks,
        .blocks = blocks, .merges = merges, .sums = sum_parts, .num_walks = num_walks,
        .num_blocks = num_blocks, .num_merges = num_merges, .num_sums = sums ? num_sums : 0,
        .num_partials = num_partials, .num_lanes = lanes, .heads_per_page = heads, .group = group, .heads_together = !joined && between(0, 1) ? heads : 1, .head_dim = wide,
        .page_tokens = tokens, .dtype = dtype, .window = window,
        .scale = 0.3f, .softcap = between(0, 2) ? 0 : 2.5f, .path = path,
        .key_coding = plain[0], .value_coding = plain[1],
    };
    if (quire_attend(&a, NULL, 1)) return 1;
    double worst = 0, *weight = malloc(sizeof(double) * widest);
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < new_tokens[r]; n++)
            for (int h = 0; h < num_heads; h++) {
                int kv = h / group, lane = kv / heads, own = slots[r * lanes + lane] - new_tokens[r] + n;
                int first = a.window && own + 1 > a.window ? own + 1 - a.window : 0;
                double top = sinks ? sinks[h] : -INFINITY, sum = 0;
                int64_t q = ((starts[r] + n) * num_heads + h) * (int64_t)wide;
                for (int s = first; s <= own; s++) {
                    int64_t page = table[(r * lanes + lane) * capacity + s / tokens];
                    int64_t at = page * page_bytes / item + ((int64_t)(kv % heads) * tokens + s % tokens) * dim;
                    int64_t of_value = page * page_bytes / item + value_at + ((int64_t)(kv % heads) * tokens + s % tokens) * width[1];
                    double product = 0;
                    for (int d = 0; d < wide - dim; d++)
                        product += (double)load_number(query, q + d, dtype) * load_number(arena, of_value + d, dtype);
                    for (int d = 0; d < dim; d++)
                        product += (double)load_number(query, q + wide - dim + d, dtype) * load_number(arena, at + d, dtype);
                    product *= a.scale;
                    if (a.softcap > 0) product = a.softcap * tanh(product / a.softcap);
                    weight[s] = product;
                    top = product > top ? product : top;
                }
                if (sinks) sum = exp(sinks[h] - top);
                for (int s = first; s <= own; s++) sum += weight[s] = exp(weight[s] - top);
                for (int s = first; s <= own; s++)
                    expected_sums[((int64_t)r * num_heads + h) * widest + s] += weight[s] / sum;
                for (int d = 0; d < width[1]; d++) {
                    double expected = 0;
                    for (int s = first; s <= own; s++) {
                        int64_t page = table[(r * lanes + lane) * capacity + s / tokens];
                        int64_t at = page * page_bytes / item + value_at + ((int64_t)(kv % heads) * tokens + s % tokens) * width[1];
                        expected += weight[s] / sum * load_number(arena, at + d, dtype);
                    }
                    double error = fabs(expected - load_number(out, q / wide * width[1] + d, dtype));
                    if (!(error <= worst)) worst = error;
                }
            }
    for (int64_t i = 0; sums && i < (int64_t)rows * num_heads * widest; i++)
        if (!(fabs(expected_sums[i] - sums[i]) <= worst)) worst = fabs(expected_sums[i] - sums[i]);
    free(expected_sums), free(normalisers), free(partials), free(scratch);
    free(arena), free(table), free(query), free(out), free(sinks), free(sums), free(weight);
    double allowed = dtype == F32 ? 2e-5 : dtype == BF16 ? 2e-2 : 4e-3;
    if (worst <= allowed) return 0;
    fprintf(stderr, "path %d dtype %d dims %d %d: error %g\n", path, dtype, dim, width[1], worst);
    return 1;
}

/* A random coding of vectors; its planes are consecutive from *at on, in bytes of a page. */
static coding some_coding(int dim, int records, int64_t *at, int64_t *codes) {
    int kind = dim % 4 ? 0 : between(0, 3), bits = kind == BIT_CODES ? 2 << between(0, 1) : 8;
    int channels = kind == BIT_CODES && between(0, 1) ? dim / 4 : dim, stretch = dim * bits / 8, run = channels;
    while (kind == BIT_CODES && (stretch % run || channels % run)) run--;
    int groups = kind == PLAIN_NUMBERS ? 0 : dim / channels, outliers = kind == BIT_CODES ? between(0, 2) : 0;
    coding c = {.kind = kind, .dtype = F32, .bits = bits, .channels = channels, .run = run,
                .num_runs = dim / run, .num_outliers = outliers, .index_bytes = 1, .dim = dim,
                .vector_bytes = kind == PLAIN_NUMBERS ? 4 * dim : stretch};
    int64_t here = *at, half = 2ll * groups * records;
#define LAY(bytes) ((const uint8_t *)(here += (bytes + 3) / 4 * 4) - (bytes + 3) / 4 * 4)
    *codes = here, here += (c.vector_bytes * records + 3) / 4 * 4;
    if (groups) c.scales = LAY(half);
    if (kind == BIT_CODES) c.zeros = LAY(half);
    if (outliers) c.outliers = LAY(2ll * outliers * records), c.indices = LAY((int64_t)outliers * records);
#undef LAY
    *at = here;
    return c;
}

/* Attention over codes equals attention over the decoded vectors; pages end at the end of their allocation. */
static int one_coded(int path) {
    int dims[] = {8, 12, 33, 64, 96, 128, 256}, dim = dims[between(0, 6)], values = between(0, 1) ? dim : dims[between(0, 6)], tokens = between(1, 35);
    int heads = between(1, 3), group = between(1, 9), count = between(0, 1) ? 1 : between(2, 30);
    int32_t slots = count + between(0, 200), columns = (slots + tokens - 1) / tokens, new_tokens = count;
    int64_t page_bytes = 0, codes[2], zero = 0;
    coding key = some_coding(dim, heads * tokens, &page_bytes, &codes[0]);
    coding value = some_coding(values, heads * tokens, &page_bytes, &codes[1]);
    uint8_t *arena = malloc((size_t)(page_bytes * columns));
    coding *both[2] = {&key, &value};
    for (int64_t i = 0; i < page_bytes * columns; i++) arena[i] = (uint8_t)random_bits();
    for (int side = 0; side < 2; side++) {
        const uint8_t **planes[4] = {&both[side]->scales, &both[side]->zeros, &both[side]->outliers, &both[side]->indices};
        coding *c = both[side];
        for (int k = 0; k < 4; k++)
            if (*planes[k]) *planes[k] = arena + (int64_t)*planes[k]; /* after the codes */
        for (int64_t p = 0; p < columns; p++) {
            int halves = heads * tokens * (c->dim / c->channels);
            for (int i = 0; c->scales && i < halves; i++) ((uint16_t *)(c->scales + p * page_bytes))[i] = to_f16(0.01f * fabsf(number())); /* as of codecs */
            for (int i = 0; c->zeros && i < halves; i++) ((uint16_t *)(c->zeros + p * page_bytes))[i] = to_f16(number());
            for (int i = 0; c->num_outliers && i < heads * tokens * c->num_outliers; i++) {
                ((uint16_t *)(c->outliers + p * page_bytes))[i] = to_f16(number());
                ((uint8_t *)(c->indices + p * page_bytes))[i] = (uint8_t)((i % c->num_outliers) * c->dim / 2 + between(0, c->dim / 2 - 1));
            }
            for (int i = 0; c->kind == PLAIN_NUMBERS && i < heads * tokens * c->dim; i++) ((float *)(arena + codes[side] + p * page_bytes))[i] = number();
        }
    }
    int32_t *table = malloc(sizeof(int32_t) * columns);
    for (int i = 0; i < columns; i++) table[i] = columns - 1 - i;
    int has_blocks = quire_block_queries(path, dim) && quire_block_queries(path, values);
    int joined = has_blocks && between(0, 1), num_heads = heads * group, wide = dim + joined * values;
    float *query = malloc(sizeof(float) * count * num_heads * wide), *out = malloc(sizeof(float) * count * num_heads * values);
    float *sums = calloc((size_t)num_heads * slots, sizeof(float)), *normalisers = malloc(sizeof(float) * 2 * count * num_heads);
    int dtype = between(0, 1) ? BF16 : F32, numbers = count * num_heads * wide, outputs = count * num_heads * values;
    uint16_t *half_query = malloc(2 * numbers), *half_out = malloc(2 * outputs);
    for (int i = 0; i < numbers; i++) {
        half_query[i] = to_bf16(query[i] = number());
        if (dtype == BF16) query[i] = from_bf16(half_query[i]);
    }
    int blocked = count > 1 && has_blocks;
    part whole = {0, 0, blocked ? count * group : slots, blocked ? 1 : -1};
    int64_t scratch_bytes = quire_scratch_bytes(wide, values, slots, heads);
    uint8_t *scratch = aligned_alloc(64, scratch_bytes);
    attention_args a = {
        .key = arena + codes[0], .value = arena + codes[1], .page_bytes = page_bytes, .table = table,
        .table_row_stride = columns, .table_lane_stride = columns, .rows = &zero, .slots = &slots,
        .starts = &zero, .tokens = &new_tokens, .query = dtype == BF16 ? (void *)half_query : query, .query_token_stride = (int64_t)num_heads * wide,
        .query_head_stride = wide, .joined = joined, .out = dtype == BF16 ? (void *)half_out : out, .column_sums = sums, .sums_stride = slots,
        .normalisers = normalisers, .scratch = scratch, .scratch_bytes = scratch_bytes, .walks = &whole,
        .blocks = &whole, .num_walks = !blocked, .num_blocks = blocked, .num_lanes = 1, .heads_per_page = heads,
        .group = group, .heads_together = !joined && between(0, 1) ? heads : 1, .head_dim = wide, .page_tokens = tokens,
        .dtype = dtype, .scale = 0.3f, .path = path, .coded = 1, .key_coding = key, .value_coding = value,
    };
    if (quire_attend(&a, NULL, 1)) return 1;
    for (int i = 0; dtype == BF16 && i < outputs; i++) out[i] = from_bf16(half_out[i]);
    double worst = 0, *weight = malloc(sizeof(double) * slots), *expected = malloc(sizeof(double) * values);
    float *vector = malloc(sizeof(float) * (dim + values));
    for (int h = 0; h < num_heads; h++)
        for (int n = 0; n < count; n++) {
            lane l = lane_of(&a, 0, h / group);
            const float *q = query + ((int64_t)n * num_heads + h) * wide, *got = out + (q - query) / wide * values;
            double top = -INFINITY, sum = 0;
            int own = slots - count + n;
            for (int s = 0; s <= own; s++) {
                if (joined) decode_vector(&value, a.value, place_of(&a, &l, s), vector);
                decode_vector(&key, a.key, place_of(&a, &l, s), vector + wide - dim);
                weight[s] = 0;
                for (int d = 0; d < wide; d++) weight[s] += (double)q[d] * vector[d] * a.scale;
                top = fmax(top, weight[s]);
            }
            for (int s = 0; s <= own; s++) sum += weight[s] = exp(weight[s] - top);
            for (int d = 0; d < values; d++) expected[d] = 0;
            for (int s = 0; s <= own; s++) {
                decode_vector(&value, a.value, place_of(&a, &l, s), vector);
                for (int d = 0; d < values; d++) expected[d] += weight[s] / sum * vector[d];
                sums[(int64_t)h * slots + s] -= (float)(weight[s] / sum);
            }
            for (int d = 0; d < values; d++) {
                double error = fabs(expected[d] - got[d]);
                if (dtype == BF16) error -= fabs(expected[d]) / 250; /* rounding error of at most 1/256 */
                if (!(error <= worst)) worst = error;
            }
        }
    for (int i = 0; i < num_heads * slots; i++)
        if (!(fabs(sums[i]) <= worst)) worst = fabs(sums[i]);
    free(arena), free(table), free(query), free(out), free(sums), free(normalisers), free(scratch);
    free(weight), free(expected), free(vector), free(half_query), free(half_out);
    double allowed = value.kind == FP8_CODES || key.kind == FP8_CODES ? 1e-3 : 5e-5; /* up to 448 */
    if (joined && multiplies_pairs(&a)) allowed = 2e-2; /* codes and weights are rounded to bfloat16 */
    if (worst <= allowed) return 0;
    fprintf(stderr, "path %d dims %d %d codes %d %d: error %g\n", path, dim, values, key.kind, value.kind, worst);
    return 1;
}

/* Every new vector is written to its slot, in planes that end at the end of their allocation. */
static int one_write(void) {
    int tokens = between(1, 40), lanes = between(1, 3), heads = between(1, 3), per_page = between(1, 17);
    int bytes[2] = {2 * between(1, 130), 2 * between(1, 130)}, pages = (tokens + per_page - 1) / per_page * lanes, all = lanes * heads;
    int64_t plane_bytes = (int64_t)heads * per_page * bytes[0], page_bytes = plane_bytes + (int64_t)heads * per_page * bytes[1];
    uint8_t *arena = calloc((size_t)pages, page_bytes), *fresh[2];
    int64_t *page = malloc(sizeof(int64_t) * tokens * lanes), *offset = malloc(sizeof(int64_t) * tokens * lanes);
    for (int k = 0; k < 2; k++) {
        size_t fresh_bytes = (size_t)tokens * all * bytes[k];
        fresh[k] = malloc(fresh_bytes);
        for (size_t i = 0; i < fresh_bytes; i++) fresh[k][i] = (uint8_t)random_bits();
    }
    for (int t = 0; t < tokens; t++)
        for (int l = 0; l < lanes; l++) {
            page[t * lanes + l] = pages - 1 - (t / per_page * lanes + l);
            offset[t * lanes + l] = t % per_page;
        }
    write_args a = {
        .plane = {arena, arena + plane_bytes}, .fresh = {fresh[0], fresh[1]},
        .token_stride = {bytes[0], (int64_t)all * bytes[1]}, .head_stride = {(int64_t)tokens * bytes[0], bytes[1]},
        .codings = {{.vector_bytes = bytes[0]}, {.vector_bytes = bytes[1]}}, .page_bytes = page_bytes, .pages = page, .offsets = offset,
        .num_tokens = tokens, .num_lanes = lanes, .heads_per_page = heads, .page_tokens = per_page,
    };
    int wrong = quire_write(&a, NULL);
    for (int k = 0; k < 2; k++)
        for (int t = 0; t < tokens; t++)
            for (int h = 0; h < all; h++) {
                int place = t * lanes + h / heads;
                int64_t slot = (int64_t)(h % heads) * per_page + offset[place];
                wrong |= memcmp(arena + page[place] * page_bytes + k * plane_bytes + slot * bytes[k],
                                fresh[k] + t * a.token_stride[k] + h * a.head_stride[k], bytes[k]);
            }
    free(arena), free(fresh[0]), free(fresh[1]), free(page), free(offset);
    if (wrong) fprintf(stderr, "a written slot differs\n");
    return wrong != 0;
}

/* New vectors become codes that decode to them, in planes that end at the end of their allocation. */
static int one_encoding(int path) {
    int tokens = between(1, 20), lanes = between(1, 3), heads = between(1, 3), per_page = between(1, 17);
    int dtype = between(0, 2), item = dtype == F32 ? 4 : 2, dim = 8 * between(1, 20), kind = between(0, 2);
    int bits = between(0, 1) ? 4 : 2, channels = kind == BIT_CODES && between(0, 1) ? 8 : dim, groups = dim / channels;
    int bytes = kind == PLAIN_NUMBERS ? 2 * dim : kind == INT8_CODES ? dim : dim * bits / 8;
    int pages = (tokens + per_page - 1) / per_page * lanes, all = lanes * heads;
    int64_t records = (int64_t)heads * per_page, plane = records * (bytes + 4 * groups), page_bytes = 2 * (plane + plane % 2);
    size_t fresh_bytes = (size_t)tokens * all * dim * item;
    uint8_t *arena = malloc((size_t)(pages * page_bytes)), *fresh = malloc(fresh_bytes);
    int64_t *page = malloc(sizeof(int64_t) * tokens * lanes), *offset = malloc(sizeof(int64_t) * tokens * lanes);
    for (int64_t i = 0; i < (int64_t)tokens * all * dim; i++) store_number(fresh, i, dtype, 9 * number());
    for (int i = 0; i < tokens * lanes; i++) {
        page[i] = pages - 1 - (i / lanes / per_page * lanes + i % lanes);
        offset[i] = i / lanes % per_page;
    }
    write_args a = {
        .fresh = {fresh, fresh}, .token_stride = {(int64_t)all * dim * item, (int64_t)all * dim * item},
        .head_stride = {dim * item, dim * item}, .page_bytes = page_bytes, .pages = page, .offsets = offset,
        .num_tokens = tokens, .num_lanes = lanes, .heads_per_page = heads, .page_tokens = per_page,
        .dtype = dtype, .path = path, .coded = 1,
    };
    for (int k = 0; k < 2; k++) {
        uint8_t *start = arena + k * (page_bytes / 2); /* scales and zeros first: they are float16 */
        coding c = {start, start + 2 * groups * records, NULL, NULL, bytes, kind, BF16, bits, channels, 1, 1, 0, 0, dim, 0};
        if (kind != BIT_CODES) c.zeros = NULL;
        if (kind == PLAIN_NUMBERS) c.scales = NULL;
        a.codings[k] = c, a.plane[k] = start + 4 * groups * records;
    }
    int wrong = quire_write(&a, NULL);
    for (int i = 0; i < tokens * all * 2 && !wrong; i++) {
        int token = i / 2 / all, head = i / 2 % all, index = token * lanes + head / heads;
        const coding *c = &a.codings[i % 2];
        place p = {page[index] * page_bytes, (int64_t)(head % heads) * per_page + offset[index]};
        float out[MAX_HEAD_DIM];
        decode_vector(c, a.plane[i % 2], p, out);
        for (int d = 0; d < dim; d++) {
            float scale = c->scales ? half_at(c->scales, p.page_at, p.record * groups + d / channels) : 0.08f;
            float x = load_number(fresh, ((int64_t)token * all + head) * dim + d, dtype);
            wrong |= fabsf(out[d] - x) > 0.501f * scale + 1e-3f;
        }
    }
    free(arena), free(fresh), free(page), free(offset);
    if (wrong) fprintf(stderr, "path %d kind %d bits %d dim %d: an encoded vector differs\n", path, kind, bits, dim);
    return wrong != 0;
}

/* A ring of slots, each moved to the next, in a plane that ends at the end of its allocation. */
static int one_move(void) {
    int pages = between(1, 9), heads = between(1, 3), tokens = between(1, 17), bytes = between(1, 300);
    int64_t slots = (int64_t)pages * tokens, page_bytes = (int64_t)heads * tokens * bytes;
    uint8_t *plane = malloc((size_t)(pages * page_bytes)), *before = malloc((size_t)(pages * page_bytes));
    uint8_t *scratch = malloc((size_t)(slots * heads * bytes));
    int64_t *place = malloc(sizeof(int64_t) * 4 * slots);
    for (int64_t i = 0; i < pages * page_bytes; i++) before[i] = plane[i] = (uint8_t)random_bits();
    for (int64_t s = 0; s < slots; s++) {
        int64_t onto = (s + 1) % slots;
        place[s] = s / tokens, place[slots + s] = s % tokens;
        place[2 * slots + s] = onto / tokens, place[3 * slots + s] = onto % tokens;
    }
    move_args a = {
        .plane = plane, .page_bytes = page_bytes, .vector_bytes = bytes, .pages = {place, place + 2 * slots},
        .offsets = {place + slots, place + 3 * slots}, .scratch = scratch, .num_moves = slots,
        .heads_per_page = heads, .page_tokens = tokens,
    };
    int wrong = quire_move(&a, NULL);
    for (int64_t s = 0; s < slots; s++)
        for (int h = 0; h < heads; h++)
            wrong |= memcmp(moved_slot(&a, 1, s, h), before + (moved_slot(&a, 0, s, h) - plane), bytes);
    free(plane), free(before), free(scratch), free(place);
    if (wrong) fprintf(stderr, "a moved slot differs\n");
    return wrong != 0;
}

/* Every live slot gets its statistic; pages and column sums end at the end of their allocation. */
static int one_tally(int path) {
    int rows = between(1, 3), lanes = between(1, 3), per_lane = between(1, 2), group = between(1, 4);
    int tokens = between(0, 1) ? 16 : between(1, 90), widest = 0, heads = between(0, 2), count = between(0, 2);
    int kv_heads = lanes * per_lane;
    int64_t step_rows[3], table_rows[3];
    int32_t slots[9], fresh[3];
    for (int r = 0; r < rows; r++) {
        step_rows[r] = table_rows[r] = rows - 1 - r;
        fresh[r] = between(1, 9);
        for (int l = 0; l < lanes; l++) {
            int held = slots[r * lanes + l] = fresh[r] + between(0, 400);
            widest = held > widest ? held : widest;
        }
    }
    int columns = (widest + tokens - 1) / tokens, pages = rows * lanes * columns;
    size_t page_floats = (size_t)per_lane * tokens, sum_count = (size_t)rows * kv_heads * group * widest;
    float *numbers = malloc(pages * page_floats * sizeof(float)), *sums = malloc(sum_count * sizeof(float));
    float *before = malloc(pages * page_floats * sizeof(float));
    int32_t *table = malloc(sizeof(int32_t) * pages);
    for (int i = 0; i < pages; i++) table[i] = pages - 1 - i;
    for (size_t i = 0; i < sum_count; i++) sums[i] = number();
    for (size_t i = 0; i < pages * page_floats; i++) before[i] = numbers[i] = number();
    tally_args a = {
        .numbers = (uint8_t *)numbers, .page_bytes = (int64_t)(page_floats * sizeof(float)), .table = table,
        .table_row_stride = (int64_t)lanes * columns, .table_lane_stride = columns, .step_rows = step_rows,
        .table_rows = table_rows, .slots = slots, .fresh = fresh, .sums = sums, .sums_stride = widest,
        .num_rows = rows, .num_lanes = lanes, .heads_per_page = per_lane, .group = group,
        .page_tokens = tokens, .heads = heads, .count = count, .path = path,
    };
    int wrong = quire_tally(&a, NULL);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < kv_heads; k++)
            for (int s = 0; s < slots[r * lanes + k / per_lane]; s++) {
                int held = slots[r * lanes + k / per_lane];
                double weight_seen = heads == HEADS_MAX ? -1e9 : 0;
                for (int g = 0; g < group; g++) {
                    double weight = sums[((step_rows[r] * kv_heads + k) * group + g) * widest + s];
                    weight_seen = heads == HEADS_MAX ? fmax(weight_seen, weight) : weight_seen + weight;
                }
                if (heads == HEADS_MEAN) weight_seen /= group;
                double added = count == COUNT_SUM ? weight_seen
                               : count == COUNT_SQUARES ? weight_seen * weight_seen : weight_seen < 1.0 / held;
                int64_t page = table[(table_rows[r] * lanes + k / per_lane) * columns + s / tokens];
                int64_t at = page * (int64_t)page_floats + (int64_t)(k % per_lane) * tokens + s % tokens;
                double expected = (s < held - fresh[r] ? before[at] : 0) + added;
                int near = count == COUNT_LOW && fabs(weight_seen - 1.0 / held) < 1e-6; /* either is right */
                wrong |= !near && !(fabs(expected - numbers[at]) <= 1e-5);
            }
    free(numbers), free(before), free(sums), free(table);
    if (wrong) fprintf(stderr, "a tally differs\n");
    return wrong != 0;
}

/* Limits and a draw over logits that end at the end of their allocation: the token is within the limits. */
static int one_sample(int path) {
    int vocab = between(0, 1) ? between(1, 40) : between(1, 3000), rows = between(1, 3), wrong = 0;
    float *logits = malloc(sizeof(float) * rows * vocab);
    sample_row options[3];
    int64_t token_ids[3], bytes = quire_sample_bytes(vocab);
    int32_t status[3];
    uint8_t *scratch = malloc(bytes);
    for (int i = 0; i < rows * vocab; i++) logits[i] = between(0, 9) ? 9 * number() : -INFINITY;
    for (int r = 0; r < rows; r++) {
        logits[r * vocab + between(0, vocab - 1)] = 10;
        options[r] = (sample_row){random_bits(), random_bits(), between(0, 1) ? 1 : 0.5 + number() / 2.1, 7,
                                  between(0, 1) ? -INFINITY : -3, between(0, 3) ? 1.5f : 0, between(0, 2) * 7};
    }
    sample_args a = {logits, vocab, options, token_ids, status, scratch, bytes, rows, vocab, path, 0};
    wrong |= quire_sample(&a, NULL, 1);
    for (int r = 0; r < rows; r++) {
        float chosen = logits[r * vocab + token_ids[r]];
        int larger = 0;
        for (int i = 0; i < vocab; i++) larger += logits[r * vocab + i] > chosen;
        wrong |= status[r] || token_ids[r] < 0 || token_ids[r] >= vocab || !(chosen > -INFINITY);
        wrong |= options[r].temperature == 0 && larger;
        wrong |= options[r].top_k && larger >= options[r].top_k;
    }
    free(logits), free(scratch);
    if (wrong) fprintf(stderr, "a sampled token differs\n");
    return wrong != 0;
}

int main(void) {
    int failures = 0;
    for (int i = 0; quire_best_path() && i < 300; i++) failures += one_sample(1 + i % quire_best_path());
    for (int i = 0; i < 100; i++) failures += one_write();
    for (int i = 0; i < 400; i++) failures += one_encoding(i % (quire_best_path() + 1));
    for (int i = 0; i < 100; i++) failures += one_move();
    for (int i = 0; i < 200; i++) failures += one_tally(i % (quire_best_path() + 1));
    for (int path = 0; path <= quire_best_path(); path++)
        for (int dtype = F32; dtype <= F16; dtype++)
            for (int i = 0; i < 40; i++) failures += one_case(path, dtype);
    for (int i = 0; i < 300; i++) failures += one_coded(i % (quire_best_path() + 1));
    printf("%d failures\n", failures);
    return failures != 0;
}
