"""Attention of one step: write the new tokens into their slots, then run attention over pages."""

from collections.abc import Sequence
from dataclasses import replace
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
    NewSlots,
    RotatesTo,
)
from quire.kernels.chains import ChainBackend, HeadBuffers
from quire.kernels.coded import decoded_slot_bytes
from quire.kernels.device_copies import to_device
from quire.kernels.rope_write import CosSin, rotated_and_written
from quire.kv.coded_layers import CodedLayers, MeasuredConstants
from quire.kv.flat_batch import DeviceTable, FlatBatch
from quire.kv.full_precision import FullPrecisionStep, full_precision_buffers
from quire.kv.group_step import ChainedStep, GroupStep, LayerStep, chained
from quire.kv.memory import KVMemory
from quire.kv.mixed_precision import promoted_buffers
from quire.kv.offload_port import EngineOffload
from quire.kv.pages import PageNumbers
from quire.kv.statistics.pages import StatisticPages, positions_of
from quire.kv.statistics.watching import SumsScratch, Unrotates, watch_group
from quire.kv.step_part import WHOLE_STEP, StepPart
from quire.kv.store import PageStore, store_of
from quire.layout.pages import NUMBERS, CacheLayout, LaneGroup, PageClass


@runtime_checkable  # for the shape checks in tests
class LayerRoPE(Unrotates, RotatesTo, Protocol):
    """RoPE of a layer: rotates queries and keys, and removes the rotation of queries."""


class PagedKV:
    """The device side of a `KVMemory`: page bytes, page tables as tensors, attention backend.

    Args:
        memory: bookkeeping; its store is `store`.
        measured: measured constants of codecs that need them.
        offload: KV offload; None if all KV is in the arena.
        pre_rope: attention of rows whose keys are stored before RoPE, beside rows with keys after
            RoPE; None if all rows store keys in the same form.
    """

    def __init__(
        self,
        memory: KVMemory,
        store: PageStore,
        backend: AttentionBackend,
        measured: MeasuredConstants | None = None,
        *,
        offload: EngineOffload | None = None,
        pre_rope: AttentionBackend | None = None,
    ) -> None:
        self.memory, self.store, self.backend = memory, store, backend
        self.pre_rope = pre_rope
        self.chains = backend if isinstance(backend, ChainBackend) else None
        self.last_chained = ChainedStep()
        self.coded = CodedLayers(store, measured)
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
        self.full_precision = full_precision_buffers(memory, store, self.tables)
        self.promoted = promoted_buffers(memory, store, self.tables)
        self.sums_scratch = SumsScratch(store.device)
        self.offload = offload
        self._batch: FlatBatch | None = None
        self._layer_pages: dict[str, tuple[LayerPages, ...]] = {}

    def add_groups(self, groups: Sequence[LaneGroup]) -> None:
        """Add private lane groups of statistics, which only later sequences can use.

        Raises:
            ConfigError: the store reserves lanes in advance, or a page is larger than a slab.
        """
        self.memory.add_groups(groups)
        for group in groups:
            self.tables[group.name] = DeviceTable(self.memory.tables[group.name], self.store.device)
        self.statistics = self._statistics()

    @property
    def rotated(self) -> bool:
        """Whether all layers store keys after RoPE; otherwise all layers store keys before RoPE."""
        return all(group.page_class.rotated for group, _ in self.place.values())

    @property
    def peak_scratch_bytes(self) -> int:
        """Peak scratch bytes outside the arena: backend, column sums, staged activations (X)."""
        staged = 0 if self.offload is None else self.offload.staging_bytes
        other = 0 if self.pre_rope is None else self.pre_rope.peak_scratch_bytes
        return self.backend.peak_scratch_bytes + other + self.sums_scratch.num_bytes + staged

    def _statistics(self) -> dict[str, list[StatisticPages]]:
        places: dict[str, list[StatisticPages]] = {}
        for group in self.memory.layout.groups:
            if group.statistic is not None:
                of, _ = self.place[group.layers[0]]
                place = StatisticPages(
                    group=group,
                    statistic=group.statistic,
                    numbers=self.store.views(group.page_class).planes[NUMBERS][0],
                    table=self.memory.tables[group.name],
                    device_table=self.tables[group.name],
                )
                places.setdefault(of.name, []).append(place)
        return places

    def flat_batch(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> FlatBatch:
        """Return the flat batch of a step; reuse the last one if rows and tokens are equal."""
        if self._batch is None or not self._batch.is_for(rows, tokens):
            self._batch = FlatBatch.of(rows, tokens, self.store.device)
        return self._batch

    def layer_pages(self, group: LaneGroup, rows: Tensor) -> tuple[LayerPages, ...]:
        """Return the pages of each layer of a group; reuse them while rows and table are equal."""
        table = self.tables[group.name].current()
        pages = self._layer_pages.get(group.name)
        if pages is None or pages[0].rows is not rows or pages[0].table is not table:
            pages = self.pages_of_layers(group, table, rows)
            self._layer_pages[group.name] = pages
        return pages

    def pages_of_layers(
        self, group: LaneGroup, table: Tensor, rows: Tensor
    ) -> tuple[LayerPages, ...]:
        views = self.store.views(group.page_class)
        return tuple(
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


def allocate_kv(
    layout: CacheLayout,
    total_bytes: int,
    max_rows: int,
    *,
    device: torch.device,
    backend: AttentionBackend,
    measured: MeasuredConstants | None = None,
) -> PagedKV:
    """Allocate a KV memory on a device.

    Raises:
        ConfigError: the arena cannot hold one sequence of one token.
    """
    memory = KVMemory(
        layout,
        total_bytes,
        max_rows,
        store=partial(PageStore, device=device, mover=backend.move),
        track_changes=device.type != "cpu",
    )
    return PagedKV(memory, store_of(memory), backend, measured)


class StepAttention:
    """Attention for one flat batch, created after the memory has grown by the step's tokens.

    Args:
        rows: [rows] table rows in the order of the flat batch, one-token rows first.
        tokens: [rows] new tokens of each row.
        later: [rows] new tokens of each row in later batches of the same step, whose slots are
            already allocated; None if the step has one batch.
        part: place of the batch in its step.
        pre_rope: whether the keys of these rows are stored before RoPE, beside others after RoPE.

    Attributes:
        wants_residual_similarity: whether a row uses `ResidualSimilarity`; if so, the model must
            call `note_residual_similarity`.
        wants_inputs: whether the model must call `note_input`.
    """

    def __init__(
        self,
        kv: PagedKV,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
        later: NDArray[np.int32] | None = None,
        part: StepPart = WHOLE_STEP,
        *,
        pre_rope: bool = False,
    ) -> None:
        self._kv = kv
        self._pre_rope = kv.pre_rope if pre_rope and kv.rotated else None
        self._later = np.zeros_like(tokens) if later is None else later
        self._lengths = _lengths_before(kv.memory.lengths, rows, later)
        self._batch = kv.flat_batch(rows, tokens)
        self._offload = None if kv.offload is None else kv.offload.step(self._batch, part)
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
        rotary: LayerRoPE | None = None,
        rope: CosSin | None = None,
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        """Write the batch's keys and values, compute attention and record attention statistics.

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
        slots = step.new_slots[index]
        query, key = self._write(step, index, (query, key, value), rope)
        if step.positions is not None:
            step.positions[slots.pages, slots.offsets] = self._positions.expand_as(slots.pages)
        if self._offload is not None:
            self._offload.start_cpu_attention(group, index, query, math)
            self._offload.wait_for_prefix(group, index, backend, slots, step.positions)
        pages, watch = step.pages[index], step.watch
        if step.full_precision is not None:
            pages = replace(
                pages,
                full_precision=step.full_precision.pages((key, value)),
                promoted=None if step.promoted is None else step.promoted.pages(),
            )
        sums = None if watch is None else watch.room_for_sums(query.shape[1], self._kv.sums_scratch)
        out = backend.attend(step.plans[index], pages, math, query, (key, value), column_sums=sums)
        if self._offload is not None:
            self._offload.merge_cpu_attention(out, group, pages, query, math)
        if watch is not None:
            watch.note(index, backend, pages, math, query, sums, rotary)
        if step.full_precision is not None:
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
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values to the slots of a layer; return queries and keys after RoPE."""
        (query, key, value), slots = heads, step.new_slots[index]
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
            such as statistics, offloaded pages or tokens in full precision.
        """
        kv, groups = self._kv, self._groups
        is_plain = self._offload is None and all(step.is_plain for step in groups.values())
        if kv.chains is None or not is_plain or not kv.rotated or self._pre_rope is not None:
            return None
        calls = kv.last_chained.calls_of(groups, layers, heads)
        if calls is None:
            places = (kv.place[layer] for layer in range(len(layers)))
            steps = [
                LayerStep(groups[group.name], index, math)
                for (group, index), math in zip(places, layers, strict=True)
            ]
            calls = chained(kv.chains, steps, heads)
            if calls is not None and not self._later.any():
                kv.last_chained = ChainedStep(self._batch, groups, layers, heads, calls)
        if calls is not None and any(step.positions is not None for step in groups.values()):
            for step in groups.values():
                step.write_positions(self._positions)
        return calls

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

    def _group_step(self, group: LaneGroup) -> GroupStep:
        held = self._kv.memory.tables[group.name].num_slots[self._batch.rows]
        slots = held - self._later[:, None]
        attended = slots if self._offload is None else self._offload.slots(group, slots)
        layers = self._kv.layer_pages(group, self._batch.row_index)
        watch = watch_group(
            self._kv.statistics.get(group.name, []), self._batch, slots, self._lengths
        )
        new_places = self._new_places(group, slots)
        continued = self._continued(group, layers, attended, new_places) if watch is None else None
        if continued is not None:
            return continued
        pages, offsets = self._tensor(new_places[0]), self._tensor(new_places[1])
        places = zip(layers, pages.unbind(), offsets.unbind(), strict=True)
        return GroupStep(
            plans=self._plans(group, attended),
            pages=layers,
            new_slots=tuple(
                NewSlots(layer.key, layer.value, page, offset, coded=layer.coded)
                for layer, page, offset in places
            ),
            new_places=(pages, offsets),
            positions=self._kv.store.views(group.page_class).positions,
            watch=watch,
            full_precision=self._full_precision_step(group.name),
            promoted=self._kv.promoted.get(group.name),
        )

    def _continued(
        self,
        group: LaneGroup,
        layers: tuple[LayerPages, ...],
        slots: NDArray[np.int32],
        places: tuple[PageNumbers, NDArray[np.int64]],
    ) -> GroupStep | None:
        """Return the state of the last chained step, changed to this step, if that is possible."""
        kv, shape = self._kv, (len(slots), len(group.layers), group.lanes_per_layer)
        if self._pre_rope is not None or kv.chains is None or self._later.any():
            return None
        if kv.last_chained.batch is not self._batch:
            return None
        by_layer = slots.reshape(shape)
        return kv.last_chained.continued(
            kv.chains, self._batch, group.name, layers, by_layer, places
        )

    def _full_precision_step(self, name: str) -> FullPrecisionStep | None:
        buffer = self._kv.full_precision.get(name)
        if buffer is None:
            return None
        promoted = self._kv.promoted.get(name)
        return FullPrecisionStep(buffer, self._batch, self._lengths, promoted)

    def _plans(self, group: LaneGroup, slots: NDArray[np.int32]) -> tuple[object, ...]:
        """Return a plan per layer; layers share a plan if all lanes of a row have equal lengths."""
        page_class, num_layers = group.page_class, len(group.layers)
        slot_bytes = slot_bytes_of(page_class)
        by_layer = slots.reshape(len(slots), num_layers, group.lanes_per_layer)
        distinct = 1 if (slots == slots[:, :1]).all() else num_layers
        plans = [
            self._backend.plan(
                self._batch.shape,
                LaneSlots(np.ascontiguousarray(by_layer[:, layer]), group.window),
                page_class.tokens,
                slot_bytes,
            )
            for layer in range(distinct)
        ]
        return tuple(plans if distinct == num_layers else plans * num_layers)

    def _new_places(
        self, group: LaneGroup, slots: NDArray[np.int32]
    ) -> tuple[PageNumbers, NDArray[np.int64]]:
        """Return pages and offsets of the new tokens, each [layers, tokens, lanes of a layer]."""
        batch, shape = self._batch, (len(group.layers), 1, group.lanes_per_layer)
        before = (slots - batch.shape.tokens[:, None]).astype(np.int64)
        slot = before[batch.token_row] + batch.token_offset[:, None]
        slot = slot.reshape(len(slot), shape[0], shape[2]).swapaxes(0, 1)
        column, offset = np.divmod(slot, group.page_class.tokens)
        row = batch.rows[batch.token_row][None, :, None]
        lane = np.arange(slots.shape[1]).reshape(shape)
        pages = self._kv.memory.tables[group.name].pages[row, lane, column]
        return pages, offset

    @cached_property
    def _positions(self) -> Tensor:
        """Logical positions of the batch's tokens, int32 [tokens, 1]."""
        positions = positions_of(self._batch, self._lengths)
        return self._tensor(positions).int()[:, None]

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        return to_device(np.asarray(numbers, dtype=np.int64), self._kv.store.device)


def slot_bytes_of(page_class: PageClass) -> int:
    """Return the bytes of a slot that a backend reads, decoded if pages are coded."""
    if page_class.is_plain:
        return page_class.page_bytes // page_class.tokens
    return decoded_slot_bytes(page_class.heads, page_class.head_dim)


def _lengths_before(
    lengths: NDArray[np.int64], rows: NDArray[np.int64], later: NDArray[np.int32] | None
) -> NDArray[np.int64]:
    if later is None or not later.any():
        return lengths
    before = lengths.copy()
    before[rows] -= later
    return before
