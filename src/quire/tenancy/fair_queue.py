"""Who waits, and who is next: by served tokens between tenants, by priority within one.

    tenant   virtual time = served tokens / weight       waiting, by (priority, deadline, arrival)
    a        1,204                                       r7 r9 r12   <- r7 is next
    b        1,310                                       r8

Source: Virtual Token Counter, "Fairness in Serving Large Language Models" (Sheng et al. 2024,
Algorithm 2). A tenant's counter grows with every token it is served; whoever has the least goes
first. One that comes back is lifted to the least among those that wait: idle time is not saved up.

Fairness (their Theorem 4.4): while two tenants both have requests waiting, their served tokens by
weight differ by 2 U / least weight at most, U = max(prompt_weight * longest prompt, output_weight *
tokens the memory holds), where nobody who is let in is thrown out again.

Differs from the paper: weights; a tenant's waiting requests are in (priority, deadline, arrival)
order, not first come first served; prompt tokens are charged chunk by chunk, when they are read;
tokens found in the prefix cache have a price of their own, 0 unless told otherwise.
"""

import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

from quire.errors import ConfigError, InvariantError

OUTPUT_TOKEN_PRICE = 2.0  # of a prompt token's, as in the paper's experiments
IDLE_KEPT = 1024  # tenants without requests that are remembered, where clients invent names

Order = tuple[int, float, int]  # priority, deadline in seconds, arrival


@runtime_checkable  # for the type checks in tests
class Queued(Protocol):
    """What waits.

    Attributes:
        request_id: names it in errors.
        tenant: on whose account it runs.
    """

    @property
    def request_id(self) -> str: ...  # noqa: D102
    @property
    def tenant(self) -> str: ...  # noqa: D102
    @property
    def order(self) -> Order:
        """Its place among the requests of its tenant, the least first."""
        ...


R = TypeVar("R", bound=Queued)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """What a served token costs, in prompt tokens.

    Attributes:
        prompt: one that was read.
        output: one that was generated.
        cached: one of a prompt whose KV was found in the prefix cache.
    """

    prompt: float = 1.0
    output: float = OUTPUT_TOKEN_PRICE
    cached: float = 0.0

    def __post_init__(self) -> None:
        if min(self.prompt, self.output, self.cached) < 0:
            raise ConfigError(f"expected prices of tokens of 0 or more, got {self}")


class _Line(Generic[R]):
    """One tenant's waiting requests: a heap whose entries are emptied when a request leaves."""

    def __init__(self) -> None:
        self.entries: list[_Entry[R]] = []
        self.num_waiting = 0

    def first(self) -> "_Entry[R]":
        """The first entry with a request; the line has one."""
        while self.entries[0].request is None:
            heapq.heappop(self.entries)
        return self.entries[0]

    def ordered(self) -> Iterator[R]:
        """All, best first: a walk down the heap that looks only at what it passes."""
        seen = [(self.entries[0], 0)] if self.entries else []
        while seen:
            entry, place = heapq.heappop(seen)
            if entry.request is not None:
                yield entry.request
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self.entries):
                    heapq.heappush(seen, (self.entries[child], child))

    def forget_empty(self) -> None:
        """Rebuild once most entries are empty: constant time for each that left."""
        if len(self.entries) > 2 * self.num_waiting + 16:
            self.entries = [entry for entry in self.entries if entry.request is not None]
            heapq.heapify(self.entries)


@dataclass(slots=True, eq=False)
class _Entry(Generic[R]):
    """A place in a line."""

    order: Order
    number: int
    request: R | None

    def __lt__(self, other: "_Entry[R]") -> bool:
        return (self.order, self.number) < (other.order, other.number)


class FairQueue(Generic[R]):
    """Waiting requests of all tenants.

    With n requests and t tenants waiting: O(log n + t) for what goes in, O(1) amortised for what
    leaves, O(t) to ask who is next.

    Args:
        weights: of tenants; 1 for who is not named.
        prices: of tokens.
    """

    def __init__(
        self, weights: Mapping[str, float] | None = None, prices: TokenPrices | None = None
    ) -> None:
        self._weights = dict(weights or {})
        self._prices = prices or TokenPrices()
        self._virtual_time: dict[str, float] = {}
        self._lines: dict[str, _Line[R]] = {}  # of tenants with a request that waits
        self._entries: dict[R, _Entry[R]] = {}
        self._numbers = itertools.count()
        self._last_left: str | None = None

    # ---- in and out ----------------------------------------------------------------------------

    def push(self, request: R) -> None:
        """Let a request wait: a new one, or one thrown out, which gets its old place again.

        Lifts the virtual time of a tenant that had none waiting.

        Raises:
            InvariantError: it waits already.
        """
        if request in self._entries:
            raise InvariantError(f"request {request.request_id} waits already")
        if request.tenant not in self._lines:
            self._lift(request.tenant)
            self._lines[request.tenant] = _Line()
        entry = _Entry(request.order, next(self._numbers), request)
        line = self._lines[request.tenant]
        heapq.heappush(line.entries, entry)
        line.num_waiting += 1
        self._entries[request] = entry

    def _lift(self, tenant: str) -> None:
        self._virtual_time[tenant] = max(self.virtual_time(tenant), self._floor)

    @property
    def _floor(self) -> float:
        """Virtual time that one who comes is lifted to. It never falls."""
        if self._lines:
            return min(map(self.virtual_time, self._lines))
        return 0.0 if self._last_left is None else self.virtual_time(self._last_left)

    def pop(self, request: R) -> None:
        """Take out a request that waits.

        Raises:
            InvariantError: it does not wait.
        """
        entry = self._entries.pop(request, None)
        if entry is None:
            raise InvariantError(f"request {request.request_id} does not wait")
        entry.request = None
        line = self._lines[request.tenant]
        line.num_waiting -= 1
        if line.num_waiting:
            line.forget_empty()
        else:
            del self._lines[request.tenant]
            self._last_left = request.tenant

    def discard(self, request: R) -> None:
        """Take out a request if it waits."""
        if request in self._entries:
            self.pop(request)

    # ---- who is next ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: R) -> bool:
        return request in self._entries

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with requests that wait, in no order."""
        return self._lines.keys()

    @property
    def backlogged(self) -> list[str]:
        """Tenants with requests that wait, the one served least first."""
        return [first.tenant for first in self.heads()]

    def heads(self) -> Iterator[R]:
        """The first request of every tenant, best first.

        Who cannot let the best one in asks for the next tenant's here: the best one's successors
        would pass a request of their own tenant.
        """
        firsts = [line.first().request for line in self._lines.values()]
        ranked = [(self.rank(r), r.tenant, r) for r in firsts if r is not None]
        heapq.heapify(ranked)
        while ranked:
            yield heapq.heappop(ranked)[2]

    def ordered(self) -> Iterator[R]:
        """All requests, best first: tenant by tenant as `heads`, each in its own order.

        The queue must not change during the walk.
        """
        for first in self.heads():
            yield from self.of_tenant(first.tenant)

    def of_tenant(self, tenant: str) -> Iterator[R]:
        """The requests of a tenant that has some, best first; do not change the queue meanwhile."""
        return self._lines[tenant].ordered()

    def rank(self, request: R) -> tuple[float, int, float, int]:
        """What requests compare by, waiting or running: virtual time, then their own order."""
        return (self.virtual_time(request.tenant), *request.order)

    # ---- what was served -----------------------------------------------------------------------

    def charge(
        self,
        tenant: str,
        *,
        prompt_tokens: int = 0,
        output_tokens: int = 0,
        cached_tokens: int = 0,
    ) -> None:
        """Note tokens that a tenant was served."""
        prices = self._prices
        cost = prices.prompt * prompt_tokens + prices.output * output_tokens
        cost += prices.cached * cached_tokens
        served = cost / self._weights.get(tenant, 1.0)
        self._virtual_time[tenant] = self.virtual_time(tenant) + served

    def virtual_time(self, tenant: str) -> float:
        """Price of all tokens served over weight, with lifts; 0 for one unknown or forgotten."""
        return self._virtual_time.get(tenant, 0.0)

    @property
    def num_tracked(self) -> int:
        """Tenants whose virtual time is kept."""
        return len(self._virtual_time)

    def forget_idle(self, running: Collection[str]) -> None:
        """Forget the virtual times of tenants without requests, where nothing hangs on them.

        That is so at or below the floor, to which they are lifted when they come back. Of those
        above it the `IDLE_KEPT` that were served most are remembered.

        Args:
            running: tenants with requests that have left the queue and have not ended.
        """
        floor, kept = self._floor, {*running, *self._lines, self._last_left}
        idle = [tenant for tenant in self._virtual_time if tenant not in kept]
        above = [tenant for tenant in idle if self.virtual_time(tenant) > floor]
        most_served = heapq.nlargest(IDLE_KEPT, above, key=self.virtual_time)
        kept.update(most_served)
        for tenant in idle:
            if tenant not in kept:
                del self._virtual_time[tenant]
