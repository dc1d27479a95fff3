"""Attention calls of the C library: arguments built once per step and updated per layer.

Division of a step's attention into parts that threads process one after the other.

rows with few query vectors     one walk; a row of many slots, several walks and a merge
rows with many query vectors    blocks of query vectors, and for column sums blocks of slots; a
                                block that has the whole row computes its column sums too

How a row is cut depends on the row only, not on other rows or the number of threads. The same holds
for its output.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.backend import (
    Alibi,
    AttentionMath,
    AttentionStatistic,
    ChainLayer,
    HeldLanes,
    LaneSlots,
    LaneVectors,
    LayerPages,
    MovedSlots,
    NewSlots,
    SelectedSlots,
    SlotRanking,
    SparseLanes,
    StatisticRows,
    StepShape,
    StoredQueries,
    WindowFinish,
    dims_of,
    token_rows,
)
from quire.kernels.gathered import GatheredPlan, group_chunks
from quire.kernels.native.arguments import (
    COUNT,
    DTYPES,
    FIRST,
    KEPT_LOGITS,
    MAX_TOGETHER,
    PART_FIELDS,
    PARTIAL,
    ROW,
    SUM_SLOTS,
    AttentionArgs,
    LaneArgs,
    LaneMoveArgs,
    MoveArgs,
    MovedPlane,
    RingArgs,
    ScoreArgs,
    SparseArgs,
    TallyArgs,
    WriteArgs,
    coding_of,
    codings_of,
    copied,
    plain_coding,
)
from quire.kernels.native.library import NativeLibrary
from quire.layout.statistics import MAX, REDUCTIONS

WALK_QUERIES = 16  # query vectors of a (row, KV head) up to which they walk over the pages
WALK_TOKENS = 16  # new tokens up to which rows walk, if the library has no blocks
TILE = 16  # slots of a tile in walk.h
SPARSE_SELECT, SPARSE_ATTEND = 1, 2  # parts of the work, as in args.h
SCORE_PADDING = 16  # columns of scores are a multiple of this: ORDER_PADDING of sparse.h
SPARE_PAGES = 4  # room for pages that later steps read
WALK_SLOTS = 512  # least slots of a walk if a row is split
WALK_ALIGNMENT = 64  # slots that are processed together
PAD_SLOTS = 64  # biases after a lane's last slot, which vector instructions read
JOINED_WALK_SLOTS = (
    1024  # least slots of a walk of all query heads, whose partial results are larger
)
JOINED_QUERIES = 192  # query vectors of a block with joined keys, which fit in a core's cache
MAX_WALKS = 16  # of a row; more would cost partial results, and heads divide the work further

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
        joined: keys are joined; see `AttentionMath`.
    """

    walks: PartList
    blocks: PartList
    merges: PartList
    sums: PartList
    walk_slots: NDArray[np.int64]
    num_partials: int
    others: NDArray[np.int64]
    work: int
    joined: bool = False


def cut(
    step: StepShape, lanes: LaneSlots, *, group: int, block_queries: int, joined: bool = False
) -> Parts:
    """Cut the rows of a step.

    Args:
        step: new tokens of the rows.
        lanes: live slots of the rows.
        group: query heads that share a KV head.
        block_queries: query vectors of a block; 0 if the library has no blocks.
        joined: keys are joined: only rows of one token walk, with all query heads of a KV head.
    """
    slots = lanes.slots.max(axis=1).astype(np.int64)
    tokens = step.tokens.astype(np.int64)
    small = tokens <= WALK_TOKENS if block_queries == 0 else tokens * group <= WALK_QUERIES
    small = (tokens == 1) | (small & (not joined))
    walked, large = np.flatnonzero(small), np.flatnonzero(~small)
    one_token = (tokens == 1) & (lanes.window is None)
    least = JOINED_WALK_SLOTS if joined else WALK_SLOTS
    counts = np.where(one_token, _num_walks(slots, least), 1)[walked]
    walks, merges, walk_slots = _walks(walked, counts, slots)
    blocked, others = (large, large[:0]) if block_queries else (large[:0], large)
    blocks = sums = NO_PARTS
    if len(blocked):
        size = min(block_queries, JOINED_QUERIES) if joined else block_queries
        blocks, sums = _blocks(blocked, tokens[blocked] * group, slots[blocked], size)
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
        joined=joined,
    )


def are_cut_alike(before: NDArray[np.int32], after: NDArray[np.int32]) -> bool:
    """Return whether decode rows with these slots [rows, lanes] have equal walks.

    The number and the size of a row's walks change at multiples of `WALK_ALIGNMENT` only. Threads
    and heads that are walked together depend on the work, which may be that of earlier slots.
    """
    same_sizes = (before - 1) // WALK_ALIGNMENT == (after - 1) // WALK_ALIGNMENT
    same_numbers = before // WALK_ALIGNMENT == after // WALK_ALIGNMENT
    return bool((same_sizes & same_numbers).all())


def _num_walks(slots: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """Return the number of walks of each row: powers of two divide evenly over most threads."""
    halvings = np.frexp(slots / least)[1].astype(np.int64) - 1  # floor of the logarithm
    walks: NDArray[np.int64] = np.minimum(1 << np.maximum(halvings, 0), MAX_WALKS)
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
    for index, column in ((ROW, rows), (COUNT, counts), (PARTIAL, first)):
        merges[:, index] = column[counts > 1]
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


ITEMS_A_THREAD = 4  # items of equal size in the work of a thread that balance the threads
SERIAL_BYTES = 128 << 10  # KV bytes in bfloat16 below which threads cost more than they save


class Scratch:
    """Reusable memory that grows on demand.

    Attributes:
        memory: the current memory.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Current size in bytes."""
        return self.memory.numel()

    def sums(self, rows: int, num_heads: int, slots: int) -> Tensor:
        """Return memory for column sums, float32 [rows, num_heads, slots]."""
        num_bytes = 4 * rows * num_heads * slots
        self.address(num_bytes)
        return self.memory[:num_bytes].view(torch.float32).view(rows, num_heads, slots)

    def address(self, num_bytes: int) -> int:
        """Return the address of at least `num_bytes`; growing replaces `memory`."""
        if self.num_bytes < num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self.memory.data_ptr()


class NativeCall:
    """Arguments that the layers of a step share, and references that keep their memory alive.

    Args:
        library: the loaded C library.
        step, lanes: step and lanes of the plan.
        parts: how the rows are cut.
        pages: pages of any layer.
        query: query of any layer.
        column_sums: column sums of any layer, or None.
        sparse: rows that read only some pages; None: all read all.

    Attributes:
        picks: [rows, KV heads, 2, pages] page numbers that sparse rows read in the last layer, and
            their columns of the page table.
    """

    def __init__(  # noqa: PLR0913 - what the layers of a step share
        self,
        library: NativeLibrary,
        step: StepShape,
        lanes: LaneSlots,
        parts: Parts,
        pages: LayerPages,
        query: Tensor,
        column_sums: Tensor | None,
        sparse: "NativeSparse | None" = None,
    ) -> None:
        self._library, self._parts, self._sums = library, parts, column_sums
        self._attended: LayerPages | None = None
        self._step, self._lanes, self._pages = step, lanes, pages
        heads_per_page, (num_tokens, num_heads, head_dim) = pages.key.shape[1], query.shape
        _, value_dim = dims_of(pages)
        slot_bytes = 2 * pages.num_lanes * heads_per_page * (head_dim + value_dim)
        if parts.joined:  # a KV head takes the time of several
            slot_bytes *= -(-num_heads // (pages.num_lanes * heads_per_page * WALK_QUERIES))
        few = parts.work * slot_bytes < SERIAL_BYTES
        self._num_threads = 1 if few else torch.get_num_threads()
        together = heads_together(heads_per_page, parts, self._num_threads)
        together = 1 if sparse is not None else together  # each head reads pages of its own
        sums_stride = 0 if column_sums is None else column_sums.stride(1)
        self._thread_bytes = library.scratch_bytes(head_dim, value_dim, sums_stride, together)
        self._partials_bytes = 4 * parts.num_partials * num_heads * (value_dim + 2)
        self._normalisers_bytes = 0 if column_sums is None else 8 * num_tokens * num_heads
        self._tops_bytes = 4 * num_tokens * num_heads * -(-sums_stride // TILE)
        self._args = AttentionArgs(
            page_bytes=pages.key.stride(0) * pages.key.itemsize,
            table=pages.table.data_ptr(),
            table_row_stride=pages.table.stride(0),
            table_lane_stride=pages.table.stride(1),
            rows=pages.rows.data_ptr(),
            slots=lanes.slots.ctypes.data,
            starts=step.starts.ctypes.data,
            tokens=step.tokens.ctypes.data,
            sums_stride=sums_stride,
            scratch_bytes=self._thread_bytes,
            walks=parts.walks.ctypes.data,
            blocks=parts.blocks.ctypes.data,
            merges=parts.merges.ctypes.data,
            sums=parts.sums.ctypes.data,
            num_walks=len(parts.walks),
            num_blocks=len(parts.blocks),
            num_merges=len(parts.merges),
            num_sums=0 if column_sums is None else len(parts.sums),
            num_partials=parts.num_partials,
            num_lanes=pages.num_lanes,
            heads_per_page=heads_per_page,
            group=num_heads // (pages.num_lanes * heads_per_page),
            heads_together=together,
            head_dim=head_dim,
            page_tokens=pages.page_tokens,
            dtype=DTYPES[query.dtype],
            window=lanes.window or 0,
            path=library.path,
            coded=pages.coded is not None,
            joined=parts.joined,
        )
        self._args.key_coding, self._args.value_coding = codings_of(pages)
        self._sparse: tuple[SparseArgs, NativeSparse, object] | None = None
        self.picks: NDArray[np.int32] | None = None
        if sparse is not None:
            assert pages.bounds is not None, "only such pages are selected"
            kv_heads, rows = pages.num_lanes * heads_per_page, len(sparse.held)
            weights = np.empty((rows, kv_heads, 2 * dims_of(pages)[0]), dtype=np.float32)
            scores = np.empty((rows, kv_heads, sparse.columns), dtype=np.int32)
            self.picks = np.zeros((rows, kv_heads, 2, sparse.picked), dtype=np.int32)
            own = SparseArgs(
                bounds=pages.bounds.data_ptr(),
                held=sparse.held.ctypes.data,
                counts=sparse.lanes.pages.ctypes.data,
                sinks=sparse.lanes.sinks.ctypes.data,
                recent=sparse.lanes.recent.ctypes.data,
                weights=weights.ctypes.data,
                scores=scores.ctypes.data,
                picks=self.picks.ctypes.data,
                num_rows=rows,
                columns=sparse.columns,
                picked=sparse.picked,
                dtype=DTYPES[pages.bounds.dtype],
            )
            self._sparse = own, sparse, (weights, scores)
            self._args.sparse = ctypes.addressof(own)

    def attend(
        self,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        out: Tensor,
        column_sums: Tensor | None,
        scratch: Scratch,
        biases: "SlotBiases | None" = None,
    ) -> None:
        """Compute attention of one layer into contiguous `out`; rows in no part are not written."""
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = None if math.sinks is None else math.sinks.float().contiguous()
        self._set_layer(pages, math, query, out, scratch)
        args = self._args
        args.sinks = None if sinks is None else sinks.data_ptr()
        self._set_biases(biases)
        self._set_sums(column_sums)
        if self._sparse is not None:
            self._fetch(pages, *self._sparse[:2])
        self._run()

    def _run(self) -> None:
        library = self._library
        if library.attend(ctypes.byref(self._args), library.parallel_for, self._num_threads):
            raise InvariantError("torch_parallel_for failed inside the C extension")

    def _fetch(self, pages: LayerPages, own: SparseArgs, sparse: "NativeSparse") -> None:
        """Select pages, some of which are offloaded, and let attention read them where they are."""
        own.only, own.at = 0, None
        if pages.offloaded is not None and self.picks is not None:
            addresses = pages.offloaded.addresses(pages, sparse.columns)
            own.only, own.at = SPARSE_SELECT, addresses.ctypes.data
            self._run()
            rows = np.flatnonzero(sparse.lanes.pages.any(axis=1))
            columns, counts = self.picks[rows, :, 1].astype(np.int64), sparse.lanes.pages[rows]
            self.picks[rows, :, 0] = pages.offloaded.fetch(rows, columns, counts)
            own.only, own.at = SPARSE_ATTEND, None

    @property
    def num_threads(self) -> int:
        """Threads that the work is worth."""
        return self._num_threads

    def layer_args(
        self, layers: Sequence[ChainLayer], query: Tensor, out: Tensor, scratch: Scratch
    ) -> "tuple[ctypes.Array[AttentionArgs], object]":
        """Return the arguments of layers without sinks, for a chain, and the owner of their memory.

        All layers use the same column sums, if any.
        """
        pages, _, math, _ = layers[0]
        self._set_layer(pages, math, query, out, scratch)
        self._set_sums(self._sums)
        copies, owner = copied(self._args, len(layers)), []
        for args, (pages, _, math, records) in zip(copies, layers, strict=True):
            args.first_lane = pages.first_lane
            args.scale, args.softcap = math.scale, math.softcap or 0.0
            made = (
                []
                if self._sums is None
                else [tally_args(self._library, *one, self._sums) for one in records.tallies]
            )
            tallies = (TallyArgs * len(made))(*made)
            rings = (RingArgs * len(records.queries))(*map(_ring_args, records.queries))
            args.tallies, args.num_tallies = ctypes.addressof(tallies), len(tallies)
            args.rings, args.num_rings = ctypes.addressof(rings), len(rings)
            owner.append((tallies, rings))
        return copies, owner

    def _set_biases(self, biases: "SlotBiases | None") -> None:
        args = self._args
        args.bias = None if biases is None else biases.numbers.data_ptr()
        if biases is not None:
            args.bias_row_stride = biases.numbers.stride(0) if len(biases.numbers) > 1 else 0
            args.bias_head_stride, args.bias_end = biases.numbers.stride(1), biases.end
            args.bias_rows = None if biases.rows is None else biases.rows.data_ptr()
            args.softcap = args.softcap or -1.0  # else logits are used as they are

    def _set_sums(self, column_sums: Tensor | None) -> None:
        if column_sums is not None:
            self._args.column_sums = column_sums.data_ptr()
            self._args.normalisers = self._args.partials + self._partials_bytes
            self._args.tops = self._args.normalisers + self._normalisers_bytes

    def _set_layer(
        self,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        out: Tensor,
        scratch: Scratch,
    ) -> None:
        args = self._args
        of_heads = self._partials_bytes + self._normalisers_bytes + self._tops_bytes
        memory = scratch.address(self._thread_bytes * self._num_threads + of_heads)
        last = self._attended
        if last is None or pages.key is not last.key or pages.value is not last.value:
            args.key, args.value = pages.key.data_ptr(), pages.value.data_ptr()
            self._attended = pages
        args.first_lane = pages.first_lane
        args.query, args.out = query.data_ptr(), out.data_ptr()
        args.query_token_stride, args.query_head_stride = query.stride(0), query.stride(1)
        args.scale, args.softcap = math.scale, math.softcap or 0.0
        if args.scratch != memory:
            args.scratch = memory
            args.partials = memory + self._thread_bytes * self._num_threads


@dataclass(frozen=True, slots=True, eq=False)
class SlotBiases:
    """Biases of the logits of a layer by slot; see `bias_of` in args.h.

    Attributes:
        numbers: float32 [rows, or 1 for all rows; num_heads; slots and `PAD_SLOTS` more].
        end: 0: by slot; else the last slot of every lane has number `end` - 1.
        rows: int64 [rows of the plan] rows of `numbers`; None: in order.
    """

    numbers: Tensor
    end: int = 0
    rows: Tensor | None = None

    @classmethod
    def in_order(cls, alibi: Alibi, max_slots: int) -> "SlotBiases":
        """Biases of lanes of at most `max_slots` slots in the order of their positions."""
        biases = alibi.bias(torch.arange(max_slots), max_slots - 1)
        padded = torch.nn.functional.pad(biases, (0, PAD_SLOTS))
        return cls(padded[None], 0 if alibi.rounded else max_slots)

    @classmethod
    def by_position(cls, alibi: Alibi, pages: LayerPages, plan: "NativePlan") -> "SlotBiases":
        """Biases of the slots of pages that store positions."""
        slots, token_row = plan.lanes.slots, plan.token_row
        if token_row is not None:  # a row of the step ends with its last token
            slots = slots[np.cumsum(np.bincount(token_row.numpy())) - 1]
        held = torch.from_numpy(slots.astype(np.int64))[:, :, None]
        lanes = slice(pages.first_lane, pages.first_lane + pages.num_lanes)
        columns = -(-int(slots.max()) // pages.page_tokens)
        numbers = pages.table[pages.rows, lanes, :columns].clamp_min(0).long()
        assert pages.positions is not None, "only called for pages with positions"
        positions = pages.positions[numbers].flatten(2).long()
        by_lane = alibi.of_lanes(pages.num_lanes, torch.arange(pages.num_lanes))
        biases = by_lane.bias(positions, positions.gather(2, held - 1)).flatten(1, 2)
        return cls(torch.nn.functional.pad(biases, (0, PAD_SLOTS)), rows=token_row)


def heads_together(heads_per_page: int, parts: Parts, num_threads: int) -> int:
    """Return the number of KV heads that one thread walks together, as many as the threads allow.

    Vectors of neighbouring heads are adjacent in a page, so memory is read in longer runs. The
    number changes no output.
    """
    most = int(parts.walk_slots.max(initial=0))
    total, walks = int(parts.walk_slots.sum()), len(parts.walk_slots)
    for heads in range(min(MAX_TOGETHER, heads_per_page), 1, -1):
        if heads_per_page % heads or parts.joined:
            continue
        items = walks * heads_per_page // heads
        small = most * heads * ITEMS_A_THREAD * num_threads <= total * heads_per_page
        if small or (items % num_threads == 0 and 10 * most * walks <= 11 * total):
            return heads
    return 1


@dataclass(frozen=True, slots=True)
class Ready:
    """Prepared attention of the layers of a plan, built by the first layer.

    Attributes:
        call: arguments of the C library; None if it cannot read the tensors.
        gathered: plan of the rows that the gathered backend computes, or None.
    """

    call: NativeCall | None
    gathered: object | None


@dataclass(frozen=True, slots=True)
class NativeSparse:
    """Rows of a plan that read only some pages of their lanes.

    Attributes:
        lanes: pages that they read.
        held: [rows, lanes] live slots.
        columns: most pages of a lane, with room for those of later steps.
        picked: most pages that are read, with room likewise.
    """

    lanes: SparseLanes
    held: NDArray[np.int32]
    columns: int
    picked: int

    @classmethod
    def of(cls, lanes: LaneSlots, page_tokens: int) -> "NativeSparse | None":
        """Copy the arrays, which change with later steps."""
        if lanes.sparse is None:
            return None
        own = SparseLanes(lanes.sparse.pages.copy(), *(_kept(lanes.sparse)))
        pages = -(-int(lanes.slots.max()) // page_tokens)
        columns = -(-pages // SCORE_PADDING) * SCORE_PADDING + SCORE_PADDING
        return cls(own, lanes.slots.copy(), columns, int(own.pages.max()) + SPARE_PAGES)

    def advance(self, lanes: LaneSlots, page_tokens: int) -> bool:
        """Change the arrays to those of a later step, if the same lanes read only some pages."""
        new = lanes.sparse
        if new is None or ((new.pages > 0) != (self.lanes.pages > 0)).any():
            return False
        columns = -(-int(lanes.slots.max()) // page_tokens)
        if columns > self.columns or int(new.pages.max()) > self.picked:
            return False
        self.held[:], self.lanes.pages[:] = lanes.slots, new.pages
        self.lanes.sinks[:], self.lanes.recent[:] = _kept(new)
        return True


def _kept(lanes: SparseLanes) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return lanes.sinks.copy(), lanes.recent.copy()


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A step for layers with the same page class, the same table and equal lane lengths.

    Attributes:
        step, lanes: shapes in contiguous arrays, as the C library requires.
        page_tokens: slots of a page.
        slot_bytes: bytes of a slot.
        token_row: [tokens] row of each token, if every token is computed as a separate row; None if
            the tokens of a row are computed together.
        sparse: rows that read only some pages; `lanes` has the slots of these pages.
        ready: prepared attention by properties of a layer's tensors.
        last: the properties and prepared attention of the last layer, or nothing.
    """

    step: StepShape
    lanes: LaneSlots
    page_tokens: int
    slot_bytes: int
    token_row: Tensor | None = None
    sparse: "NativeSparse | None" = None
    ready: dict[tuple[object, ...], Ready] = field(default_factory=dict)
    last: "list[LastLayer]" = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class LastLayer:
    """A layer without column sums and its prepared attention; the next layer is mostly alike.

    Attributes:
        pages: its pages.
        query: its query.
        ready: its prepared attention.
    """

    pages: LayerPages
    query: Tensor
    ready: Ready

    def is_like(self, pages: LayerPages, query: Tensor) -> bool:
        """Return whether the same arguments, apart from addresses, fit this layer."""
        own = self.pages
        return (
            pages.key is own.key
            and pages.value is own.value
            and pages.table is own.table
            and pages.rows is own.rows
            and pages.coded is own.coded
            and pages.full_precision is own.full_precision
            and pages.promoted is own.promoted
            and query.shape == self.query.shape
            and query.dtype == self.query.dtype
            and query.data_ptr() % query.itemsize == 0
        )


def token_plan(step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> NativePlan:
    """Plan every token as a row with one new token, which sees the slots up to its own."""
    rows, slots, token_row = token_rows(step, lanes)
    return NativePlan(rows, slots, page_tokens, slot_bytes, torch.from_numpy(token_row))


def gathered_chunks(plan: NativePlan, rows: NDArray[np.int64]) -> GatheredPlan:
    """Build a plan of the gathered backend for the chunks of these rows."""
    wanted = set(rows.tolist())
    chunks = [c for c in group_chunks(plan.step, plan.lanes) if wanted >= set(c.rows.tolist())]
    return GatheredPlan(plan.step, plan.lanes.window, (), tuple(chunks))


def check_column_sums(plan: NativePlan, query: Tensor, column_sums: Tensor | None) -> None:
    """Refuse column sums that are too small for the step."""
    if column_sums is None:
        return
    wanted = (len(plan.step.tokens), query.shape[1], int(plan.lanes.slots.max(initial=0)))
    rows, heads, slots = column_sums.shape
    if (rows, heads) != wanted[:2] or slots < wanted[2]:
        raise InvariantError(
            f"expected column sums of shape {wanted} or wider, got {tuple(column_sums.shape)}"
        )


class WriteCall:
    """Arguments of writes to the same planes, built once.

    Args:
        library: the loaded C library.
        slots: slots of the first write.
        key, value: its keys and values.
    """

    def __init__(self, library: NativeLibrary, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        self._library, self._planes = library, (slots.key, slots.value)
        self._vectors, self._dtype = (key.shape[1:], value.shape[1:]), key.dtype
        self._lanes, self._itemsize = slots.pages.shape[1], key.itemsize
        self._is_coded = slots.coded is not None
        self._args = WriteArgs(
            plane=(slots.key.data_ptr(), slots.value.data_ptr()),
            page_bytes=slots.key.stride(0) * slots.key.itemsize,
            num_lanes=self._lanes,
            heads_per_page=slots.key.shape[1],
            page_tokens=slots.key.shape[2],
            dtype=DTYPES[key.dtype],
            path=library.path,
            coded=self._is_coded,
            codings=codings_of(slots),
        )
        if slots.bounds is not None:
            self._args.bounds = slots.bounds.data_ptr()
            self._args.bounds_dtype = DTYPES[slots.bounds.dtype]

    def fits(self, slots: NewSlots, key: Tensor, value: Tensor) -> bool:
        """Return whether these tensors differ from the first ones in memory and tokens only."""
        places = (len(key), self._lanes)
        return (
            (slots.coded is not None) == self._is_coded
            and slots.key is self._planes[0]
            and slots.value is self._planes[1]
            and (slots.bounds is not None) == bool(self._args.bounds)
            and slots.pages.shape == slots.offsets.shape == places
            and (key.shape[1:], value.shape[1:]) == self._vectors
            and len(key) == len(value)
            and key.dtype == value.dtype == self._dtype
            and slots.pages.dtype == slots.offsets.dtype == torch.int64
            and slots.pages.is_contiguous()
            and slots.offsets.is_contiguous()
            and key.stride(2) == value.stride(2) == 1
        )

    def write(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        """Write keys and values [tokens, num_kv_heads, dim] with a contiguous last axis."""
        self._set(slots, key, value)
        if self._library.write(ctypes.byref(self._args), self._library.parallel_for):
            raise InvariantError("torch_parallel_for failed inside the C extension")

    def layer_args(
        self, layers: Sequence[NewSlots], key: Tensor, value: Tensor
    ) -> "ctypes.Array[WriteArgs]":
        """Return the arguments of writes that differ in their slots only, for a chain."""
        self._set(layers[0], key, value)
        copies = copied(self._args, len(layers))
        for args, slots in zip(copies, layers, strict=True):
            args.pages, args.offsets = slots.pages.data_ptr(), slots.offsets.data_ptr()
        return copies

    def _set(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        args, itemsize = self._args, self._itemsize
        args.fresh[:] = (key.data_ptr(), value.data_ptr())
        args.token_stride[:] = (key.stride(0) * itemsize, value.stride(0) * itemsize)
        args.head_stride[:] = (key.stride(1) * itemsize, value.stride(1) * itemsize)
        args.pages, args.offsets = slots.pages.data_ptr(), slots.offsets.data_ptr()
        args.num_tokens = len(key)


def move(library: NativeLibrary, moves: MovedSlots, scratch: Scratch) -> None:
    """Copy slots to other slots in every plane; see `AttentionBackend.move`."""
    (from_page, from_offset), (to_page, to_offset) = moves.source, moves.target
    for plane in moves.planes:
        _, heads_per_page, page_tokens, width = plane.shape
        args = MoveArgs(
            plane=plane.data_ptr(),
            page_bytes=plane.stride(0) * plane.itemsize,
            vector_bytes=width * plane.itemsize,
            pages=(from_page.data_ptr(), to_page.data_ptr()),
            offsets=(from_offset.data_ptr(), to_offset.data_ptr()),
            scratch=scratch.address(len(from_page) * heads_per_page * width * plane.itemsize),
            num_moves=len(from_page),
            heads_per_page=heads_per_page,
            page_tokens=page_tokens,
        )
        if library.move(ctypes.byref(args), library.parallel_for):
            raise InvariantError("torch_parallel_for failed inside the C extension")


def score(
    library: NativeLibrary,
    kind: int,
    lanes: LaneVectors,
    scratch: Scratch,
    window: tuple[Tensor, Tensor] | None = None,
    finish: WindowFinish | None = None,
) -> Tensor:
    """Score the tokens of lanes; see `ScoringBackend`.

    Args:
        library: the loaded C library.
        kind: WINDOW_SUMS, MEAN_COSINES or NORMS.
        lanes: keys or values.
        scratch: memory of the threads.
        window: records and scales of `ScoringBackend.window_sums`.
        finish: what is done with the sums.
    """
    plane, (num_lanes, slots) = lanes.plane, lanes.order.shape
    heads = plane.shape[1]
    shape: tuple[int, ...] = (num_lanes * heads, slots)
    coding = plain_coding(plane) if lanes.coded is None else coding_of(lanes.coded)
    held = [lanes.pages, lanes.order, lanes.positions, lanes.held, *(window or ())]
    held = [numbers.contiguous() for numbers in held]
    args = ScoreArgs(
        vectors=AttentionArgs(
            key=plane.data_ptr(),
            page_bytes=plane.stride(0) * plane.itemsize,
            heads_per_page=heads,
            group=1,
            head_dim=lanes.head_dim,
            page_tokens=plane.shape[2],
            dtype=DTYPES[plane.dtype] if lanes.coded is None else 0,
            path=library.path,
            coded=lanes.coded is not None,
            key_coding=coding,
        ),
        pages=held[0].data_ptr(),
        order=held[1].data_ptr(),
        positions=held[2].data_ptr(),
        held=held[3].data_ptr(),
        columns=lanes.pages.shape[1],
        slots=slots,
        num_lanes=num_lanes,
        score=kind,
    )
    if window is not None:
        args.records, args.scales = held[4].data_ptr(), held[5].data_ptr()
        args.window = window[0].shape[1]
        args.vectors.group = (window[0].shape[2] - 1) // lanes.head_dim
        if finish is None:
            shape = (shape[0], args.vectors.group, slots)
        else:
            args.kernel, args.newest = finish.kernel, finish.newest
            args.pool_max, args.heads = finish.pooling == MAX, REDUCTIONS.index(finish.heads)
    scores = torch.empty(shape)
    threads = torch.get_num_threads()
    args.out, args.scratch_bytes = scores.data_ptr(), library.score_bytes(ctypes.byref(args))
    args.scratch = scratch.address(args.scratch_bytes * threads)
    if library.score(ctypes.byref(args), library.parallel_for, threads):
        raise InvariantError("torch_parallel_for failed inside the C extension")
    return scores


BY_POSITION, BY_NUMBER = 0, 1
_RANKS = {torch.float32: 2, torch.float64: 3, torch.bool: 4}  # by type of the scores; see select.h


def order_lanes(library: NativeLibrary, lanes: HeldLanes) -> tuple[Tensor, Tensor]:
    """Sort the slots of each lane by position; see `LaneSelector.order_lanes`."""
    shape = len(lanes.pages), lanes.max_held
    by_position, slot = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
    args = _lane_args(library, lanes)
    args.by_position, args.slot = by_position.data_ptr(), slot.data_ptr()
    _call(library.lanes, args, library)
    return by_position, slot


def select_lanes(library: NativeLibrary, lanes: HeldLanes, ranking: SlotRanking) -> SelectedSlots:
    """Select the slots to retain; see `LaneSelector.select_lanes`."""
    args, score, numbers = _lane_args(library, lanes), ranking.score, ranking.numbers
    moves = torch.empty(len(lanes.pages), 2, ranking.max_moves, dtype=torch.int32)
    evicted = torch.empty(len(lanes.pages), 2 + ranking.max_evicted, dtype=torch.int32)
    args.keep, args.newest = ranking.keep.data_ptr(), _pointer(ranking.newest)
    args.sinks, args.protected = ranking.sinks, _pointer(ranking.protected)
    if score is not None:
        args.rank, args.score = _RANKS[score.dtype], score.data_ptr()
        args.lanes_per_score = len(lanes.pages) // len(score)
    elif numbers is not None:
        args.rank, args.numbers = BY_NUMBER, numbers.numbers.data_ptr()
        args.number_page_bytes = numbers.numbers.stride(0) * numbers.numbers.itemsize
        args.number_pages, args.number_columns = numbers.pages.data_ptr(), numbers.pages.shape[1]
        args.number_tokens, args.next = numbers.numbers.shape[2], _pointer(numbers.next_position)
    args.moves, args.max_moves = moves.data_ptr(), ranking.max_moves
    args.evicted, args.max_evicted = evicted.data_ptr(), ranking.max_evicted
    _call(library.lanes, args, library)
    return SelectedSlots(moves, evicted)


def move_lanes(
    library: NativeLibrary, planes: Sequence[Tensor], pages: Tensor, selected: SelectedSlots
) -> None:
    """Make the moves in planes of a page class; see `LaneSelector.move_lanes`."""
    moved = (MovedPlane * len(planes))(
        *(
            MovedPlane(
                plane=plane.data_ptr(),
                vector_bytes=plane.shape[3] * plane.itemsize,
                heads_per_page=plane.shape[1],
            )
            for plane in planes
        )
    )
    args = LaneMoveArgs(
        planes=ctypes.addressof(moved),
        pages=pages.data_ptr(),
        moves=selected.moves.data_ptr(),
        counts=selected.evicted.data_ptr() + selected.evicted.itemsize,
        page_bytes=planes[0].stride(0) * planes[0].itemsize,
        num_planes=len(planes),
        lanes=len(pages),
        columns=pages.shape[1],
        max_moves=selected.moves.shape[2],
        count_stride=selected.evicted.shape[1],
        page_tokens=planes[0].shape[2],
    )
    _call(library.move_lanes, args, library)


def _lane_args(library: NativeLibrary, lanes: HeldLanes) -> LaneArgs:
    return LaneArgs(
        positions=lanes.positions.data_ptr(),
        pages=lanes.pages.data_ptr(),
        held=lanes.held.data_ptr(),
        page_bytes=lanes.positions.stride(0) * lanes.positions.itemsize,
        lanes=len(lanes.pages),
        slots=lanes.max_held,
        columns=lanes.pages.shape[1],
        page_tokens=lanes.positions.shape[1],
        rank=BY_POSITION,
        lanes_per_score=1,
        path=library.path,
    )


def _call(function: Callable[..., int], args: ctypes.Structure, library: NativeLibrary) -> None:
    if function(ctypes.byref(args), library.parallel_for):
        raise InvariantError("slots of a lane have no distinct positions, or memory is exhausted")


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def tally_args(
    library: NativeLibrary, target: AttentionStatistic, rows: StatisticRows, column_sums: Tensor
) -> TallyArgs:
    """Return the arguments of a tally, also for one that attention makes."""
    _, heads_per_page, page_tokens, _ = target.numbers.shape
    num_rows, num_lanes = rows.slots.shape
    return TallyArgs(
        numbers=target.numbers.data_ptr(),
        page_bytes=target.numbers.stride(0) * target.numbers.itemsize,
        table=target.table.data_ptr(),
        table_row_stride=target.table.stride(0),
        table_lane_stride=target.table.stride(1),
        step_rows=rows.step_rows.data_ptr(),
        table_rows=rows.table_rows.data_ptr(),
        slots=rows.slots.data_ptr(),
        fresh=rows.fresh.data_ptr(),
        sums=column_sums.data_ptr(),
        sums_stride=column_sums.shape[2],
        number=None if rows.number is None else rows.number.data_ptr(),
        num_rows=num_rows,
        num_lanes=num_lanes,
        heads_per_page=heads_per_page,
        group=column_sums.shape[1] // (num_lanes * heads_per_page),
        first_lane=target.first_lane,
        page_tokens=page_tokens,
        heads=REDUCTIONS.index(target.heads),
        count=int(target.count),
        path=library.path,
    )


def tally(
    library: NativeLibrary, target: AttentionStatistic, rows: StatisticRows, column_sums: Tensor
) -> None:
    """Add attention to the statistics of slots; see `AttentionBackend.tally`."""
    args = tally_args(library, target, rows, column_sums)
    args.number = None  # attention has added no row's column sums
    if library.tally(ctypes.byref(args), library.parallel_for):
        raise InvariantError("torch_parallel_for failed inside the C extension")


def _ring_args(stored: StoredQueries) -> RingArgs:
    _, heads_per_page, page_tokens, width = stored.numbers.shape
    num_records, num_lanes = stored.pages.shape
    return RingArgs(
        numbers=stored.numbers.data_ptr(),
        page_bytes=stored.numbers.stride(0) * stored.numbers.itemsize,
        pages=stored.pages.data_ptr(),
        offsets=stored.offsets.data_ptr(),
        tokens=stored.tokens.data_ptr(),
        marks=stored.marks.data_ptr(),
        num_records=num_records,
        num_lanes=num_lanes,
        heads_per_page=heads_per_page,
        page_tokens=page_tokens,
        width=width,
    )
