"""One KV memory for several models in one process, each sure of a part of it.

    pool = SharedPool("64MiB")
    big = Engine(big_model, pool=pool.join("big", guaranteed="40MiB"))
    small = Engine(small_model, pool=pool.join("small", guaranteed="8MiB", burst="16MiB"))

The engines of a pool are stepped in one thread, one after the other: what one needs back, another
gives between two of its own steps. `AsyncLLM`, which has a thread of its own, takes none of them.
An engine that is idle may leave; one that cannot be made has never joined.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from quire.errors import ConfigError
from quire.kernels.backend import MovedSlots
from quire.kv.memory import KVMemory
from quire.kv.shared_arena import SharedArena
from quire.kv.store import PageStore
from quire.kv.stores.paged import Paged
from quire.layout.pages import CacheLayout
from quire.layout.sizes import parse_size
from quire.models.device_memory import free_device_bytes
from quire.scheduler.scheduler import Scheduler
from quire.tenancy.tenants import check_tenant_name


class SharedPool:
    """The bytes, and who is in.

    Args:
        total_bytes: of all members together, a number or a size such as 64MiB.
        device: where they lie, and where the members' models must.
        slab_bytes: grain of what is lent; None takes about 2 MiB, at most 1/64 of a small pool.

    Raises:
        ConfigError: more than is free, or not one slab; nothing was allocated.
    """

    def __init__(
        self,
        total_bytes: int | str,
        *,
        device: torch.device | str = "cpu",
        slab_bytes: int | str | None = None,
    ) -> None:
        self.device = torch.device(device)
        requested_bytes, free_bytes = parse_size(total_bytes), free_device_bytes(self.device)
        if requested_bytes > free_bytes:
            raise ConfigError(
                f"a shared KV memory of {requested_bytes:,} B is more than the {free_bytes:,} B "
                "that "
                f"are free on {self.device}; lower total_bytes"
            )
        slab = None if slab_bytes is None else parse_size(slab_bytes)
        self.arena = SharedArena(requested_bytes, slab, self._preempt)
        self._bytes = PageStore(self.arena.total_bytes, self.device)
        self._promised: dict[str, int] = {}
        self._schedulers: dict[str, Scheduler] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all members together, in whole slabs."""
        return self.arena.total_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of slabs that nobody holds."""
        return len(self.arena.free) * self.arena.slab_bytes

    def held_bytes(self, name: str) -> int:
        """Bytes of the slabs that a member holds."""
        return len(self.arena.members[name].held) * self.arena.slab_bytes

    def store(self, mover: Callable[[MovedSlots], None]) -> PageStore:
        """The bytes as one member sees them.

        Args:
            mover: copies the member's slots.
        """
        return PageStore(self.arena.total_bytes, self.device, mover, self._bytes.arena)

    def join(
        self, name: str, *, guaranteed: int | str, burst: int | str | None = None
    ) -> "PoolMember":
        """A place in the pool, for one engine.

        Args:
            name: unique, of letters, digits, '_', '.' and '-'.
            guaranteed: bytes that the engine gets whenever it needs them; a request must fit them.
            burst: bytes it may borrow above that; None bounds nothing.

        Raises:
            ConfigError: a name twice, or guarantees that add up to more than the pool.
        """
        check_tenant_name(name, "member")
        if name in self._promised:
            raise ConfigError(f"two members of the shared pool are called {name!r}")
        guaranteed_bytes = parse_size(guaranteed)
        promised_bytes = sum(self._promised.values())
        if promised_bytes + guaranteed_bytes > self.total_bytes:
            raise ConfigError(
                f"member {name!r} asks for {guaranteed_bytes:,} B, of {self.total_bytes:,} B "
                f"{promised_bytes:,} B are promised already ({', '.join(self._promised)}); lower "
                "guaranteed= or raise total_bytes"
            )
        self._promised[name] = guaranteed_bytes
        return PoolMember(
            self, name, guaranteed_bytes, None if burst is None else parse_size(burst)
        )

    def leave(self, name: str) -> None:
        """Give a member's place back, and drop what its engine has cached.

        The engine takes no more requests. Others may be guaranteed its bytes at once.

        Args:
            name: of the member, with an engine or without.

        Raises:
            ConfigError: nobody is called so, or requests of its engine run or wait.
        """
        if name not in self._promised:
            known = ", ".join(self._promised) or "nobody is in"
            raise ConfigError(f"no member of the shared pool is called {name!r} ({known})")
        scheduler = self._schedulers.get(name)
        if scheduler is not None and scheduler.has_work:
            raise ConfigError(
                f"member {name!r} cannot leave: {len(scheduler.running)} requests of its engine "
                f"run and hold {self.held_bytes(name):,} B, {scheduler.num_waiting} wait; step it "
                "until has_work is False, or cancel them"
            )
        if scheduler is not None:
            scheduler.sequence_memory.sharing.drop_cached()
        self.forget(name)

    def attach(self, name: str, scheduler: Scheduler) -> None:
        """Register the scheduler of a member's engine, which frees memory for the others."""
        self._schedulers[name] = scheduler

    def _preempt(self, name: str) -> bool:
        """Have a member's engine free memory; False where it has none, or nothing left to free."""
        scheduler = self._schedulers.get(name)
        return scheduler is not None and scheduler.preempt_one()

    def refuse_if_not_free(self, name: str) -> None:
        """Refuse an engine whose place is not there for it.

        Raises:
            ConfigError: an engine has it already, or it was given back.
        """
        if name in self._schedulers:
            raise ConfigError(f"two members of the shared pool are called {name!r}")
        if name not in self._promised:
            raise ConfigError(f"the place of {name!r} was given back; join the shared pool again")

    def forget(self, name: str) -> None:
        """Let go of a member that holds nothing, wherever it was on its way in or out."""
        if name in self.arena.members:
            self.arena.leave(name)
        self._schedulers.pop(name, None)
        del self._promised[name]

    def check(self) -> None:
        """Prove that every slab is free or one member's.

        Raises:
            InvariantError: one is not.
        """
        self.arena.check()


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A place in a shared pool, for one engine. Make with `SharedPool.join`.

    An engine that cannot be made gives it back: join again for another try.

    Attributes:
        pool: the bytes.
        name: unique in it.
        guaranteed_bytes: what its engine gets whenever it needs it.
        burst_bytes: what it may borrow above; None bounds nothing.
    """

    pool: SharedPool
    name: str
    guaranteed_bytes: int
    burst_bytes: int | None

    def make_memory(
        self,
        layout: CacheLayout,
        max_rows: int,
        device: torch.device,
        mover: Callable[[MovedSlots], None],
    ) -> KVMemory:
        """The bookkeeping of an engine in the pool, over the pool's bytes.

        Raises:
            ConfigError: another device, a place that is taken, pages larger than slabs, or a
                guarantee that holds not one token.
        """
        if device.type != self.pool.device.type:
            raise ConfigError(
                f"the model lies on {device}, the shared pool on {self.pool.device}; give "
                "SharedPool the model's device"
            )
        page_bytes = [page_class.page_bytes for page_class in layout.page_classes]
        arena = self.pool.arena.join(self.name, self.guaranteed_bytes, self.burst_bytes, page_bytes)
        return KVMemory(
            layout,
            arena.guaranteed_bytes,
            max_rows,
            store=self.pool.store(mover),
            track_changes=device.type != "cpu",
            placement=partial(Paged, arena=arena),
        )


@contextmanager
def joining(member: PoolMember | None) -> Iterator[Callable[[Scheduler], None]]:
    """Make an engine that has a place; the place is given back if that fails.

    Args:
        member: the place; None for an engine with a memory of its own.

    Yields:
        What is to be told the engine's scheduler.

    Raises:
        ConfigError: an engine has the place already, or it was given back.
    """
    if member is None:
        yield lambda scheduler: None
        return
    member.pool.refuse_if_not_free(member.name)
    try:
        yield partial(member.pool.attach, member.name)
    except BaseException:
        member.pool.forget(member.name)
        raise
