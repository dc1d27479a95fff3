"""One arena shared by several KV memories: each has guaranteed slabs and may use free ones.

    slabs   | a: guaranteed                            | b: guaranteed | not guaranteed   |
            |<- in use by a ->|<- free: b may use it ->|               |<- any member   ->|

Free slabs can be used by every member, slabs of other members' guarantees included. If a member is
below its guarantee and no slab is free, the member with the most slabs above its guarantee must
free slabs. That member preempts requests at once, between two of its steps. So a guaranteed slab is
available without waiting for a step, and only running requests of the other member are preempted.
"""

from collections.abc import Callable, Sequence
from typing import final

from quire.errors import ConfigError, InvariantError
from quire.kv.pages import Arena, CopyFences
from quire.layout.pages import PAGE_ALIGNMENT_BYTES, SLABS_OF_A_SMALL_ARENA
from quire.layout.sizes import HUGE_PAGE_BYTES

HEADROOM_SHARE = 8
"""While a member holds slabs, 1/HEADROOM_SHARE of its guaranteed slabs is withheld from others: the
member would need them at its next step, and a request of another member would be preempted."""


@final
class SharedArena:
    """A fixed number of slabs of equal size, and the members that hold them."""

    def __init__(
        self,
        total_bytes: int,
        slab_bytes: int | None = None,
        preempt: Callable[[str], bool] = lambda name: False,
    ) -> None:
        if slab_bytes is None:
            target = min(HUGE_PAGE_BYTES, total_bytes // SLABS_OF_A_SMALL_ARENA)
            slab_bytes = max(1, target // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
        if slab_bytes < 1 or slab_bytes % PAGE_ALIGNMENT_BYTES:
            raise ConfigError(
                f"expected slabs of a multiple of {PAGE_ALIGNMENT_BYTES} B, got {slab_bytes:,} B"
            )
        self.slab_bytes, self._preempt = slab_bytes, preempt
        self.num_slabs = total_bytes // slab_bytes
        if self.num_slabs < 1:
            raise ConfigError(
                f"a shared KV memory of {total_bytes:,} B holds no slab of {slab_bytes:,} B; raise "
                "total_bytes"
            )
        self.free = list(range(self.num_slabs - 1, -1, -1))
        self.members: dict[str, MemberArena] = {}
        self.fences = CopyFences()

    @property
    def total_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def num_unpromised(self) -> int:
        return self.num_slabs - sum(member.num_slabs for member in self.members.values())

    def join(
        self, name: str, guaranteed_bytes: int, burst_bytes: int | None, page_bytes: Sequence[int]
    ) -> "MemberArena":
        """Add a member; its guarantee is rounded down to whole slabs, None is no limit above it."""
        if name in self.members:
            raise ConfigError(f"two members of the shared pool are called {name!r}")
        largest = max(page_bytes)
        cut = 1 if self.slab_bytes % largest else 0  # a page crosses each slab boundary
        if self.slab_bytes // largest - cut < 1:
            raise ConfigError(
                f"pages of {largest:,} B of member {name!r} do not fit into slabs of "
                f"{self.slab_bytes:,} B; give the shared pool slab_bytes={2 * largest:,} or more"
            )
        slabs = guaranteed_bytes // self.slab_bytes
        if slabs < 1:
            raise ConfigError(
                f"member {name!r} is guaranteed {guaranteed_bytes:,} B, less than one slab of "
                f"{self.slab_bytes:,} B; raise guaranteed="
            )
        if slabs > self.num_unpromised:
            each = ", ".join(f"{m.name} {m.guaranteed_bytes:,} B" for m in self.members.values())
            raise ConfigError(
                f"member {name!r} is guaranteed {slabs * self.slab_bytes:,} B, but of "
                f"{self.total_bytes:,} B only {self.num_unpromised * self.slab_bytes:,} B are not "
                f"guaranteed yet ({each or 'no members'}); lower guarantees or raise total_bytes"
            )
        burst = None if burst_bytes is None else burst_bytes // self.slab_bytes
        member = MemberArena(self, name, slabs, burst)
        self.members[name] = member
        return member

    def leave(self, name: str) -> None:
        """Remove a member that holds no slabs."""
        member = self.members[name]
        if member.held:
            raise InvariantError(f"member {name!r} leaves with slabs {sorted(member.held)}")
        member.close()
        del self.members[name]

    def free_up(self, owner: "MemberArena") -> None:
        """Preempt in other members until a slab is free for a member below its guarantee."""
        while not self.free:
            others = (member for member in self.members.values() if member is not owner)
            largest = max(others, key=lambda m: (m.num_borrowed, m.name), default=owner)
            if largest.num_borrowed < 1 or not self._preempt(largest.name):
                raise InvariantError(
                    f"member {owner.name!r} is below its guarantee and no slab is free: "
                    f"{largest.name!r} holds {len(largest.held)} and frees none"
                )

    def check(self) -> None:
        """Every slab is either free once or held by one member."""
        slabs = [*self.free, *(slab for m in self.members.values() for slab in m.held)]
        if sorted(slabs) != list(range(self.num_slabs)):
            raise InvariantError("a slab of the shared arena is missing, or held twice")


@final
class MemberArena(Arena):
    """One member's view of a shared arena."""

    size_option = "guaranteed="

    def __init__(self, arena: SharedArena, name: str, num_slabs: int, burst: int | None) -> None:
        self.name, self.num_slabs = name, num_slabs
        self.slab_bytes = arena.slab_bytes
        self.held: set[int] = set()
        self._arena, self._burst = arena, burst
        self.fences = arena.fences

    def close(self) -> None:
        """Drop the guarantee and stop allocating slabs."""
        self.num_slabs = self._burst = 0

    def slab_bytes_of(self, total_bytes: int) -> int:
        """Return the bytes of a slab; they do not depend on `total_bytes`."""
        return self.slab_bytes

    @property
    def guaranteed_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    @property
    def num_borrowed(self) -> int:
        return max(0, len(self.held) - self.num_slabs)

    @property
    def total_bytes(self) -> int:
        """Bytes of the slabs that the member holds or could allocate now."""
        return (len(self.held) + self.num_free_slabs) * self.slab_bytes

    @property
    def span_bytes(self) -> int:
        return self._arena.total_bytes

    @property
    def num_free_slabs(self) -> int:
        """Slabs the member could allocate now: the rest of its guarantee, or free slabs if more."""
        own = max(0, self.num_slabs - len(self.held))
        others = (m for m in self._arena.members.values() if m is not self)
        left = len(self._arena.free) - sum(member.num_wanted_back for member in others)
        if self._burst is not None:
            left = min(left, self.num_slabs + self._burst - len(self.held))
        return max(own, left)

    @property
    def num_wanted_back(self) -> int:
        """Free slabs withheld from other members because the member will soon need them."""
        missing = self.num_slabs - len(self.held)
        return max(0, min(missing, -(-self.num_slabs // HEADROOM_SHARE))) if self.held else 0

    @property
    def free_slabs(self) -> frozenset[int]:
        return frozenset(self._arena.free)

    def allocate_slab(self) -> int:
        """Another member may be preempted to free slabs above its guarantee."""
        if not self._arena.free:
            self._arena.free_up(self)
        slab = self._arena.free.pop()
        self.held.add(slab)
        return slab

    def free_slab(self, slab: int) -> None:
        self.held.remove(slab)
        self._arena.free.append(slab)

    def check(self) -> None:
        self._arena.check()
