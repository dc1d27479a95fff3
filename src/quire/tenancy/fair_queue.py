"""Queue of waiting requests: by served tokens between tenants, by priority within a tenant.

    tenant   virtual time = served tokens / weight       waiting, by (priority, deadline, arrival)
    a        1,204                                       r7 r9 r12   <- r7 is next
    b        1,310                                       r8

Source: Virtual Token Counter, "Fairness in Serving Large Language Models" (Sheng et al. 2024,
Algorithm 2). A tenant's counter (virtual time) grows with every token it is served; the tenant with
the lowest counter is next. When an idle tenant submits again, its counter is lifted to the lowest
counter of the waiting tenants: idle time is not credited.

Fairness (their Theorem 4.4): while two tenants both have waiting requests, their served tokens
divided by weight differ by at most 2 U / least weight. U = max(prompt price * longest prompt,
output price * tokens the memory holds). The theorem assumes that no admitted request is preempted.

Differs from the paper: tenants have weights. The waiting requests of a tenant are in (priority,
deadline, arrival) order, not first come first served. Prompt tokens are charged per chunk, when
they are computed. Tokens found in the prefix cache have their own price, default: 0.
"""

import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from quire.errors import ConfigError, InvariantError

OUTPUT_TOKEN_PRICE = 2.0  # in prompt tokens, as in the paper's experiments
IDLE_KEPT = 1024  # tracked tenants without requests; bounded, since clients may send any names

Order = tuple[int, float, int]  # priority, deadline in seconds, arrival


@runtime_checkable  # for the type checks in tests
class Queued(Protocol):
    """A request in the queue."""

    @property
    def request_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def order(self) -> Order:
        """Sort key among the requests of its tenant, lowest first."""
        ...


R = TypeVar("R", bound=Queued)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Prices of served tokens, in prompt tokens."""

    prompt: float = 1.0
    output: float = OUTPUT_TOKEN_PRICE
    cached: float = 0.0  # of a prompt token whose KV was found in the prefix cache

    def __post_init__(self) -> None:
        if min(self.prompt, self.output, self.cached) < 0:
            raise ConfigError(f"expected token prices >= 0, got {self}")


class _TenantQueue(Generic[R]):
    """Heap of one tenant's waiting requests; removing a request leaves an empty entry."""

    def __init__(self) -> None:
        self.entries: list[_Entry[R]] = []
        self.num_waiting = 0

    def first(self) -> "_Entry[R]":
        """Return the first entry with a request; the queue must have one."""
        while self.entries[0].request is None:
            heapq.heappop(self.entries)
        return self.entries[0]

    def ordered(self) -> Iterator[R]:
        """Yield all requests, best first, by a lazy traversal of the heap."""
        seen = [(self.entries[0], 0)] if self.entries else []
        while seen:
            entry, index = heapq.heappop(seen)
            if entry.request is not None:
                yield entry.request
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self.entries):
                    heapq.heappush(seen, (self.entries[child], child))

    def forget_empty(self) -> None:
        """Rebuild the heap once most entries are empty: amortized constant time per removal."""
        if len(self.entries) > 2 * self.num_waiting + 16:
            self.entries = [entry for entry in self.entries if entry.request is not None]
            heapq.heapify(self.entries)


@dataclass(slots=True, eq=False)
class _Entry(Generic[R]):
    """An entry of a tenant's heap; `request` is None once the request was removed."""

    order: Order
    number: int
    request: R | None

    def __lt__(self, other: "_Entry[R]") -> bool:
        return (self.order, self.number) < (other.order, other.number)


class FairQueue(Generic[R]):
    """Queue of the waiting requests of all tenants.

    With n requests and t tenants: push is O(log n + t), pop is amortized O(1), `heads` is O(t).
    """

    def __init__(
        self, weights: Mapping[str, float] | None = None, prices: TokenPrices | None = None
    ) -> None:
        self._weights = dict(weights or {})
        self._prices = prices or TokenPrices()
        self._virtual_time: dict[str, float] = {}
        self._queues: dict[str, _TenantQueue[R]] = {}  # only tenants with waiting requests
        self._entries: dict[R, _Entry[R]] = {}
        self._numbers = itertools.count()
        self._last_emptied: str | None = None

    # ---- push and pop --------------------------------------------------------------------------

    def push(self, request: R) -> None:
        """Queue a new or preempted request; a preempted one keeps its order of arrival.

        Lifts the virtual time of a tenant that had no waiting request.
        """
        if request in self._entries:
            raise InvariantError(f"request {request.request_id} is waiting already")
        if request.tenant not in self._queues:
            self._virtual_time[request.tenant] = max(self.virtual_time(request.tenant), self._floor)
            self._queues[request.tenant] = _TenantQueue()
        entry = _Entry(request.order, next(self._numbers), request)
        queue = self._queues[request.tenant]
        heapq.heappush(queue.entries, entry)
        queue.num_waiting += 1
        self._entries[request] = entry

    @property
    def _floor(self) -> float:
        """Virtual time to which tenants that become active are lifted. It never decreases."""
        if self._queues:
            return min(map(self.virtual_time, self._queues))
        return 0.0 if self._last_emptied is None else self.virtual_time(self._last_emptied)

    def pop(self, request: R) -> None:
        entry = self._entries.pop(request, None)
        if entry is None:
            raise InvariantError(f"request {request.request_id} is not waiting")
        entry.request = None
        queue = self._queues[request.tenant]
        queue.num_waiting -= 1
        if queue.num_waiting:
            queue.forget_empty()
        else:
            del self._queues[request.tenant]
            self._last_emptied = request.tenant

    def discard(self, request: R) -> None:
        if request in self._entries:
            self.pop(request)

    # ---- order ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: R) -> bool:
        return request in self._entries

    def num_waiting(self, tenant: str) -> int:
        return self._queues[tenant].num_waiting if tenant in self._queues else 0

    @property
    def tenants(self) -> Collection[str]:
        return self._queues.keys()

    @property
    def backlogged(self) -> list[str]:
        """Tenants with waiting requests, the one served least first."""
        return [first.tenant for first in self.heads()]

    def heads(self) -> Iterator[R]:
        """Yield the first request of every tenant, best first.

        If the best one cannot be admitted, the next candidate is another tenant's first request.
        Later requests of the same tenant must not overtake its first one.
        """
        firsts = [queue.first().request for queue in self._queues.values()]
        ranked = [(self.rank(r), r.tenant, r) for r in firsts if r is not None]
        heapq.heapify(ranked)
        while ranked:
            yield heapq.heappop(ranked)[2]

    def ordered(self) -> Iterator[R]:
        """Yield all requests, best first: tenants in the order of `heads`, one after the other.

        The queue must not change during the iteration.
        """
        for first in self.heads():
            yield from self.of_tenant(first.tenant)

    def of_tenant(self, tenant: str) -> Iterator[R]:
        """Requests of a tenant, best first; the queue must not change during the iteration."""
        return self._queues[tenant].ordered()

    def rank(self, request: R) -> tuple[float, int, float, int]:
        """Sort key of waiting and running requests: virtual time, then the request's order."""
        return (self.virtual_time(request.tenant), *request.order)

    # ---- served tokens -------------------------------------------------------------------------

    def charge(
        self,
        tenant: str,
        *,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        prices = self._prices
        cost = prices.prompt * prompt_tokens + prices.output * output_tokens
        cost += prices.cached * cached_tokens
        served = cost / self._weights.get(tenant, 1.0)
        self._virtual_time[tenant] = self.virtual_time(tenant) + served

    def virtual_time(self, tenant: str) -> float:
        """Price of a tenant's served tokens divided by its weight, plus lifts; 0 if untracked."""
        return self._virtual_time.get(tenant, 0.0)

    @property
    def num_tracked(self) -> int:
        """Tenants with a stored virtual time."""
        return len(self._virtual_time)

    def forget_idle(self, running: Collection[str]) -> None:
        """Delete the virtual times of idle tenants that do not affect the order.

        A virtual time at or below the floor has no effect: the tenant is lifted to the floor when
        it submits again. Of the idle tenants above the floor, the `IDLE_KEPT` served most are kept.
        """
        floor, kept = self._floor, {*running, *self._queues, self._last_emptied}
        idle = [tenant for tenant in self._virtual_time if tenant not in kept]
        above = [tenant for tenant in idle if self.virtual_time(tenant) > floor]
        max_served = heapq.nlargest(IDLE_KEPT, above, key=self.virtual_time)
        kept.update(max_served)
        for tenant in idle:
            if tenant not in kept:
                del self._virtual_time[tenant]
