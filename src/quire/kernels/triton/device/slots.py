"""Copies of vectors to and between slots and of pages; statistics of slots; their selection."""

import triton
import triton.language as tl

from quire.kernels.triton.device.tiles import pages_of, record_of, stored_as


# page numbers and offsets are parts of larger tensors, so that their addresses have any alignment
@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def write_vectors(
    plane,
    vectors,
    pages,
    offsets,
    token_stride,
    head_stride,
    page_bytes,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program per (token, block of KV heads): write unquantized vectors to their slots."""
    token = tl.program_id(0)
    heads, dim = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_head = heads < NUM_LANES * PAGE_HEADS
    inside = is_head[:, None] & (dim < HEAD_DIM)[None, :]
    place = token * NUM_LANES + heads // PAGE_HEADS
    page = tl.load(pages + place, mask=is_head, other=0)
    offset = tl.load(offsets + place, mask=is_head, other=0)
    source = vectors + token.to(tl.int64) * token_stride + (heads * head_stride)[:, None]
    numbers = tl.load(source + dim[None, :], mask=inside)
    if plane.dtype.element_ty != vectors.dtype.element_ty:
        numbers = stored_as(numbers.to(tl.float32), plane.dtype.element_ty)
    vector = heads % PAGE_HEADS * PAGE_TOKENS + offset
    target = record_of(plane, page, vector, page_bytes, HEAD_DIM)[:, None] + dim[None, :]
    tl.store(target, numbers, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["pages", "offsets"])
def copy_slots(
    plane,
    scratch,
    pages,
    offsets,
    page_stride,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_SCRATCH: tl.constexpr,
):
    """One program per (slot, block of its numbers): copy slots to or from contiguous memory."""
    move, item = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = item < HEADS * WIDTH
    page, offset = tl.load(pages + move), tl.load(offsets + move)
    record = item // WIDTH * PAGE_TOKENS + offset
    in_plane = plane + page * page_stride + record * WIDTH + item % WIDTH
    in_scratch = scratch + move.to(tl.int64) * (HEADS * WIDTH) + item
    if TO_SCRATCH:
        tl.store(in_scratch, tl.load(in_plane, mask=inside), mask=inside)
    else:
        tl.store(in_plane, tl.load(in_scratch, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["page_items"], do_not_specialize_on_alignment=["pages"])
def copy_pages(
    arena, packed, pages, page_stride, page_items, BLOCK: tl.constexpr, TO_PACKED: tl.constexpr
):
    """One program per (page, block of its numbers): copy pages to or from contiguous memory."""
    index, item = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = item < page_items
    in_arena = arena + tl.load(pages + index) * page_stride + item
    in_packed = packed + index.to(tl.int64) * page_stride + item
    if TO_PACKED:
        tl.store(in_packed, tl.load(in_arena, mask=inside), mask=inside)
    else:
        tl.store(in_arena, tl.load(in_packed, mask=inside), mask=inside)


@triton.jit(
    do_not_specialize=["first_lane", "sums_row_stride", "sums_head_stride"],
    do_not_specialize_on_alignment=["slots"],  # part of a larger tensor
)
def add_attention(
    numbers,
    table,
    sums,
    step_rows,
    table_rows,
    slots,
    fresh,
    sums_row_stride,
    sums_head_stride,
    table_row_stride,
    table_lane_stride,
    page_numbers,
    first_lane,
    NUM_LANES: tl.constexpr,
    PAGE_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_MAX: tl.constexpr,
    IS_MEAN: tl.constexpr,
    MEASURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per (row, head with a number, block of slots).

    Reduces the weights of a group of query heads, measures them, and adds the result to the numbers
    of old slots; those of new slots are overwritten. MEASURE is an `AttentionMeasure`.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    lane, page_head = head // PAGE_HEADS, head % PAGE_HEADS
    held = tl.load(slots + row * NUM_LANES + lane)
    slot = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    live = slot < held
    own = sums + tl.load(step_rows + row) * sums_row_stride + slot
    weights = tl.zeros([BLOCK], tl.float32)
    for member in tl.static_range(GROUP):
        of_head = own + (head * GROUP + member).to(tl.int64) * sums_head_stride
        number = tl.load(of_head, mask=live, other=0.0)
        weights = tl.maximum(weights, number) if IS_MAX else weights + number
    if IS_MEAN:
        weights = weights / GROUP
    if MEASURE == 1:
        weights = weights * weights
    if MEASURE == 2:
        seen = tl.maximum(held, 1).to(tl.float32) + tl.zeros_like(weights)
        low = tl.div_rn(1.0 + tl.zeros_like(weights), seen)
        weights = (weights < low).to(tl.float32)
    table_row = tl.load(table_rows + row)
    entry = table + table_row * table_row_stride + (first_lane + lane) * table_lane_stride
    page = tl.load(entry + slot // PAGE_TOKENS, mask=live, other=0).to(tl.int64)
    place = numbers + page * page_numbers + page_head * PAGE_TOKENS + slot % PAGE_TOKENS
    is_old = slot < held - tl.load(fresh + row)
    before = tl.load(place, mask=is_old, other=0.0)
    tl.store(place, before + weights, mask=live)


NO_POSITION = tl.constexpr(0x7FFFFFFF)  # above every position
BY_POSITION, BY_NUMBER = tl.constexpr(0), tl.constexpr(1)
BY_FLOAT, BY_DOUBLE, BY_MARK = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
NOT_FINITE, OVER_PROTECTED = tl.constexpr(1), tl.constexpr(2)
WRONG_COUNT = tl.constexpr(4)


@triton.jit
def _sorted_slots(positions, pages, held, page_numbers, columns, PAGE_TOKENS: tl.constexpr, index):
    """Positions of a lane, ascending, and their slots; then `NO_POSITION` and the other slots."""
    lane, live = tl.program_id(0), index < held
    page = pages_of(pages + lane.to(tl.int64) * columns, index, live, PAGE_TOKENS)
    place = positions + page * page_numbers + index % PAGE_TOKENS
    position = tl.load(place, mask=live, other=NO_POSITION)
    keys = tl.sort((position.to(tl.int64) << 32) | index)
    return (keys >> 32).to(tl.int32), keys.to(tl.int32)


@triton.jit(
    do_not_specialize=["columns", "slots"], do_not_specialize_on_alignment=["pages", "held_slots"]
)
def order_slots(
    positions,
    pages,
    held_slots,
    by_position,
    slot_numbers,
    page_numbers,
    columns,
    slots,
    PAGE_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane: sort its slots by position."""
    lane, index = tl.program_id(0), tl.arange(0, BLOCK)
    held = tl.load(held_slots + lane)
    position, slot = _sorted_slots(
        positions, pages, held, page_numbers, columns, PAGE_TOKENS, index
    )
    place = lane.to(tl.int64) * slots + index
    position = tl.where(index < held, position, -1)
    tl.store(by_position + place, position.to(tl.int64), mask=index < slots)
    tl.store(slot_numbers + place, slot.to(tl.int64), mask=index < slots)


@triton.jit
def _best_marks(keys, free, wanted, STEPS: tl.constexpr):
    """Mark the free slots with the highest `wanted` keys, ties to the lower position.

    The border is the highest key that `wanted` keys reach, found by halves.
    """
    high = tl.max(tl.where(free, keys, keys.dtype.get_int_min_value()), axis=0)
    low = tl.min(tl.where(free, keys, keys.dtype.get_int_max_value()), axis=0)
    for _ in range(STEPS):
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        enough = tl.sum((free & (keys >= middle)).to(tl.int32), axis=0) >= wanted
        high = tl.where(enough, high, tl.maximum(middle - 1, low))
        low = tl.where(enough, middle, low)
    above, tied = free & (keys > low), free & (keys == low)
    left = wanted - tl.sum(above.to(tl.int32), axis=0)
    first = tl.cumsum(tied.to(tl.int32), axis=0) <= left
    return (above | (tied & first)) & (wanted > 0)


@triton.jit(
    do_not_specialize=[
        *("columns", "number_columns", "slots", "sinks"),
        *("lanes_per_score", "max_moves", "max_evicted"),
    ],
    do_not_specialize_on_alignment=[
        *("pages", "held_slots", "keep_slots", "newest_slots", "next_positions", "number_pages"),
    ],
)
def select_slots(
    positions,
    pages,
    held_slots,
    keep_slots,
    newest_slots,
    next_positions,
    score,
    protected,
    numbers,
    number_pages,
    moves,
    evicted,
    page_numbers,
    columns,
    number_stride,
    number_columns,
    slots,
    sinks,
    lanes_per_score,
    max_moves,
    max_evicted,
    PAGE_TOKENS: tl.constexpr,
    NUMBER_TOKENS: tl.constexpr,
    RANK: tl.constexpr,
    HAS_PROTECTED: tl.constexpr,
    PER_QUERY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per lane: select the slots to retain, and list moves and evicted positions."""
    lane, index = tl.program_id(0), tl.arange(0, BLOCK)
    held, keep = tl.load(held_slots + lane), tl.load(keep_slots + lane)
    live = index < held
    position, slot = _sorted_slots(
        positions, pages, held, page_numbers, columns, PAGE_TOKENS, index
    )
    row = lane // lanes_per_score
    scored = score + row.to(tl.int64) * slots + index
    if RANK == BY_MARK:
        kept = live & (tl.load(scored, mask=live, other=0) != 0)
        breach = (tl.sum(kept.to(tl.int32), axis=0) != keep).to(tl.int32) * WRONG_COUNT
    else:
        if HAS_PROTECTED:
            own = protected + lane.to(tl.int64) * slots + index
            must = live & (tl.load(own, mask=live, other=0) != 0)
        else:
            must = live & ((position < sinks) | (index >= held - tl.load(newest_slots + lane)))
        free = live & (must == 0)
        wanted = keep - tl.sum(must.to(tl.int32), axis=0)
        breach = (wanted < 0).to(tl.int32) * OVER_PROTECTED
        if RANK == BY_POSITION:
            best = _best_marks(position, free, wanted, 31)
        elif RANK == BY_DOUBLE:
            number = tl.load(scored, mask=free, other=0.0)
            bits = tl.where(number == 0.0, 0, number.to(tl.int64, bitcast=True))
            wrong = free & (((bits >> 52) & 0x7FF) == 0x7FF)
            breach = breach | tl.max(wrong.to(tl.int32), axis=0) * NOT_FINITE
            best = _best_marks(bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF), free, wanted, 64)
        else:
            if RANK == BY_NUMBER:
                table = number_pages + lane.to(tl.int64) * number_columns
                page = pages_of(table, slot, free, NUMBER_TOKENS)
                place = numbers + page * number_stride + slot % NUMBER_TOKENS
                number = tl.load(place, mask=free, other=0.0)
                if PER_QUERY:
                    seen = tl.load(next_positions + lane) - tl.where(free, position, 0)
                    number = tl.div_rn(number, tl.where(free, seen, 1).to(tl.float32))
            else:
                number = tl.load(scored, mask=free, other=0.0)
            bits = tl.where(number == 0.0, 0, number.to(tl.int32, bitcast=True))
            wrong = free & ((bits & 0x7F800000) == 0x7F800000)
            breach = breach | tl.max(wrong.to(tl.int32), axis=0) * NOT_FINITE
            best = _best_marks(bits ^ ((bits >> 31) & 0x7FFFFFFF), free, wanted, 32)
        kept = must | best
    # the number of retained slots is known elsewhere
    kept = tl.where(breach != 0, live & (index >= held - keep), kept)
    gone = live & (kept == 0)
    own = evicted + lane.to(tl.int64) * (2 + max_evicted)
    tl.store(own + 1 + tl.cumsum(gone.to(tl.int32), axis=0), position, mask=gone)
    marks = tl.sort((slot << 1) | kept.to(tl.int32)) & 1  # in the order of slots
    hole, source = (index < keep) & live & (marks == 0), (index >= keep) & live & (marks != 0)
    own_moves = moves + lane.to(tl.int64) * 2 * max_moves
    tl.store(own_moves + tl.cumsum(source.to(tl.int32), axis=0) - 1, index, mask=source)
    tl.store(own_moves + max_moves + tl.cumsum(hole.to(tl.int32), axis=0) - 1, index, mask=hole)
    tl.store(own, breach)
    tl.store(own + 1, tl.sum(hole.to(tl.int32), axis=0))


@triton.jit
def _move_in_plane(
    read,
    written,
    source,
    target,
    is_move,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copy the vectors of all heads between offsets in pages."""
    for start in range(0, HEADS * WIDTH, BLOCK_W):
        word = start + tl.arange(0, BLOCK_W)
        inside = is_move[:, None] & (word < HEADS * WIDTH)[None, :]
        in_page = FIRST + word // WIDTH * (PAGE_TOKENS * WIDTH) + word % WIDTH
        of_source = in_page[None, :] + (source * WIDTH)[:, None]
        of_target = in_page[None, :] + (target * WIDTH)[:, None]
        tl.store(
            written[:, None] + of_target,
            tl.load(read[:, None] + of_source, mask=inside),
            mask=inside,
        )


@triton.jit(
    do_not_specialize=["columns", "max_moves", "max_evicted"],
    do_not_specialize_on_alignment=["pages"],
)
def move_lane_slots(
    first_plane,
    pages,
    moves,
    evicted,
    page_words,
    columns,
    max_moves,
    max_evicted,
    WORD: tl.constexpr,
    PLANES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program per (lane, block of moves): copy slots in all planes of a page class.

    PLANES has the first word of each plane in a page, its heads, and the words of a vector. No slot
    is a source and a target.
    """
    lane, move = tl.program_id(0), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_move = move < tl.load(evicted + lane.to(tl.int64) * (2 + max_evicted) + 1)
    own = moves + lane.to(tl.int64) * 2 * max_moves + move
    source = tl.load(own, mask=is_move, other=0)
    target = tl.load(own + max_moves, mask=is_move, other=0)
    table = pages + lane.to(tl.int64) * columns
    words = first_plane.to(tl.pointer_type(WORD), bitcast=True)
    read = words + pages_of(table, source, is_move, PAGE_TOKENS) * page_words
    written = words + pages_of(table, target, is_move, PAGE_TOKENS) * page_words
    for plane in tl.static_range(len(PLANES)):
        _move_in_plane(
            read,
            written,
            source % PAGE_TOKENS,
            target % PAGE_TOKENS,
            is_move,
            PLANES[plane][0],
            PLANES[plane][1],
            PLANES[plane][2],
            PAGE_TOKENS,
            BLOCK_W,
        )
