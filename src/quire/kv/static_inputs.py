"""The inputs of a decode step of a fixed number of rows: views of one buffer on the device.

    rows         0 1 2 . . . n-1 | n . . . size-1
                 the batch         padding: row 0 again

One copy overwrites the buffer before each step. A padding row has the token, the page table and the
new slot of row 0, and one live slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.device_copies import copy_to
from quire.kv.statistics.pages import StatisticPages
from quire.kv.step import PagedKV
from quire.layout.pages import LaneGroup

_INT32_PAIR = 2  # int32 numbers in an element of the buffer
_ALIGNMENT = 2  # elements in 16 bytes: Triton compiles other kernels for other addresses


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of a decode step, each with one new token whose slot is allocated.

    Attributes:
        rows: int64 [rows] table rows.
        token_ids: int64 [rows].
        positions: int64 [rows] logical positions.
        write_pending: overwrites token ids on the device that the CPU does not know; rows after
            those of the batch are padding with the first row's id.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    write_pending: Callable[[Tensor], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class StaticShape:
    """What the kernels of a step depend on.

    Attributes:
        size: number of rows.
        is_uniform: for each lane group, whether all lanes of a row have equal lengths.
        recorded: for each lane group, the indices of its statistics that some row uses.
    """

    size: int
    is_uniform: tuple[bool, ...]
    recorded: tuple[tuple[int, ...], ...]


class _Layout:
    """Divides one int64 buffer into the inputs of a step."""

    def __init__(self) -> None:
        self.total = 0

    def take(self, count: int) -> slice:
        """Return the place of the next `count` elements."""
        part = slice(self.total, self.total + count)
        self.total += -(-count // _ALIGNMENT) * _ALIGNMENT
        return part


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Inputs of one lane group: places in the buffer.

    Attributes:
        group: the lane group.
        is_uniform: see `StaticShape`.
        pages, offsets: of new tokens, [layers, rows, lanes of a layer].
        slots: live slots as int32, [1 or layers, rows, lanes of a layer].
        recorded: statistics that some row uses, each with live slots in the same shape; 0 for rows
            that do not use it.
    """

    group: LaneGroup
    is_uniform: bool
    pages: slice
    offsets: slice
    slots: slice
    recorded: tuple[tuple[StatisticPages, slice], ...] = ()

    @property
    def distinct(self) -> int:
        """Number of layers with own live slots."""
        return 1 if self.is_uniform else len(self.group.layers)


class StaticInputs:
    """The inputs of a step, on the CPU and on the device.

    Args:
        groups: lane groups that attend.
        shape: shape of the step.
        kv: the paged KV of the engine.
    """

    def __init__(self, groups: Sequence[LaneGroup], shape: StaticShape, kv: PagedKV) -> None:
        size, layout = shape.size, _Layout()
        self.shape = shape
        self._ids, self._positions = layout.take(size), layout.take(size)
        self._rows, self._source = layout.take(size), layout.take(size)
        self.groups = []
        described = zip(groups, shape.is_uniform, shape.recorded, strict=True)
        for group, is_uniform, recorded in described:
            lanes, layers = group.lanes_per_layer, len(group.layers)
            places = size * group.num_lanes
            counts = size * lanes * (1 if is_uniform else layers)
            pages, offsets = layout.take(places), layout.take(places)
            words = -(-counts // _INT32_PAIR)
            slots, known = layout.take(words), kv.statistics.get(group.name, [])
            statistics = tuple((known[number], layout.take(words)) for number in recorded)
            self.groups.append(GroupInputs(group, is_uniform, pages, offsets, slots, statistics))
        self._host = np.zeros(layout.total, dtype=np.int64)
        self._device = torch.zeros(layout.total, dtype=torch.int64, device=kv.store.device)
        self.token_ids, self.positions = self._device[self._ids], self._device[self._positions]
        self.row_index, self.source = self._device[self._rows], self._device[self._source]

    def new_slots(self, of: GroupInputs) -> tuple[Tensor, Tensor]:
        """Pages and offsets of the new tokens, each [layers, rows, lanes of a layer]."""
        shape = (len(of.group.layers), self.shape.size, of.group.lanes_per_layer)
        return self._device[of.pages].view(shape), self._device[of.offsets].view(shape)

    def live_slots(
        self, of: GroupInputs, place: slice | None = None
    ) -> Int[Tensor, "distinct row lane"]:
        """Live slots of each distinct layer; with the place of a statistic, those of its rows."""
        shape = (of.distinct, self.shape.size, of.group.lanes_per_layer)
        flat = self._device[of.slots if place is None else place].view(torch.int32)
        return flat[: shape[0] * shape[1] * shape[2]].view(shape)

    def fill(self, batch: DecodeRows, kv: PagedKV) -> list[NDArray[np.int32]]:
        """Copy the inputs of a batch of at most `size` rows to the device.

        Returns:
            For each group, live slots [distinct layers, rows, lanes of a layer].
        """
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
        self, of: GroupInputs, rows: NDArray[np.int64], count: int, kv: PagedKV
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
        for statistic, place in of.recorded:
            used = live * statistic.table.active[rows][None, :, None]
            used[:, count:] = 0
            self._host[place].view(np.int32)[: used.size] = used.reshape(-1)
        return live
