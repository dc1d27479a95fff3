"""Arenas shared by several members: guarantees, bursts and reclaimed slabs."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.errors import ConfigError, InvariantError
from quire.kv.shared_arena import SharedArena

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


def test_member_can_use_free_slabs_above_its_guarantee():
    arena, (a, b) = arena_of(16, a=8, b=4)

    assert a.num_free_slabs == 16
    take(a, 16)

    assert a.num_borrowed == 8
    assert b.num_free_slabs == 4  # its guarantee, even while another member holds it
    assert not arena.free


def test_guarantee_is_reclaimed_from_the_member_furthest_above_its_own():
    arena, (a, b, c) = arena_of(16, preemptible="ab", a=4, b=4, c=4)
    take(a, 9)
    take(b, 7)

    take(c, 4)

    assert (len(a.held), len(b.held), len(c.held)) == (6, 6, 4)
    assert c.num_free_slabs == 0  # all other slabs belong to others
    arena.check()


def test_part_of_a_running_members_guarantee_stays_reserved():
    _, (a, b) = arena_of(16, a=8, b=8)
    take(a, 1)

    assert b.num_free_slabs == 14  # of 15 free slabs, an eighth of a's guarantee is reserved
    assert a.num_free_slabs == 15


def test_burst_limits_slabs_above_the_guarantee():
    arena = SharedArena(16 * SLAB, SLAB)
    member = arena.join("a", 4 * SLAB, 2 * SLAB + 1, [64])

    assert member.num_free_slabs == 6
    take(member, 6)
    assert member.num_free_slabs == 0
    assert member.total_bytes == 6 * SLAB


def test_guarantee_that_cannot_be_reclaimed_raises():
    _, (a, b) = arena_of(4, a=2, b=2)
    take(a, 4)

    with pytest.raises(InvariantError, match="'b' is below its guarantee"):
        b.allocate_slab()


def test_guarantees_above_the_arena_size_are_rejected_with_the_sizes():
    arena, _ = arena_of(16, a=8, b=6)

    with pytest.raises(ConfigError, match=r"1,920 B, but of 10,240 B only 1,280 B .*a 5,120 B"):
        arena.join("c", 3 * SLAB, None, [64])


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


def test_slab_is_a_64th_of_the_arena_or_2_mib():
    assert SharedArena(64 * 1000).slab_bytes == 960
    assert SharedArena(1 << 30).slab_bytes == 2 << 20
    with pytest.raises(ConfigError, match="holds no slab"):
        SharedArena(63)
    with pytest.raises(ConfigError, match="multiple of 64"):
        SharedArena(6400, 100)


def test_check_detects_a_missing_slab_and_a_slab_held_twice():
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
