"""Attention statistics accumulated per slot: C equals torch, torch equals plain loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.backend import AttentionMeasure, AttentionStatistic, StatisticRows
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.triton.hardware import why_no_triton
from quire.layout.statistics import MAX, MEAN, REDUCTIONS
from support.interpreted import triton_backend

CPU = torch.device("cpu")
LIBRARY = load_library()
BACKENDS = {"reference": ReferenceAttention(), "gathered": GatheredAttention(CPU)}
if isinstance(LIBRARY, NativeLibrary):
    for path in range(LIBRARY.path + 1):
        library = replace(LIBRARY, path=path)
        BACKENDS[f"native, {PATHS[path]}"] = NativeAttention(library, GatheredAttention(CPU))
    BACKENDS["native"] = BACKENDS[f"native, {PATHS[LIBRARY.path]}"]
if why_no_triton(CPU) is None:
    BACKENDS["triton"] = triton_backend(GatheredAttention(CPU))


class StatisticsCase:
    """Statistics of slots in scattered pages, and column sums; NaN in unused elements."""

    def __init__(self, *, slots, fresh, heads, group, page_tokens, seed):
        generator = torch.Generator().manual_seed(seed)
        num_slots = torch.tensor(slots, dtype=torch.int32)
        rows, lanes = num_slots.shape
        columns = -(-int(num_slots.max()) // page_tokens)
        num_pages = rows * (lanes + 2) * columns
        # as in an arena: other data is between the pages
        arena = torch.full((num_pages, 2, heads, page_tokens, 1), float("nan"))
        table = torch.randperm(num_pages, generator=generator).int().view(rows, lanes + 2, columns)
        self.table = table.flip(0)
        self.numbers, self.first_lane = arena[:, 1], 1
        self.rows = StatisticRows(
            step_rows=torch.arange(rows) + 2,
            table_rows=torch.arange(rows).flip(0),
            slots=num_slots,
            fresh=torch.tensor(fresh, dtype=torch.int32),
            max_slots=int(num_slots.max()),
        )
        widest = int(num_slots.max()) + 3
        self.sums = torch.full((rows + 2, lanes * heads * group, widest), float("nan"))
        for row in range(rows):
            for lane in range(lanes):
                for slot in range(slots[row][lane]):
                    part = slice(lane * heads * group, (lane + 1) * heads * group)
                    self.sums[row + 2, part, slot] = torch.rand(heads * group, generator=generator)
                    if slot < slots[row][lane] - fresh[row]:
                        self.at(row, lane, slot)[:] = torch.rand(heads, generator=generator)

    def at(self, row, lane, slot):
        """The statistics of a slot, [heads]."""
        page_tokens = self.numbers.shape[2]
        page = self.table[self.rows.table_rows[row], self.first_lane + lane, slot // page_tokens]
        return self.numbers[page, :, slot % page_tokens, 0]

    def tally(self, count, heads):
        return AttentionStatistic(self.numbers, self.table, self.first_lane, count, heads)

    def expected(self, count, heads):
        """The statistics after accumulation, slot by slot."""
        found, per_page = {}, self.numbers.shape[1]
        rows, lanes = self.rows.slots.shape
        group = self.sums.shape[1] // (lanes * per_page)
        for row in range(rows):
            for lane in range(lanes):
                num_slots = int(self.rows.slots[row, lane])
                for slot in range(num_slots):
                    weights = self.sums[row + 2, :, slot].view(lanes, per_page, group)[lane]
                    reduced = {
                        "mean": weights.mean(1),
                        "max": weights.amax(1),
                        "sum": weights.sum(1),
                    }
                    weight = reduced[heads]
                    added = [weight, weight * weight, (weight < 1 / num_slots).float()][count]
                    is_old = slot < num_slots - int(self.rows.fresh[row])
                    found[row, lane, slot] = (self.at(row, lane, slot) if is_old else 0) + added
        return found


@st.composite
def cases(draw):
    lanes = draw(st.sampled_from([1, 3]))
    rows = draw(st.integers(1, 3))
    fresh = [draw(st.sampled_from([1, 1, 2, 30])) for _ in range(rows)]
    before = st.one_of(st.just(0), st.integers(0, 90), st.integers(230, 300))
    return StatisticsCase(
        slots=[[draw(before) + new for _ in range(lanes)] for new in fresh],
        fresh=fresh,
        heads=draw(st.sampled_from([1, 3])),
        group=draw(st.sampled_from([1, 2, 5])),
        page_tokens=draw(st.sampled_from([1, 3, 16, 70])),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@given(
    case=cases(),
    count=st.sampled_from(list(AttentionMeasure)),
    heads=st.sampled_from(list(REDUCTIONS)),
)
def test_every_backend_accumulates_the_statistics_of_every_slot(backend, case, count, heads):
    expected = case.expected(count, heads)
    num_before = int((~case.numbers.isnan()).sum())
    fresh = sum(
        int(new) * len(num_slots)
        for new, num_slots in zip(case.rows.fresh, case.rows.slots, strict=True)
    )
    backend.tally(case.tally(count, heads), case.rows, case.sums)

    found = torch.stack([case.at(*place) for place in expected])
    torch.testing.assert_close(found, torch.stack([*expected.values()]), atol=1e-6, rtol=1e-5)
    written = int((~case.numbers.isnan()).sum())
    assert written == num_before + fresh * case.numbers.shape[1]  # no other element was written


def test_low_attention_is_less_than_an_equal_share():
    """Four slots: a weight of exactly 1/4 is not low, any smaller weight is."""
    case = StatisticsCase(slots=[[4]], fresh=[1], heads=1, group=2, page_tokens=16, seed=0)
    for slot, weight in enumerate((0.25, 0.2, 0.55, 0.0)):
        case.sums[2, :, slot] = weight
        case.at(0, 0, slot)[:] = 3.0
    for name, backend in BACKENDS.items():
        before = case.numbers.clone()
        backend.tally(case.tally(AttentionMeasure.LOW, MEAN), case.rows, case.sums)

        assert [float(case.at(0, 0, slot)) for slot in range(4)] == [3, 4, 3, 1], name
        case.numbers.copy_(before)


@pytest.mark.skipif("native" not in BACKENDS, reason="the C extension is not built")
@pytest.mark.parametrize(
    "change",
    [
        lambda case: setattr(case, "table", case.table.long()),
        lambda case: setattr(case, "sums", case.sums.transpose(0, 1).contiguous().transpose(0, 1)),
    ],
)
def test_unsupported_tensors_fall_back_to_torch(change):
    case = StatisticsCase(slots=[[40, 7]], fresh=[1], heads=1, group=2, page_tokens=16, seed=3)
    expected = case.expected(AttentionMeasure.SQUARES, MAX)
    change(case)
    BACKENDS["native"].tally(case.tally(AttentionMeasure.SQUARES, MAX), case.rows, case.sums)

    for (row, lane, slot), number in expected.items():
        torch.testing.assert_close(case.at(row, lane, slot), number, atol=1e-6, rtol=1e-5)


@pytest.mark.skipif("triton" not in BACKENDS, reason="no interpreter of Triton")
@pytest.mark.parametrize("count", list(AttentionMeasure))
@pytest.mark.parametrize("heads", list(REDUCTIONS))
def test_triton_accumulates_without_torch(count, heads, monkeypatch):
    monkeypatch.setattr(GatheredAttention, "tally", None)
    case = StatisticsCase(
        slots=[[300, 7], [1, 256]], fresh=[1, 1], heads=2, group=4, page_tokens=16, seed=3
    )
    expected = case.expected(count, heads)

    BACKENDS["triton"].tally(case.tally(count, heads), case.rows, case.sums)

    found = torch.stack([case.at(*place) for place in expected])
    torch.testing.assert_close(found, torch.stack([*expected.values()]), atol=1e-6, rtol=1e-5)
