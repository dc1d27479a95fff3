"""Attention of layers prepared for a chain: the calls equal `write` and `attend`."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.kernels.backend import (
    AttentionMath,
    AttentionMeasure,
    AttentionStatistic,
    ChainLayer,
    HeadBuffers,
    LaneSlots,
    LayerPages,
    LayerRecords,
    NewSlots,
    StatisticRows,
    StepShape,
    StoredQueries,
)
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.arguments import unfit_tensors
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.chain import LayerAttention
from quire.kernels.native.library import PATHS, NativeLibrary, load_library

LIBRARY = load_library()
SUPPORTED_PATHS = range(1, LIBRARY.path + 1) if isinstance(LIBRARY, NativeLibrary) else ()
HEADS, KV_HEADS, DIM, VALUE_DIM, PAGE, LAYERS = 6, 2, 32, 48, 16, 3
MATH = AttentionMath(DIM**-0.5)

pytestmark = pytest.mark.skipif(not SUPPORTED_PATHS, reason="no C extension with vectors")


class Step:
    """One decode step of rows with this many slots, in layers that share pages and a table."""

    def __init__(
        self,
        slots: list[int],
        dim: int = DIM,
        heads: int = HEADS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rows, columns = len(slots), -(-max(slots) // PAGE)
        generator = torch.Generator().manual_seed(0)
        pages, sizes = rows * LAYERS * columns, [KV_HEADS * PAGE * d for d in (dim, VALUE_DIM)]
        table = torch.arange(pages, dtype=torch.int32).view(rows, LAYERS, columns)
        arena = torch.randn(pages, sum(sizes), generator=generator).to(dtype)
        key, value = (side.unflatten(1, (KV_HEADS, PAGE, -1)) for side in arena.split(sizes, dim=1))
        self.shape = StepShape.of(np.ones(rows, dtype=np.int32))
        self.lanes = LaneSlots(np.array(slots, dtype=np.int32)[:, None], None)
        last = torch.tensor(slots) - 1
        self.layers = [
            ChainLayer(
                LayerPages(key, value, table, torch.arange(rows), layer, 1),
                NewSlots(
                    key,
                    value,
                    table[torch.arange(rows), layer, last // PAGE].long()[:, None],
                    (last % PAGE)[:, None].contiguous(),
                ),
                MATH,
            )
            for layer in range(LAYERS)
        ]
        self.heads = HeadBuffers(
            *(
                torch.randn(rows, number, own, generator=generator).to(dtype)
                for number, own in (
                    (heads, dim),
                    (KV_HEADS, dim),
                    (KV_HEADS, VALUE_DIM),
                    (heads, VALUE_DIM),
                )
            )
        )

    def record(self, apart: bool) -> None:
        """Record sums and squares of all rows but the first, and the query of the last row."""
        rows, slots = len(self.lanes.slots), torch.tensor(self.lanes.slots)
        pages = self.layers[0].pages
        each = self.heads.query.shape[1] // KV_HEADS if apart else 1
        generator = torch.Generator().manual_seed(1)
        shape = (2, len(pages.key), KV_HEADS * each, PAGE, 1)
        self.numbers = torch.rand(shape, generator=generator)
        width = self.heads.query.shape[1] // KV_HEADS * self.heads.query.shape[2] + 1
        self.records = torch.zeros(LAYERS, KV_HEADS, 3, width)
        watched = torch.arange(1, rows)
        number = torch.arange(rows, dtype=torch.int32) - 1
        self.watched = StatisticRows(
            watched,
            watched,
            slots[1:],
            torch.ones(rows - 1, dtype=torch.int32),
            int(slots.max()),
            number,
        )
        kinds = ((AttentionMeasure.SUM, "max"), (AttentionMeasure.SQUARES, "mean"))
        self.layers = [
            layer._replace(
                records=LayerRecords(
                    tuple(
                        (AttentionStatistic(own, pages.table, index, *kind), self.watched)
                        for own, kind in zip(self.numbers, kinds, strict=True)
                    ),
                    (
                        StoredQueries(
                            self.records,
                            torch.tensor([[index]]),
                            torch.tensor([2]),
                            torch.tensor([rows - 1]),
                            torch.tensor([7.0]),
                        ),
                    ),
                )
            )
            for index, layer in enumerate(self.layers)
        ]

    def plan(self, backend: NativeAttention) -> object:
        return backend.plan(self.shape, self.lanes, PAGE, 1)

    def chain(self, backend: NativeAttention) -> list[LayerAttention]:
        prepared = backend.chain(self.plan(backend), self.layers, self.heads)
        assert prepared is not None
        return prepared

    def attended(self, backend: NativeAttention) -> list[torch.Tensor]:
        plan, heads, outputs = self.plan(backend), self.heads, []
        for pages, slots, math, _ in self.layers:
            backend.write(slots, heads.key, heads.value)
            fresh = heads.key, heads.value
            outputs.append(backend.attend(plan, pages, math, heads.query, fresh))
        return outputs


def backend_of(path: int, *, fixed_rows: int | None = None) -> NativeAttention:
    assert isinstance(LIBRARY, NativeLibrary)
    library = replace(LIBRARY, path=path)
    gathered = GatheredAttention(torch.device("cpu"))
    return NativeAttention(library, gathered, fixed_rows=fixed_rows)


@pytest.mark.parametrize("path", SUPPORTED_PATHS, ids=lambda path: PATHS[path])
@pytest.mark.parametrize("slots", [[1], [17, 40, 33], [3000, 5]])
def test_prepared_calls_equal_write_and_attend(path: int, slots: list[int]) -> None:
    assert isinstance(LIBRARY, NativeLibrary)
    backend = backend_of(path)
    expected = Step(slots).attended(backend)
    step = Step(slots)

    for layer, out in zip(step.chain(backend), expected, strict=True):
        LIBRARY.write(ctypes.byref(layer.write), None)
        LIBRARY.attend(ctypes.byref(layer.attend), LIBRARY.parallel_for, layer.num_threads)
        assert torch.equal(step.heads.out, out)


@pytest.mark.parametrize("path", SUPPORTED_PATHS, ids=lambda path: PATHS[path])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dim", "heads", "apart"), [(64, 6, False), (32, 6, True), (64, 20, False)]
)
def test_recorded_statistics_equal_column_sums_and_tally(path, dtype, dim, heads, apart) -> None:
    """Groups of 3, and of 10: more query vectors than one walk has. Long rows are divided."""
    assert isinstance(LIBRARY, NativeLibrary)
    backend, slots = backend_of(path), [40, 17, 1, 3000, 260]
    expected, step = (Step(slots, dim, heads, dtype) for _ in range(2))
    expected.record(apart)
    step.record(apart)
    plan, kept = expected.plan(backend), expected.heads
    for layer in expected.layers:
        backend.write(layer.slots, kept.key, kept.value)
        sums = torch.zeros(len(slots), heads, 3008)
        fresh = kept.key, kept.value
        backend.attend(plan, layer.pages, layer.math, kept.query, fresh, column_sums=sums)
        for tally, rows in layer.records.tallies:
            backend.tally(tally, rows, sums)

    for layer in step.chain(backend):
        LIBRARY.write(ctypes.byref(layer.write), None)
        LIBRARY.attend(ctypes.byref(layer.attend), LIBRARY.parallel_for, 2)
    assert torch.equal(step.numbers, expected.numbers)
    stored = step.heads.query[-1].float().view(KV_HEADS, -1).expand(LAYERS, -1, -1)
    assert torch.equal(step.records[:, :, 2, :-1], stored)
    assert (step.records[:, :, 2, -1] == 7).all()
    assert not step.records[:, :, :2].any()


def test_scratch_of_prepared_calls_lives_as_long_as_the_calls() -> None:
    backend = backend_of(LIBRARY.path)
    (first, *_) = Step([17]).chain(backend)
    (second, *_) = Step([3000] * 8).chain(backend)  # replaces the scratch memory of the first

    assert first.attend.scratch != second.attend.scratch
    for layer in (first, second):
        memory = [part for part in layer.owner if isinstance(part, torch.Tensor)]
        assert [part.data_ptr() for part in memory] == [layer.attend.scratch]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": torch.empty(12, KV_HEADS, PAGE, DIM, device="meta")}, "not all on the CPU"),
        ({"query": torch.zeros(2, HEADS, DIM, dtype=torch.float64)}, "queries of torch.float64"),
        ({"table": torch.zeros(2, LAYERS, 2, dtype=torch.int64)}, "page table of torch.int64"),
        ({"table": torch.zeros(2, 2, LAYERS, dtype=torch.int32).mT}, "not contiguous"),
        ({"query": torch.zeros(2, HEADS + 1, DIM)}, "for pages of 2 heads"),
        ({"sinks": torch.zeros(HEADS + 1)}, f"{HEADS + 1} sinks for {HEADS} heads"),
        ({"sums": torch.zeros(2, HEADS, 40).mT}, "column sums"),
    ],
    ids=["device", "dtype", "table", "strides", "heads", "sinks", "sums"],
)
def test_what_the_library_cannot_read_is_named(changes, reason):
    step = Step([17, 5])
    pages, _, math, _ = step.layers[0]
    planes = {name: changes[name] for name in ("key", "table") if name in changes}
    found = unfit_tensors(
        replace(pages, **planes),
        replace(math, sinks=changes.get("sinks")),
        changes.get("query", step.heads.query),
        changes.get("sums"),
    )

    assert reason in found
