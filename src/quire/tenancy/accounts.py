"""Tenant accounts: the KV bytes of each tenant, and which tenants must free bytes for another.

    0            guaranteed              share                limit = guaranteed + burst
    |----------------|---------------------|-----------------------|----------------> held bytes
      GUARANTEED       SHARE                 ABOVE_SHARE             REFUSED
      reclaimed from   reclaimed from        only free bytes;        never
      tenants above    tenants above         reclaimed first
      their guarantee  their share

The shared pool is the memory that no guarantee covers. Active tenants (which hold bytes or have
waiting requests) divide it by weight. A tenant's *share* is its guarantee plus its fraction of the
shared pool. Any tenant may use free bytes, guaranteed or not. A tenant within its share waits at
most until requests of other tenants have been preempted.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, NeverFits, RequestError
from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.layout.pages import PageClass
from quire.tenancy.tenants import PUBLIC, TenantSpec, check_distinct, check_tenant_name


class Right(enum.IntEnum):
    """The right by which a tenant takes bytes; a higher right takes bytes from a lower one."""

    REFUSED = 0
    ABOVE_SHARE = 1
    SHARE = 2
    GUARANTEED = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a tenant may take bytes, and why."""

    right: Right  # REFUSED: no bytes; ABOVE_SHARE: free bytes only; others may preempt
    reason: str  # with the numbers

    def __bool__(self) -> bool:
        return self.right > Right.REFUSED


class TenantAccounts:
    """Bytes held by each tenant, and the tenants' rights to more.

    Args:
        specs: the tenants; if empty, every name is a tenant of weight 1 without a guarantee.
        pool_bytes: size of the KV memory.
    """

    def __init__(self, specs: Iterable[TenantSpec], pool_bytes: int) -> None:
        self.specs = list(specs)
        check_distinct(spec.name for spec in self.specs)
        self._specs = {spec.name: spec for spec in self.specs}
        self.pool_bytes = pool_bytes
        self._held: dict[str, int] = {}
        self._waiting: frozenset[str] = frozenset()
        guaranteed = sum(spec.guaranteed_bytes for spec in self.specs)
        if guaranteed > pool_bytes:
            each = ", ".join(f"{s.name} {s.guaranteed_bytes:,} B" for s in self.specs)
            raise ConfigError(
                f"guarantees add up to {guaranteed:,} B ({each}), the KV memory has "
                f"{pool_bytes:,} B; lower guaranteed= of some tenants or raise --kv-memory"
            )
        self.shared_bytes = pool_bytes - guaranteed

    # ---- specifications ------------------------------------------------------------------------

    def spec(self, tenant: str) -> TenantSpec:
        if not self._specs:
            return _open_spec(tenant)
        if tenant not in self._specs:
            known = ", ".join(sorted(self._specs))
            raise RequestError(f"unknown tenant {tenant!r}: expected one of {known}")
        return self._specs[tenant]

    def refuse_if_never(self, tenant: str, peak_bytes: int, *, param: str = "max_tokens") -> None:
        """Refuse a request whose peak exceeds its tenant's limit."""
        limit = self.spec(tenant).limit_bytes
        if limit is not None and peak_bytes > limit:
            raise NeverFits(
                f"the request needs {peak_bytes:,} B of KV, tenant {tenant!r} may hold "
                f"{limit:,} B (guaranteed and burst); shorten the prompt, lower max_tokens or "
                "raise its burst=",
                param=param,
            )

    # ---- held bytes ----------------------------------------------------------------------------

    def note(self, held: Mapping[str, int], waiting: Iterable[str] = ()) -> None:
        """Replace all accounts: bytes of private pages, of public prefixes under `PUBLIC`."""
        self._held = {tenant: size for tenant, size in held.items() if size}
        self._waiting = frozenset(waiting)

    def add(self, tenant: str, delta_bytes: int) -> None:
        """Change one account between two calls of `note`."""
        held = self.held_bytes(tenant) + delta_bytes
        if held < 0:
            raise InvariantError(f"tenant {tenant!r} frees {-held:,} B more than it holds")
        self._held[tenant] = held

    def held_bytes(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    @property
    def tenants(self) -> list[str]:
        """Tenants that are configured, hold bytes or have waiting requests, by name."""
        names = {spec.name for spec in self.specs} | self._held.keys() | self._waiting
        return sorted(names - {PUBLIC})

    def share_bytes(self, tenant: str) -> int:
        """A tenant's guarantee plus its fraction, by weight, of the shared pool.

        Public prefixes are subtracted from the shared pool.
        """
        return self._share_among(tenant, {tenant})

    def _share_among(self, tenant: str, needing: set[str]) -> int:
        """A tenant's share if the tenants of `needing` are active too."""
        active = {t for t, size in self._held.items() if size} | self._waiting | needing
        weights = sum(self.spec(other).weight for other in active - {PUBLIC})
        spec = self.spec(tenant)
        divided = max(0, self.shared_bytes - self.held_bytes(PUBLIC))
        return spec.guaranteed_bytes + int(divided * spec.weight / weights)

    def over_quota_bytes(self, tenant: str) -> int:
        return max(0, self.held_bytes(tenant) - self.spec(tenant).guaranteed_bytes)

    def over_share_bytes(self, tenant: str) -> int:
        """Bytes that a tenant holds above its share; they are reclaimed first."""
        return self._over_share(tenant, tenant)

    def _over_share(self, tenant: str, needing: str) -> int:
        """Bytes that a tenant holds above its share while another tenant needs bytes."""
        share = self._share_among(tenant, {tenant, needing})
        return max(0, self.held_bytes(tenant) - share)

    # ---- rights --------------------------------------------------------------------------------

    def may_take(self, tenant: str, size_bytes: int) -> Verdict:
        """Right of a tenant to allocate `size_bytes` more, regardless of free memory."""
        spec, then = self.spec(tenant), self.held_bytes(tenant) + size_bytes
        if spec.limit_bytes is not None and then > spec.limit_bytes:
            right, limit, name = Right.REFUSED, spec.limit_bytes, "over its limit"
        elif then <= spec.guaranteed_bytes:
            right, limit, name = Right.GUARANTEED, spec.guaranteed_bytes, "within its guarantee"
        elif then <= (share := self.share_bytes(tenant)):
            right, limit, name = Right.SHARE, share, "within its share"
        else:
            right, limit, name = Right.ABOVE_SHARE, share, "above its share"
        return Verdict(right, f"tenant {tenant!r} would hold {then:,} B, {name} of {limit:,} B")

    def reclaimable_for(self, tenant: str, size_bytes: int) -> list[tuple[str, int]]:
        """Tenants from which to reclaim bytes so that another tenant gets its share.

        Within its guarantee, a tenant reclaims what others hold above their guarantee. Within its
        share, it reclaims what others hold above their share. Tenants with the most bytes above it
        per weight come first.
        """
        right = self.may_take(tenant, size_bytes).right
        if right < Right.SHARE:
            return []
        is_guaranteed = right is Right.GUARANTEED
        others = [
            (self.over_quota_bytes(t) if is_guaranteed else self._over_share(t, tenant), t)
            for t in self._held
            if t not in (tenant, PUBLIC)
        ]
        others.sort(key=lambda pair: (-pair[0] / self.spec(pair[1]).weight, pair[1]))
        reclaimed: list[tuple[str, int]] = []
        for held_over, other in others:
            num_bytes = min(held_over, size_bytes)
            if num_bytes:
                reclaimed.append((other, num_bytes))
                size_bytes -= num_bytes
        return reclaimed


@lru_cache(maxsize=1024)  # every comparison needs one; bounded, since clients may send any names
def _open_spec(tenant: str) -> TenantSpec:
    return TenantSpec(name=tenant)


def checked_tenant(accounts: TenantAccounts, tenant: str) -> str:
    """Check and return the tenant name of a request."""
    try:
        check_tenant_name(tenant)
    except ConfigError as error:
        raise RequestError(str(error)) from None
    accounts.spec(tenant)
    return tenant


NO_OWNER = -1


def bytes_by_tenant(
    memory: KVMemory,
    rows: Mapping[str, Sequence[int]],
    referenced: Mapping[str, Sequence[Mapping[str, PageNumbers]]] | None = None,
    public_tokens: Mapping[int, int] | None = None,
) -> dict[str, int]:
    """Count the bytes of the pages that each tenant refers to, every page once.

    A page of a public prefix is charged to `PUBLIC`, also while requests use it. If two tenants
    refer to one page otherwise (private salts prevent it), the tenant listed first is charged.
    """
    referenced = referenced or {}
    public_tokens = public_tokens or {}
    names = [PUBLIC, *sorted((rows.keys() | referenced.keys()) - {PUBLIC})]
    if not referenced and not any(pool.num_shared for pool in memory.pools.values()):
        return {name: _unshared_bytes(memory, rows.get(name, ())) for name in names}
    owners = {c: np.full(len(p.ref_counts), NO_OWNER, np.int32) for c, p in memory.pools.items()}
    held = dict.fromkeys(names, 0)
    for row, tokens in public_tokens.items():
        for page_class, pages in _first_pages(memory, row, tokens):
            held[PUBLIC] += _claim(owners, page_class, pages, 0)
    for index, name in enumerate(names):
        for cached_reference in referenced.get(name, ()):
            for group, pages in cached_reference.items():
                page_class = memory.tables[group].group.page_class
                held[name] += _claim(owners, page_class, pages, index)
        for table in memory.tables.values():
            pages = table.pages[np.asarray(rows.get(name, ()), dtype=np.int64)]
            held[name] += _claim(owners, table.group.page_class, pages[pages >= 0], index)
    return held


def _unshared_bytes(memory: KVMemory, rows: Sequence[int]) -> int:
    index = np.asarray(rows, dtype=np.int64)
    return sum(
        int(table.num_pages[index].sum()) * table.group.page_class.page_bytes
        for table in memory.tables.values()
    )


def _first_pages(
    memory: KVMemory, row: int, tokens: int
) -> Iterator[tuple[PageClass, PageNumbers]]:
    """Yield the shared whole pages of a row's first tokens, in lanes without a window."""
    for table in memory.tables.values():
        group = table.group
        if not group.bounded and not group.private:
            pages = table.pages[row][:, : tokens // group.page_class.tokens]
            counts = memory.pools[group.page_class].ref_counts
            held = pages[pages >= 0]
            yield group.page_class, held[counts[held] > 1]


def _claim(
    owners: Mapping[PageClass, NDArray[np.int32]],
    page_class: PageClass,
    pages: PageNumbers,
    owner: int,
) -> int:
    """Assign an owner to pages that have none; return their bytes."""
    owned = owners[page_class]
    free = np.unique(pages[owned[pages] == NO_OWNER])
    owned[free] = owner
    return len(free) * page_class.page_bytes
