"""Statistics of each tenant: requests, tokens, queue time, bytes, preemptions.

If no tenants are configured, clients may send any tenant name. Then the meter keeps one row for
each tenant with requests and for the `IDLE_KEPT` most recently seen ones. The counts of older
tenants are summed in one row, `OTHERS`.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.kv.memory import KVMemory
from quire.kv.pages import PageNumbers
from quire.layout.pages import PageClass
from quire.tenancy.accounts import TenantAccounts
from quire.tenancy.tenants import PUBLIC

IDLE_KEPT = 1024
OTHERS = "(others)"
"""Name of the row that sums tenants without a row of their own; no tenant can have this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """Statistics of one tenant since the engine's start, and its current bytes."""

    tenant: str  # `OTHERS` for the sum of tenants without a row of their own
    num_requests: int = 0
    num_admitted: int = 0  # including those after a preemption
    prompt_tokens: int = 0  # computed; recomputed ones are not counted again
    cached_tokens: int = 0  # found in a prefix cache
    output_tokens: int = 0  # every beam of a search counts
    queue_s: float = 0.0  # that its admitted requests waited
    num_preemptions: int = 0
    held_bytes: int = 0
    guaranteed_bytes: int = 0
    share_bytes: int = 0


class _Counts:
    """Mutable counts behind `TenantStats`."""

    def __init__(self) -> None:
        self.num_requests = self.num_admitted = self.num_preemptions = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.queue_s = 0.0

    def add(self, other: "_Counts") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class TenantMeter:
    """Counter of the requests and tokens of each tenant."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, _Counts] = OrderedDict()  # least recently seen first
        self._others: _Counts | None = None

    @property
    def num_tenants(self) -> int:
        return len(self._counts) + (self._others is not None)

    def fold(self, busy: Collection[str]) -> None:
        """Sum the rows of the least recently seen tenants, except `busy` ones, into `OTHERS`."""
        if len(self._counts) <= len(busy) + IDLE_KEPT:
            return
        idle = [tenant for tenant in self._counts if tenant not in busy]
        for tenant in idle[:-IDLE_KEPT]:
            self._others = self._others or _Counts()
            self._others.add(self._counts.pop(tenant))

    def submitted(self, tenant: str) -> None:
        self._of(tenant).num_requests += 1

    def admitted(self, tenant: str, waited_s: float) -> None:
        """`waited_s` since the request was submitted or preempted."""
        counts = self._of(tenant)
        counts.num_admitted += 1
        counts.queue_s += waited_s

    def cached(self, tenant: str, tokens: int) -> None:
        """Count prompt tokens whose KV was found in a prefix cache, of any tier."""
        self._of(tenant).cached_tokens += tokens

    def served(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count prompt tokens computed for the first time, and generated tokens."""
        counts = self._of(tenant)
        counts.prompt_tokens += prompt_tokens
        counts.output_tokens += output_tokens

    def preempted(self, tenant: str) -> None:
        self._of(tenant).num_preemptions += 1

    def report(self, accounts: TenantAccounts | None = None) -> tuple[TenantStats, ...]:
        """Statistics of all tenants and those of `accounts`, by name, `OTHERS` last."""
        names = self._counts.keys() | (set() if accounts is None else set(accounts.tenants))
        rows = [_row(name, self._counts.get(name, _Counts())) for name in sorted(names)]
        if accounts is not None:
            rows = [_with_bytes(row, accounts) for row in rows]
        return tuple(rows if self._others is None else [*rows, _row(OTHERS, self._others)])

    def _of(self, tenant: str) -> _Counts:
        if tenant not in self._counts:
            self._counts[tenant] = _Counts()
        self._counts.move_to_end(tenant)
        return self._counts[tenant]


def _row(tenant: str, counts: _Counts) -> TenantStats:
    return TenantStats(tenant=tenant, **vars(counts))


def _with_bytes(row: TenantStats, accounts: TenantAccounts) -> TenantStats:
    return replace(
        row,
        held_bytes=accounts.held_bytes(row.tenant),
        guaranteed_bytes=accounts.spec(row.tenant).guaranteed_bytes,
        share_bytes=accounts.share_bytes(row.tenant),
    )


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
        if group.window is None and not group.private:
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
