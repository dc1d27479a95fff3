"""The fair queue compared with sorted lists, its cost, and the fairness theorem of its source."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, InvariantError
from quire.scheduler.request import Request
from quire.tenancy.fair_queue import IDLE_KEPT, FairQueue, TokenPrices
from support.requests import make_request

TENANTS = ("a", "b", "c")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
PRICES = TokenPrices(prompt=1.0, output=2.0, cached=0.25)
numbers = itertools.count()


def request(tenant="default", *, priority=0, prompt=1, output=1):
    number = next(numbers)
    place = {"priority": priority, "arrival": number, "tenant": tenant}
    return make_request(f"r{number}", [0] * prompt, SamplingParams(max_tokens=output), **place)


class PlainQueue:
    """The same queue as plain lists with linear searches."""

    def __init__(self):
        self.waiting, self.times, self.last_left = [], dict.fromkeys(TENANTS, 0.0), None

    @property
    def floor(self):
        empty = self.times[self.last_left] if self.last_left else 0.0
        return min((self.times[r.tenant] for r in self.waiting), default=empty)

    def push(self, new):
        if all(r.tenant != new.tenant for r in self.waiting):
            self.times[new.tenant] = max(self.times[new.tenant], self.floor)
        self.waiting.append(new)

    def remove(self, old):
        self.waiting.remove(old)
        if all(r.tenant != old.tenant for r in self.waiting):
            self.last_left = old.tenant

    def ordered(self):
        def key(r):
            best = min(o.order for o in self.waiting if o.tenant == r.tenant)
            return self.times[r.tenant], best, r.tenant, r.order

        return sorted(self.waiting, key=key)


class FairQueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.queue, self.plain = FairQueue(WEIGHTS, PRICES), PlainQueue()
        self.running = []

    @rule(tenant=st.sampled_from(TENANTS), priority=st.integers(0, 2))
    def push(self, tenant, priority):
        new = request(tenant, priority=priority)
        self.queue.push(new)
        self.plain.push(new)

    @precondition(lambda self: self.plain.waiting)
    @rule()
    def admit_first(self):
        first = next(self.queue.ordered())
        self.queue.pop(first)
        self.plain.remove(first)
        self.running.append(first)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        victim = data.draw(st.sampled_from(self.running))
        self.running.remove(victim)
        self.queue.push(victim)
        self.plain.push(victim)

    @precondition(lambda self: self.plain.waiting)
    @rule(data=st.data(), number=st.integers(0, 10**6))
    def cancel(self, data, number):
        cancelled = self.plain.waiting[number % len(self.plain.waiting)]
        self.queue.discard(cancelled)
        self.queue.discard(cancelled)
        self.plain.remove(cancelled)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 10**6))
    def finish(self, number):
        del self.running[number % len(self.running)]

    @rule()
    def forget(self):
        self.queue.forget_idle({r.tenant for r in self.running})

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.tuples(*[st.integers(0, 50)] * 3))
    def serve(self, tenant, tokens):
        if tenant not in self.present:  # absent tenants are not served
            return
        prompt, output, cached = tokens
        self.queue.charge(tenant, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached)
        self.plain.times[tenant] += (prompt + 2 * output + 0.25 * cached) / WEIGHTS[tenant]

    @property
    def present(self):
        return {r.tenant for r in [*self.running, *self.plain.waiting]}

    @invariant()
    def check_order(self):
        assert list(self.queue.ordered()) == self.plain.ordered()
        assert len(self.queue) == len(self.plain.waiting)
        times, floor = self.plain.times, self.plain.floor
        assert all(self.queue.virtual_time(t) == times[t] for t in self.present)
        assert all(max(floor, self.queue.virtual_time(t)) == max(floor, times[t]) for t in TENANTS)
        heads = list(self.queue.heads())
        assert self.queue.backlogged == [r.tenant for r in heads]
        assert [self.queue.rank(r) for r in heads] == sorted(map(self.queue.rank, heads))


TestFairQueueMachine = FairQueueMachine.TestCase


def test_number_of_tracked_idle_tenants_is_bounded():
    queue = FairQueue()
    queue.push(request("slow"))
    for number in range(IDLE_KEPT + 5):
        queue.push(one := request(f"t{number}"))
        queue.pop(one)
        queue.charge(f"t{number}", prompt_tokens=10 + number)

    queue.forget_idle(running={"t0"})

    assert queue.num_tracked == IDLE_KEPT + 3
    assert queue.virtual_time("t0") == 10
    assert [queue.virtual_time(f"t{number}") for number in (3, 5, 6)] == [0, 15, 16]


def test_request_is_pushed_once_and_popped_once():
    queue = FairQueue()
    queue.push(one := request())
    with pytest.raises(InvariantError, match="is waiting already"):
        queue.push(one)
    queue.pop(one)
    with pytest.raises(InvariantError, match="is not waiting"):
        queue.pop(one)
    assert one not in queue
    with pytest.raises(ConfigError, match="expected token prices >= 0"):
        TokenPrices(cached=-1.0)


class CountedOrder(tuple):
    """A sort key that counts its comparisons."""

    num_comparisons = 0

    def __lt__(self, other):
        CountedOrder.num_comparisons += 1
        return super().__lt__(other)


class CountedRequest:
    """A request with a counted sort key."""

    def __init__(self, tenant, priority):
        self.request_id, self.tenant = f"r{next(numbers)}", tenant
        self.order = CountedOrder((priority, 0.0, next(numbers)))


def test_cost_of_push_and_pop_is_logarithmic():
    """An entry is compared with a path of the heap, not with all entries."""
    queue, many = FairQueue(), [CountedRequest(t, -n) for t in "ab" for n in range(4_000)]
    CountedOrder.num_comparisons = 0
    for one in many:
        queue.push(one)
    for one in many[1_000:3_000]:
        queue.discard(one)
    for _ in range(2_000):
        first = next(queue.ordered())
        queue.pop(first)
        queue.charge(first.tenant, prompt_tokens=10)

    assert len(queue) == 4_000
    assert len(many) < CountedOrder.num_comparisons < 2 * len(many) * 13  # log2 of 8,000


# ---- the theorem, on a serving loop without a model ----------------------------------------------


class Server:
    """Admits requests while their full length fits; each step decodes one token per request."""

    def __init__(self, queue, memory_tokens, weights, refill=lambda: None):
        self.refill = refill
        self.queue, self.memory_tokens, self.weights = queue, memory_tokens, weights
        self.running: dict[Request, int] = {}
        self.served = {}  # tenant -> price of its tokens over its weight

    def _serve(self, tenant, **tokens):
        self.queue.charge(tenant, **tokens)
        price = tokens.get("prompt_tokens", 0) + 2 * tokens.get("output_tokens", 0)
        self.served[tenant] = self.served.get(tenant, 0) + price / self.weights[tenant]

    def step(self):
        free = self.memory_tokens - sum(map(size, self.running))
        self.refill()
        while len(self.queue) and size(first := next(self.queue.ordered())) <= free:
            self.queue.pop(first)
            self.refill()
            self.running[first] = first.params.max_tokens
            free -= size(first)
            self._serve(first.tenant, prompt_tokens=len(first.prompt_token_ids))
        for one in list(self.running):
            self._serve(one.tenant, output_tokens=1)
            self.running[one] -= 1
            if not self.running[one]:
                del self.running[one]


def size(one):
    return len(one.prompt_token_ids) + one.params.max_tokens


lengths = st.tuples(st.integers(4, 40), st.integers(4, 40))


@given(
    st.lists(lengths, min_size=1, max_size=8),
    st.lists(lengths, min_size=1, max_size=8),
    st.sampled_from([(1.0, 1.0), (1.0, 3.0), (0.5, 0.25)]),
    st.integers(0, 20),
)
def test_service_of_backlogged_tenants_differs_by_a_constant(a_sizes, b_sizes, weights, late_steps):
    """Sheng et al. 2024, Theorem 4.4: |W_a(t1, t2) - W_b(t1, t2)| <= 2 U over any interval in which
    both have requests waiting; with weights the service is divided by them, and U by the least."""
    by_name = dict(zip("ab", weights, strict=True))
    queue, memory_tokens = FairQueue(by_name), 120
    longest_prompt = max(prompt for prompt, _ in a_sizes + b_sizes)
    bound = 2 * max(longest_prompt, 2 * memory_tokens) / min(weights)
    sizes = {"a": itertools.cycle(a_sizes), "b": itertools.cycle(b_sizes)}
    present = ["a"]

    def refill():
        waiting = [r.tenant for r in queue.ordered()]
        for name in present:  # two, so that one still waits when the first is admitted
            for _ in range(2 - waiting.count(name)):
                prompt, output = next(sizes[name])
                queue.push(request(name, prompt=prompt, output=output))

    server, gaps = Server(queue, memory_tokens, by_name, refill), []
    for step in range(late_steps + 40):
        if step == late_steps:  # b arrives late: its idle time is not credited
            present.append("b")
        if step >= late_steps:
            gaps.append(server.served.get("a", 0) - server.served.get("b", 0))
        server.step()

    assert max(gaps) - min(gaps) <= bound


def test_flooding_tenant_gets_no_more_than_half():
    """Jain's index (a + b)^2 / (2 (a^2 + b^2)) of served tokens while both are backlogged."""
    weights = {"flood": 1.0, "small": 1.0}
    queue = FairQueue(weights)
    server = Server(queue, 1_000, weights)
    for number in range(20 * 40):
        queue.push(request("flood", prompt=50 + number % 7, output=30))
        if number % 20 == 0:
            queue.push(request("small", prompt=40 + number % 9, output=35))
    while "small" in queue.backlogged:
        server.step()

    flood, small = server.served["flood"], server.served["small"]
    assert (flood + small) ** 2 / (2 * (flood**2 + small**2)) >= 0.98
