"""One KV memory for several models in one process, each sure of a part of it.

    pool = SharedPool("64MiB")
    big = Engine(big_model, pool=pool.join("big", guaranteed="40MiB"))
    small = Engine(small_model, pool=pool.join("small", guaranteed="8MiB", burst="16MiB"))

The engines of a pool are stepped in one thread, one after the other: what one needs back, another
gives between two of its own steps. `AsyncLLM`, which has a thread of its own, takes none of them.
"""

from dataclasses import dataclass
from functools import partial

import torch

from quire.engine.device_memory import free_device_bytes
from quire.engine.tenants import check_tenant_name
from quire.errors import ConfigError
from quire.kv.memory import KVMemory
from quire.kv.shared_arena import MemberArena, SharedArena
from quire.kv.store import PageStore
from quire.kv.stores.paged import Paged
from quire.plan.sizes import parse_size
from quire.spec.pages import CacheLayout


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
        asked_bytes, free_bytes = parse_size(total_bytes), free_device_bytes(self.device)
        if asked_bytes > free_bytes:
            raise ConfigError(
                f"a shared KV memory of {asked_bytes:,} B is more than the {free_bytes:,} B that "
                f"are free on {self.device}; lower total_bytes"
            )
        slab = None if slab_bytes is None else parse_size(slab_bytes)
        self.arena = SharedArena(asked_bytes, slab)
        self.store = PageStore(self.arena.total_bytes, self.device)
        self._promised: dict[str, int] = {}

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

    def check(self) -> None:
        """Prove that every slab is free or one member's.

        Raises:
            InvariantError: one is not.
        """
        self.arena.check()


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A place in a shared pool. Make with `SharedPool.join`.

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
        self, layout: CacheLayout, max_rows: int, device: torch.device
    ) -> tuple[KVMemory, PageStore]:
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
        try:
            memory = KVMemory(
                layout,
                arena.guaranteed_bytes,
                max_rows,
                store=self.pool.store,
                track_changes=device.type != "cpu",
                placement=partial(Paged, arena=arena),
            )
        except ConfigError:
            self.pool.arena.leave(self.name)
            raise
        return memory, self.pool.store

    @property
    def arena(self) -> MemberArena:
        """What its engine sees of the arena, once there is one."""
        return self.pool.arena.members[self.name]
