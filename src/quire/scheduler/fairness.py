"""Tenants beside each other: whose turn it is, who owes memory, what is charged to whom.

While one tenant is alone and no tenants are configured, nothing here costs or changes anything.
Of tenants that are not configured and have gone, no more is kept than `IDLE_KEPT` names.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from quire.scheduler.prefix_sharing import PrefixSharing
from quire.scheduler.request import Request
from quire.tenancy.accounts import Right, TenantAccounts, checked_tenant
from quire.tenancy.fair_queue import FairQueue
from quire.tenancy.meter import TenantMeter, TenantStats
from quire.tenancy.page_owners import bytes_by_tenant
from quire.tenancy.tenants import PUBLIC

FORGET_FROM = 64  # tenants remembered at least: to look for idle ones costs a pass over all


class Fairness:
    """Keeps the accounts of tenants for a scheduler.

    Args:
        accounts: the tenants, and the bytes that each holds.
        sharing: the prefix cache, whose public prefixes are on no tenant's account.
        waiting: the queue, fair by served tokens.

    Attributes:
        waiting: see above.
        meter: what each tenant has had.
    """

    def __init__(
        self, accounts: TenantAccounts, sharing: PrefixSharing, waiting: FairQueue[Request]
    ) -> None:
        self.accounts, self._sharing, self.waiting = accounts, sharing, waiting
        self.meter = TenantMeter()
        self._here: set[str] = set()
        self._forget_from = FORGET_FROM

    @property
    def has_several(self) -> bool:
        """Whether there is anybody to be fair to: tenants are configured, or several are here."""
        return len(self._here) > 1 or bool(self.accounts.specs)

    def admit(self, request: Request, peak_bytes: int) -> None:
        """Note a new request.

        Raises:
            RequestError: an unknown tenant, or a name that cannot be one.
            NeverFits: its tenant may never hold as much.
        """
        checked_tenant(self.accounts, request.tenant)
        is_mostly_prompt = len(request.prompt_token_ids) > request.params.max_tokens
        param = "prompt" if is_mostly_prompt else "max_tokens"
        self.accounts.refuse_if_never(request.tenant, peak_bytes, param=param)
        self._here.add(request.tenant)
        self.meter.submitted(request.tenant)

    def report(self, running: Sequence[Request]) -> tuple[TenantStats, ...]:
        """What each tenant has had; bytes only where there have been several.

        Args:
            running: all that have a row.
        """
        if self.meter.num_tenants < 2 and not self.accounts.specs:
            return self.meter.report()
        self._count(running)
        return self.meter.report(self.accounts)

    # ---- bytes ---------------------------------------------------------------------------------

    def recount(self, running: Sequence[Request]) -> None:
        """Look who is here, and count what each tenant holds now."""
        self._here = {request.tenant for request in running}.union(self.waiting.tenants)
        self._forget_idle()
        if self.has_several:
            self._count(running)
        else:
            self.accounts.note({})

    def suppose(self, staying: Sequence[Request], leaving: Sequence[Request]) -> None:
        """Count what each tenant would hold if some left and waited; `recount` takes it back.

        Args:
            staying: keep their rows.
            leaving: have rows still.
        """
        self._count(staying, leaving)

    def _forget_idle(self) -> None:
        self.meter.fold(self._here)
        if self.waiting.num_tracked > self._forget_from:
            self.waiting.forget_idle(self._here)
            self._forget_from = max(FORGET_FROM, 2 * self.waiting.num_tracked)

    def _count(self, running: Sequence[Request], leaving: Sequence[Request] = ()) -> None:
        rows: dict[str, list[int]] = defaultdict(list)
        for request in running:
            rows[request.tenant].append(request.memory.row)
        prefix = self._sharing.prefix
        public = [] if prefix is None else prefix.public_references()
        held = bytes_by_tenant(self._sharing.memory, rows, {PUBLIC: public} if public else {})
        self.accounts.note(held, {*self.waiting.tenants, *(request.tenant for request in leaving)})

    def owes(self, request: Request) -> bool:
        """Whether its tenant holds more than its share, so that it gives way first."""
        return self.has_several and self.accounts.over_share_bytes(request.tenant) > 0

    def right(self, request: Request, size_bytes: int) -> Right:
        """On what ground a waiting request may take bytes."""
        if not self.has_several:
            return Right.SHARE
        return self.accounts.may_take(request.tenant, size_bytes).right

    def may_hold(self, request: Request, peak_bytes: int) -> bool:
        """Whether so many bytes are within the limit of a request's tenant.

        Raises:
            RequestError: an unknown tenant, or a name that cannot be one.
        """
        limit_bytes = self.accounts.spec(checked_tenant(self.accounts, request.tenant)).limit_bytes
        return limit_bytes is None or peak_bytes <= limit_bytes

    def has_limit(self, request: Request) -> bool:
        """Whether its tenant may hold so much and no more."""
        return self.has_several and self.accounts.spec(request.tenant).limit_bytes is not None

    def debtors(self, request: Request, missing_bytes: int) -> list[str]:
        """Tenants that must give back so that a request gets what is its tenant's own."""
        if not self.has_several:
            return []
        return [
            tenant for tenant, _ in self.accounts.reclaimable_for(request.tenant, missing_bytes)
        ]

    def rows_debtors(self, request: Request, running: Sequence[Request], most: int) -> list[str]:
        """The tenant that holds most rows over its part, where this request's holds less than its.

        Args:
            request: waits for a row.
            running: all that have one.
            most: rows there are.
        """
        rows = Counter(other.tenant for other in running)
        weights = {tenant: self.accounts.spec(tenant).weight for tenant in {*rows, request.tenant}}
        a_weight = most / sum(weights.values())
        over = {tenant: count - a_weight * weights[tenant] for tenant, count in rows.items()}
        worst = max(over, key=lambda tenant: (over[tenant], tenant), default=None)
        enough = rows[request.tenant] + 1 > a_weight * weights[request.tenant]
        return [] if worst is None or enough or over[worst] <= 0 else [worst]

    # ---- tokens --------------------------------------------------------------------------------

    def prefill_order(self, request: Request) -> tuple[float, int, float, int]:
        """Whose prompt is read first: of the tenant served least."""
        return self.waiting.rank(request) if self.has_several else (0.0, *request.order)

    def step_part(self, request: Request, others: Iterable[Request], budget: int) -> int:
        """Tokens of a step's budget that one tenant may read while others have prompts too."""
        if not self.has_several:
            return budget
        tenants = {other.tenant for other in others} | set(self.waiting.backlogged)
        weights = {
            tenant: self.accounts.spec(tenant).weight for tenant in {*tenants, request.tenant}
        }
        return max(1, int(budget * weights[request.tenant] / sum(weights.values())))

    def charge_prefill(self, request: Request, tokens: int) -> None:
        """Charge a chunk that is planned; what was read before a preemption was charged then.

        Tokens that came from a prefix cache since the last chunk are charged with it.
        """
        self._charge_cached(request)
        end = request.progress.num_computed + tokens
        new = end - max(request.progress.charged_tokens, request.progress.num_computed)
        if new > 0:
            request.progress.charged_tokens = end
            self.waiting.charge(request.tenant, prompt_tokens=new)
            self.meter.served(request.tenant, prompt_tokens=new)

    def charge_decoding(self, requests: Iterable[Request]) -> None:
        """Charge a token for each of these."""
        for tenant, tokens in Counter(request.tenant for request in requests).items():
            self.waiting.charge(tenant, output_tokens=tokens)
            self.meter.served(tenant, output_tokens=tokens)

    def entered(self, request: Request, waited_s: float) -> None:
        """Note an entry, with the tokens that a prefix cache gave it."""
        self.finalize(request)
        self.meter.entered(request.tenant, waited_s)
        self._charge_cached(request)

    def _charge_cached(self, request: Request) -> None:
        """Charge tokens of a prompt that came from a prefix cache, once."""
        new = request.progress.cached_tokens - request.progress.charged_cached_tokens
        request.progress.charged_cached_tokens = request.progress.cached_tokens
        if new:
            self.waiting.charge(request.tenant, cached_tokens=new)
            self.meter.cached(request.tenant, new)

    def preempted(self, requests: Sequence[Request]) -> None:
        """Note that one request, or a group with its first member first, is thrown out."""
        for request in requests:
            self.finalize(request)
        self.meter.preempted(requests[0].tenant)

    def finalize(self, request: Request) -> None:
        """All that a request holds is paid for: read again, it costs its tenant nothing.

        Decoding charges by the step and keeps no account of each request, so this is called
        whenever KV comes (from a cache, from the host) and before it goes.
        """
        request.progress.charged_tokens = max(
            request.progress.charged_tokens, request.progress.num_computed
        )
