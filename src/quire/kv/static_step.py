"""A decode step of a fixed number of rows whose inputs keep their addresses.

    rows         0 1 2 . . . n-1 | n . . . size-1
                 the batch         padding: row 0 again

All inputs are views of one buffer, which one copy overwrites before each step. A padding row has
the token, the page table and the new slot of row 0, and one live slot. It writes nothing if RoPE is
part of the write; else its new keys and values are replaced by those of row 0, so that it writes
what row 0 writes. Its outputs are not used.

Statistics of slots are added for rows with live slots only: padding and rows that do not use a
statistic have none there, and neither has any row in the calls before a capture, which would else
be counted. Records of queries are overwritten, so other rows write those of the first row that has
some.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    CosSin,
    LayerPages,
    LayerRecords,
    NewSlots,
    StaticLanes,
    StaticPlans,
    StatisticRows,
    StepShape,
    StoredQueries,
    rotated_and_written,
)
from quire.kernels.device_copies import copy_to
from quire.kv.paged_kv import PagedKV, slot_bytes_of
from quire.kv.statistics import StatisticPages, first_number, store_queries, tally_of
from quire.layout.pages import LaneGroup
from quire.layout.statistics import OfWeights, QueryRing
from quire.models.base import AttentionCall

_INT32_PAIR = 2  # int32 numbers in an element of the buffer
_ALIGNMENT = 2  # elements in 16 bytes: Triton compiles other kernels for other addresses


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of a decode step, each with one new token whose slot is allocated."""

    rows: NDArray[np.int64]  # int64 [rows] table rows
    token_ids: NDArray[np.int64]  # int64 [rows]
    positions: NDArray[np.int64]  # int64 [rows] logical positions
    # overwrites ids on the device that the CPU does not know, and padding
    write_pending: Callable[[Tensor], None] = lambda _: None


def recorded_statistics(kv: PagedKV, rows: NDArray[np.int64]) -> tuple[str, ...] | None:
    """Return the lane groups of statistics that rows use; None if some are not recorded here."""
    places = (place for own in kv.statistics.values() for place in own)
    used = [place for place in places if place.table.active[rows].any()]
    if not all(isinstance(place.statistic, OfWeights | QueryRing) for place in used):
        return None
    return tuple(place.group.name for place in used)


@dataclass(frozen=True, slots=True)
class StaticShape:
    """What the kernels of a step depend on."""

    size: int  # number of rows
    # for each lane group, whether all lanes of a row have equal lengths
    is_uniform: tuple[bool, ...]
    statistics: tuple[str, ...] = ()  # names of the lane groups of statistics that are recorded


class _Layout:
    """Divides one int64 buffer into the inputs of a step."""

    def __init__(self) -> None:
        self.total = 0

    def take(self, count: int) -> slice:
        part = slice(self.total, self.total + count)
        self.total += -(-count // _ALIGNMENT) * _ALIGNMENT
        return part


@dataclass(frozen=True, slots=True)
class _GroupInputs:
    """Inputs of one lane group: places in the buffer."""

    group: LaneGroup
    is_uniform: bool
    pages: slice  # of new tokens, as offsets [layers, rows, lanes of a layer]
    offsets: slice
    slots: slice  # live slots as int32, [1 or layers, rows, lanes of a layer]

    @property
    def distinct(self) -> int:
        """Number of layers with own live slots."""
        return 1 if self.is_uniform else len(self.group.layers)


class _WatchedInputs:
    """Inputs of one statistic: live slots of its rows, or places of its rows' queries."""

    def __init__(self, place: StatisticPages, layout: _Layout, size: int) -> None:
        group = place.group
        self.place, self.shape = place, (len(group.layers), size, group.lanes_per_layer)
        self._places = layout.take(size * group.num_lanes)  # live slots as int32, or pages
        self._offsets, self._tokens = layout.take(size), layout.take(size)
        self._marks = layout.take(size)  # as float32

    def fill(
        self, host: NDArray[np.int64], batch: DecodeRows, slots: NDArray[np.int32], *, record: bool
    ) -> None:
        """Set the inputs; `slots` are those of the rows in the lane group of the keys."""
        place, (layers, size, lanes) = self.place, self.shape
        used = np.flatnonzero(place.table.active[batch.rows])
        if not isinstance(place.statistic, QueryRing):
            live = np.zeros((size, layers, lanes), dtype=np.int32)
            live[used] = slots[used].reshape(-1, layers, lanes) * record
            host[self._places].view(np.int32)[: live.size] = live.swapaxes(0, 1).reshape(-1)
            return
        source = np.full(size, used[0])
        source[used] = used
        positions = batch.positions[source]
        record_of = positions % place.statistic.window
        column, offset = np.divmod(record_of, place.group.page_class.tokens)
        pages = place.table.pages[batch.rows[source], :, column].reshape(size, layers, lanes)
        host[self._places] = pages.swapaxes(0, 1).reshape(-1)
        host[self._offsets], host[self._tokens] = offset, source
        host[self._marks].view(np.float32)[:size] = positions + 1

    def records(
        self, device: Tensor, layer: int, row_index: Tensor, reader: int = 0
    ) -> LayerRecords:
        """Return what is recorded of a layer; `layer` is its index in the group."""
        place, places, (layers, size, lanes) = self.place, device[self._places], self.shape
        if isinstance(place.statistic, QueryRing):
            pages = places[: layers * size * lanes].view(self.shape)[layer]
            offsets, tokens = device[self._offsets][:size], device[self._tokens][:size]
            marks = device[self._marks].view(torch.float32)[:size]
            first = first_number(place, reader)
            stored = StoredQueries(place.numbers, pages, offsets, tokens, marks, first)
            return LayerRecords(queries=(stored,))
        live = places.view(torch.int32)[: layers * size * lanes].view(self.shape)[layer]
        begins = not reader or place.is_apart  # the first layer begins numbers of all layers
        fresh = torch.full((size,), int(begins), dtype=torch.int32, device=device.device)
        rows = StatisticRows(torch.arange(size, device=device.device), row_index, live, fresh)
        return LayerRecords(((tally_of(place, layer, reader), rows),))


class StaticInputs:
    """The inputs of a step, on the CPU and on the device."""

    def __init__(
        self,
        groups: Sequence[LaneGroup],
        shape: StaticShape,
        device: torch.device,
        statistics: Mapping[str, Sequence[StatisticPages]],
    ) -> None:
        size, layout = shape.size, _Layout()
        self.shape = shape
        self._ids, self._positions = layout.take(size), layout.take(size)
        self._rows, self._source = layout.take(size), layout.take(size)
        self.groups = []
        for group, is_uniform in zip(groups, shape.is_uniform, strict=True):
            lanes, layers = group.lanes_per_layer, len(group.layers)
            places = size * group.num_lanes
            counts = size * lanes * (1 if is_uniform else layers)
            pages, offsets = layout.take(places), layout.take(places)
            slots = layout.take(-(-counts // _INT32_PAIR))
            self.groups.append(_GroupInputs(group, is_uniform, pages, offsets, slots))
        self.watched = {
            name: [
                _WatchedInputs(place, layout, size)
                for place in places
                if place.group.name in shape.statistics
            ]
            for name, places in statistics.items()
        }
        self._host = np.zeros(layout.total, dtype=np.int64)
        self._device = torch.zeros(layout.total, dtype=torch.int64, device=device)
        self.token_ids, self.positions = self._device[self._ids], self._device[self._positions]
        self.row_index, self.source = self._device[self._rows], self._device[self._source]

    def new_slots(self, of: _GroupInputs) -> tuple[Tensor, Tensor]:
        """Pages and offsets of the new tokens, each [layers, rows, lanes of a layer]."""
        shape = (len(of.group.layers), self.shape.size, of.group.lanes_per_layer)
        return self._device[of.pages].view(shape), self._device[of.offsets].view(shape)

    def live_slots(self, of: _GroupInputs) -> Int[Tensor, "distinct row lane"]:
        shape = (of.distinct, self.shape.size, of.group.lanes_per_layer)
        flat = self._device[of.slots].view(torch.int32)
        return flat[: shape[0] * shape[1] * shape[2]].view(shape)

    def records(self, of: LaneGroup, layer: int, reader: int) -> list[LayerRecords]:
        """Return what is recorded of a layer that reads the lanes of layer `layer` of the group."""
        watched = self.watched.get(of.name, [])
        return [one.records(self._device, layer, self.row_index, reader) for one in watched]

    def fill(
        self, batch: DecodeRows, kv: PagedKV, *, record: bool = True
    ) -> list[NDArray[np.int32]]:
        """Copy the inputs; live slots of groups [distinct layers, rows, lanes of a layer].

        Args:
            batch: the rows.
            kv: has their pages.
            record: whether the attention statistics of slots are added.
        """
        size, count = self.shape.size, len(batch.rows)
        source = np.where(np.arange(size) < count, np.arange(size), 0)
        self._host[self._ids] = batch.token_ids[source]
        self._host[self._positions] = batch.positions[source]
        self._host[self._rows] = batch.rows[source]
        self._host[self._source] = source
        filled = [self._fill_group(of, batch.rows[source], count, kv) for of in self.groups]
        for name, watched in self.watched.items():
            for one in watched:
                held = kv.memory.tables[name].num_slots[batch.rows]
                one.fill(self._host, batch, held, record=record)
        copy_to(self._device, self._host)
        batch.write_pending(self.token_ids)
        return filled

    def _fill_group(
        self, of: _GroupInputs, rows: NDArray[np.int64], count: int, kv: PagedKV
    ) -> NDArray[np.int32]:
        group, table = of.group, kv.memory.tables[of.group.name]
        held = table.num_slots[rows]
        column, offset = np.divmod(held - 1, group.page_class.tokens)
        lane = np.arange(group.num_lanes)
        pages = table.pages[rows[:, None], lane, column]
        shape = (len(rows), len(group.layers), group.lanes_per_layer)
        for place, numbers in ((of.pages, pages), (of.offsets, offset)):
            self._host[place] = numbers.reshape(shape).swapaxes(0, 1).reshape(-1)
        live = held.reshape(shape).swapaxes(0, 1)[: of.distinct].astype(np.int32)
        live[:, count:] = 1
        self._host[of.slots].view(np.int32)[: live.size] = live.reshape(-1)
        return live


@dataclass(frozen=True, slots=True)
class _StaticGroup:
    """A lane group of a step."""

    distinct: tuple[object, ...]  # the backend's plans, one for all layers or one for each
    plans: tuple[object, ...]  # of each layer
    pages: tuple[LayerPages, ...]
    new_slots: tuple[NewSlots, ...]
    positions: Tensor | None  # of all pages of the class; None if pages have no positions
    records: tuple[list[list[LayerRecords]], ...]  # of each layer, of each layer that reads it
    max_slots: int  # of a lane


class StaticAttention:
    """Attention of a decode step whose inputs keep their addresses; see `PagedAttention`."""

    takes_rope = True

    def __init__(
        self,
        kv: PagedKV,
        backend: StaticPlans,
        inputs: StaticInputs,
        tables: Sequence[Tensor],
    ) -> None:
        self._kv, self._backend, self._inputs = kv, backend, inputs
        self._shape = StepShape.of(np.ones(inputs.shape.size, dtype=np.int32))
        self._groups = {
            of.group.name: self._group(of, table)
            for of, table in zip(inputs.groups, tables, strict=True)
        }

    @property
    def is_possible(self) -> bool:
        """Whether the backend has a plan for every layer."""
        return all(plan is not None for group in self._groups.values() for plan in group.plans)

    def refresh(self, slots: Sequence[NDArray[np.int32]]) -> bool:
        """Prepare the plans for these live slots; see `StaticPlans.refresh`."""
        return all(
            self._backend.refresh(plan, own)
            for group, live in zip(self._groups.values(), slots, strict=True)
            for plan, own in zip(group.distinct, live, strict=True)
        )

    def attend(
        self,
        call: AttentionCall,
        query: Float[Tensor, "num_tokens num_heads query_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads key_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads value_dim"],
    ) -> Float[Tensor, "num_tokens num_heads output_dim"]:
        group, index = self._kv.place[call.layer]
        own, backend = self._groups[group.name], self._kv.backend
        reader = self._kv.readers[call.layer]
        slots, records_of_layer = own.new_slots[index], own.records[index][reader]
        if not reader:
            query, key, value = self._write(slots, (query, key, value), call.rope)
        elif call.rope is not None:
            query = call.rope.rotate(query)
        if not reader and own.positions is not None:
            positions = self._inputs.positions.int()[:, None]
            own.positions[slots.pages, slots.offsets] = positions.expand_as(slots.pages)
        tallies = [one for records in records_of_layer for one in records.tallies]
        sums = None
        if tallies:  # memory of the graphs, which the layers share
            shape = (len(query), query.shape[1], own.max_slots)
            sums = query.new_empty(shape, dtype=torch.float32)
        plan, pages = own.plans[index], own.pages[index]
        out = backend.attend(plan, pages, call.math, query, (key, value), column_sums=sums)
        if sums is not None:
            for tally, rows in tallies:
                backend.tally(tally, rows, sums)
        for records in records_of_layer:
            for stored in records.queries:
                store_queries(stored, query)
        return out

    def _write(
        self, slots: NewSlots, heads: tuple[Tensor, Tensor, Tensor], rope: CosSin | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write keys and values to the slots of a layer; return all heads after RoPE."""
        (query, key, value), source = heads, self._inputs.source
        if rope is not None:
            if rotated_and_written(self._kv.backend, slots, heads, rope, source):
                return heads  # padding rows write nothing, and their outputs are not used
            query, key = rope.rotate(query), rope.rotate(key)
        # also in a full batch, so that padded ones use the same graph
        key, value = (x.index_select(0, source) for x in (key, value))
        self._kv.backend.write(slots, key, value)
        return query, key, value

    def _group(self, of: _GroupInputs, table: Tensor) -> _StaticGroup:
        group, inputs = of.group, self._inputs
        layers = self._kv.pages_of_layers(group, table, inputs.row_index)
        pages, offsets = (places.unbind() for places in inputs.new_slots(of))
        max_slots = table.shape[2] * group.page_class.tokens
        plans = [
            None
            if group.topk is not None  # the number of selected slots is read on the CPU
            else self._backend.static_plan(
                self._shape,
                StaticLanes(live, max_slots, group.window),
                layers if of.is_uniform else layers[number : number + 1],
                slot_bytes_of(group.page_class),
            )
            for number, live in enumerate(inputs.live_slots(of).unbind())
        ]
        return _StaticGroup(
            distinct=tuple(plans),
            plans=tuple(plans * (len(layers) // len(plans))),
            pages=layers,
            new_slots=tuple(
                NewSlots(layer.key, layer.value, page, offset, coded=layer.coded)
                for layer, page, offset in zip(layers, pages, offsets, strict=True)
            ),
            positions=self._kv.store.views(group.page_class).positions,
            records=tuple(
                [inputs.records(group, layer, reader) for reader in range(group.readers)]
                for layer in range(len(layers))
            ),
            max_slots=max_slots,
        )
