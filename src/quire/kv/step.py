"""Attention of one step: write the new tokens into their slots, then run attention over pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionBackend,
    AttentionMath,
    ChainBackend,
    ChainLayer,
    CosSin,
    HeadBuffers,
    LaneSlots,
    LayerPages,
    LayerRecords,
    NewSlots,
    RotatesTo,
    SparseLanes,
    TokenIndex,
    rotated_and_written,
)
from quire.kernels.device_copies import to_device
from quire.kernels.latent import LatentPlan, attend_pages
from quire.kernels.sparse import SparsePlan
from quire.kv.flat_batch import WHOLE_STEP, FlatBatch, Scoring, StepPart
from quire.kv.paged_kv import PagedKV, slot_bytes_of
from quire.kv.pages import PageNumbers
from quire.kv.states import StepStates
from quire.kv.statistics import (
    GroupWatch,
    StatisticPages,
    Unrotates,
    positions_of,
    statistics_used,
    watch_group,
)
from quire.kv.token_precision import FullPrecisionStep, PromotedBuffer
from quire.layout.pages import LaneGroup
from quire.layout.sparse import SparseSpec


@runtime_checkable  # for the shape checks in tests
class LayerRoPE(Unrotates, RotatesTo, Protocol):
    """RoPE of a layer: rotates queries and keys, and removes the rotation of queries."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The state of one lane group in a step."""

    plans: tuple[object, ...]  # of each layer
    pages: tuple[LayerPages, ...]
    new_slots: tuple[NewSlots, ...]  # of the new tokens in each layer
    new_places: tuple[Tensor, Tensor]  # pages and offsets, each [layers, tokens, lanes of a layer]
    # int32 [pages, tokens] of all pages of the class; None if pages have no positions
    positions: Tensor | None
    watch: GroupWatch | None  # None if no row uses any statistic
    full_precision: FullPrecisionStep | None  # None if the group has none
    promoted: PromotedBuffer | None  # in addition to these; None if the group has none
    first: int = 0  # index in the group of the first layer of `plans`, `pages` and `new_slots`

    def chain_layer(self, index: int, math: AttentionMath) -> ChainLayer | None:
        """Return a layer of a chain; None if it needs more than a chain does.

        Positions can be written for all layers together: attention does not read them.
        """
        records = LayerRecords() if self.watch is None else self.watch.records(index)
        if records is None or self.full_precision is not None or self.promoted is not None:
            return None
        return ChainLayer(self.pages[index], self.new_slots[index], math, records)

    def write_positions(self, positions: Tensor) -> None:
        """Store the positions, int32 [tokens, 1], of the new tokens in all layers."""
        if self.positions is not None:
            pages, offsets = self.new_places
            self.positions[pages, offsets] = positions.expand_as(pages)


def chained(
    backend: ChainBackend, layers: Sequence[tuple[object, ChainLayer]], heads: HeadBuffers
) -> list[object] | None:
    """Prepare layers, each with its plan; None if the backend has no calls for a layer."""
    by_plan: dict[int, list[int]] = {}
    for number, (plan, _) in enumerate(layers):
        by_plan.setdefault(id(plan), []).append(number)
    calls: dict[int, object] = {}
    for numbers in by_plan.values():
        parts = [layers[number][1] for number in numbers]
        prepared = backend.chain(layers[numbers[0]][0], parts, heads)
        if prepared is None:
            return None
        calls.update(zip(numbers, prepared, strict=True))
    return [calls[number] for number in range(len(layers))]


@dataclass(slots=True)
class ChainedStep:
    """The last step that ran as a chain, which a later decode step of the same rows continues.

    From one decode step to the next, only numbers change: live slots, and places of new tokens.
    They are written into the arrays that the calls point to.
    """

    batch: FlatBatch | None = None
    groups: Mapping[str, GroupStep] = field(default_factory=dict)
    layers: Sequence[AttentionMath] = ()
    heads: HeadBuffers | None = None
    calls: list[object] | None = None

    def continued(
        self,
        backend: ChainBackend,
        name: str,
        pages: tuple[LayerPages, ...],
        lanes: Sequence[LaneSlots],
        places: tuple[PageNumbers, NDArray[np.int64]],
    ) -> GroupStep | None:
        """A lane group changed to the next step, places [layers, tokens, lanes]; or None.

        `lanes` of each layer; layers that can share a plan have the same object.
        """
        last = self.groups.get(name)
        if last is None or pages is not last.pages:
            return None
        first: dict[int, int] = {}  # the first layer of each plan
        for layer, plan in enumerate(last.plans):
            if lanes[first.setdefault(id(plan), layer)] is not lanes[layer]:
                return None
        if not all(backend.advance(last.plans[layer], lanes[layer]) for layer in first.values()):
            return None
        for held, new in zip(last.new_places, places, strict=True):
            held.numpy()[:] = new
        return last

    def calls_of(
        self, groups: Mapping[str, GroupStep], layers: Sequence[AttentionMath], heads: HeadBuffers
    ) -> list[object] | None:
        """Return the calls of the layers if this step's calls serve these groups."""
        same = self.heads is heads and self.layers is layers
        if same and all(groups[name] is group for name, group in self.groups.items()):
            return self.calls
        return None


@dataclass(slots=True)
class LastStep:
    """What a later step of the same rows uses again; its owner passes it to each step."""

    batch: FlatBatch | None = None
    layer_pages: dict[str, tuple[LayerPages, ...]] = field(default_factory=dict)  # by lane group
    chained: ChainedStep = field(default_factory=ChainedStep)

    def flat_batch(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int32], device: torch.device
    ) -> FlatBatch:
        if self.batch is None or not self.batch.is_for(rows, tokens):
            self.batch = FlatBatch.of(rows, tokens, device)
        return self.batch

    def pages_of_layers(
        self, kv: PagedKV, group: LaneGroup, rows: Tensor
    ) -> tuple[LayerPages, ...]:
        table = kv.tables[group.name].current()
        pages = self.layer_pages.get(group.name)
        if pages is None or pages[0].rows is not rows or pages[0].table is not table:
            pages = self.layer_pages[group.name] = kv.pages_of_layers(group, table, rows)
        return pages


class StepAttention:
    """Attention for one flat batch, created after the memory has grown by the step's tokens.

    Args:
        rows: [rows] table rows in the order of the flat batch, one-token rows first.
        tokens: [rows] new tokens of each row.
        later: [rows] new tokens of each row in later batches of the same step, whose slots are
            already allocated; None if the step has one batch.
        part: place of the batch in its step.
        pre_rope: whether the keys of these rows are stored before RoPE, beside others after RoPE.
        layer: the only layer whose slots are allocated; None: those of all layers are.
        scoring: the part of a scoring pass that the tokens are; None: they are tokens of requests.
        sparse: [rows] sparse attention of decode rows; None: of a row that reads all pages.
        last: the last step of the same owner; default: nothing is used again.

    Attributes:
        wants_residual_similarity: whether a row uses `ResidualSimilarity`; if so, the model must
            call `note_residual_similarity`.
        wants_inputs: whether the model must call `note_input`.
    """

    def __init__(  # noqa: PLR0913 - rows, and what their step has
        self,
        kv: PagedKV,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
        later: NDArray[np.int32] | None = None,
        part: StepPart = WHOLE_STEP,
        *,
        pre_rope: bool = False,
        layer: int | None = None,
        scoring: Scoring | None = None,
        sparse: Sequence[SparseSpec | None] = (),
        last: LastStep | None = None,
    ) -> None:
        self._kv, self._last, self._scoring = kv, last or LastStep(), scoring
        self._pre_rope = kv.pre_rope if pre_rope and kv.rotated else None
        self._later = np.zeros_like(tokens) if later is None else later
        self._sparse = sparse if any(sparse) else ()
        self._lengths = _lengths_before(kv.memory.lengths, rows, later)
        self._batch = self._last.flat_batch(rows, tokens, kv.store.device)
        self._offload = None
        if kv.offload is not None:
            ends = self._later == 0  # a row whose last token is in this batch
            own = [one if end else None for one, end in zip(self._sparse, ends, strict=False)]
            self._offload = kv.offload.step(self._batch, part, own)
        if layer is None:
            groups = (group for group in kv.memory.layout.groups if not group.private)
            self._groups = {group.name: self._group_step(group) for group in groups}
        else:
            group, index = kv.place[layer]
            self._groups = {group.name: self._group_step(group, range(index, index + 1))}
        watches = (step.watch for step in self._groups.values())
        self.wants_residual_similarity = any(
            watch is not None and watch.wants_residual_similarity for watch in watches
        )
        self.wants_inputs = self._offload is not None and self._offload.wants_inputs

    def attend(
        self,
        layer: int,
        math: AttentionMath,
        query: Float[Tensor, "num_tokens num_heads query_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads key_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads value_dim"],
        rotary: LayerRoPE | None = None,
        rope: CosSin | None = None,
    ) -> Float[Tensor, "num_tokens num_heads output_dim"]:
        """Write the batch's keys and values, compute attention and record attention statistics.

        A layer that reads the lanes of another layer writes nothing.

        Args:
            layer: index of the layer in the model.
            math: scale and other attention options.
            query: queries after RoPE; before RoPE if the layer's pages hold keys before RoPE.
            key: keys, in the same form.
            value: values.
            rotary: RoPE of the layer; needed for query moments and for keys before RoPE.
            rope: rotates the queries and keys of this batch, which are before RoPE and may be
                overwritten; None: they are in the form above.
        """
        group, index = self._kv.place[layer]
        step, backend = self._groups[group.name], self._backend
        if self._pre_rope is not None or not group.page_class.rotated:
            assert rotary is not None, "the model was prepared for keys before RoPE"
            math = replace(math, rotary=rotary)
        at, reader = index - step.first, self._kv.readers[layer]
        slots = step.new_slots[at]
        if reader:
            query = query if rope is None else rope.rotate(query)
        else:
            query, key = self._write(step, index, (query, key, value), rope, math.index)
        if not reader and step.positions is not None:
            step.positions[slots.pages, slots.offsets] = self._positions.expand_as(slots.pages)
        pages, watch = step.pages[at], step.watch
        if self._offload is not None:
            self._offload.start_cpu_attention(group, index, query, math)
            self._offload.wait_for_prefix(group, index, backend, slots, step.positions)
            pages = self._offload.layer_pages(group, index, pages)
        if step.full_precision is not None:
            pages = replace(
                pages,
                full_precision=step.full_precision.pages((key, value)),
                promoted=None if step.promoted is None else step.promoted.pages(),
            )
        sums = None if watch is None else watch.room_for_sums(query.shape[1], self._kv.sums_scratch)
        attend = partial(attend_pages, backend, step.plans[at], pages, math)
        out = attend(query, (key, value), column_sums=sums)
        if self._offload is not None:
            self._offload.merge_cpu_attention(out, group, pages, query, math)
        if watch is not None:
            watch.note(index, backend, pages, math, query, sums, rotary, reader)
        if step.full_precision is not None and reader == group.readers - 1:
            # after the last layer that reads them: older tokens are overwritten
            step.full_precision.keep(index, key, value)
        if self._offload is not None:
            self._offload.release_staging(group, index)
        return out

    def _write(
        self,
        step: GroupStep,
        index: int,
        heads: tuple[Tensor, Tensor, Tensor],
        rope: CosSin | None,
        token_index: TokenIndex | None,
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values to the slots of a layer; return queries and keys after RoPE."""
        (query, key, value), slots = heads, step.new_slots[index - step.first]
        if slots.index is not None:
            assert token_index is not None, "the model passes the keys of its index"
            slots.write_index(token_index.key)
        full_precision = step.full_precision
        if rope is not None:
            if full_precision is None and rotated_and_written(self._backend, slots, heads, rope):
                return query, key
            query, key = rope.rotate(query), rope.rotate(key)
        if full_precision is None or not full_precision.encode(index, slots, key, value):
            self._backend.write(slots, key, value)
        return query, key

    def chain(self, layers: Sequence[AttentionMath], heads: HeadBuffers) -> list[object] | None:
        """Prepare writing and attention of all layers as parts of one chain of C calls.

        Returns:
            The calls of each layer; None if the backend has no chains or if a layer needs more,
            such as query moments, offloaded pages or tokens in full precision.
        """
        kv, groups = self._kv, self._groups
        fits = self._offload is None and kv.rotated and self._pre_rope is None
        fits = fits and not (kv.memory.layout.shared or kv.joined or kv.states)
        if kv.chains is None or not fits:
            return None
        calls = self._last.chained.calls_of(groups, layers, heads)
        if calls is None:
            steps: list[tuple[object, ChainLayer]] = []
            for layer, math in enumerate(layers):
                group, index = kv.place[layer]
                step = groups[group.name]
                chain_layer = step.chain_layer(index, math)
                if chain_layer is None:
                    return None
                steps.append((step.plans[index], chain_layer))
            calls = chained(kv.chains, steps, heads)
            if calls is not None and not self._later.any():
                self._last.chained = ChainedStep(self._batch, groups, layers, heads, calls)
        if calls is not None and any(step.positions is not None for step in groups.values()):
            for step in groups.values():
                step.write_positions(self._positions)
        return calls

    @cached_property
    def states(self) -> StepStates:
        """The recurrent states of the batch's rows."""
        return StepStates(self._kv, self._batch, self._lengths)

    @property
    def _backend(self) -> AttentionBackend:
        return self._kv.backend if self._pre_rope is None else self._pre_rope

    def begin_layer(self, layer: int) -> None:
        """Recompute the offloaded KV of a layer before the other weights of the layer arrive."""
        if self._offload is not None:
            group, index = self._kv.place[layer]
            step = self._groups[group.name]
            slots = step.new_slots[index]
            self._offload.begin_layer(group, index, self._kv.backend, slots, step.positions)

    def note_input(self, layer: int, inputs: Float[Tensor, "num_tokens hidden"]) -> None:
        """Record the input of a layer's attention; call before `attend`."""
        assert self._offload is not None, "wants_inputs is False without KV offload"
        self._offload.note_input(layer, inputs)

    def note_residual_similarity(self, layer: int, cosines: Float[Tensor, " num_tokens"]) -> None:
        """Record how much a layer's attention changed the residual stream."""
        group, index = self._kv.place[layer]
        watch = self._groups[group.name].watch
        if watch is not None:
            watch.note_residual_similarity(index, cosines)

    def _group_step(self, group: LaneGroup, only: range | None = None) -> GroupStep:
        """The state of a group, with the plans and slots of only some layers if given."""
        held = self._kv.memory.tables[group.name].num_slots[self._batch.rows]
        slots = held - self._later[:, None]
        attended = slots if self._offload is None else self._offload.slots(group, slots)
        layers = self._last.pages_of_layers(self._kv, group, self._batch.row_index)
        chosen = range(len(group.layers)) if only is None else only
        lanes = slice(chosen.start * group.lanes_per_layer, chosen.stop * group.lanes_per_layer)
        new_places = self._new_places(group, slots[:, lanes], lanes.start)
        if only is not None:
            layers = layers[only.start : only.stop]
        of_layers = self._lanes_of_layers(group, attended[:, lanes], chosen.start)
        if only is None:
            continued = self._continued(group, layers, slots, of_layers, new_places)
            if continued is not None:
                return continued
        pages, offsets = self._tensor(new_places[0]), self._tensor(new_places[1])
        places = zip(layers, pages.unbind(), offsets.unbind(), strict=True)
        return GroupStep(
            plans=self._plans(group, of_layers),
            pages=layers,
            new_slots=tuple(
                NewSlots(
                    *(layer.key, layer.value, page, offset),
                    *(layer.coded, layer.index, layer.bounds),
                )
                for layer, page, offset in places
            ),
            new_places=(pages, offsets),
            positions=self._kv.store.views(group.page_class).positions,
            watch=watch_group(
                self._statistics(group), self._batch, slots, self._lengths, self._scoring
            ),
            full_precision=self._full_precision_step(group.name),
            promoted=self._kv.promoted.get(group.name),
            first=chosen.start,
        )

    def _statistics(self, group: LaneGroup) -> list[StatisticPages]:
        """The statistics in which the batch's queries count: those of scoring passes, or others."""
        places, scores = self._kv.statistics.get(group.name, []), self._scoring is not None
        return [place for place in places if (place.statistic.scoring is not None) == scores]

    def _continued(
        self,
        group: LaneGroup,
        layers: tuple[LayerPages, ...],
        slots: NDArray[np.int32],
        lanes: Sequence[LaneSlots],
        places: tuple[PageNumbers, NDArray[np.int64]],
    ) -> GroupStep | None:
        """Return the state of the last chained step, changed to this step, if that is possible."""
        kv = self._kv
        if self._pre_rope is not None or kv.chains is None or self._later.any():
            return None
        last = self._last.chained
        found = last.groups.get(group.name)
        if last.batch is not self._batch or found is None:
            return None
        uses = statistics_used(self._statistics(group), self._batch)
        if uses != (() if found.watch is None else found.watch.uses):
            return None
        if found.watch is not None:
            found.watch.advance(slots, self._lengths)
        return last.continued(kv.chains, group.name, layers, lanes, places)

    def _full_precision_step(self, name: str) -> FullPrecisionStep | None:
        buffer = self._kv.full_precision.get(name)
        if buffer is None:
            return None
        promoted = self._kv.promoted.get(name)
        return FullPrecisionStep(buffer, self._batch, self._lengths, promoted, self._later)

    def _lanes_of_layers(
        self, group: LaneGroup, slots: NDArray[np.int32], first: int
    ) -> list[LaneSlots]:
        """Return the slots of each layer: the same object for all whose lanes are read alike."""
        num_layers = slots.shape[1] // group.lanes_per_layer
        by_layer = slots.reshape(len(slots), num_layers, group.lanes_per_layer)
        alike = bool((slots == slots[:, :1]).all())
        if alike and not self._sparse:
            return [LaneSlots(np.ascontiguousarray(by_layer[:, 0]), group.window)] * num_layers
        found: dict[tuple[int, bytes], LaneSlots] = {}
        lanes = []
        for layer in range(num_layers):
            number = group.layers[first + layer]
            by_row = [one is None or number < one.dense_layers for one in self._sparse]
            dense = np.array(by_row, dtype=np.bool_)
            key = 0 if alike else layer, dense.tobytes()
            if key not in found:
                own = np.ascontiguousarray(by_layer[:, layer])
                found[key] = LaneSlots(own, group.window, self._sparse_lanes(group, own, dense))
            lanes.append(found[key])
        if self._sparse and group.page_class.has_bounds:
            self._count_pages(group, lanes)
        return lanes

    def _count_pages(self, group: LaneGroup, lanes: Sequence[LaneSlots]) -> None:
        rows = np.array([one is not None for one in self._sparse])
        heads, reads = group.page_class.heads * group.readers, self._kv.page_reads
        for one in lanes:
            held = -(-one.slots[rows] // group.page_class.tokens)
            pages = held if one.sparse is None else one.sparse.pages[rows]
            reads.held += heads * int(held.sum())
            reads.read += heads * int(np.where(pages > 0, pages, held).sum())

    def _sparse_lanes(
        self, group: LaneGroup, slots: NDArray[np.int32], dense: NDArray[np.bool_]
    ) -> SparseLanes | None:
        if dense.all() or not group.page_class.has_bounds:
            return None
        held, sinks, recent = -(-slots // group.page_class.tokens), *np.ones((2, len(slots)), "i4")
        pages = np.zeros_like(slots)
        for row, one in enumerate(self._sparse):
            if one is not None and not dense[row]:
                pages[row] = [one.pages_read(int(lane)) for lane in held[row]]
                sinks[row], recent[row] = one.sinks, one.recent
        return SparseLanes(pages, sinks, recent) if pages.any() else None

    def _plans(self, group: LaneGroup, lanes: Sequence[LaneSlots]) -> tuple[object, ...]:
        """Return a plan per layer; layers with the same lanes share a plan."""
        page_class, backend = group.page_class, self._backend
        plan = partial(LatentPlan.of if page_class.joined else SparsePlan.of, backend)
        tokens, slot_bytes = page_class.tokens, slot_bytes_of(page_class)
        distinct = {id(one): one for one in lanes}
        plans = {
            key: plan(self._batch.shape, one, tokens, slot_bytes) for key, one in distinct.items()
        }
        return tuple(plans[id(one)] for one in lanes)

    def _new_places(
        self, group: LaneGroup, slots: NDArray[np.int32], first_lane: int
    ) -> tuple[PageNumbers, NDArray[np.int64]]:
        """Return pages and offsets of the new tokens, each [layers, tokens, lanes of a layer]."""
        batch, per_layer = self._batch, group.lanes_per_layer
        shape = (slots.shape[1] // per_layer, 1, per_layer)
        before = (slots - batch.shape.tokens[:, None]).astype(np.int64)
        slot = before[batch.token_row] + batch.token_offset[:, None]
        slot = slot.reshape(len(slot), shape[0], shape[2]).swapaxes(0, 1)
        column, offset = np.divmod(slot, group.page_class.tokens)
        row = batch.rows[batch.token_row][None, :, None]
        lane = np.arange(first_lane, first_lane + slots.shape[1]).reshape(shape)
        pages = self._kv.memory.tables[group.name].pages[row, lane, column]
        return pages, offset

    @cached_property
    def _positions(self) -> Tensor:
        """Logical positions of the batch's tokens, int32 [tokens, 1]."""
        positions = positions_of(self._batch, self._lengths)
        return self._tensor(positions).int()[:, None]

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        return to_device(np.asarray(numbers, dtype=np.int64), self._kv.store.device)


def _lengths_before(
    lengths: NDArray[np.int64], rows: NDArray[np.int64], later: NDArray[np.int32] | None
) -> NDArray[np.int64]:
    if later is None or not later.any():
        return lengths
    before = lengths.copy()
    before[rows] -= later
    return before
