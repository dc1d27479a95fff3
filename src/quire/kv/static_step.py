"""A decode step of a fixed number of rows whose inputs keep their addresses.

The inputs are those of `static_inputs`. A padding row writes nothing if RoPE is part of the write;
else its new keys and values are replaced by those of row 0, so that it writes what row 0 writes.
Its outputs are not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionMath, LayerPages, NewSlots, StepShape
from quire.kernels.rope_write import CosSin, rotated_and_written
from quire.kernels.static_plan import StaticLanes, StaticPlans
from quire.kv.static_inputs import GroupInputs, StaticInputs
from quire.kv.static_statistics import RecordedStatistic, StaticRecords
from quire.kv.step import PagedKV, slot_bytes_of
from quire.models.base import AttentionCall


@dataclass(frozen=True, slots=True)
class _StaticGroup:
    """A lane group of a step.

    Attributes:
        distinct: the backend's plans, one for all layers or one for each.
        plans: the plan of each layer.
        pages, new_slots: of each layer.
        positions: of all pages of the class; None if pages have no positions.
        records: statistics of the rows.
    """

    distinct: tuple[object, ...]
    plans: tuple[object, ...]
    pages: tuple[LayerPages, ...]
    new_slots: tuple[NewSlots, ...]
    positions: Tensor | None
    records: StaticRecords


class StaticAttention:
    """Attention of a decode step whose inputs keep their addresses; see `PagedAttention`.

    Attributes:
        takes_rope: see `PagedAttention`.

    Args:
        kv: the paged KV of the engine.
        backend: its backend.
        inputs: inputs of the step.
        tables: the page table of each group on the device.
        num_heads: query heads of a layer.
    """

    takes_rope = True

    def __init__(
        self,
        kv: PagedKV,
        backend: StaticPlans,
        inputs: StaticInputs,
        tables: Sequence[Tensor],
        num_heads: int,
    ) -> None:
        self._kv, self._backend, self._inputs = kv, backend, inputs
        self._num_heads = num_heads
        self._shape = StepShape.of(np.ones(inputs.shape.size, dtype=np.int32))
        self._groups = {
            of.group.name: self._group(of, table)
            for of, table in zip(inputs.groups, tables, strict=True)
        }

    @property
    def is_possible(self) -> bool:
        """Whether the backend has a plan for every layer."""
        return all(plan is not None for group in self._groups.values() for plan in group.plans)

    @property
    def can_record(self) -> bool:
        """Whether the backend can record the statistics of the rows under the rules of a graph."""
        return all(group.records.is_possible(self._kv.backend) for group in self._groups.values())

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
        """Write keys and values, then attend; see `PagedAttention.attend`."""
        group, index = self._kv.place[call.layer]
        own, backend = self._groups[group.name], self._kv.backend
        self._kv.note_scale(call.scale)
        slots = own.new_slots[index]
        query, key, value = self._write(slots, (query, key, value), call.rope)
        if own.positions is not None:
            positions = self._inputs.positions.int()[:, None]
            own.positions[slots.pages, slots.offsets] = positions.expand_as(slots.pages)
        math = AttentionMath(call.scale, call.softcap, call.sinks)
        sums, fresh = own.records.sums, (key, value)
        plan, pages = own.plans[index], own.pages[index]
        out = backend.attend(plan, pages, math, query, fresh, column_sums=sums)
        own.records.record(index, backend)
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

    def _group(self, of: GroupInputs, table: Tensor) -> _StaticGroup:
        group, inputs = of.group, self._inputs
        layers = self._kv.pages_of_layers(group, table, inputs.row_index)
        pages, offsets = (places.unbind() for places in inputs.new_slots(of))
        most_slots = table.shape[2] * group.page_class.tokens
        plans = [
            self._backend.static_plan(
                self._shape,
                StaticLanes(live, most_slots, group.window),
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
            records=self._records(of, most_slots),
        )

    def _records(self, of: GroupInputs, most_slots: int) -> StaticRecords:
        inputs = self._inputs
        recorded = [
            RecordedStatistic.of(statistic, inputs.live_slots(of, place), inputs.row_index)
            for statistic, place in of.recorded
        ]
        shape = (inputs.shape.size, self._num_heads, most_slots)
        return StaticRecords(recorded, shape, self._kv.store.device)
