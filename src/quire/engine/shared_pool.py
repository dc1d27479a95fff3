"""One KV memory shared by several models in one process, each with a guaranteed size.

    pool = SharedPool("64MiB")
    big = Engine(big_model, pool=pool.join("big", guaranteed="40MiB"))
    small = Engine(small_model, pool=pool.join("small", guaranteed="8MiB", burst="16MiB"))

One thread steps the engines of a pool, one after the other: an engine frees memory for another
between two of its steps. `AsyncLLM` steps its engine in a separate thread and cannot use a pool.
An idle engine may leave the pool. If the construction of an engine fails, it leaves the pool.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from quire.errors import ConfigError
from quire.kernels.backend import MovedSlots
from quire.kernels.memory import free_device_bytes
from quire.kv.memory import KVMemory
from quire.kv.shared_arena import SharedArena
from quire.kv.store import PageStore
from quire.layout.pages import CacheLayout
from quire.layout.sizes import parse_size
from quire.scheduler.scheduler import Scheduler
from quire.tenancy.tenants import check_tenant_name


class SharedPool:
    """A KV memory with several members.

    Args:
        total_bytes: size of the pool, in bytes or as a size such as 64MiB.
        device: device of the pool and of the members' models.
        slab_bytes: allocation granularity; default: about 2 MiB, at most 1/64 of a small pool.
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
                f"a shared KV memory of {requested_bytes:,} B exceeds the {free_bytes:,} B "
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
        return self.arena.total_bytes

    @property
    def free_bytes(self) -> int:
        return len(self.arena.free) * self.arena.slab_bytes

    def held_bytes(self, name: str) -> int:
        return len(self.arena.members[name].held) * self.arena.slab_bytes

    def store(self, mover: Callable[[MovedSlots], None]) -> PageStore:
        return PageStore(self.arena.total_bytes, self.device, mover, self._bytes.arena)

    def join(
        self, name: str, *, guaranteed: int | str, burst: int | str | None = None
    ) -> "PoolMember":
        """Add a member to the pool, for one engine.

        Args:
            name: unique, of letters, digits, '_', '.' and '-'.
            guaranteed: bytes always available to the engine; every request must fit them.
            burst: limit of bytes beyond the guarantee; None: no limit.
        """
        check_tenant_name(name, "member")
        if name in self._promised:
            raise ConfigError(f"two members of the shared pool are named {name!r}")
        guaranteed_bytes = parse_size(guaranteed)
        promised_bytes = sum(self._promised.values())
        if promised_bytes + guaranteed_bytes > self.total_bytes:
            raise ConfigError(
                f"member {name!r} needs {guaranteed_bytes:,} B, but {promised_bytes:,} B of "
                f"{self.total_bytes:,} B are guaranteed to {', '.join(self._promised)}; lower "
                "guaranteed= or raise total_bytes"
            )
        self._promised[name] = guaranteed_bytes
        return PoolMember(
            self, name, guaranteed_bytes, None if burst is None else parse_size(burst)
        )

    def leave(self, name: str) -> None:
        """Remove a member and drop the cached prefixes of its engine.

        The engine accepts no more requests. The member's guarantee is available at once.
        """
        if name not in self._promised:
            known = ", ".join(self._promised) or "none"
            raise ConfigError(f"no member of the shared pool is named {name!r}; members: {known}")
        scheduler = self._schedulers.get(name)
        if scheduler is not None and scheduler.has_work:
            raise ConfigError(
                f"member {name!r} cannot leave: {len(scheduler.running)} requests of its engine "
                f"are running and hold {self.held_bytes(name):,} B, {scheduler.num_waiting} are "
                "waiting; step the engine until has_work is False, or cancel them"
            )
        if scheduler is not None:
            scheduler.sequence_memory.drop_cached()
        self.forget(name)

    def attach(self, name: str, scheduler: Scheduler) -> None:
        """Register the scheduler of a member's engine; it frees memory for other members."""
        self._schedulers[name] = scheduler

    def _preempt(self, name: str) -> bool:
        """Preempt a request of a member's engine; False if there is no engine or request."""
        scheduler = self._schedulers.get(name)
        return scheduler is not None and scheduler.preempt_one()

    def refuse_if_not_free(self, name: str) -> None:
        """Refuse a second engine for a member, and an engine for a member that has left."""
        if name in self._schedulers:
            raise ConfigError(f"two members of the shared pool are named {name!r}")
        if name not in self._promised:
            raise ConfigError(f"member {name!r} has left; join the shared pool again")

    def forget(self, name: str) -> None:
        """Remove a member that holds no pages, with or without an engine."""
        if name in self.arena.members:
            self.arena.leave(name)
        self._schedulers.pop(name, None)
        del self._promised[name]

    def check(self) -> None:
        """Verify that every slab is free or belongs to exactly one member."""
        self.arena.check()


@dataclass(frozen=True, slots=True)
class PoolMember:
    """Membership of one engine in a shared pool; created by `SharedPool.join`.

    If the construction of the engine fails, the member leaves the pool: join again to retry.
    """

    pool: SharedPool
    name: str
    guaranteed_bytes: int
    burst_bytes: int | None  # beyond the guarantee; None: no limit

    def make_memory(
        self,
        layout: CacheLayout,
        max_rows: int,
        device: torch.device,
        mover: Callable[[MovedSlots], None],
    ) -> KVMemory:
        """Create the KV memory of an engine over the pool's bytes."""
        if device.type != self.pool.device.type:
            raise ConfigError(
                f"the model is on {device}, the shared pool on {self.pool.device}; give "
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
            arena=arena,
        )


@contextmanager
def joining(member: PoolMember | None) -> Iterator[Callable[[Scheduler], None]]:
    """Build an engine as a member of a pool; the member leaves the pool if the build fails."""
    if member is None:
        yield lambda scheduler: None
        return
    member.pool.refuse_if_not_free(member.name)
    try:
        yield partial(member.pool.attach, member.name)
    except BaseException:
        member.pool.forget(member.name)
        raise
