"""Arenas and what they hand out: slabs, also of several members, page pools, and extents."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import quire.kv.pages as pages_module
from quire.errors import ConfigError, InvariantError, OutOfPages
from quire.kv.extents import Extent, ExtentMap
from quire.kv.memory import KVMemory
from quire.kv.pages import Arena, PagePool
from quire.kv.shared_arena import SharedArena
from quire.layout.pages import CacheLayout, LaneGroup, choose_slab_bytes
from quire.layout.sizes import HUGE_PAGE_BYTES
from support.small_memory import plain_class
from support.type_checks import is_check

PAGE = plain_class(tokens=4, head_dim=8)  # 128 B


def pool_of(num_slabs, pages_per_slab):
    """A pool over slabs of `pages_per_slab` pages: a second page size sets the slab size."""
    slab_bytes = pages_per_slab * PAGE.page_bytes
    arena = Arena(num_slabs * slab_bytes, [PAGE.page_bytes, slab_bytes])
    assert (arena.slab_bytes, arena.num_slabs) == (slab_bytes, num_slabs)
    return arena, PagePool(arena, PAGE)


def count_calls(function, *arguments):
    """The number of calls of functions of `quire.kv.pages` that a call of `function` makes."""
    num_calls = 0

    def profile(frame, event, _argument):
        nonlocal num_calls
        code = frame.f_code
        is_of_pages = code.co_filename == pages_module.__file__ and not is_check(code)
        num_calls += event == "call" and is_of_pages

    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return num_calls


def test_slabs_are_allocated_when_full_and_freed_with_their_last_page():
    arena, pool = pool_of(4, 8)
    pages = pool.allocate(8)
    assert arena.num_free_slabs == 3
    pages = [*pages, *pool.allocate(12)]  # contiguous and distinct
    assert pages == list(range(20))
    assert (pool.ref_counts[pages] == 1).all()
    assert arena.num_free_slabs == 1
    pool.release(np.array(pages[:7]))
    assert arena.num_free_slabs == 1
    pool.release(np.array(pages[7:]))

    assert arena.num_free_slabs == 4
    assert pool.held_slabs == frozenset()
    assert pool.free_bytes == 0

    arena, pool = pool_of(3, 8)
    pages = pool.allocate(12)

    pool.release(pages[[1, 5, 9]])
    pages_after = pool.allocate(7)

    assert arena.num_free_slabs == 1
    assert set(pages[[1, 5, 9]].tolist()) <= set(pages_after.tolist())


def test_freed_slab_serves_another_page_class_and_failed_allocation_changes_nothing():
    arena, pool = pool_of(1, 8)
    wide = PagePool(arena, plain_class(head_dim=16))
    pages = pool.allocate(3)

    with pytest.raises(OutOfPages):
        wide.allocate(1)
    pool.release(pages)

    assert len(wide.allocate(4)) == 4

    arena, pool = pool_of(2, 8)
    pool.allocate(5)
    counts, free, slabs = pool.ref_counts.copy(), pool.free_bytes, arena.free_slabs

    expected = "12 free pages of 128 B, got 3 in held slabs and 1 free slabs"
    with pytest.raises(OutOfPages, match=expected):
        pool.allocate(12)

    assert (pool.ref_counts == counts).all()
    assert (pool.free_bytes, arena.free_slabs) == (free, slabs)
    assert len(pool.allocate(11)) == 11


def test_duplicate_page_in_release_drops_two_references_and_one_too_many_is_detected():
    _, pool = pool_of(2, 8)
    pages = pool.allocate(2)
    pool.retain(pages[:1])

    pool.release(np.array([pages[0], pages[0]]))

    assert pool.num_used == 1
    assert pool.num_shared == 0
    pool.check()
    pool.release(pages[:1])
    with pytest.raises(InvariantError):
        pool.check()


def test_cost_depends_on_slabs_not_on_pages():
    """300 pages in slabs of 64, and 38 pages in slabs of 8, are both 5 slabs."""
    rng, calls = np.random.default_rng(0), []
    for pages_per_slab, num_pages in ((64, 300), (8, 38)):
        allocated = count_calls(pool_of(8, pages_per_slab)[1].allocate, num_pages)
        _, pool = pool_of(8, pages_per_slab)
        released = count_calls(pool.release, rng.permutation(pool.allocate(num_pages)))
        calls.append((allocated, released))

    assert calls[0] == calls[1]
    assert min(calls[0]) > 5


MIB = 1024 * 1024


SLABS = [
    (1024 * MIB, [65_536, 3 * 1024], 1_966_080),  # a multiple of 196,608 below a huge page
    (1 * MIB, [64, 192], 16_320),  # at most a 64th: 85 * 192, below 16,384
    (100_000, [33_280], 33_280),  # a single size wastes no byte at slab borders
    (64 * 1024, [64 * 31, 64 * 29], 4 * 64 * 31),  # no small multiple: four pages
]


def test_slabs_are_at_most_a_64th_of_the_arena_and_smaller_arenas_are_rejected():
    for total_bytes, page_bytes, slab_bytes in SLABS:
        assert choose_slab_bytes(total_bytes, page_bytes) == slab_bytes
        assert slab_bytes <= HUGE_PAGE_BYTES

    assert SharedArena(64 * 1000).slab_bytes == 960
    assert SharedArena(1 << 30).slab_bytes == 2 << 20
    with pytest.raises(ConfigError, match="holds no slab"):
        SharedArena(63)
    with pytest.raises(ConfigError, match="multiple of 64"):
        SharedArena(6400, 100)

    with pytest.raises(ConfigError, match=r"memory of 65,536 B or more, got 60,000 B"):
        Arena(60_000, [65_536])
    arena = Arena(1000, [128])  # rounded down to whole slabs
    assert (arena.num_slabs, arena.total_bytes) == (7, 896)
    group = LaneGroup(name="kv", page_class=plain_class(), layers=(0, 1, 2))  # 128 B pages
    expected = r"256 B cannot hold one token .*: 384 B are needed; raise --kv-memory to 1KiB"
    with pytest.raises(ConfigError, match=expected):
        KVMemory(CacheLayout((group,)), 256, 1)
    assert KVMemory(CacheLayout((group,)), 384, 1).total_bytes == 384


@given(
    total_bytes=st.integers(1, 64 * MIB),
    units=st.lists(st.integers(1, 2_000), min_size=1, max_size=5),
)
def test_every_slab_holds_pages_of_every_class(total_bytes, units):
    page_bytes = [64 * unit for unit in units]
    slab_bytes = choose_slab_bytes(total_bytes, page_bytes)

    assert slab_bytes % 64 == 0
    assert all(slab_bytes // size - bool(slab_bytes % size) >= 1 for size in page_bytes)


TOTAL = 64


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([1, 3, 4, 8])) | st.integers(0, 20),
        max_size=40,
    )
)
def test_extents_never_overlap_and_are_allocated_if_whole_units_fit(actions):
    space, held, owner = ExtentMap(TOTAL), [], [None] * TOTAL
    for number, action in enumerate(actions):
        if isinstance(action, tuple):
            units, unit_bytes = action
            holes = free_runs(owner)
            allocated = space.allocate(units, unit_bytes)
            assert (allocated is not None) == (sum(run // unit_bytes for run in holes) >= units)
            if allocated is None:
                continue
            assert sum(e.num_bytes for e in allocated) == units * unit_bytes
            assert all(e.num_bytes % unit_bytes == 0 for e in allocated)
            if max(holes, default=0) >= units * unit_bytes:
                assert len(allocated) <= 1
            for extent in allocated:
                assert owner[extent.start : extent.end] == [None] * extent.num_bytes
                owner[extent.start : extent.end] = [number] * extent.num_bytes
            held.append(allocated)
        elif held:
            released = held.pop(action % len(held))
            space.release(released)
            for extent in released:
                owner[extent.start : extent.end] = [None] * extent.num_bytes
        space.check(tuple(e for extents in held for e in extents))
        assert space.free_bytes == owner.count(None)
        assert [e.num_bytes for e in space.free_extents] == free_runs(owner)


def free_runs(owner):
    """Lengths of the runs of free bytes."""
    runs, length = [], 0
    for holder in [*owner, "end"]:
        if holder is None:
            length += 1
        elif length:
            runs.append(length)
            length = 0
    return runs


def test_the_lowest_sufficient_hole_is_used_and_wrong_extents_are_rejected():
    space = ExtentMap(20)
    first, _, _ = (space.allocate(n, 1) for n in (4, 2, 8))
    space.release(first)

    assert space.allocate(3, 1) == (Extent(0, 3),)
    assert space.allocate(3, 1) == (Extent(14, 3),)

    space = ExtentMap(20)
    extents = space.allocate(2, 5)
    with pytest.raises(InvariantError, match="expected an extent at byte 0"):
        space.check(())
    with pytest.raises(InvariantError, match="expected an extent at byte 12, got"):
        space.check((Extent(0, 12),))
    space.release(extents)
    for wrong in (*extents, Extent(15, 10)):
        with pytest.raises(InvariantError, match="was never allocated"):
            space.release((wrong,))


SLAB = 640


class Engines:
    """Frees one slab of a named member per call, like the preemption of a request."""

    def __init__(self, total_bytes, *names):
        self.names = set(names)
        self.arena = SharedArena(total_bytes, SLAB, self.preempt)

    def preempt(self, name):
        member = self.arena.members[name]
        if name not in self.names or not member.held:
            return False
        member.free_slab(max(member.held))
        return True


def arena_of(num_slabs=16, preemptible=(), **guaranteed):
    arena = Engines(num_slabs * SLAB, *preemptible).arena
    return arena, [arena.join(n, slabs * SLAB, None, [64]) for n, slabs in guaranteed.items()]


def take(member, slabs):
    return [member.allocate_slab() for _ in range(slabs)]


def test_member_can_use_free_slabs_above_its_guarantee_up_to_its_burst():
    arena, (a, b) = arena_of(16, a=8, b=4)
    assert a.num_free_slabs == 16
    take(a, 16)

    assert a.num_borrowed == 8
    assert b.num_free_slabs == 4  # its guarantee, even while another member holds it
    assert not arena.free
    _, (a, b) = arena_of(16, a=8, b=8)
    take(a, 1)
    assert b.num_free_slabs == 14  # of 15 free slabs, an eighth of a's guarantee is reserved
    assert a.num_free_slabs == 15

    arena = SharedArena(16 * SLAB, SLAB)
    member = arena.join("a", 4 * SLAB, 2 * SLAB + 1, [64])

    assert member.num_free_slabs == 6
    take(member, 6)
    assert member.num_free_slabs == 0
    assert member.total_bytes == 6 * SLAB


def test_guarantees_are_reclaimed_from_the_member_furthest_above_its_own_or_rejected():
    arena, (a, b, c) = arena_of(16, preemptible="ab", a=4, b=4, c=4)
    take(a, 9)
    take(b, 7)

    take(c, 4)

    assert (len(a.held), len(b.held), len(c.held)) == (6, 6, 4)
    assert c.num_free_slabs == 0  # all other slabs belong to others
    arena.check()

    arena, _ = arena_of(16, a=8, b=6)
    with pytest.raises(ConfigError, match=r"1,920 B, but of 10,240 B only 1,280 B .*a 5,120 B"):
        arena.join("c", 3 * SLAB, None, [64])
    _, (a, b) = arena_of(4, a=2, b=2)
    take(a, 4)
    with pytest.raises(InvariantError, match="'b' is below its guarantee"):
        b.allocate_slab()


@pytest.mark.parametrize(
    ("name", "guaranteed", "page_bytes", "message"),
    [
        ("a", SLAB, 64, "two members"),
        ("c", SLAB - 1, 64, "less than one slab of 640 B"),
        ("c", SLAB, 704, "704 B of member 'c' do not fit into slabs of 640 B"),
        ("c", SLAB, 576, "do not fit"),  # a slab border cuts every page
    ],
)
def test_invalid_member_is_rejected(name, guaranteed, page_bytes, message):
    arena, _ = arena_of(16, a=8)

    with pytest.raises(ConfigError, match=message):
        arena.join(name, guaranteed, None, [64, page_bytes])
    assert list(arena.members) == ["a"]


def test_check_detects_a_missing_slab_and_slabs_held_or_freed_twice():
    arena, (a, b) = arena_of(4, a=2, b=2)
    take(a, 2)
    a.check()

    b.held.add(min(a.held))
    with pytest.raises(InvariantError, match="held twice"):
        b.check()
    b.held.clear()
    arena.free.pop()
    with pytest.raises(InvariantError, match="is missing"):
        a.check()

    arena = Arena(1024, [128])
    slab = arena.allocate_slab()
    arena.free_slab(slab)
    arena.free_slab(slab)

    with pytest.raises(InvariantError, match="twice"):
        arena.check()


class SharedArenaMachine(RuleBasedStateMachine):
    """Members allocate and free slabs; a member below its guarantee always gets slabs."""

    @initialize(
        guaranteed=st.lists(st.integers(1, 6), min_size=1, max_size=4),
        spare=st.integers(0, 6),
        bursts=st.lists(st.none() | st.integers(0, 8), min_size=4, max_size=4),
    )
    def begin(self, guaranteed, spare, bursts):
        names = [f"m{i}" for i in range(len(guaranteed))]
        self.arena = Engines((sum(guaranteed) + spare) * SLAB, *names).arena
        self.bursts = bursts
        self.members = [
            self.arena.join(f"m{i}", slabs * SLAB, None if burst is None else burst * SLAB, [64])
            for i, (slabs, burst) in enumerate(zip(guaranteed, bursts, strict=False))
        ]

    @rule(number=st.integers(0, 3), share=st.floats(0, 1))
    def take(self, number, share):
        member = self.members[number % len(self.members)]
        before = {m.name: len(m.held) for m in self.members}

        take(member, int(share * member.num_free_slabs))

        for other in self.members:
            lost = before[other.name] - len(other.held)
            if other is not member and lost:  # only slabs above the guarantee are reclaimed
                assert len(other.held) >= other.num_slabs

    @rule(number=st.integers(0, 3), slabs=st.integers(0, 8))
    def give(self, number, slabs):
        member = self.members[number % len(self.members)]
        for slab in sorted(member.held)[:slabs]:
            member.free_slab(slab)

    @invariant()
    def check_slabs_and_guarantees(self):
        self.arena.check()
        for member, burst in zip(self.members, self.bursts, strict=False):
            held = len(member.held)
            assert held + member.num_free_slabs >= member.num_slabs
            assert held * SLAB + member.num_free_slabs * SLAB == member.total_bytes
            assert burst is None or held <= member.num_slabs + burst


TestSharedArenaMachine = SharedArenaMachine.TestCase
