"""Division of a step's attention into parts that threads process one after the other.

rows with few query vectors     one walk; a row of many slots, several walks and a merge
rows with many query vectors    blocks of query vectors, and for column sums blocks of slots; a
                                block that has the whole row computes its column sums too

How a row is cut depends on the row only, not on other rows or the number of threads. The same holds
for its output.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.kernels.backend import LaneSlots, StepShape
from quire.kernels.native.arguments import (
    COUNT,
    FIRST,
    KEPT_LOGITS,
    PART_FIELDS,
    PARTIAL,
    ROW,
    SUM_SLOTS,
)

WALK_QUERIES = 16  # query vectors of a (row, KV head) up to which they walk over the pages
WALK_TOKENS = 16  # new tokens up to which rows walk, if the library has no blocks
WALK_SLOTS = 512  # least slots of a walk if a row is split
WALK_ALIGNMENT = 64  # slots that are processed together
MOST_WALKS = 16  # of a row; more would cost partial results, and heads divide the work further

PartList = NDArray[np.int32]  # [parts, PART_FIELDS]
NO_PARTS: PartList = np.zeros((0, PART_FIELDS), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one layer; see `part` in args.h.

    Attributes:
        walks, blocks, merges, sums: int32 [parts, row first count partial].
        walk_slots: slots of each walk.
        num_partials: number of partial results that merges read.
        others: rows left to another backend.
        work: slots times tokens, summed over the rows of walks and blocks.
    """

    walks: PartList
    blocks: PartList
    merges: PartList
    sums: PartList
    walk_slots: NDArray[np.int64]
    num_partials: int
    others: NDArray[np.int64]
    work: int


def cut(step: StepShape, lanes: LaneSlots, *, group: int, block_queries: int) -> Parts:
    """Cut the rows of a step.

    Args:
        step: new tokens of the rows.
        lanes: live slots of the rows.
        group: query heads that share a KV head.
        block_queries: query vectors of a block; 0 if the library has no blocks.
    """
    slots = lanes.slots.max(axis=1).astype(np.int64)
    tokens = step.tokens.astype(np.int64)
    small = tokens <= WALK_TOKENS if block_queries == 0 else tokens * group <= WALK_QUERIES
    small |= tokens == 1
    walked, large = np.flatnonzero(small), np.flatnonzero(~small)
    one_token = (tokens == 1) & (lanes.window is None)
    counts = np.where(one_token, _num_walks(slots), 1)[walked]
    walks, merges, walk_slots = _walks(walked, counts, slots)
    blocked, others = (large, large[:0]) if block_queries else (large[:0], large)
    blocks = sums = NO_PARTS
    if len(blocked):
        blocks, sums = _blocks(blocked, tokens[blocked] * group, slots[blocked], block_queries)
    kept = walked if len(others) else slice(None)
    return Parts(
        walks=walks,
        blocks=blocks,
        merges=merges,
        sums=sums,
        walk_slots=walk_slots,
        num_partials=int(counts[counts > 1].sum()),
        others=others,
        work=int((slots * tokens)[kept].sum()),
    )


def are_cut_alike(before: NDArray[np.int32], after: NDArray[np.int32]) -> bool:
    """Return whether decode rows with these slots [rows, lanes] have equal walks.

    The number and the size of a row's walks change at multiples of `WALK_ALIGNMENT` only. Threads
    and heads that are walked together depend on the work, which may be that of earlier slots.
    """
    same_sizes = (before - 1) // WALK_ALIGNMENT == (after - 1) // WALK_ALIGNMENT
    same_numbers = before // WALK_ALIGNMENT == after // WALK_ALIGNMENT
    return bool((same_sizes & same_numbers).all())


def _num_walks(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of walks of each row: powers of two divide evenly over most threads."""
    halvings = np.frexp(slots / WALK_SLOTS)[1].astype(np.int64) - 1  # floor of the logarithm
    walks: NDArray[np.int64] = np.minimum(1 << np.maximum(halvings, 0), MOST_WALKS)
    return walks


def _walks(
    rows: NDArray[np.int64], counts: NDArray[np.int64], slots: NDArray[np.int64]
) -> tuple[PartList, PartList, NDArray[np.int64]]:
    """Return `counts[i]` consecutive walks over the slots of row `rows[i]`, merges, and slots.

    Args:
        rows: rows that are walked.
        counts: walks of each of them.
        slots: slots of all rows.
    """
    own, longest = slots[rows], int(slots.max(initial=0))
    longest = -(-longest // WALK_ALIGNMENT) * WALK_ALIGNMENT  # room for slots of later steps
    if not (counts > 1).any():
        return _repeat(rows, counts, longest), NO_PARTS, own
    sizes = -(-own // (counts * WALK_ALIGNMENT)) * WALK_ALIGNMENT
    walks = _repeat(rows, counts, np.repeat(sizes, counts))
    split = np.repeat(counts > 1, counts)
    walks[:, COUNT][~split] = longest
    walks[:, PARTIAL] = np.where(split, np.cumsum(split) - 1, -1)
    left = np.repeat(own, counts) - walks[:, FIRST]
    return walks, _merges(rows, counts), np.clip(left, 0, walks[:, COUNT])


def _merges(rows: NDArray[np.int64], counts: NDArray[np.int64]) -> PartList:
    """Return a merge for each row with several walks."""
    first = np.cumsum(np.where(counts > 1, counts, 0)) - counts
    merges = np.zeros((int((counts > 1).sum()), PART_FIELDS), dtype=np.int32)
    for field, column in ((ROW, rows), (COUNT, counts), (PARTIAL, first)):
        merges[:, field] = column[counts > 1]
    return merges


def _blocks(
    rows: NDArray[np.int64], pairs: NDArray[np.int64], slots: NDArray[np.int64], size: int
) -> tuple[PartList, PartList]:
    """Return blocks of rows with this many query vectors and slots, and parts of column sums."""
    counts = -(-pairs // size)
    blocks = _repeat(rows, counts, size)
    blocks[:, COUNT] = np.minimum(size, np.repeat(pairs, counts) - blocks[:, FIRST])
    # logits are kept in whole tiles, of 6 query vectors and 16 slots
    alone = (pairs <= size) & ((pairs + 5) * (slots + 15) <= KEPT_LOGITS)
    blocks[:, PARTIAL] = np.repeat(alone, counts)
    sums = _repeat(rows[~alone], -(-slots[~alone] // SUM_SLOTS), SUM_SLOTS)
    return blocks[::-1].copy(), sums  # the last blocks of a chunk see most slots and start first


def _repeat(
    rows: NDArray[np.int64], counts: NDArray[np.int64], size: int | NDArray[np.int64]
) -> PartList:
    """Return `counts[i]` consecutive parts of `size` for row `rows[i]`."""
    parts = np.zeros((int(counts.sum()), PART_FIELDS), dtype=np.int32)
    parts[:, ROW] = np.repeat(rows, counts)
    ends = np.cumsum(counts)
    parts[:, FIRST] = (np.arange(len(parts)) - np.repeat(ends - counts, counts)) * size
    parts[:, COUNT] = size
    parts[:, PARTIAL] = -1
    return parts
