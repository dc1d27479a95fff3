"""Recurrent states in pages: a layer and a sequence have one or several pages, of a part each.

A state is decoded and encoded once per step and layer: the rows of a step that decode together, and
each chunk of a prompt alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.coded import CodedPlanes
from quire.kernels.device_copies import to_device
from quire.kernels.native.recurrent import PagedState
from quire.kv.flat_batch import FlatBatch
from quire.kv.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class StatePart:
    """Rows of a flat batch whose recurrent layers run in one call.

    Attributes:
        rows: their indices in the batch.
        tokens: their tokens in the batch, row by row.
        length: tokens of each row.
        is_fresh: whether they begin here, without a state.
    """

    rows: NDArray[np.int64]
    tokens: Int[Tensor, " token"]
    length: int
    is_fresh: bool


class StepStates:
    """The recurrent states of the rows of a flat batch.

    Args:
        kv: pages and tables.
        batch: the rows.
        lengths: tokens of all table rows, those of the batch included.
    """

    def __init__(self, kv: PagedKV, batch: FlatBatch, lengths: NDArray[np.int64]) -> None:
        self._kv, self._batch = kv, batch
        self._before = lengths[batch.rows] - batch.shape.tokens

    @cached_property
    def parts(self) -> list[StatePart]:
        """All rows: those that decode together, and each other row alone."""
        tokens, starts = self._batch.shape.tokens, self._batch.shape.starts
        together = np.flatnonzero((tokens == 1) & (self._before > 0))
        found = [StatePart(together, self._tensor(starts[together]), 1, is_fresh=False)]
        for row in np.flatnonzero((tokens > 1) | (self._before == 0)).tolist():
            own = np.arange(starts[row], starts[row] + tokens[row])
            fresh = bool(self._before[row] == 0)
            part = StatePart(np.array([row]), self._tensor(own), int(tokens[row]), is_fresh=fresh)
            found.append(part)
        return [part for part in found if len(part.rows)]

    def load(self, layer: int, part: StatePart) -> dict[str, Tensor] | None:
        """Return copies of the states [rows, *shape] of a layer; None where they begin."""
        return None if part.is_fresh else self.begun(layer, part)

    def begun(self, layer: int, part: StatePart) -> dict[str, Tensor]:
        """Return copies of the states [rows, *shape] of a layer; zeros where they begin."""
        pages, coded, shapes = self._place(layer, part)
        if part.is_fresh:
            return {
                name: torch.zeros(len(part.rows), *shape, device=pages.device)
                for name, shape in shapes.items()
            }
        return {
            name: of.codec.decode([plane[pages] for plane in of.planes]).reshape(
                len(part.rows), *shapes[name]
            )
            for name, of in coded.items()
        }

    def in_pages(self, layer: int, part: StatePart) -> dict[str, PagedState] | None:
        """Return states in float32 in their pages on a CPU; None for others, and new ones."""
        if part.is_fresh or self._kv.store.device.type != "cpu":
            return None
        pages, coded, shapes = self._place(layer, part)
        planes = {name: of.planes[0] for name, of in coded.items()}
        if any(plane.dtype != torch.float32 for plane in planes.values()):
            return None
        return {name: PagedState(planes[name], pages, shapes[name]) for name in planes}

    def rounded(self, layer: int, name: str, state: Tensor) -> Tensor:
        """Return a state [rows, *shape] as it is after it was stored."""
        group, _ = self._kv.states[layer]
        of = self._kv.state_planes[group.name][name]
        if of.planes[0].dtype == torch.float32:
            return state
        vectors = state.float().reshape(len(state), 1, -1, 1, state.shape[-1])
        return of.codec.decode(of.codec.encode(vectors)).reshape(state.shape)

    def store(self, layer: int, part: StatePart, states: Mapping[str, Tensor]) -> None:
        """Overwrite the states of a layer."""
        pages, coded, shapes = self._place(layer, part)
        for name, of in coded.items():
            vectors = states[name].float().reshape(*pages.shape, -1, 1, shapes[name][-1])
            for plane, codes in zip(of.planes, of.codec.encode(vectors), strict=True):
                plane[pages] = codes

    def _place(
        self, layer: int, part: StatePart
    ) -> tuple[Tensor, Mapping[str, CodedPlanes], dict[str, tuple[int, ...]]]:
        group, index = self._kv.states[layer]
        assert group.state is not None, "a group of states"
        rows = self._batch.rows[part.rows]
        first, count = index * group.lanes_per_layer, group.lanes_per_layer
        table = self._kv.memory.tables[group.name].pages
        pages = self._tensor(table[rows, first : first + count, 0]).contiguous()
        return pages, self._kv.state_planes[group.name], group.state.shapes

    def _tensor(self, numbers: NDArray[np.generic]) -> Tensor:
        device: torch.device = self._kv.store.device
        return to_device(np.asarray(numbers, dtype=np.int64), device)
