"""The native backend: attention in C, directly from the pages.

If the CPU has neither AVX2 nor AVX-512 (or head_dim is not a multiple of 8 or 16, respectively),
the C library has no code for large chunks; the gathered backend computes those.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.codecs.hadamard import rotate
from quire.errors import InvariantError
from quire.kernels.backend import (
    Alibi,
    AttentionMath,
    AttentionStatistic,
    ChainLayer,
    HeadBuffers,
    HeldLanes,
    LaneSlots,
    LaneVectors,
    LayerPages,
    MovedSlots,
    NewSlots,
    SelectedSlots,
    SlotRanking,
    StatisticRows,
    StepShape,
    WindowFinish,
    dims_of,
)
from quire.kernels.coded import CodedPlanes
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.arguments import (
    AVX2,
    DTYPES,
    EXPANDED,
    MEAN_COSINES,
    NORMS,
    WINDOW_SUMS,
    are_rotated,
    can_move,
    can_read_sums,
    can_score,
    can_tally,
    can_write,
    unfit_blocks,
    unfit_tensors,
)
from quire.kernels.native.call import (
    PAD_SLOTS,
    WALK_ALIGNMENT,
    LastLayer,
    NativeCall,
    NativePlan,
    NativeSparse,
    Parts,
    Ready,
    Scratch,
    SlotBiases,
    WriteCall,
    are_cut_alike,
    check_column_sums,
    cut,
    gathered_chunks,
    order_lanes,
    score,
    select_lanes,
    token_plan,
)
from quire.kernels.native.call import move as move_in_c
from quire.kernels.native.call import move_lanes as move_lanes_in_c
from quire.kernels.native.call import tally as tally_in_c
from quire.kernels.native.chain import LayerAttention
from quire.kernels.native.library import NativeLibrary
from quire.kernels.sparse import SparsePlan, attend_planned, spread_sums

_log = logging.getLogger(__name__)


class NativeAttention:
    """Attention over unquantized and coded pages on a CPU.

    Args:
        library: the loaded C library.
        gathered: computes what the C library has no code for.
        fixed_rows: compute each token of a chunk like a decode row, and products of latents in
            this number of rows. The output of a token then depends on the earlier tokens only, bit
            for bit. Excludes column sums. None: rows are computed together.
    """

    name = "native"

    def __init__(
        self, library: NativeLibrary, gathered: GatheredAttention, *, fixed_rows: int | None = None
    ) -> None:
        self._library, self._gathered, self.fixed_rows = library, gathered, fixed_rows
        self._scratch, self._moving, self._sums = Scratch(), Scratch(), Scratch()
        self._noticed: set[str] = set()
        self._write: WriteCall | None = None
        self._biases: dict[int, tuple[Alibi, SlotBiases]] = {}  # of lanes in order

    def one_by_one(self, fixed_rows: int) -> "NativeAttention":
        """Return the same backend, computing each token separately."""
        return NativeAttention(self._library, self._gathered, fixed_rows=fixed_rows)

    def why_not_joined(self, dims: tuple[int, int], group: int) -> str | None:
        """Return why joined keys cannot be read from pages, or None.

        Args:
            dims: elements of a stored key and of a value.
            group: query heads of a KV head.
        """
        library = self._joined_library(dims)
        return unfit_blocks(max(dims), library.max_head_dim, group, library.blocks(*dims))

    def _joined_library(self, dims: tuple[int, int]) -> NativeLibrary:
        if self._library.blocks(*dims):
            return self._library
        return replace(self._library, path=min(self._library.path, AVX2))  # fits more dims

    @property
    def peak_scratch_bytes(self) -> int:
        """Most bytes of packed slots, moved slots and gathered pages held at once."""
        own_bytes = sum(own.num_bytes for own in (self._scratch, self._moving, self._sums))
        return self._gathered.peak_scratch_bytes + own_bytes

    def plan(self, step: StepShape, lanes: LaneSlots, page_tokens: int, slot_bytes: int) -> object:
        """Store the step; the first layer determines how its rows are cut."""
        if self.fixed_rows is not None:
            return token_plan(step, lanes, page_tokens, slot_bytes)
        tokens, starts = np.ascontiguousarray(step.tokens), np.ascontiguousarray(step.starts)
        return NativePlan(
            StepShape(tokens, starts, step.num_decode),
            LaneSlots(np.ascontiguousarray(lanes.slots_read(page_tokens)), lanes.window),
            page_tokens,
            slot_bytes,
            sparse=NativeSparse.of(lanes, page_tokens),
        )

    @property
    def plans_sparse(self) -> bool:
        return self.fixed_rows is None

    def write(self, slots: NewSlots, key: Tensor, value: Tensor) -> None:
        """Write keys and values to their slots; see `AttentionBackend.write`."""
        call = self._write
        if call is None or not call.fits(slots, key, value):
            if not can_write(slots, key, value):
                self._gathered.write(slots, key, value)
                return
            call = self._write = WriteCall(self._library, slots, key, value)
        call.write(slots, key, value)

    def move(self, moves: MovedSlots) -> None:
        """Copy slots to other slots; see `AttentionBackend.move`."""
        if can_move(moves):
            move_in_c(self._library, moves, self._moving)
        else:
            self._gathered.move(moves)

    def order_lanes(self, lanes: HeldLanes) -> tuple[Tensor, Tensor]:
        """Sort the slots of each lane by position; see `LaneSelector`."""
        return order_lanes(self._library, lanes)

    def select_lanes(self, lanes: HeldLanes, ranking: SlotRanking) -> SelectedSlots:
        """Select the slots to retain; see `LaneSelector`."""
        return select_lanes(self._library, lanes, ranking)

    def move_lanes(self, planes: Sequence[Tensor], pages: Tensor, selected: SelectedSlots) -> None:
        """Make the moves in planes of a page class; see `LaneSelector`."""
        move_lanes_in_c(self._library, planes, pages, selected)

    def tally(self, tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> None:
        """Add a step's attention to the statistics of slots; see `AttentionBackend.tally`."""
        if can_read_sums(column_sums) and can_tally(tally, rows, column_sums.shape[1]):
            tally_in_c(self._library, tally, rows, column_sums)
        else:
            self._gathered.tally(tally, rows, column_sums)

    def can_score(self, plane: Tensor, coded: CodedPlanes | None) -> bool:
        dim = plane.shape[3] if coded is None else coded.codec.head_dim
        return self._library.blocks(dim) > 0 and can_score(plane, coded)

    def window_sums(
        self,
        lanes: LaneVectors,
        records: Tensor,
        scales: Tensor,
        finish: WindowFinish | None = None,
    ) -> Tensor:
        return score(self._library, WINDOW_SUMS, lanes, self._scratch, (records, scales), finish)

    def mean_cosines(self, lanes: LaneVectors) -> Tensor:
        return score(self._library, MEAN_COSINES, lanes, self._scratch)

    def norms(self, lanes: LaneVectors) -> Tensor:
        return score(self._library, NORMS, lanes, self._scratch)

    def attend(
        self,
        plan: object,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        fresh: tuple[Tensor, Tensor],
        *,
        column_sums: Tensor | None = None,
    ) -> Tensor:
        """Compute attention for all rows of the step; see `AttentionBackend.attend`."""
        assert isinstance(plan, NativePlan), "a plan comes from this backend"
        expands = math.latent is not None and not math.joined
        if expands and self._reads_expanded(plan, pages, math, query):
            return self._attend_expanded(plan, pages, math, query, column_sums)
        rotated_keys, rotated_values = are_rotated(pages)
        own = query.float() if rotated_keys or rotated_values else query
        own = rotate(own) if rotated_keys else own
        ready = self._ready(plan, pages, math, own, column_sums)
        if ready.gathered is None:
            out = torch.empty(*query.shape[:2], dims_of(pages)[1], dtype=own.dtype)
        else:
            out = attend_planned(
                *(self._gathered, ready.gathered, pages, math, query, fresh),
                column_sums=column_sums,
            )
        if ready.call is not None:
            out = out.contiguous()
            biases = None if math.alibi is None else self._slot_biases(plan, pages, math.alibi)
            ready.call.attend(pages, math, own, out, column_sums, self._scratch, biases)
            if plan.sparse is not None and column_sums is not None:
                self._spread_sums(plan, ready.call, pages, column_sums)
            out = (rotate(out) if rotated_values else out).to(query.dtype)
        return out

    def _spread_sums(
        self, plan: NativePlan, call: NativeCall, pages: LayerPages, column_sums: Tensor
    ) -> None:
        """Move the column sums of sparse rows from slots of the pages read to those of lanes."""
        sparse, heads = plan.sparse, pages.key.shape[1]
        assert sparse is not None, "see `attend`"
        assert call.picks is not None, "see `attend`"
        counts, columns = sparse.lanes.pages, call.picks[:, :, 1].astype(np.int64)
        order = np.arange(max(sparse.columns, sparse.picked))
        whole = np.zeros((*columns.shape[:2], len(order)), dtype=np.int64)
        whole[:, :, : columns.shape[2]] = columns
        dense = np.repeat(counts == 0, heads, axis=1)
        whole[dense] = order
        rows = np.flatnonzero(counts.any(axis=1))
        slots = np.repeat(plan.lanes.slots[rows], heads, axis=1)
        width, row = column_sums.shape[2], torch.from_numpy(rows)
        column_sums[row] = spread_sums(
            column_sums[row][:, :, : int(slots.max())],
            torch.from_numpy(whole[rows]),
            slots,
            plan.page_tokens,
            width,
        )

    def _reads_expanded(
        self, plan: NativePlan, pages: LayerPages, math: AttentionMath, query: Tensor
    ) -> bool:
        """Whether blocks attend to keys and values that are expanded from latents."""
        others = (pages.full_precision, pages.promoted, math.selected)
        has_blocks = self._library.blocks(query.shape[2], math.output_dim(pages)) > 0
        plain = all(other is None for other in others) and query.dtype in DTYPES
        return plan.token_row is None and plain and has_blocks

    def _attend_expanded(
        self,
        plan: NativePlan,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        column_sums: Tensor | None,
    ) -> Tensor:
        """Expand the latents of one row after the other to one page, and attend to it."""
        out = query.new_empty(*query.shape[:2], math.output_dim(pages))
        lane, window = torch.zeros(1, dtype=torch.int64), plan.lanes.window
        for row, (start, tokens) in enumerate(zip(plan.step.starts, plan.step.tokens, strict=True)):
            own, held = slice(start, start + tokens), int(plan.lanes.slots[row, 0])
            oldest = 0 if window is None else max(0, held - int(tokens) + 1 - window)
            begin = oldest - oldest % pages.page_tokens  # first slot of the first page
            columns = torch.arange(begin, held, pages.page_tokens)[None] // pages.page_tokens
            latents = self._gathered.gather(pages, lane + row, lane, columns, query.dtype)
            expanded = math.heads(*latents)
            key, value = (vectors[:, :, : held - begin].contiguous() for vectors in expanded)
            slots = plan.lanes.slots[row : row + 1, :1] - np.int32(begin)
            step = StepShape.of(plan.step.tokens[row : row + 1])
            sums = None if column_sums is None else torch.zeros(1, query.shape[1], held - begin)
            out[own] = self.attend(
                self.plan(step, LaneSlots(slots, window), held - begin, plan.slot_bytes),
                LayerPages(key, value, lane.int().view(1, 1, 1), lane, 0, 1),
                replace(math, latent=None),
                query[own],
                (key[0, :, -tokens:].transpose(0, 1), value[0, :, -tokens:].transpose(0, 1)),
                column_sums=sums,
            )
            if column_sums is not None and sums is not None:
                column_sums[row, :, begin:held] = sums[0]
        return out

    def _slot_biases(self, plan: NativePlan, pages: LayerPages, alibi: Alibi) -> SlotBiases:
        if pages.positions is not None:
            return SlotBiases.by_position(alibi, pages, plan)
        slots = int(plan.lanes.slots.max(initial=1))
        known = self._biases.get(id(alibi))  # with its key, which thus stays alive
        if known is None or slots > known[1].numbers.shape[2] - PAD_SLOTS:
            table = SlotBiases.in_order(alibi, 1 << (slots - 1).bit_length())
            known = self._biases[id(alibi)] = alibi, table
        return known[1]

    def _ready(
        self,
        plan: NativePlan,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        column_sums: Tensor | None,
    ) -> Ready:
        """Return the prepared attention of a layer, which mostly fits the next layer too."""
        simple = column_sums is None and math.sinks is None
        if simple and plan.last and plan.last[0].is_like(pages, query):
            return plan.last[0].ready
        key = (
            query.shape[1:],
            query.dtype,
            query.data_ptr() % query.itemsize,
            pages.key.data_ptr(),
            pages.table.data_ptr(),
            pages.rows.data_ptr(),
            math.sinks is None,
            None if column_sums is None else column_sums.shape,
        )
        ready = plan.ready.get(key)
        if ready is None:
            ready = plan.ready[key] = self._make_ready(plan, pages, math, query, column_sums)
        if simple:
            plan.last[:] = [LastLayer(pages, query, ready)]
        return ready

    def chain(
        self, plan: object, layers: Sequence[ChainLayer], heads: HeadBuffers
    ) -> list[LayerAttention] | None:
        if not isinstance(plan, NativePlan):  # sparse rows of single tokens
            return None
        pages, slots, math, records = layers[0]
        extras = math.sinks is not None or math.alibi is not None or any(are_rotated(pages))
        if unfit_tensors(pages, math, heads.query, None) or extras:
            return None
        num_heads, sums = heads.query.shape[1], None
        if records.tallies:
            fit = all(can_tally(*one, num_heads) for one in records.tallies)
            if plan.token_row is not None or plan.sparse is not None or not fit:
                return None
            longest = -(-int(plan.lanes.slots.max()) // WALK_ALIGNMENT) * WALK_ALIGNMENT
            sums = self._sums.sums(len(plan.step.tokens), num_heads, longest)  # as `advance` allows
        ready = self._make_ready(plan, pages, math, heads.query, sums)
        call = ready.call
        fits = ready.gathered is None and can_write(slots, heads.key, heads.value)
        if call is None or not fits:
            return None
        write = WriteCall(self._library, slots, heads.key, heads.value)
        writes = write.layer_args([layer.slots for layer in layers], heads.key, heads.value)
        attends, held = call.layer_args(layers, heads.query, heads.out, self._scratch)
        owner = call, layers, held, self._scratch.memory
        return [
            LayerAttention(written, attended, call.num_threads, owner)
            for written, attended in zip(writes, attends, strict=True)
        ]

    def advance(self, plan: object, lanes: LaneSlots) -> bool:
        assert isinstance(plan, NativePlan), "a plan comes from this backend"
        decodes = plan.step.num_decode == len(plan.step.tokens) and plan.token_row is None
        slots, sparse = lanes.slots_read(plan.page_tokens), plan.sparse
        if not decodes or not are_cut_alike(plan.lanes.slots, slots):
            return False
        if lanes.sparse if sparse is None else not sparse.advance(lanes, plan.page_tokens):
            return False
        plan.lanes.slots[:] = slots
        return True

    def _make_ready(
        self,
        plan: NativePlan,
        pages: LayerPages,
        math: AttentionMath,
        query: Tensor,
        column_sums: Tensor | None,
    ) -> Ready:
        check_column_sums(plan, query, column_sums)
        group = query.shape[1] // (pages.num_lanes * pages.key.shape[1])
        unfit, library = unfit_tensors(pages, math, query, column_sums), self._library
        if math.joined:
            library = self._joined_library(dims_of(pages))
            unfit = unfit or self.why_not_joined(dims_of(pages), group)
        blocks = library.blocks(*dims_of(pages))
        if plan.token_row is not None:
            if unfit or column_sums is not None:
                reason = unfit or "column sums"
                raise InvariantError(f"cannot compute attention token by token: {reason}")
            pages = replace(pages, rows=pages.rows[plan.token_row])
        parts = cut(plan.step, plan.lanes, group=group, block_queries=blocks, joined=math.joined)
        if any(are_rotated(pages)):
            unfit = unfit or _unfit_rotated(plan, math, parts)
        if unfit:
            if unfit != EXPANDED:  # which is chosen where it takes less time
                self._notice(unfit)
            lanes = plan.lanes
            if plan.sparse is not None:
                lanes = LaneSlots(plan.sparse.held, lanes.window, plan.sparse.lanes)
            shape = plan.step, lanes, plan.page_tokens, plan.slot_bytes
            return Ready(None, SparsePlan.of(self._gathered, *shape))
        step, lanes = plan.step, plan.lanes
        call = NativeCall(library, step, lanes, parts, pages, query, column_sums, plan.sparse)
        return Ready(call, gathered_chunks(plan, parts.others) if len(parts.others) else None)

    def _notice(self, reason: str) -> None:
        if reason not in self._noticed:
            self._noticed.add(reason)
            _log.warning("attention falls back from the C extension to torch: %s", reason)


def _unfit_rotated(plan: NativePlan, math: AttentionMath, parts: Parts) -> str | None:
    """Return why the C library cannot read rotated codes in a step, or None."""
    if math.joined:
        return "rotated codes of latents"
    if plan.sparse is not None:  # the bounds of pages are those of keys as computed
        return "sparse attention to rotated codes"
    return "chunks of rotated codes without vector instructions" if len(parts.others) else None
