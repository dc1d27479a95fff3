"""Slots of pages: selected, moved, their statistics, new tokens in codes; by every backend."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.backend import (
    AttentionMeasure,
    AttentionStatistic,
    HeldLanes,
    MovedSlots,
    NewSlots,
    SlotRanking,
    StatisticRows,
    StoredNumbers,
)
from quire.kernels.coded import decode_slots
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import PATHS, NativeLibrary, load_library
from quire.kernels.pre_rope import PreRopeAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.triton.hardware import why_no_triton
from quire.kv.slot_moves import fill_holes
from quire.kv.store import PageStore
from quire.layout.codec_names import codec_pair
from quire.layout.pages import kv_pages
from quire.layout.statistics import MAX, MEAN, REDUCTIONS
from support.interpreted import make_interpreter_faster, triton_backend
from support.pairwise import every_pair

CPU = torch.device("cpu")
LIBRARY = load_library()
BACKENDS = {"reference": ReferenceAttention(), "gathered": GatheredAttention(CPU)}
BACKENDS["pre_rope"] = PreRopeAttention(CPU)
TALLYING = {name: BACKENDS[name] for name in ("reference", "gathered")}
WRITE_PATHS = range(LIBRARY.best_path + 1) if isinstance(LIBRARY, NativeLibrary) else ()


def native(path, **options):
    return NativeAttention(replace(LIBRARY, path=path, **options), GatheredAttention(CPU))


if WRITE_PATHS:
    BACKENDS["native"] = native(LIBRARY.path)
    BACKENDS["native, one thread"] = native(LIBRARY.path, parallel_for=None)
    TALLYING |= {f"native, {PATHS[path]}": native(path) for path in WRITE_PATHS}
    TALLYING["native"] = BACKENDS["native"]
if why_no_triton(CPU) is None:
    TALLYING["triton"] = triton_backend()  # which may not fall back to torch
needs_native = pytest.mark.skipif(not WRITE_PATHS, reason="the C extension is not built")


def planes_of(pages, heads, tokens, dim, dtype):
    """Keys, values and positions of pages, with other data at the end of each page."""
    size, value_size = heads * tokens * dim, heads * tokens * (dim + 2)
    arena = torch.arange(pages * (size + value_size + tokens + 8)).view(pages, -1).to(dtype)
    *sides, positions, _ = arena.split([size, value_size, tokens, 8], dim=1)
    key, value = (side.unflatten(1, (heads, tokens, -1)) for side in sides)
    positions = positions[:, None, :, None]
    return arena, (key, value, positions)


def moves_of(planes, num_moves, seed):
    """Distinct targets; sources may be any slots, including targets."""
    pages, _, tokens, _ = planes[0].shape
    rng = np.random.default_rng(seed)
    target = rng.permutation(pages * tokens)[:num_moves]
    source = rng.permutation(pages * tokens)[:num_moves]
    indices = (torch.from_numpy(part) for ends in (source, target) for part in divmod(ends, tokens))
    from_page, from_offset, to_page, to_offset = indices
    return MovedSlots(planes, (from_page, from_offset), (to_page, to_offset))


MOVING = BACKENDS | {name: one for name, one in TALLYING.items() if name == "triton"}


@pytest.mark.parametrize("backend", MOVING.values(), ids=MOVING)
@given(
    pages=st.integers(1, 5),
    heads=st.sampled_from([1, 3]),
    tokens=st.sampled_from([1, 3, 16]),
    dim=st.sampled_from([1, 5, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.uint8]),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_all_slots_are_read_before_any_slot_is_written(
    backend, pages, heads, tokens, dim, dtype, share, seed
):
    arena, planes = planes_of(pages, heads, tokens, dim, dtype)
    moves = moves_of(planes, round(share * pages * tokens), seed)
    old, expected = arena.clone(), arena.clone()
    for plane in planes:
        shape = plane.shape, plane.stride(), plane.storage_offset()
        before, after = old.as_strided(*shape), expected.as_strided(*shape)
        for page, offset, to_page, to_offset in zip(*moves.source, *moves.target, strict=True):
            after[to_page, :, to_offset] = before[page, :, offset]
    backend.move(moves)

    assert torch.equal(arena, expected)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_moves_in_several_threads(backend):
    """Enough moves for several threads: a ring of slots, each moved to the next."""
    _, planes = planes_of(200, 2, 16, 8, torch.float32)
    slots = torch.arange(200 * 16)
    targets = slots.roll(-1)
    ends = ((slots // 16, slots % 16), (targets // 16, targets % 16))
    before = [plane.clone() for plane in planes]
    backend.move(MovedSlots(planes, *ends))

    for plane, old in zip(planes, before, strict=True):
        by_slot, old_by_slot = (p.transpose(1, 2).flatten(0, 1) for p in (plane, old))
        assert torch.equal(by_slot, old_by_slot.roll(1, dims=0))


@pytest.mark.parametrize("name", [name for name in MOVING if name in ("native", "triton")])
def test_unsupported_planes_fall_back_to_torch(name):
    _, planes = planes_of(4, 2, 8, 6, torch.float32)
    strided = tuple(plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in planes)
    moves = replace(moves_of(planes, 20, seed=1), planes=strided)
    expected = [plane.clone() for plane in strided]
    ReferenceAttention().move(replace(moves, planes=tuple(expected)))
    gathered = GatheredAttention(CPU)
    backend = triton_backend(gathered) if name == "triton" else BACKENDS[name]
    backend.move(moves)

    assert all(map(torch.equal, strided, expected))


class Lanes:
    """Lanes whose slots have random positions, in scattered pages, and a ranking of them.

    Attributes:
        positions, slots: [lane][slot] by position; `kept`: those to retain.
        breaks: [lane] whether more slots are protected than retained.
    """

    def __init__(self, seed, rank):
        rng = np.random.default_rng(seed)
        tokens, lanes, most = (int(rng.integers(1, end)) for end in (18, 7, 40))
        held, columns = rng.integers(0, most + 1, lanes), -(-most // tokens)
        held[0] = most
        keep = np.array([rng.integers(0, number + 1) for number in held])
        self.tokens, self.num_pages = tokens, lanes * columns + 2
        self.pages = rng.permutation(self.num_pages)[: lanes * columns].reshape(lanes, columns)
        plane = np.full((self.num_pages, tokens + 3), -9)  # other data is between the pages
        numbers = rng.standard_normal((self.num_pages, 1, tokens, 1)).astype(np.float32)
        if rng.random() < 0.5:
            numbers = numbers.round()  # many equal ones
        self.positions, self.slots = [], []
        for lane, number in enumerate(held):
            own = rng.choice(int(rng.choice([60, 90_000])), number, replace=False)
            own = np.sort(own) if rng.random() < 0.3 else own
            for slot, position in enumerate(own):
                plane[self.pages[lane, slot // tokens], slot % tokens] = position
            self.positions.append(np.sort(own))
            self.slots.append(np.argsort(own))
        sinks, newest = int(rng.integers(0, 4)), rng.integers(0, 5, lanes)
        self.held = HeldLanes(
            whole(plane)[:, :tokens], whole(self.pages), whole(held), int(held.max())
        )
        gone = held - keep
        most_moves, own = (
            int(np.minimum(keep, gone).max()),
            {"sinks": sinks, "newest": whole(newest)},
        )
        self.ranking = SlotRanking(whole(keep), most_moves, int(gone.max()), **own)
        protected = np.zeros((lanes, most), dtype=bool)
        for lane, (own, number) in enumerate(zip(self.positions, newest, strict=True)):
            protected[lane, : len(own)] = own < sinks
            protected[lane, max(0, len(own) - number) : len(own)] = True
        if rng.random() < 0.3:
            protected &= rng.random(protected.shape) < 0.5
            self.ranking = replace(self.ranking, protected=torch.from_numpy(protected))
        score = self._score(rng, rank, numbers, keep)
        if rank == "marks":
            protected[:] = False
        self.breaks = protected.sum(axis=1) > keep
        self.kept = [
            self._kept(lane, score[lane], protected[lane], keep[lane]) for lane in range(lanes)
        ]

    def _score(self, rng, rank, numbers, keep):
        """Scores by position; added to the ranking."""
        lanes, most = len(keep), self.held.max_held
        if rank == "positions":
            return self.positions
        if rank in ("numbers", "means"):
            after = np.array([own.max(initial=0) + 1 for own in self.positions]) + 2
            next_position = whole(after) if rank == "means" else None
            stored = StoredNumbers(torch.from_numpy(numbers), whole(self.pages), next_position)
            self.ranking = replace(self.ranking, numbers=stored)
            found = [
                numbers[self.pages[lane, slots // self.tokens], 0, slots % self.tokens, 0]
                for lane, slots in enumerate(self.slots)
            ]
            seen = [after[lane] - own for lane, own in enumerate(self.positions)]
            if next_position is None:
                return found
            return [one / n.astype(np.float32) for one, n in zip(found, seen, strict=True)]
        score = rng.standard_normal((lanes, most))
        score = (score * 2).round() * rng.choice([1, -0.0, 2**-40]) if rng.random() < 0.5 else score
        if rank == "floats":
            score = score.astype(np.float32)
        if rank == "marks":
            score = np.zeros((lanes, most), dtype=bool)
            for lane, own in enumerate(self.positions):
                score[lane, rng.permutation(len(own))[: keep[lane]]] = True
        self.ranking = replace(self.ranking, score=torch.from_numpy(score))
        return score

    def _kept(self, lane, score, protected, keep):
        number = len(self.positions[lane])
        if self.breaks[lane]:
            return np.arange(number) >= number - keep
        kept = protected[:number].copy()
        free = [slot for slot in range(number) if not kept[slot]]
        free.sort(key=lambda slot: (-float(score[slot]), slot))
        kept[free[: keep - kept.sum()]] = True
        return kept

    def check(self, backend):
        """Compare the order, the selection and the moves of a backend."""
        ordered = backend.order_lanes(self.held)
        found = backend.select_lanes(self.held, self.ranking)
        planes, expected = self.planes(), self.planes()
        for lane, (positions, slots) in enumerate(zip(self.positions, self.slots, strict=True)):
            rest = range(len(slots), self.held.max_held)
            assert ordered[0][lane].tolist() == [*positions, *[-1] * len(rest)]
            assert ordered[1][lane].tolist() == [*slots, *rest]
            marks = np.zeros(len(slots), dtype=bool)
            marks[slots] = self.kept[lane]
            moves = fill_holes(marks[None])
            breaks, number, *evicted = found.evicted[lane].tolist()
            assert bool(breaks) == self.breaks[lane]
            gone = positions[~self.kept[lane]].tolist()
            assert evicted[: len(gone)] == gone
            wanted = [moves.source.tolist(), moves.target.tolist()]
            assert found.moves[lane, :, :number].tolist() == wanted
            at, to = (divmod(end, self.tokens) for end in (moves.source, moves.target))
            for plane in expected:
                plane[self.pages[lane, to[0]], :, to[1]] = plane[self.pages[lane, at[0]], :, at[1]]
        backend.move_lanes(planes, self.held.pages, found)
        assert all(map(torch.equal, planes, expected))

    def planes(self):
        """Planes of several types in the same pages."""
        arena = torch.arange(self.num_pages * self.tokens * 48) % 251
        arena = arena.view(self.num_pages, -1).to(torch.uint8)
        parts = arena.split([self.tokens * size for size in (32, 4, 3, 9)], 1)
        return [
            parts[0].view(torch.bfloat16).view(-1, 2, self.tokens, 8),
            parts[1].view(-1, 1, self.tokens, 4),
            parts[2].view(-1, 1, self.tokens, 3),
        ]


def whole(numbers):
    return torch.from_numpy(np.ascontiguousarray(numbers).astype(np.int32))


RANKS = ("positions", "numbers", "means", "floats", "doubles", "marks")


@needs_native
@pytest.mark.parametrize("rank", RANKS)
def test_c_selects_and_moves_the_slots_of_lanes(rank):
    paths = [native(path, parallel_for=None) for path in WRITE_PATHS]
    for seed in range(60):
        for backend in (*paths, BACKENDS["native"]):
            Lanes(seed, rank).check(backend)


@pytest.mark.skipif(why_no_triton(CPU) is not None, reason="no interpreter of Triton")
@pytest.mark.parametrize("rank", RANKS)
def test_triton_selects_and_moves_the_slots_of_lanes(rank):
    make_interpreter_faster()
    for seed in range(3):
        Lanes(seed, rank).check(triton_backend())


def selectors():
    """Backends that select slots."""
    selecting = [BACKENDS["native"]] if "native" in BACKENDS else []
    return selecting + ([triton_backend()] if why_no_triton(CPU) is None else [])


def test_lanes_without_tokens_are_ordered():
    """Later layers hold no token while a prompt is computed layer by layer."""
    positions = torch.arange(8)[None].int()
    for backend in selectors():
        for held in ([0, 0], [0, 3]):
            pages = whole([[-1], [-1] if held[1] == 0 else [0]])
            found = backend.order_lanes(HeldLanes(positions, pages, whole(held), max(held)))
            assert [one.tolist() for one in found] == (
                [[[], []]] * 2 if max(held) == 0 else [[[-1] * 3, [0, 1, 2]], [[0, 1, 2]] * 2]
            )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_are_not_finite_are_a_breach_of_their_lane(number, dtype):
    score = torch.arange(16, dtype=dtype).view(2, 8)
    score[1, 5] = number
    held = HeldLanes(torch.arange(8)[None].int(), *map(whole, ([[0], [0]], [8, 8])), 8)
    for backend in selectors():
        ranking = SlotRanking(whole([5, 5]), 3, 3, score, newest=whole([0, 0]))
        found = backend.select_lanes(held, ranking)
        assert (found.evicted[:, 0] != 0).tolist() == [False, True]
        assert found.evicted[:, 2:].tolist() == [[0, 1, 2]] * 2  # the newest slots stay


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
        new, widest = torch.tensor(fresh, dtype=torch.int32), int(num_slots.max())
        of_rows = torch.arange(rows) + 2, torch.arange(rows).flip(0)
        self.rows = StatisticRows(*of_rows, num_slots, new, widest)
        widest += 3
        self.sums = torch.full((rows + 2, lanes * heads * group, widest), float("nan"))
        for row, own in enumerate(slots):
            for lane, held in enumerate(own):
                part = slice(lane * heads * group, (lane + 1) * heads * group)
                for slot in range(held):
                    self.sums[row + 2, part, slot] = torch.rand(heads * group, generator=generator)
                    if slot < held - fresh[row]:
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
        lanes = self.rows.slots.shape[1]
        group = self.sums.shape[1] // (lanes * per_page)
        for row, own in enumerate(self.rows.slots.tolist()):
            for lane, num_slots in enumerate(own):
                for slot in range(num_slots):
                    weights = self.sums[row + 2, :, slot].view(lanes, per_page, group)[lane]
                    reduce = {"mean": Tensor.mean, "max": Tensor.amax, "sum": Tensor.sum}[heads]
                    weight = reduce(weights, 1)
                    added = [weight, weight * weight, (weight < 1 / num_slots).float()][count]
                    is_old = slot < num_slots - int(self.rows.fresh[row])
                    found[row, lane, slot] = (self.at(row, lane, slot) if is_old else 0) + added
        return found

    def check(self, expected):
        found = torch.stack([self.at(*place) for place in expected])
        torch.testing.assert_close(found, torch.stack([*expected.values()]), atol=1e-6, rtol=1e-5)


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


@pytest.mark.parametrize("backend", TALLYING.values(), ids=TALLYING)
@given(
    case=cases(),
    count=st.sampled_from(list(AttentionMeasure)),
    heads=st.sampled_from(list(REDUCTIONS)),
)
def test_every_backend_accumulates_the_statistics_of_every_slot(backend, case, count, heads):
    expected = case.expected(count, heads)
    num_before = int((~case.numbers.isnan()).sum())
    fresh = int(case.rows.fresh.sum()) * case.rows.slots.shape[1]
    backend.tally(case.tally(count, heads), case.rows, case.sums)

    case.check(expected)
    written = int((~case.numbers.isnan()).sum())
    assert written == num_before + fresh * case.numbers.shape[1]  # no other element was written


def test_low_attention_is_less_than_an_equal_share():
    """Four slots: a weight of exactly 1/4 is not low, any smaller weight is."""
    case = StatisticsCase(slots=[[4]], fresh=[1], heads=1, group=2, page_tokens=16, seed=0)
    for slot, weight in enumerate((0.25, 0.2, 0.55, 0.0)):
        case.sums[2, :, slot] = weight
        case.at(0, 0, slot)[:] = 3.0
    for name, backend in TALLYING.items():
        before = case.numbers.clone()
        backend.tally(case.tally(AttentionMeasure.LOW, MEAN), case.rows, case.sums)

        assert [float(case.at(0, 0, slot)) for slot in range(4)] == [3, 4, 3, 1], name
        case.numbers.copy_(before)


@needs_native
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
    TALLYING["native"].tally(case.tally(AttentionMeasure.SQUARES, MAX), case.rows, case.sums)

    case.check(expected)


WRITTEN_PAGES, TOKENS, HEADS, LANES = 40, 5, 2, 3
CODECS = ["int8", "int4", "int4:group=8", "int2", "int8/int4", "int8/bfloat16", "float16/int2"]


class Written:
    """Pages into which a backend has written vectors; all other bytes are 255."""

    def __init__(self, backend, codec, key, value) -> None:
        sides, dims = dict(zip(("key", "value"), codec_pair(codec), strict=True)), (key, value)
        sizes = {name: x.shape[2] for name, x in zip(("head_dim", "value_dim"), dims, strict=True)}
        page_class = kv_pages(**sides, **sizes, heads=HEADS, tokens=TOKENS)
        store = PageStore(WRITTEN_PAGES * page_class.page_bytes, torch.device("cpu"))
        store.arena.fill_(255)
        views = store.views(page_class)
        generator = torch.Generator().manual_seed(1)
        slots = torch.randperm(WRITTEN_PAGES * TOKENS, generator=generator)[: len(key) * LANES]
        pages, offsets = (x.view(len(key), LANES) for x in (slots // TOKENS, slots % TOKENS))
        backend.write(NewSlots(views.key, views.value, pages, offsets, views.coded), key, value)
        self.arena = store.arena
        self.decoded = [
            decode_slots(side, pages, offsets).flatten(1, 2)
            for side in (views.coded.key, views.coded.value)
        ]


def vectors(tokens, head_dim, dtype, scale=1.0, seed=0, value_dim=None):
    """Keys and values with heads first in memory, as in models."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(LANES * HEADS, tokens, dim) for dim in (head_dim, value_dim or head_dim)]
    drawn = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    return tuple(x.to(dtype).transpose(0, 1) for x in drawn)


@needs_native
@every_pair(path=WRITE_PATHS, codec=CODECS, dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_bytes_equal_those_of_torch(codec, dtype, path, monkeypatch):
    head_dim = 40 if codec != "int4" else 64
    for scale, value_dim in ((1.0, head_dim), (3e4, 32), (1e-4, 96)):
        key, value = vectors(21, head_dim, dtype, scale, value_dim=value_dim)
        expected = Written(GatheredAttention(CPU), codec, key, value)
        with monkeypatch.context() as patched:
            patched.setattr(GatheredAttention, "write", pytest.fail)
            got = Written(native(path), codec, key, value)

        assert torch.equal(got.arena, expected.arena)


@needs_native
@given(
    numbers=st.lists(st.floats(width=32), min_size=16, max_size=16),
    codec=st.sampled_from(["int8", "int4", "int4:group=8", "int2"]),
)
def test_any_numbers_decode_as_from_torch(numbers, codec):
    key, value = vectors(1, 16, torch.float32)
    key[0, 1], value[0, 4] = torch.tensor(numbers), torch.tensor(numbers)
    expected = Written(GatheredAttention(CPU), codec, key, value).decoded
    for path in WRITE_PATHS:
        found = Written(native(path), codec, key, value).decoded
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@needs_native
@pytest.mark.parametrize("codec", ["fp8", "int4_outliers", "int3"])
def test_torch_encodes_what_the_library_does_not(codec):
    key, value = vectors(3, 64, torch.float32)
    expected = Written(GatheredAttention(CPU), codec, key, value)

    assert torch.equal(Written(native(WRITE_PATHS[-1]), codec, key, value).arena, expected.arena)
