/* Included by select.c, which defines TARGET and NAME. Loops are simple, so that the compiler vectorizes them. */

/* ---- free slots ----------------------------------------------------------------------------------------------- */

static TARGET int32_t NAME(count_of)(const uint8_t *marks, int count) {
    int32_t sum = 0;
    for (int i = 0; i < count; i++) sum += marks[i];
    return sum;
}

static TARGET void NAME(free_of_row)(const free_args *a, int row, uint8_t *any) {
    int slots = a->slots; /* a byte may alias a field */
    int64_t start = (int64_t)row * slots;
    const uint8_t *live = a->live + start, *held = a->protected + start;
    uint8_t *free = a->free + start;
    for (int i = 0; i < slots; i++) free[i] = live[i] & ~held[i];
    for (int i = 0; i < slots; i++) any[i] |= free[i];
    int32_t all = NAME(count_of)(live, slots), count = NAME(count_of)(free, slots);
    int64_t wanted = a->keep[row] - all + count;
    a->retained[row] = wanted < 0 ? 0 : wanted < count ? wanted : count;
}

static TARGET void NAME(without)(const uint8_t *marks, const uint8_t *others, int count, uint8_t *restrict found) {
    for (int i = 0; i < count; i++) found[i] = marks[i] & ~others[i];
}

/* ---- best columns --------------------------------------------------------------------------------------------- */

/* All bits of the free columns, and 0; returns their number. */
static TARGET int32_t NAME(masks_of)(const uint8_t *free, int columns, int32_t *masks) {
    int32_t count = 0;
    for (int i = 0; i < columns; i++) masks[i] = free[i] ? -1 : 0;
    for (int i = columns; i < padded(columns); i++) masks[i] = 0;
    for (int i = 0; i < padded(columns); i++) count -= masks[i];
    return count;
}

/* Integers in the order of the scores, INT32_MIN if not free; the least and the most of the free ones. */
static TARGET void NAME(keys_of)(const float *score, const int32_t *masks, int columns, int32_t *keys,
                                 int32_t *least, int32_t *most) {
    int32_t low = INT32_MAX, high = INT32_MIN;
    memcpy(keys, score, sizeof(float) * columns);
    for (int i = columns; i < padded(columns); i++) keys[i] = 0;
    for (int i = 0; i < padded(columns); i++) {
        int32_t bits = keys[i], mask = masks[i];
        int32_t key = bits ^ (bits >> 31 & INT32_MAX); /* negative numbers in ascending order */
        key += key == -1;                              /* -0 equals 0 */
        int32_t lower = (key & mask) | (INT32_MAX & ~mask);
        key = (key & mask) | (INT32_MIN & ~mask);
        keys[i] = key;
        low = lower < low ? lower : low;
        high = key > high ? key : high;
    }
    *least = low, *most = high;
}

static TARGET int32_t NAME(count_from)(const int32_t *keys, int columns, int32_t least) {
    int32_t count = 0;
    for (int i = 0; i < padded(columns); i++) count += keys[i] >= least;
    return count;
}

/* Keys from `from` up are among the best, and the first `tied` keys equal to from - 1. */
typedef struct {
    int64_t from;
    int32_t tied;
} NAME(border);

static TARGET NAME(border) NAME(border_of)(const int32_t *keys, int columns, int64_t wanted, int32_t total,
                                           int32_t least, int32_t most) {
    NAME(border) none = {(int64_t)most + 1, 0}, all = {least, 0};
    if (wanted <= 0 || total == 0) return none;
    if (wanted >= total) return all;
    /* count(>= low) > wanted > above = count(>= high) */
    int64_t low = least, high = (int64_t)most + 1;
    int32_t above = 0, from_low = total;
    for (int step = 0; high - low > 1; step++) {
        /* by interpolation and by halves in turn: few steps for smooth scores, 64 at most for any */
        int64_t middle = low + (high - low) / 2;
        if (step % 2 == 0) middle = low + (high - low) * (from_low - wanted) / (from_low - above);
        if (middle <= low) middle = low + 1;
        if (middle >= high) middle = high - 1;
        int32_t count = NAME(count_from)(keys, columns, (int32_t)middle);
        if (count == wanted) return (NAME(border)){middle, 0};
        if (count > wanted) low = middle, from_low = count;
        else high = middle, above = count;
    }
    return (NAME(border)){high, (int32_t)wanted - above};
}

/* Keys from the returned one up are the best of a head. */
static TARGET int32_t NAME(best_from)(const best_args *a, int row, int head, const int32_t *masks, int32_t total,
                                      int32_t *keys) {
    int32_t least, most;
    const float *score = a->score + row * a->score_row + head * a->score_head;
    NAME(keys_of)(score, masks, a->columns, keys, &least, &most);
    NAME(border) border = NAME(border_of)(keys, a->columns, a->wanted[row], total, least, most);
    for (int i = 0; border.tied > 0; i++)
        if (keys[i] == border.from - 1) keys[i]++, border.tied--;
    return border.from > INT32_MAX ? INT32_MAX : (int32_t)border.from; /* above every finite score */
}

static TARGET void NAME(best_of_row)(const best_args *a, int row) {
    int columns = a->columns;
    int32_t *masks = a->keys, *keys = masks + padded(columns);
    int32_t total = NAME(masks_of)(a->free + row * a->free_row, columns, masks);
    uint64_t *words = a->words ? a->words + (int64_t)row * columns : NULL;
    for (int head = 0; head < a->heads; head++) {
        int32_t from = NAME(best_from)(a, row, head, masks, total, keys);
        if (a->best) {
            uint8_t *best = a->best + ((int64_t)row * a->heads + head) * columns;
            for (int i = 0; i < columns; i++) best[i] = keys[i] >= from;
        }
        if (words) {
            uint64_t bit = 1ull << (row % a->rows_per_layer * a->heads + head);
            for (int i = 0; i < columns; i++) words[i] |= keys[i] >= from ? bit : 0;
        }
    }
}

/* ---- representatives ------------------------------------------------------------------------------------------ */

/* Scratch of a row: the grouped units only. */
typedef struct {
    uint64_t *words;  /* [unit_words, units] */
    uint64_t *anchor; /* [unit_words] */
    int32_t *unit;    /* [units] ascending */
    int32_t *distance, *order;
    int32_t *first;   /* [distances + 1] rank of the first unit of each distance */
} NAME(scratch);

static TARGET int NAME(collect)(const represent_args *a, int row, NAME(scratch) *s) {
    int units = a->units, width = a->unit_words, count = 0;
    const uint8_t *grouped = a->grouped + (int64_t)row * units;
    int32_t *found = s->unit;
    for (int unit = 0; unit < units; unit++) { /* without a branch: marks are irregular */
        found[count] = unit;
        count += grouped[unit];
    }
    for (int w = 0; w < width; w++) {
        const uint64_t *words = a->words + (int64_t)row * units * width + w;
        uint64_t *own = s->words + (int64_t)w * units;
        for (int i = 0; i < count; i++) own[i] = words[(int64_t)found[i] * width];
    }
    return count;
}

static TARGET uint64_t NAME(majority)(const uint64_t *words, int count) {
    uint64_t any = 0, result = 0;
    uint32_t ones[64] = {0};
    for (int i = 0; i < count; i++) any |= words[i];
    for (int bit = 0; bit < 8; bit++) {
        if (!(any >> bit & EIGHTH)) continue;
        for (int first = 0; first < count; first += 255) { /* a byte counts up to 255 ones of each eighth bit */
            int end = first + 255 < count ? first + 255 : count;
            uint64_t sums = 0;
            for (int i = first; i < end; i++) sums += words[i] >> bit & EIGHTH;
            for (int byte = 0; byte < 8; byte++) ones[8 * byte + bit] += sums >> 8 * byte & 255;
        }
    }
    for (int bit = 0; bit < 64; bit++) result |= (uint64_t)(2 * ones[bit] > (uint32_t)count) << bit;
    return result;
}

static TARGET void NAME(distances)(const represent_args *a, const NAME(scratch) *s, int count) {
    for (int w = 0; w < a->unit_words; w++) {
        const uint64_t *words = s->words + (int64_t)w * a->units;
        uint64_t anchor = s->anchor[w];
        for (int i = 0; i < count; i++) {
            int32_t bits = __builtin_popcountll(words[i] ^ anchor);
            s->distance[i] = w ? s->distance[i] + bits : bits;
        }
    }
}

/* Order of (distance, unit), by counting. */
static TARGET void NAME(rank)(const NAME(scratch) *s, int count) {
    int most = 0;
    for (int i = 0; i < count; i++) most = s->distance[i] > most ? s->distance[i] : most;
    memset(s->first, 0, sizeof(int32_t) * (most + 2));
    for (int i = 0; i < count; i++) s->first[s->distance[i] + 1]++;
    for (int d = 1; d <= most; d++) s->first[d] += s->first[d - 1];
    for (int i = 0; i < count; i++) s->order[s->first[s->distance[i]]++] = s->unit[i];
}

static TARGET void NAME(represent_row)(const represent_args *a, int row) {
    NAME(scratch) s = {.words = a->scratch};
    s.anchor = s.words + (int64_t)a->units * a->unit_words;
    s.unit = (int32_t *)(s.anchor + a->unit_words);
    s.distance = s.unit + a->units, s.order = s.distance + a->units, s.first = s.order + a->units;
    int64_t total = NAME(collect)(a, row, &s);
    int64_t slices = a->count[row] < total ? a->count[row] : total;
    if (slices <= 0) return;
    for (int w = 0; w < a->unit_words; w++)
        s.anchor[w] = a->anchor ? a->anchor[(int64_t)row * a->unit_words + w]
                                : NAME(majority)(s.words + (int64_t)w * a->units, (int)total);
    NAME(distances)(a, &s, (int)total);
    NAME(rank)(&s, (int)total);
    const float *score = a->score ? a->score + row * a->score_row : NULL;
    uint8_t *chosen = a->chosen + (int64_t)row * a->units;
    /* slice i starts at i * total / slices, rounded down: whole tokens of a slice, and the rest of the division */
    int64_t length = total / slices, more = total % slices, rest = 0, first = 0, end;
    for (int64_t slice = 0; slice < slices; slice++, first = end) {
        end = first + length, rest += more;
        if (rest >= slices) rest -= slices, end++;
        int64_t picked = first + (end - first - 1) / 2;
        if (score) {
            picked = first;
            for (int64_t rank = first + 1; rank < end; rank++)
                if (score[s.order[rank]] > score[s.order[picked]]) picked = rank;
        }
        chosen[s.order[picked]] = 1;
    }
}

/* ---- slots of lanes --------------------------------------------------------------------------------------------- */

/* Scores of the slots from `first` on, by position, as integers in their order; whether one is not finite. */
static TARGET int NAME(score_lane)(const lane_args *a, int64_t lane, lane_scratch *s, int first, int count) {
    int32_t low, high, breach = 0, *bits = s->bits;
    if (a->rank == BY_DOUBLE) {
        const int64_t *score = (const int64_t *)a->score + lane / a->lanes_per_score * a->slots + first;
        for (int i = 0; i < count; i++) {
            int64_t own = score[i] == INT64_MIN ? 0 : score[i]; /* -0 equals 0 */
            breach |= (own >> 52 & 0x7ff) == 0x7ff;
            s->wide[i] = own ^ (own >> 63 & INT64_MAX);
        }
        return breach;
    }
    if (a->rank == BY_FLOAT) {
        memcpy(bits, (const float *)a->score + lane / a->lanes_per_score * a->slots + first, sizeof(float) * count);
    } else {
        const int32_t *pages = a->number_pages + lane * a->number_columns;
        for (int i = 0; i < count; i++) {
            int at = s->slot[first + i], column = at / a->number_tokens;
            const uint8_t *page = a->numbers + pages[column] * a->number_page_bytes;
            float number;
            memcpy(&number, page + sizeof(float) * (at - column * a->number_tokens), sizeof(float));
            if (a->next) number /= (float)(a->next[lane] - s->position[first + i]);
            memcpy(bits + i, &number, sizeof(float));
        }
    }
    for (int i = 0; i < count; i++) breach |= (bits[i] & 0x7f800000) == 0x7f800000;
    for (int i = 0; i < padded(count); i++) s->masks[i] = i < count ? -1 : 0;
    NAME(keys_of)((const float *)bits, s->masks, count, s->keys, &low, &high);
    return breach;
}

/* Mark the best `wanted` of the scores, ties to the lower position. */
static TARGET void NAME(mark_best)(const lane_args *a, const lane_scratch *s, int count, int32_t wanted,
                                   uint8_t *kept) {
    if (a->rank != BY_DOUBLE) {
        int32_t low = INT32_MAX, high = INT32_MIN;
        for (int i = 0; i < count; i++) {
            low = s->keys[i] < low ? s->keys[i] : low;
            high = s->keys[i] > high ? s->keys[i] : high;
        }
        NAME(border) border = NAME(border_of)(s->keys, count, wanted, count, low, high);
        for (int i = 0; i < count; i++) kept[i] = s->keys[i] >= border.from;
        for (int i = 0; border.tied > 0; i++)
            if (s->keys[i] == border.from - 1) kept[i] = 1, border.tied--;
        return;
    }
    int64_t low = INT64_MIN, high = INT64_MAX; /* the highest `low` that `wanted` scores reach */
    while (low < high) {
        int64_t middle = (low >> 1) + (high >> 1) + ((low | high) & 1);
        int32_t reached = 0;
        for (int i = 0; i < count; i++) reached += s->wide[i] >= middle;
        if (reached >= wanted) low = middle;
        else high = middle - 1;
    }
    for (int i = 0; i < count; i++) kept[i] = s->wide[i] > low, wanted -= kept[i];
    for (int i = 0; wanted > 0 && i < count; i++)
        if (s->wide[i] == low) kept[i] = 1, wanted--;
}

/* Mark the slots of a lane to retain, by position; return the breaches of the contract. */
static TARGET int NAME(mark_retained)(const lane_args *a, int64_t lane, lane_scratch *s) {
    int held = a->held[lane], first = 0, end = held, breach = 0;
    int32_t wanted = a->keep[lane], newest = a->newest ? a->newest[lane] : 0;
    uint8_t *kept = s->kept;
    if (a->rank == BY_MARK) {
        memcpy(kept, (const uint8_t *)a->score + lane / a->lanes_per_score * a->slots, held);
        return NAME(count_of)(kept, held) == wanted ? 0 : WRONG_COUNT;
    }
    const uint8_t *protected = a->protected ? a->protected + lane * a->slots : NULL;
    if (protected) {
        memcpy(kept, protected, held);
        wanted -= NAME(count_of)(kept, held);
    } else {
        while (first < held && s->position[first] < a->sinks) first++;
        if (held - newest < end) end = held - newest > first ? held - newest : first;
        memset(kept, 1, held);
        memset(kept + first, 0, end - first);
        wanted -= held - (end - first);
    }
    if (wanted < 0) return OVER_PROTECTED;
    if (a->rank == BY_POSITION) {
        for (int i = end - 1; wanted > 0 && i >= first; i--)
            if (!kept[i]) kept[i] = 1, wanted--;
        return 0;
    }
    breach = NAME(score_lane)(a, lane, s, first, end - first) ? NOT_FINITE : 0;
    if (!protected) {
        NAME(mark_best)(a, s, end - first, wanted, kept + first);
        return breach;
    }
    for (int i = 0; i < held; i++) { /* above every score */
        if (!kept[i]) continue;
        if (a->rank == BY_DOUBLE) s->wide[i] = INT64_MAX;
        else s->keys[i] = INT32_MAX - 1;
    }
    NAME(mark_best)(a, s, held, a->keep[lane], kept);
    return breach;
}
