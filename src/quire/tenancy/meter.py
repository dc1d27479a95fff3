"""What each tenant has had so far: requests, tokens, time in the queue, bytes, preemptions.

Where no tenants are configured, clients may send any name. Then a row each is kept of those that
have requests and of the IDLE_KEPT seen last; what older ones had is added up in one row, OTHERS.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace

from quire.tenancy.accounts import TenantAccounts

IDLE_KEPT = 1024
OTHERS = "(others)"
"""The row of those that have no row any more; no tenant can have this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStats:
    """Numbers of one tenant since the engine's start, and what it holds now.

    Attributes:
        tenant: whose; `OTHERS` for all those together that were not seen for long.
        num_requests: submitted.
        num_entered: times a request was let into the KV memory, after a preemption again.
        prompt_tokens: read, each token of a prompt once.
        cached_tokens: of prompts, whose KV was there.
        output_tokens: generated.
        queue_s: seconds its requests have waited, of those that were let in.
        num_preemptions: times one of its requests was thrown out.
        held_bytes, guaranteed_bytes, share_bytes: KV bytes it holds, is sure of, and would be given
            now. 0 where nobody keeps its account.
    """

    tenant: str
    num_requests: int = 0
    num_entered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    num_preemptions: int = 0
    held_bytes: int = 0
    guaranteed_bytes: int = 0
    share_bytes: int = 0


class _Counts:
    """The same, while it changes."""

    def __init__(self) -> None:
        self.num_requests = self.num_entered = self.num_preemptions = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.queue_s = 0.0

    def add(self, other: "_Counts") -> None:
        """Add what another has had."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class TenantMeter:
    """Counts what tenants are served."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, _Counts] = OrderedDict()  # the longest unseen first
        self._others: _Counts | None = None

    @property
    def num_tenants(self) -> int:
        """Rows there are."""
        return len(self._counts) + (self._others is not None)

    def fold(self, busy: Collection[str]) -> None:
        """Add up the rows of tenants that have not been seen for long.

        Args:
            busy: tenants whose rows stay.
        """
        if len(self._counts) <= len(busy) + IDLE_KEPT:
            return
        idle = [tenant for tenant in self._counts if tenant not in busy]
        for tenant in idle[:-IDLE_KEPT]:
            self._others = self._others or _Counts()
            self._others.add(self._counts.pop(tenant))

    def submitted(self, tenant: str) -> None:
        """A request has been queued."""
        self._of(tenant).num_requests += 1

    def entered(self, tenant: str, waited_s: float) -> None:
        """A request has been let in.

        Args:
            tenant: whose.
            waited_s: seconds since it was submitted, or thrown out.
        """
        counts = self._of(tenant)
        counts.num_entered += 1
        counts.queue_s += waited_s

    def cached(self, tenant: str, tokens: int) -> None:
        """Tokens of a prompt have come from a prefix cache, in memory or outside."""
        self._of(tenant).cached_tokens += tokens

    def served(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Tokens have been read for the first time, or generated."""
        counts = self._of(tenant)
        counts.prompt_tokens += prompt_tokens
        counts.output_tokens += output_tokens

    def preempted(self, tenant: str) -> None:
        """A request has been thrown out."""
        self._of(tenant).num_preemptions += 1

    def report(self, book: TenantAccounts | None = None) -> tuple[TenantStats, ...]:
        """The numbers of all who asked for anything, by name.

        Args:
            book: the accounts of bytes; its tenants are reported too, whether they asked or not.

        Returns:
            A row each, and `OTHERS` last.
        """
        names = self._counts.keys() | (set() if book is None else set(book.tenants))
        rows = [_row(name, self._counts.get(name, _Counts())) for name in sorted(names)]
        if book is not None:
            rows = [_with_bytes(row, book) for row in rows]
        return tuple(rows if self._others is None else [*rows, _row(OTHERS, self._others)])

    def _of(self, tenant: str) -> _Counts:
        counts = self._counts.setdefault(tenant, _Counts())
        self._counts.move_to_end(tenant)
        return counts


def _row(tenant: str, counts: _Counts) -> TenantStats:
    return TenantStats(tenant=tenant, **vars(counts))


def _with_bytes(row: TenantStats, book: TenantAccounts) -> TenantStats:
    return replace(
        row,
        held_bytes=book.held_bytes(row.tenant),
        guaranteed_bytes=book.spec(row.tenant).guaranteed_bytes,
        share_bytes=book.share_bytes(row.tenant),
    )
