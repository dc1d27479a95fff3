"""Attention of one step: put the new tokens into their slots, let the backend attend over pages."""

from collections.abc import Iterator

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
    StepShape,
)
from quire.kernels.paging import write_slots
from quire.kv.device_tables import DeviceTable
from quire.kv.memory import KVMemory
from quire.kv.store import PageStore
from quire.spec.pages import LaneGroup


class PagedKV:
    """The device side of a `KVMemory`: bytes, tables as tensors, and who attends.

    Args:
        memory: bookkeeping, whose store is `store`.
        store: the bytes.
        backend: computes attention.
    """

    def __init__(self, memory: KVMemory, store: PageStore, backend: AttentionBackend) -> None:
        self.memory, self.store, self.backend = memory, store, backend
        self.tables = {
            name: DeviceTable(table, store.device) for name, table in memory.tables.items()
        }
        self.place = {
            layer: (group, index)
            for group in memory.layout.groups
            if not group.private
            for index, layer in enumerate(group.layers)
        }


class StepAttention:
    """Attention for one flat batch. Made after the memory has grown by the step's tokens.

    Args:
        kv: memory and bytes.
        rows: [rows] table rows in the order of the flat batch, one-token rows first.
        tokens: [rows] new tokens of each.
    """

    def __init__(self, kv: PagedKV, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        self._kv, self._rows = kv, rows
        self._shape = StepShape.of(tokens)
        self._row_index = self._tensor(rows)
        row = np.repeat(np.arange(len(rows)), tokens)
        self._token_row = self._tensor(row)
        self._token_offset = self._tensor(np.arange(len(row)) - self._shape.starts[row])
        self._tables = {name: table.current() for name, table in kv.tables.items()}
        self._plans = {
            (group.name, index): plan
            for group in kv.memory.layout.groups
            if not group.private
            for index, plan in enumerate(self._layer_plans(group))
        }

    def attend(
        self,
        layer: int,
        math: AttentionMath,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads head_dim"],
    ) -> Float[Tensor, "num_tokens num_heads head_dim"]:
        """Write keys and values of the whole batch, then attend.

        Args:
            layer: the model's layer.
            math: scale and extras.
            query: after RoPE.
            key: after RoPE.
            value: like key.
        """
        group, index = self._kv.place[layer]
        plan, pages, offsets = self._plans[group.name, index]
        views = self._kv.store.views(group.page_class)
        assert views.value is not None, "lanes that attend have a value plane"
        shape = (len(key), group.lanes_per_layer, group.page_class.heads, group.page_class.head_dim)
        write_slots(views.key, key.reshape(shape), pages, offsets)
        write_slots(views.value, value.reshape(shape), pages, offsets)
        if views.positions is not None:
            views.positions[pages, offsets] = self._positions().expand_as(pages)
        layer_pages = LayerPages(
            key=views.key,
            value=views.value,
            table=self._tables[group.name],
            rows=self._row_index,
            first_lane=index * group.lanes_per_layer,
            num_lanes=group.lanes_per_layer,
        )
        return self._kv.backend.attend(plan, layer_pages, math, query, (key, value))

    def _layer_plans(self, group: LaneGroup) -> Iterator[tuple[object, Tensor, Tensor]]:
        """For each layer the backend's plan, and pages and offsets [tokens, lanes] to write to.

        Where all lanes of a group are equally full, one plan serves its layers.
        """
        slots = self._kv.memory.tables[group.name].num_slots[self._rows]
        alike = bool((slots == slots[:, :1]).all())
        plan: object = None
        for index in range(len(group.layers)):
            first = index * group.lanes_per_layer
            lanes = slice(first, first + group.lanes_per_layer)
            if index == 0 or not alike:
                plan = self._backend_plan(group, slots[:, lanes])
            yield plan, *self._new_slots(group, slots, lanes)

    def _backend_plan(self, group: LaneGroup, slots: NDArray[np.int32]) -> object:
        page_class = group.page_class
        slot_bytes = page_class.page_bytes // page_class.tokens
        lanes = LaneSlots(slots, group.window)
        return self._kv.backend.plan(self._shape, lanes, page_class.tokens, slot_bytes)

    def _new_slots(
        self, group: LaneGroup, slots: NDArray[np.int32], lanes: slice
    ) -> tuple[Tensor, Tensor]:
        per_page = group.page_class.tokens
        before = self._tensor(slots[:, lanes] - self._shape.tokens[:, None])
        slot = before[self._token_row] + self._token_offset[:, None]
        row = self._row_index[self._token_row][:, None]
        lane = torch.arange(lanes.start, lanes.stop, device=slot.device)
        return self._tables[group.name][row, lane, slot // per_page].long(), slot % per_page

    def _positions(self) -> Tensor:
        """Logical positions of the batch's tokens, int32 [tokens, 1]."""
        first = self._tensor(self._kv.memory.lengths[self._rows] - self._shape.tokens)
        return (first[self._token_row] + self._token_offset).int()[:, None]

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        whole = np.ascontiguousarray(numbers, dtype=np.int64)
        return torch.from_numpy(whole).to(self._kv.store.device)
