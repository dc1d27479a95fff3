"""One arena for several memories: each is sure of some slabs and borrows what the others leave.

    slabs of the arena   | a: guaranteed         | b: guaranteed    | nobody's             |
                         |<- a holds ->|<- lent to b while a leaves it ->|<- who comes first ->|

Slabs that nobody uses serve whoever asks, other members' guarantees included. A member below its
guarantee that finds none free takes them back from whoever borrows most. The borrower throws
requests out there and then, between two of its steps: nobody waits for a slab of its own, not even
one step, and a borrower loses at most the requests it runs.
"""

from collections.abc import Callable, Sequence
from typing import final

from quire.errors import ConfigError, InvariantError
from quire.kv.arena import HUGE_PAGE_BYTES, SLABS_OF_A_SMALL_ARENA, Arena
from quire.layout.pages import PAGE_ALIGNMENT_BYTES

HEADROOM_SHARE = 8
"""While a member holds slabs, one in so many of its guarantee is not lent: it would be wanted back
at the next step, and a borrower's request thrown out for it."""


@final
class SharedArena:
    """Fixed bytes in equal slabs, and the members that hold them.

    Args:
        total_bytes: rounded down to whole slabs.
        slab_bytes: of a slab; None takes about 2 MiB, at most 1/64 of a small arena.
        preempt: has the member of a name drop what it caches, or preempt one request; False when
            it has nothing left to free.

    Raises:
        ConfigError: not even one slab fits, or slabs that are no multiple of 64 bytes.
    """

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

    @property
    def total_bytes(self) -> int:
        """Bytes in whole slabs."""
        return self.num_slabs * self.slab_bytes

    @property
    def num_unpromised(self) -> int:
        """Slabs that no guarantee covers."""
        return self.num_slabs - sum(member.num_slabs for member in self.members.values())

    def join(
        self, name: str, guaranteed_bytes: int, burst_bytes: int | None, page_bytes: Sequence[int]
    ) -> "MemberArena":
        """Let one more memory in.

        Args:
            name: unique among the members.
            guaranteed_bytes: rounded down to whole slabs.
            burst_bytes: most it borrows above that; None bounds nothing.
            page_bytes: sizes of its pages.

        Raises:
            ConfigError: a name twice, guarantees that add up to more than the arena, one below a
                slab, or pages that do not fit into a slab.
        """
        if name in self.members:
            raise ConfigError(f"two members of the shared pool are called {name!r}")
        self._check_pages(name, page_bytes)
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
                f"promised yet ({each or 'nobody is in'}); lower guarantees or raise total_bytes"
            )
        burst = None if burst_bytes is None else burst_bytes // self.slab_bytes
        member = MemberArena(self, name, slabs, burst)
        self.members[name] = member
        return member

    def leave(self, name: str) -> None:
        """Let a member go that holds nothing. It finds no slab any more.

        Raises:
            InvariantError: it holds slabs.
        """
        member = self.members[name]
        if member.held:
            raise InvariantError(f"member {name!r} leaves with slabs {sorted(member.held)}")
        member.close()
        del self.members[name]

    def _check_pages(self, name: str, page_bytes: Sequence[int]) -> None:
        largest = max(page_bytes)
        cut = 1 if self.slab_bytes % largest else 0  # slab borders cut a page
        if self.slab_bytes // largest - cut < 1:
            raise ConfigError(
                f"pages of {largest:,} B of member {name!r} do not fit into slabs of "
                f"{self.slab_bytes:,} B; give the shared pool slab_bytes={2 * largest:,} or more"
            )

    def free_up(self, owner: "MemberArena") -> None:
        """Have a slab given back to an owner that is below its guarantee.

        Raises:
            InvariantError: whoever borrows has nothing to give, which cannot be.
        """
        while not self.free:
            others = (member for member in self.members.values() if member is not owner)
            borrower = max(others, key=lambda m: (m.num_borrowed, m.name), default=owner)
            if borrower.num_borrowed < 1 or not self._preempt(borrower.name):
                raise InvariantError(
                    f"member {owner.name!r} is below its guarantee and finds no slab: "
                    f"{borrower.name!r} holds {len(borrower.held)} and gives none"
                )

    def check(self) -> None:
        """Prove that every slab is free once or one member's.

        Raises:
            InvariantError: one is not.
        """
        slabs = [*self.free, *(slab for m in self.members.values() for slab in m.held)]
        if sorted(slabs) != list(range(self.num_slabs)):
            raise InvariantError("a slab of the shared arena is nobody's, or held twice")


@final
class MemberArena(Arena):
    """What one memory sees of a shared arena. `total_bytes` is what it holds or could take now.

    Attributes:
        name: of the member.
        size_option: gives the bytes that a request must fit into.
        num_slabs: guaranteed: what a request must fit into.
        held: numbers of the slabs it holds.
    """

    size_option = "guaranteed="

    def __init__(self, arena: SharedArena, name: str, num_slabs: int, burst: int | None) -> None:
        self.name, self.num_slabs = name, num_slabs
        self.slab_bytes = arena.slab_bytes
        self.held: set[int] = set()
        self._arena, self._burst = arena, burst

    def close(self) -> None:
        """Be sure of nothing and borrow nothing from now on."""
        self.num_slabs = self._burst = 0

    def slab_bytes_of(self, total_bytes: int) -> int:
        """Bytes of a slab, whatever the member is guaranteed."""
        return self.slab_bytes

    @property
    def guaranteed_bytes(self) -> int:
        """What it is sure of."""
        return self.num_slabs * self.slab_bytes

    @property
    def num_borrowed(self) -> int:
        """Slabs it holds above its guarantee."""
        return max(0, len(self.held) - self.num_slabs)

    @property
    def total_bytes(self) -> int:
        """Bytes it holds or could take now."""
        return (len(self.held) + self.num_free_slabs) * self.slab_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes of the whole arena: page numbers are places in it."""
        return self._arena.total_bytes

    @property
    def num_free_slabs(self) -> int:
        """Slabs it could take now: what is its own, and what others leave."""
        own = max(0, self.num_slabs - len(self.held))
        others = (m for m in self._arena.members.values() if m is not self)
        left = len(self._arena.free) - sum(member.num_wanted_back for member in others)
        if self._burst is not None:
            left = min(left, self.num_slabs + self._burst - len(self.held))
        return max(own, left)

    @property
    def num_wanted_back(self) -> int:
        """Free slabs that it would soon want back if they were lent."""
        missing = self.num_slabs - len(self.held)
        return max(0, min(missing, -(-self.num_slabs // HEADROOM_SHARE))) if self.held else 0

    @property
    def free_slabs(self) -> frozenset[int]:
        """Numbers of the slabs nobody holds."""
        return frozenset(self._arena.free)

    def take_slab(self) -> int:
        """Hand out a slab; the caller has checked `num_free_slabs`. Borrowers may lose theirs."""
        if not self._arena.free:
            self._arena.free_up(self)
        slab = self._arena.free.pop()
        self.held.add(slab)
        return slab

    def take_this_slab(self, slab: int) -> None:
        """Hand out a slab of `free_slabs`."""
        self._arena.free.remove(slab)
        self.held.add(slab)

    def give_slab(self, slab: int) -> None:
        """Take a slab back."""
        self.held.remove(slab)
        self._arena.free.append(slab)

    def check(self) -> None:
        """Prove that the whole arena adds up.

        Raises:
            InvariantError: it does not.
        """
        self._arena.check()
