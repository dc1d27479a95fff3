"""Fairness between tenants: order of service, memory above a share, charged tokens, statistics.

With a single tenant and no configured tenants, `Fairness` changes nothing. If no tenants are
configured, clients may send any tenant name. Then the meter keeps one row for each tenant with
requests and for the `IDLE_KEPT` most recently seen ones. The counts of older tenants are summed in
one row, `OTHERS`.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from quire.scheduler.request import Request
from quire.scheduler.sequence_memory import SequenceMemory
from quire.tenancy.accounts import Right, TenantAccounts, bytes_by_tenant, checked_tenant
from quire.tenancy.fair_queue import FairQueue
from quire.tenancy.tenants import PUBLIC

FORGET_FROM = 64  # least number of tracked tenants before idle ones are searched: a full pass
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


class Fairness:
    """Tenant accounts of a scheduler.

    Args:
        accounts: the tenants and the bytes that each holds.
        sequence_memory: its cached public prefixes are charged to no tenant.
        waiting: the queue of waiting requests, fair by served tokens.

    Attributes:
        accounts: see above.
        waiting: see above.
        meter: statistics of each tenant.
    """

    def __init__(
        self,
        accounts: TenantAccounts,
        sequence_memory: SequenceMemory,
        waiting: FairQueue[Request],
    ) -> None:
        self.accounts, self._sequence_memory, self.waiting = accounts, sequence_memory, waiting
        self.meter = TenantMeter()
        self._active: set[str] = set()
        self._has_new = self._has_counted = False
        self._forget_from = FORGET_FROM

    @property
    def has_several(self) -> bool:
        """Whether tenants are configured or several tenants are active."""
        return len(self._active) > 1 or bool(self.accounts.specs)

    def admit(self, request: Request, peak_bytes: int) -> None:
        """Check and count a newly submitted request.

        Args:
            request: the request.
            peak_bytes: peak KV bytes of the request.

        Raises:
            RequestError: an unknown or invalid tenant name.
            NeverFits: the tenant's limit is below the request's peak.
        """
        checked_tenant(self.accounts, request.tenant)
        is_mostly_prompt = len(request.prompt_token_ids) > request.params.max_tokens
        param = "prompt" if is_mostly_prompt else "max_tokens"
        self.accounts.refuse_if_never(request.tenant, peak_bytes, param=param)
        self._active.add(request.tenant)
        self._has_new = True
        self.meter.submitted(request.tenant)

    def report(self, running: Sequence[Request]) -> tuple[TenantStats, ...]:
        """Return the statistics of each tenant; bytes are 0 if there has been only one tenant.

        Args:
            running: all running requests.
        """
        if self.meter.num_tenants < 2 and not self.accounts.specs:
            return self.meter.report()
        self._count(running)
        return self.meter.report(self.accounts)

    # ---- bytes ---------------------------------------------------------------------------------

    def recount(self, running: Sequence[Request]) -> None:
        """Update the active tenants and the bytes that each tenant holds."""
        active = {request.tenant for request in running}.union(self.waiting.tenants)
        if self._has_new or active != self._active:
            self._active, self._has_new = active, False
            self._forget_idle()
        if self.has_several:
            self._count(running)
        elif self._has_counted:
            self.accounts.note({})
            self._has_counted = False

    def suppose(self, staying: Sequence[Request], leaving: Sequence[Request]) -> None:
        """Set the accounts as if some running requests were preempted; `recount` restores them.

        Args:
            staying: requests that would keep their rows.
            leaving: requests that would be preempted; they still hold rows.
        """
        self._count(staying, leaving)

    def _forget_idle(self) -> None:
        self.meter.fold(self._active)
        if self.waiting.num_tracked > self._forget_from:
            self.waiting.forget_idle(self._active)
            self._forget_from = max(FORGET_FROM, 2 * self.waiting.num_tracked)

    def _count(self, running: Sequence[Request], leaving: Sequence[Request] = ()) -> None:
        rows: dict[str, list[int]] = defaultdict(list)
        for request in running:
            rows[request.tenant].append(request.memory.row)
        self._has_counted = True
        memory, prefix = self._sequence_memory.memory, self._sequence_memory.prefix
        public = [] if prefix is None else prefix.public_references()
        held = bytes_by_tenant(memory, rows, {PUBLIC: public} if public else {})
        self.accounts.note(held, {*self.waiting.tenants, *(request.tenant for request in leaving)})

    def is_over_share(self, request: Request) -> bool:
        """Whether the request's tenant holds more than its share; it is then preempted first."""
        return self.has_several and self.accounts.over_share_bytes(request.tenant) > 0

    def right(self, request: Request, size_bytes: int) -> Right:
        """The right by which the tenant of a waiting request may take bytes."""
        if not self.has_several:
            return Right.SHARE
        return self.accounts.may_take(request.tenant, size_bytes).right

    def may_hold(self, request: Request, peak_bytes: int) -> bool:
        """Whether `peak_bytes` are within the limit of a request's tenant.

        Raises:
            RequestError: an unknown tenant or an invalid name.
        """
        limit_bytes = self.accounts.spec(checked_tenant(self.accounts, request.tenant)).limit_bytes
        return limit_bytes is None or peak_bytes <= limit_bytes

    def has_limit(self, request: Request) -> bool:
        """Whether the request's tenant has a limit of bytes."""
        return self.has_several and self.accounts.spec(request.tenant).limit_bytes is not None

    def tenants_to_reclaim(self, request: Request, missing_bytes: int) -> list[str]:
        """Tenants whose requests may be preempted for a request within its tenant's share."""
        if not self.has_several:
            return []
        return [
            tenant for tenant, _ in self.accounts.reclaimable_for(request.tenant, missing_bytes)
        ]

    def tenants_over_rows(
        self, request: Request, running: Sequence[Request], most: int
    ) -> list[str]:
        """The tenant furthest above its share of rows, if the request's tenant is below its own.

        Args:
            request: a request that waits for a row.
            running: all requests that hold a row.
            most: number of rows.

        Returns:
            One tenant, or an empty list.
        """
        rows = Counter(other.tenant for other in running)
        weights = {tenant: self.accounts.spec(tenant).weight for tenant in {*rows, request.tenant}}
        rows_per_weight = most / sum(weights.values())
        over = {tenant: count - rows_per_weight * weights[tenant] for tenant, count in rows.items()}
        worst = max(over, key=lambda tenant: (over[tenant], tenant), default=None)
        enough = rows[request.tenant] + 1 > rows_per_weight * weights[request.tenant]
        return [] if worst is None or enough or over[worst] <= 0 else [worst]

    # ---- tokens --------------------------------------------------------------------------------

    def prefill_order(self, request: Request) -> tuple[float, int, float, int]:
        """Sort key of prefill: the tenant served least first."""
        return self.waiting.rank(request) if self.has_several else (0.0, *request.order)

    def step_part(self, request: Request, others: Iterable[Request], budget: int) -> int:
        """Tokens of a step's budget that one tenant may prefill while others have prompts too."""
        if not self.has_several:
            return budget
        tenants = {other.tenant for other in others} | set(self.waiting.backlogged)
        weights = {
            tenant: self.accounts.spec(tenant).weight for tenant in {*tenants, request.tenant}
        }
        return max(1, int(budget * weights[request.tenant] / sum(weights.values())))

    def charge_prefill(self, request: Request, tokens: int, *, scoring_tokens: int = 0) -> None:
        """Charge the tenant for a planned chunk; recomputed tokens are not charged again.

        Tokens found in a prefix cache since the last chunk are charged too, at their own price,
        and those of a scoring pass after the chunk as prompt tokens.
        """
        self._charge_cached(request)
        end = request.progress.num_computed + tokens
        start = max(request.progress.charged_tokens, request.progress.num_computed)
        if end > start:
            request.progress.charged_tokens = end
            self.waiting.charge(request.tenant, prompt_tokens=end - start + scoring_tokens)
            of_prompt = min(end, len(request.prompt_token_ids)) - start
            self.meter.served(request.tenant, prompt_tokens=max(0, of_prompt))

    def charge_decoding(self, requests: Iterable[Request]) -> None:
        """Charge one output token for each request."""
        for tenant, tokens in Counter(request.tenant for request in requests).items():
            self.waiting.charge(tenant, output_tokens=tokens)

    def admitted(self, request: Request, waited_s: float) -> None:
        """Record an admission and charge the tokens found in a prefix cache.

        Args:
            request: the admitted request.
            waited_s: seconds that it waited.
        """
        self.finalize(request)
        self.meter.admitted(request.tenant, waited_s)
        self._charge_cached(request)

    def _charge_cached(self, request: Request) -> None:
        """Charge the prompt tokens found in a prefix cache that are not charged yet."""
        new = request.progress.cached_tokens - request.progress.charged_cached_tokens
        request.progress.charged_cached_tokens = request.progress.cached_tokens
        if new:
            self.waiting.charge(request.tenant, cached_tokens=new)
            self.meter.cached(request.tenant, new)

    def preempted(self, requests: Sequence[Request]) -> None:
        """Record the preemption of one request, or of a group (first member first)."""
        for request in requests:
            self.finalize(request)
        self.meter.preempted(requests[0].tenant)

    def finalize(self, request: Request) -> None:
        """Mark all computed tokens of a request as charged: recomputing them is free.

        Decoding is charged per step, without a record for each request. So this is called whenever
        the request gains KV (from a cache or the swap space) and before it loses KV.
        """
        request.progress.charged_tokens = max(
            request.progress.charged_tokens, request.progress.num_computed
        )
