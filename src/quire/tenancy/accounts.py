"""Whose KV bytes are whose: the accounts of tenants, and who may take more from whom.

    0            guaranteed              share                limit = guaranteed + burst
    |----------------|---------------------|-----------------------|----------------> held bytes
      GUARANTEED       SHARE                 BORROWED                NOTHING
      taken back from  taken back from       taken while it is       refused
      all who borrow   those over their      free, given back
                       share                 first

The shared part is what no guarantee covers. Tenants that are there (they hold bytes, or wait)
divide it by weight; guarantee and part of the shared part together are a tenant's *share*. Idle
bytes serve whoever can use them, guaranteed or not: nothing lies idle while somebody waits, and
nobody waits for more than it takes to throw a borrower out.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from quire.errors import ConfigError, InvariantError, NeverFits, RequestError
from quire.tenancy.tenants import PUBLIC, TenantSpec, check_distinct, check_tenant_name


class Right(enum.IntEnum):
    """On what ground bytes are taken; a higher one takes from a lower one."""

    NOTHING = 0
    BORROWED = 1
    SHARE = 2
    GUARANTEED = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a tenant may take bytes, and why.

    Attributes:
        right: NOTHING refuses; BORROWED takes what is free; SHARE and GUARANTEED may have others
            thrown out (see `TenantAccounts.reclaimable_for`).
        reason: with the numbers, for people.
    """

    right: Right
    reason: str

    def __bool__(self) -> bool:
        return self.right > Right.NOTHING


class TenantAccounts:
    """The accounts.

    Args:
        specs: the tenants; without any, every name is a tenant of weight 1 without a guarantee.
        pool_bytes: the KV memory they divide.

    Raises:
        ConfigError: a name twice, or guarantees that add up to more than the pool.
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

    # ---- who -----------------------------------------------------------------------------------

    def spec(self, tenant: str) -> TenantSpec:
        """What a tenant may count on.

        Raises:
            RequestError: nobody is called so; lists who is.
            ConfigError: where every name is taken, one that cannot be a name.
        """
        if not self._specs:
            return _open_spec(tenant)
        if tenant not in self._specs:
            known = ", ".join(sorted(self._specs))
            raise RequestError(f"unknown tenant {tenant!r}: expected one of {known}")
        return self._specs[tenant]

    def refuse_if_never(self, tenant: str, peak_bytes: int, *, param: str = "max_tokens") -> None:
        """Refuse a request that could not run even if its tenant held nothing else.

        Args:
            tenant: of the request.
            peak_bytes: that it may come to hold.
            param: the option to lower first.

        Raises:
            RequestError: an unknown tenant.
            NeverFits: with the bytes needed and the tenant's limit.
        """
        limit = self.spec(tenant).limit_bytes
        if limit is not None and peak_bytes > limit:
            raise NeverFits(
                f"the request needs {peak_bytes:,} B of KV, tenant {tenant!r} may hold "
                f"{limit:,} B (guaranteed and burst); shorten the prompt, lower max_tokens or "
                "raise its burst=",
                param=param,
            )

    # ---- what they hold ------------------------------------------------------------------------

    def note(self, held: Mapping[str, int], waiting: Iterable[str] = ()) -> None:
        """Replace the accounts by a fresh count.

        Args:
            held: bytes of each tenant's private pages, and of shared prefixes under `PUBLIC`.
            waiting: tenants with requests that wait; they count as being there.
        """
        self._held = {tenant: size for tenant, size in held.items() if size}
        self._waiting = frozenset(waiting)

    def add(self, tenant: str, delta_bytes: int) -> None:
        """Change one account between two counts.

        Raises:
            InvariantError: it would fall below 0.
        """
        held = self.held_bytes(tenant) + delta_bytes
        if held < 0:
            raise InvariantError(f"tenant {tenant!r} gives back {-held:,} B more than it holds")
        self._held[tenant] = held

    def held_bytes(self, tenant: str) -> int:
        """Bytes on a tenant's account."""
        return self._held.get(tenant, 0)

    @property
    def tenants(self) -> list[str]:
        """Those that are configured, hold bytes or wait, by name."""
        names = {spec.name for spec in self.specs} | self._held.keys() | self._waiting
        return sorted(names - {PUBLIC})

    def share_bytes(self, tenant: str) -> int:
        """Its guarantee and its part, by weight, of the shared part less shared prefixes."""
        here = {t for t, size in self._held.items() if size} | self._waiting | {tenant}
        weights = sum(self.spec(other).weight for other in here - {PUBLIC})
        spec = self.spec(tenant)
        divided = max(0, self.shared_bytes - self.held_bytes(PUBLIC))
        return spec.guaranteed_bytes + int(divided * spec.weight / weights)

    def over_quota_bytes(self, tenant: str) -> int:
        """Bytes it holds above its guarantee: what it borrowed."""
        return max(0, self.held_bytes(tenant) - self.spec(tenant).guaranteed_bytes)

    def over_share_bytes(self, tenant: str) -> int:
        """Bytes it holds above its share: what it gives back first, its debt."""
        return max(0, self.held_bytes(tenant) - self.share_bytes(tenant))

    # ---- who may take from whom ----------------------------------------------------------------

    def may_take(self, tenant: str, size_bytes: int) -> Verdict:
        """Whether a tenant may hold so many bytes more, free or not."""
        spec, then = self.spec(tenant), self.held_bytes(tenant) + size_bytes
        if spec.limit_bytes is not None and then > spec.limit_bytes:
            right, border, name = Right.NOTHING, spec.limit_bytes, "over its limit"
        elif then <= spec.guaranteed_bytes:
            right, border, name = Right.GUARANTEED, spec.guaranteed_bytes, "within its guarantee"
        elif then <= (share := self.share_bytes(tenant)):
            right, border, name = Right.SHARE, share, "within its share"
        else:
            right, border, name = Right.BORROWED, share, "borrowed above its share"
        return Verdict(right, f"tenant {tenant!r} would hold {then:,} B, {name} of {border:,} B")

    def reclaimable_for(self, tenant: str, size_bytes: int) -> list[tuple[str, int]]:
        """From whom bytes are taken so that a tenant gets what is its own.

        Within its guarantee a tenant takes back whatever others hold over theirs; within its share,
        what they hold over their share. Those most over it, by weight, give first.

        Args:
            tenant: who asks.
            size_bytes: how many bytes are missing, at most so many are named.

        Returns:
            (tenant, bytes) in the order in which to take; less than asked for where there is not
            more to take, nothing for one that has no right to take.
        """
        right = self.may_take(tenant, size_bytes).right
        if right < Right.SHARE:
            return []
        is_guaranteed = right is Right.GUARANTEED
        over = self.over_quota_bytes if is_guaranteed else self.over_share_bytes
        others = [(over(t), t) for t in self._held if t not in (tenant, PUBLIC)]
        others.sort(key=lambda pair: (-pair[0] / self.spec(pair[1]).weight, pair[1]))
        taken: list[tuple[str, int]] = []
        for held_over, other in others:
            part = min(held_over, size_bytes)
            if part:
                taken.append((other, part))
                size_bytes -= part
        return taken


@lru_cache(maxsize=1024)  # asked for in every comparison, while clients may invent names for ever
def _open_spec(tenant: str) -> TenantSpec:
    return TenantSpec(name=tenant)


def checked_tenant(book: TenantAccounts, tenant: str) -> str:
    """A tenant's name as a request gives it.

    Raises:
        RequestError: no name, or nobody's.
    """
    try:
        check_tenant_name(tenant)
    except ConfigError as error:
        raise RequestError(str(error)) from None
    book.spec(tenant)
    return tenant
