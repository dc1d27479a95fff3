"""A backend with static plans, and a capture that repeats operations, for CPUs.

A replay of `TapedCalls` repeats the recorded operations on the recorded tensors, as CUDA graphs do,
without the Python code between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine.core import Engine
from quire.engine.decode_graphs import Captured, DecodeGraphs, GraphCapture
from quire.engine.runner import Runner
from quire.kernels.backend import (
    AttentionMath,
    AttentionStatistic,
    LayerPages,
    StaticLanes,
    StatisticRows,
    StepShape,
)
from quire.kernels.coded import decode_pages
from quire.kernels.dense import attend_dense, column_sums_dense
from quire.kernels.gathered import GatheredAttention
from quire.kernels.paging import measure_attention, over_group


@dataclass(frozen=True, eq=False)
class WholeTables:
    """A plan that gathers all columns of the page tables."""

    lanes: StaticLanes


class StaticGathered(GatheredAttention):
    """The gathered backend; decode steps with static plans gather whole page tables."""

    name = "static_gathered"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.refuses = False

    def static_plan(
        self, step: StepShape, lanes: StaticLanes, layers: Sequence[LayerPages], slot_bytes: int
    ) -> object | None:
        return WholeTables(lanes)

    def refresh(self, plan: object, slots: NDArray[np.int32]) -> bool:
        assert isinstance(plan, WholeTables)
        assert plan.lanes.slots.shape == slots.shape
        assert 1 <= slots.min() <= slots.max() <= plan.lanes.max_slots
        return not self.refuses

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
        if not isinstance(plan, WholeTables):
            return super().attend(plan, pages, math, query, fresh, column_sums=column_sums)
        lanes = slice(pages.first_lane, pages.first_lane + pages.num_lanes)
        numbers = pages.table[pages.rows][:, lanes].clamp_min(0).long().flatten(0, 1)
        key, value = self._whole(pages, numbers, query)
        slots = plan.lanes.slots.reshape(-1, 1)
        slot = torch.arange(key.shape[2], device=key.device)
        seen = slot < slots
        if plan.lanes.window is not None:
            seen &= slot >= slots - plan.lanes.window
        dead = ~seen[:, None, :, None]
        key, value = key.masked_fill(dead, 0), value.masked_fill(dead, 0)
        own = query.reshape(len(numbers), -1, 1, query.shape[2])
        if math.sinks is not None:
            sinks = math.sinks.view(pages.num_lanes, -1).repeat(len(query), 1)
            math = replace(math, sinks=sinks)
        out = attend_dense(own, key, value, math=math, seen=seen[:, None, None])
        if column_sums is not None:
            sums = column_sums_dense(own, key, math=math, seen=seen[:, None, None])
            column_sums.copy_(sums.reshape(column_sums.shape))
        return out.reshape(query.shape)

    def tally(self, tally: AttentionStatistic, rows: StatisticRows, column_sums: Tensor) -> None:
        """Add to all slots of the page tables, 0 to those that are not live: nothing is read."""
        if rows.number is not None:  # of a step without a static plan
            super().tally(tally, rows, column_sums)
            return
        _, heads, tokens, _ = tally.numbers.shape
        held, wide = rows.slots, column_sums.shape[2]
        weights = column_sums[rows.step_rows].view(len(held), held.shape[1] * heads, -1, wide)
        seen = held.clamp_min(1).repeat_interleave(heads, dim=1)[:, :, None]
        added = measure_attention(tally.count, over_group(weights, tally.heads), seen)
        slot = torch.arange(wide, device=held.device)
        live, is_new = slot < held[:, :, None], slot == held[:, :, None] - 1
        lanes = slice(tally.first_lane, tally.first_lane + held.shape[1])
        pages = tally.table[rows.table_rows][:, lanes].clamp_min(0).long()
        places = pages.repeat_interleave(tokens, dim=2), slot % tokens
        each = (len(held), held.shape[1], heads, wide)
        at = (places[0][:, :, None], torch.arange(heads)[:, None], places[1])
        plane = torch.zeros(tally.numbers.shape[:3])
        more = added.view(each).masked_fill(~live[:, :, None], 0)
        sums = plane.index_put(at, more, accumulate=True)
        fresh = plane.index_put(at, is_new[:, :, None].expand(each).float(), accumulate=True)
        numbers = tally.numbers[..., 0]
        numbers.copy_(torch.where(fresh > 0, sums, numbers + sums))

    def _whole(self, pages: LayerPages, numbers: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        if pages.coded is None:
            planes = (
                plane[numbers].transpose(1, 2).flatten(2, 3) for plane in (pages.key, pages.value)
            )
            key, value = planes
            return key, value
        lanes = torch.arange(pages.num_lanes, device=numbers.device).repeat(
            len(numbers) // pages.num_lanes
        )
        numbers_of_side = numbers.numel() * pages.page_tokens * pages.coded.key.planes[0].shape[1]
        room = query.new_empty(numbers_of_side * query.shape[2])
        key, value = (
            decode_pages(side, numbers, torch.empty_like(room), lanes)
            for side in (pages.coded.key, pages.coded.value)
        )
        return key, value


class Tape(TorchDispatchMode):
    """Records operations and their tensors; `replay` repeats them in place."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def run(self) -> None:
        """Repeat all operations; their results overwrite the recorded ones."""
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def _tensors(out: Any) -> list[Tensor]:
    outs = out if isinstance(out, tuple | list) else [out]
    return [one for one in outs if isinstance(one, Tensor)]


class TapedCall:
    """A recorded computation."""

    def __init__(self, tape: Tape, output: Tensor) -> None:
        self._tape, self._output = tape, output

    def replay(self) -> Tensor:
        self._tape.run()
        return self._output


class TapedCalls:
    """Records computations on a CPU; see the module."""

    def capture(self, call: Callable[[], Tensor]) -> TapedCall:
        tape = Tape()
        with tape:
            output = call()
        return TapedCall(tape, output)


class RepeatedCalls:
    """Calls a computation again instead of a replay: inputs are those of a graph."""

    def capture(self, call: Callable[[], Tensor]) -> Captured:
        return Mock(replay=call)


def use_graphs(
    engine: Engine,
    max_num_seqs: int,
    device: torch.device | None = None,
    capture: GraphCapture | None = None,
    *,
    required: bool = False,
) -> DecodeGraphs:
    """Run decode steps of an engine as graphs, with the test backend on `device` if it is given."""
    kv, decoder = engine.pool.kv, engine.model.decoder
    if device is not None:
        kv.backend = StaticGathered(device)
    graphs = DecodeGraphs(decoder, kv, capture or RepeatedCalls(), max_num_seqs, required=required)
    engine.decode_graphs = graphs
    step_size = engine.scheduler.step_size
    engine.runner = Runner(decoder, kv, engine.times, step_size, graphs=graphs)
    return graphs
