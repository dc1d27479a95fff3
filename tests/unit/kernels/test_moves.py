"""Slots selected and moved in pages: every backend equals copying one vector at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.backend import HeldLanes, MovedSlots, SlotRanking, StoredNumbers
from quire.kernels.gathered import GatheredAttention
from quire.kernels.native.backend import NativeAttention
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.pre_rope import PreRopeAttention
from quire.kernels.reference_backend import ReferenceAttention
from quire.kernels.triton.hardware import why_no_triton
from quire.kv.slot_moves import fill_holes
from support.interpreted import make_interpreter_faster, triton_backend

CPU = torch.device("cpu")
LIBRARY = load_library()
BACKENDS = {
    "reference": ReferenceAttention(),
    "gathered": GatheredAttention(CPU),
    "pre_rope": PreRopeAttention(CPU),
}
if isinstance(LIBRARY, NativeLibrary):
    BACKENDS["native"] = NativeAttention(LIBRARY, GatheredAttention(CPU))
    one_thread = replace(LIBRARY, parallel_for=None)
    BACKENDS["native, one thread"] = NativeAttention(one_thread, GatheredAttention(CPU))


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


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@given(
    pages=st.integers(1, 5),
    heads=st.sampled_from([1, 3]),
    tokens=st.sampled_from([1, 3, 16]),
    dim=st.sampled_from([1, 5, 64]),
    dtype=st.sampled_from([torch.float32, torch.int16, torch.uint8]),
    share=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_all_slots_are_read_before_any_slot_is_written(
    backend, pages, heads, tokens, dim, dtype, share, seed
):
    arena, planes = planes_of(pages, heads, tokens, dim, dtype)
    moves = moves_of(planes, round(share * pages * tokens), seed)
    expected = arena.clone()
    for before, after in zip(
        planes_like(arena.clone(), planes), planes_like(expected, planes), strict=True
    ):
        for (page, offset), (to_page, to_offset) in zip(
            zip(*moves.source, strict=True), zip(*moves.target, strict=True), strict=True
        ):
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


@pytest.mark.skipif("native" not in BACKENDS, reason="the C extension is not built")
def test_unsupported_planes_fall_back_to_torch():
    _, planes = planes_of(4, 2, 8, 6, torch.float32)
    strided = tuple(plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in planes)
    moves = replace(moves_of(planes, 20, seed=1), planes=strided)
    expected = [plane.clone() for plane in strided]
    ReferenceAttention().move(replace(moves, planes=tuple(expected)))
    BACKENDS["native"].move(moves)

    assert all(map(torch.equal, strided, expected))


def planes_like(arena, planes):
    """The planes of another arena of the same shape."""
    return [
        arena.as_strided(plane.shape, plane.stride(), plane.storage_offset()) for plane in planes
    ]


class Lanes:
    """Lanes whose slots have random positions, in scattered pages, and a ranking of them.

    Attributes:
        held, ranking: arguments of `LaneSelector`.
        positions, slots: [lane][slot] by position.
        kept: [lane][slot] slots to retain, by position.
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
        self.ranking = SlotRanking(
            whole(keep),
            int(np.minimum(keep, gone).max()),
            int(gone.max()),
            sinks=sinks,
            newest=whole(newest),
        )
        protected = np.zeros((lanes, most), dtype=bool)
        for lane, (own, number) in enumerate(zip(self.positions, newest, strict=True)):
            protected[lane, : len(own)] = own < sinks
            protected[lane, max(0, len(own) - number) : len(own)] = True
        if rng.random() < 0.3:
            protected &= rng.random(protected.shape) < 0.5
            mask = torch.from_numpy(protected)
            self.ranking = replace(self.ranking, protected=mask)
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
            pairs = zip(found, seen, strict=True)
            return (
                [one / number.astype(np.float32) for one, number in pairs]
                if next_position is not None
                else found
            )
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
            assert found.moves[lane, :, :number].tolist() == [
                moves.source.tolist(),
                moves.target.tolist(),
            ]
            at, to = (divmod(end, self.tokens) for end in (moves.source, moves.target))
            for plane in expected:
                plane[self.pages[lane, to[0]], :, to[1]] = plane[self.pages[lane, at[0]], :, at[1]]
        backend.move_lanes(planes, self.held.pages, found)
        assert all(map(torch.equal, planes, expected))

    def planes(self):
        """Planes of several types in the same pages."""
        arena = torch.arange(self.num_pages * self.tokens * 48) % 251
        arena = arena.view(self.num_pages, -1).to(torch.uint8)
        parts = arena.split(
            [self.tokens * 32, self.tokens * 4, self.tokens * 3, self.tokens * 9], 1
        )
        return [
            parts[0].view(torch.bfloat16).view(-1, 2, self.tokens, 8),
            parts[1].view(-1, 1, self.tokens, 4),
            parts[2].view(-1, 1, self.tokens, 3),
        ]


def whole(numbers):
    return torch.from_numpy(np.ascontiguousarray(numbers).astype(np.int32))


RANKS = ("positions", "numbers", "means", "floats", "doubles", "marks")


@pytest.mark.skipif("native" not in BACKENDS, reason="the C extension is not built")
@pytest.mark.parametrize("rank", RANKS)
def test_c_selects_and_moves_the_slots_of_lanes(rank):
    paths = [
        NativeAttention(replace(LIBRARY, path=path, parallel_for=None), GatheredAttention(CPU))
        for path in range(LIBRARY.path + 1)
    ]
    for seed in range(60):
        for backend in (*paths, BACKENDS["native"]):
            Lanes(seed, rank).check(backend)


@pytest.mark.skipif(why_no_triton(CPU) is not None, reason="no interpreter of Triton")
@pytest.mark.parametrize("rank", RANKS)
def test_triton_selects_and_moves_the_slots_of_lanes(rank):
    make_interpreter_faster()
    for seed in range(3):
        Lanes(seed, rank).check(triton_backend())


def test_lanes_without_tokens_are_ordered():
    """Later layers hold no token while a prompt is computed layer by layer."""
    selectors = [BACKENDS["native"]] if "native" in BACKENDS else []
    selectors += [triton_backend()] if why_no_triton(CPU) is None else []
    positions = torch.arange(8)[None].int()
    for backend in selectors:
        for held in ([0, 0], [0, 3]):
            pages = whole([[-1], [-1] if held[1] == 0 else [0]])
            found = backend.order_lanes(HeldLanes(positions, pages, whole(held), max(held)))
            assert [one.tolist() for one in found] == (
                [[[], []]] * 2 if max(held) == 0 else [[[-1] * 3, [0, 1, 2]], [[0, 1, 2]] * 2]
            )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_are_not_finite_are_a_breach_of_their_lane(number, dtype):
    selectors = [BACKENDS["native"]] if "native" in BACKENDS else []
    selectors += [triton_backend()] if why_no_triton(CPU) is None else []
    score = torch.arange(16, dtype=dtype).view(2, 8)
    score[1, 5] = number
    held = HeldLanes(torch.arange(8)[None].int(), *map(whole, ([[0], [0]], [8, 8])), 8)
    for backend in selectors:
        found = backend.select_lanes(
            held, SlotRanking(whole([5, 5]), 3, 3, score, newest=whole([0, 0]))
        )
        assert (found.evicted[:, 0] != 0).tolist() == [False, True]
        assert found.evicted[:, 2:].tolist() == [[0, 1, 2]] * 2  # the newest slots stay
