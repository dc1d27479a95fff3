"""A decode step of a fixed number of rows whose inputs keep their addresses.

    rows         0 1 2 . . . n-1 | n . . . size-1
                 the batch         padding: row 0 again

All inputs are views of one buffer, which one copy overwrites before each step. A padding row has
the token, the page table and the new slot of row 0, and one live slot. It writes nothing if RoPE is
part of the write; else its new keys and values are replaced by those of row 0, so that it writes
what row 0 writes. Its outputs are not used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import (
    AttentionMath,
    CosSin,
    LayerPages,
    NewSlots,
    StaticLanes,
    StaticPlans,
    StepShape,
    rotated_and_written,
)
from quire.kernels.device_copies import copy_to
from quire.kv.paged_kv import PagedKV, slot_bytes_of
from quire.layout.pages import LaneGroup
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


@dataclass(frozen=True, slots=True)
class StaticShape:
    """What the kernels of a step depend on."""

    size: int  # number of rows
    # for each lane group, whether all lanes of a row have equal lengths
    is_uniform: tuple[bool, ...]


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


class StaticInputs:
    """The inputs of a step, on the CPU and on the device."""

    def __init__(
        self, groups: Sequence[LaneGroup], shape: StaticShape, device: torch.device
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

    def fill(self, batch: DecodeRows, kv: PagedKV) -> list[NDArray[np.int32]]:
        """Copy the inputs; live slots of groups [distinct layers, rows, lanes of a layer]."""
        size, count = self.shape.size, len(batch.rows)
        source = np.where(np.arange(size) < count, np.arange(size), 0)
        self._host[self._ids] = batch.token_ids[source]
        self._host[self._positions] = batch.positions[source]
        self._host[self._rows] = batch.rows[source]
        self._host[self._source] = source
        filled = [self._fill_group(of, batch.rows[source], count, kv) for of in self.groups]
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
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        group, index = self._kv.place[call.layer]
        own, backend = self._groups[group.name], self._kv.backend
        slots = own.new_slots[index]
        query, key, value = self._write(slots, (query, key, value), call.rope)
        if own.positions is not None:
            positions = self._inputs.positions.int()[:, None]
            own.positions[slots.pages, slots.offsets] = positions.expand_as(slots.pages)
        math = AttentionMath(call.scale, call.softcap, call.sinks)
        return backend.attend(own.plans[index], own.pages[index], math, query, (key, value))

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
            self._backend.static_plan(
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
        )
