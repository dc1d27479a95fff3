"""Attention of one step: put the new tokens into their slots, let the backend attend over pages."""

from dataclasses import dataclass, replace
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
    LaneSlots,
    LayerPages,
    Moves,
    NewSlots,
)
from quire.kernels.coded import decoded_slot_bytes
from quire.kv.coded_layers import CodedLayers, MeasuredConstants
from quire.kv.flat_batch import DeviceTable, FlatBatch
from quire.kv.full_precision import FullPrecisionStep, full_precision_buffers
from quire.kv.memory import KVMemory
from quire.kv.mixed_precision import PromotedBuffer, promoted_buffers
from quire.kv.offload_port import KVOffload
from quire.kv.statistics.pages import StatisticPages, positions_of
from quire.kv.statistics.watching import GroupWatch, SumsScratch, Unrotates, watch_group
from quire.kv.store import PageStore, store_of
from quire.kv.stores.base import PlacementMaker
from quire.kv.stores.paged import Paged
from quire.layout.pages import CacheLayout, LaneGroup

# ---- group step ----------------------------------------------------------------------------------

# What one lane group does in a step: plans, pages, and where new tokens go.


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What one lane group does in a step.

    Attributes:
        plans: the backend's plan for each layer.
        pages: the layers' pages.
        new_slots: where the layers write new tokens.
        positions: int32 [pages, tokens], all pages of the class; None where pages carry none.
        watch: what the rows have remembered; None where they have nothing.
        kept: tokens that stay as they were made; None where there are none.
        promoted: tokens in a finer codec, beside kept ones; None where there are none.
    """

    plans: tuple[object, ...]
    pages: tuple[LayerPages, ...]
    new_slots: tuple[NewSlots, ...]
    positions: Tensor | None
    watch: GroupWatch | None
    kept: FullPrecisionStep | None
    promoted: PromotedBuffer | None


# ---- step ----------------------------------------------------------------------------------------


@runtime_checkable  # for the shape checks in tests
class Turns(Unrotates, Moves, Protocol):
    """RoPE of a layer: taken off queries, put on queries and keys."""


class PagedKV:
    """The device side of a `KVMemory`: bytes, tables as tensors, and who attends.

    Args:
        memory: bookkeeping, whose store is `store`.
        store: the bytes.
        backend: computes attention.
        measured: constants of codecs that need some.
        offload: KV that is not in the arena; None where all of it is.
    """

    def __init__(
        self,
        memory: KVMemory,
        store: PageStore,
        backend: AttentionBackend,
        measured: MeasuredConstants | None = None,
        *,
        offload: KVOffload | None = None,
    ) -> None:
        self.memory, self.store, self.backend = memory, store, backend
        self.coded = CodedLayers(store, measured)
        self.scale = 1.0  # on products of queries and keys, as the last layer that attended said
        self.tables = {
            name: DeviceTable(table, store.device) for name, table in memory.tables.items()
        }
        self.place = {
            layer: (group, index)
            for group in memory.layout.groups
            if not group.private
            for index, layer in enumerate(group.layers)
        }
        self.statistics = self._statistics()
        self.kept = full_precision_buffers(memory, store, self.tables)
        self.promoted = promoted_buffers(memory, store, self.tables)
        self.sums_scratch = SumsScratch(store.device)
        self.offload = offload
        self._batch: FlatBatch | None = None
        self._layer_pages: dict[str, tuple[LayerPages, ...]] = {}

    def note_scale(self, scale: float) -> None:
        """Record the scale on products of queries and keys of the layer that attends."""
        self.scale = scale

    @property
    def rotated(self) -> bool:
        """Whether keys are stored after RoPE, in all layers; else before it, in all."""
        return all(group.page_class.rotated for group, _ in self.place.values())

    @property
    def peak_scratch_bytes(self) -> int:
        """Most bytes held at once beside the arena: the backend's, column sums, X on its way."""
        staged = 0 if self.offload is None else self.offload.staging_bytes
        return self.backend.peak_scratch_bytes + self.sums_scratch.num_bytes + staged

    def _statistics(self) -> dict[str, list[StatisticPages]]:
        """What is remembered of each lane group, for the rows that have it."""
        places: dict[str, list[StatisticPages]] = {}
        for group in self.memory.layout.groups:
            if group.statistic is not None:
                of, _ = self.place[group.layers[0]]
                place = StatisticPages(
                    group=group,
                    statistic=group.statistic,
                    numbers=self.store.views(group.page_class).key,
                    table=self.memory.tables[group.name],
                    device_table=self.tables[group.name],
                )
                places.setdefault(of.name, []).append(place)
        return places

    def flat_batch(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> FlatBatch:
        """The shape of a step; the last one again when nothing changed."""
        if self._batch is None or not self._batch.is_for(rows, tokens):
            self._batch = FlatBatch.of(rows, tokens, self.store.device)
        return self._batch

    def layer_pages(self, group: LaneGroup, rows: Tensor) -> tuple[LayerPages, ...]:
        """The pages of each layer of a group; the last ones again while rows and table stay."""
        table = self.tables[group.name].current()
        made = self._layer_pages.get(group.name)
        if made is None or made[0].rows is not rows or made[0].table is not table:
            views = self.store.views(group.page_class)
            assert views.value is not None, "lanes that attend have a value plane"
            made = tuple(
                LayerPages(
                    key=views.key,
                    value=views.value,
                    table=table,
                    rows=rows,
                    first_lane=index * group.lanes_per_layer,
                    num_lanes=group.lanes_per_layer,
                    positions=views.positions,
                    coded=self.coded.of(group.page_class, layer),
                )
                for index, layer in enumerate(group.layers)
            )
            self._layer_pages[group.name] = made
        return made


def allocate_kv(
    layout: CacheLayout,
    total_bytes: int,
    max_rows: int,
    *,
    device: torch.device,
    backend: AttentionBackend,
    measured: MeasuredConstants | None = None,
    placement: PlacementMaker = Paged,
) -> PagedKV:
    """Allocate a KV memory on a device.

    Args:
        layout: lane groups of every sequence.
        total_bytes: of the arena.
        max_rows: sequences that can exist at once.
        device: of the arena.
        backend: computes attention, and copies slots.
        measured: constants of codecs that need some.
        placement: which store gives lanes their pages.

    Raises:
        ConfigError: the arena does not hold one sequence of one token.
    """
    memory = KVMemory(
        layout,
        total_bytes,
        max_rows,
        store=partial(PageStore, device=device, mover=backend.move),
        track_changes=device.type != "cpu",
        placement=placement,
    )
    return PagedKV(memory, store_of(memory), backend, measured)


class StepAttention:
    """Attention for one flat batch. Made after the memory has grown by the step's tokens.

    Args:
        kv: memory and bytes.
        rows: [rows] table rows in the order of the flat batch, one-token rows first.
        tokens: [rows] new tokens of each.
        later: [rows] tokens of each that the memory has grown by for a later batch of the step;
            None where the step is one batch.

    Attributes:
        wants_residual_similarity: whether any row has `ResidualSimilarity`; then
            `note_residual_similarity` is to be called.
        wants_inputs: whether `note_input` is to be called.
    """

    def __init__(
        self,
        kv: PagedKV,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
        later: NDArray[np.int32] | None = None,
    ) -> None:
        self._kv = kv
        self._later = np.zeros_like(tokens) if later is None else later
        self._lengths = _lengths_before(kv.memory.lengths, rows, later)
        self._batch = kv.flat_batch(rows, tokens)
        self._offload = None if kv.offload is None else kv.offload.step(self._batch)
        self._groups = {
            group.name: self._group_step(group)
            for group in kv.memory.layout.groups
            if not group.private
        }
        watches = (step.watch for step in self._groups.values())
        self.wants_residual_similarity = any(
            watch is not None and watch.wants_residual_similarity for watch in watches
        )
        self.wants_inputs = self._offload is not None and self._offload.wants_inputs

    def attend(
        self,
        layer: int,
        math: AttentionMath,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        rotary: Turns | None = None,
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        """Write keys and values of the whole batch, attend, write down what is to be remembered.

        Args:
            layer: the model's layer.
            math: scale and extras.
            query: after RoPE; before it where the layer's pages hold keys before RoPE.
            key: likewise.
            value: like key.
            rotary: what RoPE does in this layer; needed where moments of queries are kept, and
                where keys are stored before it.
        """
        group, index = self._kv.place[layer]
        step, backend = self._groups[group.name], self._kv.backend
        self._kv.note_scale(math.scale)
        if not group.page_class.rotated:
            assert rotary is not None, "the model was prepared for keys before RoPE"
            math = replace(math, rotary=rotary)
        slots = step.new_slots[index]
        if step.kept is None or not step.kept.encode(index, slots, key, value):
            backend.write(slots, key, value)
        if step.positions is not None:
            step.positions[slots.pages, slots.offsets] = self._positions.expand_as(slots.pages)
        if self._offload is not None:
            self._offload.start_cpu_attention(group, index, query, math)
            self._offload.arrive(group, index, backend, slots, step.positions)
        pages, watch = step.pages[index], step.watch
        if step.kept is not None:
            pages = replace(
                pages,
                kept=step.kept.pages((key, value)),
                promoted=None if step.promoted is None else step.promoted.pages(),
            )
        sums = None if watch is None else watch.room_for_sums(query.shape[1], self._kv.sums_scratch)
        out = backend.attend(step.plans[index], pages, math, query, (key, value), column_sums=sums)
        if self._offload is not None:
            self._offload.merge_cpu_attention(out, group, pages, query, math)
        if watch is not None:
            watch.note(index, backend, pages, math, query, sums, rotary)
        if step.kept is not None:
            step.kept.keep(index, key, value)
        if self._offload is not None:
            self._offload.leave(group, index)
        return out

    def note_input(self, layer: int, inputs: Float[Tensor, "num_tokens hidden"]) -> None:
        """Keep what a layer's attention is given; called before it attends."""
        assert self._offload is not None, "asked for"
        self._offload.note_input(layer, inputs)

    def note_residual_similarity(self, layer: int, cosines: Float[Tensor, " num_tokens"]) -> None:
        """Write down how much a layer's attention changed the residual stream.

        Args:
            layer: the model's layer.
            cosines: between the stream before and after attention was added, for each token.
        """
        group, index = self._kv.place[layer]
        watch = self._groups[group.name].watch
        if watch is not None:
            watch.note_residual_similarity(index, cosines)

    def _group_step(self, group: LaneGroup) -> GroupStep:
        held = self._kv.memory.tables[group.name].num_slots[self._batch.rows]
        slots = held - self._later[:, None]
        attended = slots if self._offload is None else self._offload.slots(group, slots)
        layers = self._kv.layer_pages(group, self._batch.row_index)
        pages, offsets = self._new_slots(group, slots)
        places = zip(layers, pages.unbind(), offsets.unbind(), strict=True)
        return GroupStep(
            plans=self._plans(group, attended),
            pages=layers,
            new_slots=tuple(
                NewSlots(layer.key, layer.value, page, offset, coded=layer.coded)
                for layer, page, offset in places
            ),
            positions=self._kv.store.views(group.page_class).positions,
            watch=watch_group(
                self._kv.statistics.get(group.name, []), self._batch, slots, self._lengths
            ),
            kept=self._kept_step(group.name),
            promoted=self._kv.promoted.get(group.name),
        )

    def _kept_step(self, name: str) -> FullPrecisionStep | None:
        place = self._kv.kept.get(name)
        return None if place is None else FullPrecisionStep(place, self._batch, self._lengths)

    def _plans(self, group: LaneGroup, slots: NDArray[np.int32]) -> tuple[object, ...]:
        """One for each layer; where all lanes of a group are equally full, one for all layers."""
        page_class, num_layers = group.page_class, len(group.layers)
        slot_bytes = page_class.page_bytes // page_class.tokens
        if not page_class.is_plain:
            slot_bytes = decoded_slot_bytes(page_class.heads, page_class.head_dim)
        by_layer = slots.reshape(len(slots), num_layers, group.lanes_per_layer)
        distinct = 1 if (slots == slots[:, :1]).all() else num_layers
        plans = [
            self._kv.backend.plan(
                self._batch.shape,
                LaneSlots(np.ascontiguousarray(by_layer[:, layer]), group.window),
                page_class.tokens,
                slot_bytes,
            )
            for layer in range(distinct)
        ]
        return tuple(plans if distinct == num_layers else plans * num_layers)

    def _new_slots(self, group: LaneGroup, slots: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
        """Pages and offsets to write to, [layers, tokens, lanes of a layer], all layers at once."""
        batch, shape = self._batch, (len(group.layers), 1, group.lanes_per_layer)
        before = (slots - batch.shape.tokens[:, None]).astype(np.int64)
        slot = before[batch.token_row] + batch.token_offset[:, None]
        slot = slot.reshape(len(slot), shape[0], shape[2]).swapaxes(0, 1)
        column, offset = np.divmod(slot, group.page_class.tokens)
        row = batch.rows[batch.token_row][None, :, None]
        lane = np.arange(slots.shape[1]).reshape(shape)
        pages = self._kv.memory.tables[group.name].pages[row, lane, column]
        return self._tensor(pages), self._tensor(offset)

    @cached_property
    def _positions(self) -> Tensor:
        """Logical positions of the batch's tokens, int32 [tokens, 1]."""
        positions = positions_of(self._batch, self._lengths)
        return self._tensor(positions).int()[:, None]

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        whole = np.ascontiguousarray(numbers, dtype=np.int64)
        return torch.from_numpy(whole).to(self._kv.store.device)


def _lengths_before(
    lengths: NDArray[np.int64], rows: NDArray[np.int64], later: NDArray[np.int32] | None
) -> NDArray[np.int64]:
    """Lengths of all rows without the tokens of later batches."""
    if later is None or not later.any():
        return lengths
    before = lengths.copy()
    before[rows] -= later
    return before
