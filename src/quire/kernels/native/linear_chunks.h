/* Included by linear.c: products of chunks of packed rows; see linear_packed.h. */

/* Two rows of words from each row of units: float32 from pairs of bfloat16, or bytes from int4. */
#define WIDEN(name, target)                                                                            \
    static target void name(const uint32_t *units, int count, int int4, uint32_t *restrict to) {       \
        for (int u = 0; u < count; u++, to += 2 * PANEL_COLUMNS, units += PANEL_COLUMNS)               \
            for (int n = 0; n < PANEL_COLUMNS; n++) {                                                  \
                uint32_t unit = units[n], low = int4 ? unit & 0x0f0f0f0f : unit << 16;                 \
                to[n] = low, to[PANEL_COLUMNS + n] = int4 ? unit >> 4 & 0x0f0f0f0f : unit & 0xffff0000; \
            }                                                                                          \
    }
WIDEN(widen_512, AVX512)
WIDEN(widen_256, AVX2)

static void widen(const linear_args *a, packed_block *b, packed_chunk *chunk) {
    const uint32_t *units = (const uint32_t *)b->unit;
    int int4 = a->weight_kind == WEIGHT_INT4;
    if (a->path == PATH_AVX2) widen_256(units, b->units / 2, int4, chunk->block);
    else widen_512(units, b->units / 2, int4, chunk->block);
    b->unit = (const uint8_t *)chunk->block;
}

static void sum_tiles(const linear_args *a, const packed_block *b) {
    int wide = a->path != PATH_AVX2, vnni = wide && has_vnni();
    if (a->weight_kind == WEIGHT_INT4) (vnni ? packed_tiles_nibbles_512 : packed_tiles_nibbles_256)(b);
    else if (a->weight_kind == WEIGHT_INT8) (vnni ? packed_tiles_bytes_512 : packed_tiles_bytes_256)(b);
    else if (a->x_dtype == BF16) packed_tiles_pairs_512(b);
    else (wide ? packed_tiles_f32_512 : packed_tiles_f32_256)(b);
}

static void set_scales(const linear_args *a, packed_block *b, const packed_chunk *chunk, int number, int group) {
    b->x_scales = chunk->x_scales + group * b->tiles * TILE_ROWS;
    b->x_sums = chunk->x_sums + group * b->tiles * TILE_ROWS;
    if (a->weight_kind == WEIGHT_INT4)
        b->scales = a->scales + ((int64_t)number * num_groups(a) + group) * PANEL_COLUMNS;
}

/* Sums of `rows` packed rows and one panel, as sum_panel. */
static void sum_packed(const linear_args *a, packed_chunk *chunk, int rows, int number) {
    int coded = a->weight_kind >= WEIGHT_INT8, words = row_words(a), tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int halves = a->weight_kind == WEIGHT_INT4 || (a->weight_kind == WEIGHT_BF16 && a->x_dtype != BF16);
    int block = coded ? GROUP_WORDS : BLOCK_WORDS, block_bytes = block * UNIT_ROW_BYTES >> halves;
    const uint8_t *unit = a->weight + number * panel_bytes(a);
    packed_block b = {.tile_bytes = (int64_t)words * TILE_WORD_BYTES, .sums = chunk->sums, .tiles = tiles,
                      .ahead_bytes = (block_bytes / tiles + 63) / 64 * 64};
    for (int first = 0; first < words; first += block, unit += block_bytes) {
        b.x = (const uint8_t *)chunk->words + (int64_t)first * TILE_WORD_BYTES;
        b.unit = unit, b.ahead = unit + block_bytes, b.first = first == 0;
        b.units = words - first < block ? words - first : block;
        if (coded) set_scales(a, &b, chunk, number, first / block);
        if (halves) widen(a, &b, chunk);
        sum_tiles(a, &b);
    }
}

/* ---- threads ------------------------------------------------------------------------------------ */

/* An item is a chunk of rows and one of `parts` equal ranges of panels. */
typedef struct {
    const linear_args *args;
    int32_t chunks, parts;
    atomic_llong next;
} chunk_work;

static void multiply_chunk(const linear_args *a, packed_chunk *chunk, int64_t first, int rows, int64_t from,
                           int64_t to) {
    pack_chunk(a, first, rows, chunk);
    for (int number = (int)from; number < to; number++) {
        sum_packed(a, chunk, rows, number);
        finish(a, first, rows, number, chunk->sums);
    }
}

static void take_chunks(int64_t begin, int64_t end, void *context) {
    static _Thread_local packed_chunk packed; /* allocated on a thread's first product of many rows */
    chunk_work *work = context;
    const linear_args *a = work->args;
    int64_t items = (int64_t)work->chunks * work->parts, panels = num_panels(a), item;
    (void)begin, (void)end;
    while ((item = atomic_fetch_add(&work->next, 1)) < items) {
        int64_t chunk = item / work->parts, part = item % work->parts;
        int64_t first = a->rows * chunk / work->chunks, after = a->rows * (chunk + 1) / work->chunks;
        multiply_chunk(a, &packed, first, (int)(after - first), panels * part / work->parts,
                       panels * (part + 1) / work->parts);
    }
}

/* Divide the rows into equal chunks for the threads; if chunks would be too small, divide the panels as well. */
static chunk_work divide_chunks(const linear_args *a, int threads) {
    int most = max_chunk_rows(a), chunks = (a->rows + most - 1) / most;
    int equal = (chunks + threads - 1) / threads * threads;
    if (a->rows >= MIN_CHUNK_ROWS * equal) return (chunk_work){a, equal, 1, 0};
    return (chunk_work){a, chunks, threads, 0};
}
