"""Tenants: the fair queue compared with sorted lists, rights to memory, and bytes of pages."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, InvariantError, NeverFits, RequestError, UnknownName
from quire.kv.sharing import fork, reference_pages, start_from_references
from quire.layout.pages import LaneGroup
from quire.scheduler.request import Request
from quire.tenancy.accounts import Right, TenantAccounts, bytes_by_tenant, checked_tenant
from quire.tenancy.fair_queue import IDLE_KEPT, FairQueue, TokenPrices
from quire.tenancy.tenants import PUBLIC, TenantSpec, parse_tenants
from support.requests import make_request
from support.small_memory import grow, one_group, plain_class, started, with_groups

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


def test_requests_are_popped_once_and_idle_tenants_bounded():
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
    num_comparisons = 0

    def __lt__(self, other):
        CountedOrder.num_comparisons += 1
        return super().__lt__(other)


class CountedRequest:
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


# ---- accounts ------------------------------------------------------------------------------------


POOL = 1000


def accounts_of(text, **held):
    accounts = TenantAccounts(parse_tenants(text), POOL)
    accounts.note(held)
    return accounts


def test_invalid_tenants_and_accounts_are_refused():
    with pytest.raises(ConfigError, match=r"1,100 B \(a 600 B, b 500 B\).*1,000 B; lower"):
        accounts_of("a:guaranteed=600B;b:guaranteed=500B")
    with pytest.raises(ConfigError, match="is repeated"):
        TenantAccounts([TenantSpec(name="a"), TenantSpec(name="a")], POOL)
    accounts = accounts_of("a")
    accounts.add("a", 5)
    with pytest.raises(InvariantError, match="frees 1 B more"):
        accounts.add("a", -6)
    assert accounts.held_bytes("a") == 5

    with pytest.raises(ConfigError, match="burst >= 0"):
        TenantSpec(name="a", burst_bytes=-5)


def test_any_valid_name_is_accepted_without_configured_tenants_and_limits_of_others():
    accounts = TenantAccounts((), POOL)
    empty_bytes = len(pickle.dumps(accounts))
    for number in range(5_000):
        assert checked_tenant(accounts, f"user-{number}") == f"user-{number}"
    for name in ("", "a\x00b", PUBLIC, "ü", "a" * 65):
        with pytest.raises(RequestError):
            checked_tenant(accounts, name)
    with pytest.raises(RequestError, match=r"unknown tenant 'c': expected one of a, b"):
        checked_tenant(accounts_of("b;a"), "c")
    assert not accounts.specs
    assert accounts.tenants == []
    assert len(pickle.dumps(accounts)) == empty_bytes
    accounts = accounts_of("a:guaranteed=100B,burst=50B;b")
    accounts.refuse_if_never("a", 150)
    accounts.refuse_if_never("b", POOL)
    with pytest.raises(NeverFits, match=r"151 B of KV, tenant 'a' may hold 150 B"):
        accounts.refuse_if_never("a", 151)


def test_rights_decrease_with_held_bytes_and_the_furthest_is_reclaimed_first():
    accounts = accounts_of("a:guaranteed=200B,burst=500B;b:guaranteed=200B", a=100, b=100)

    rights = [accounts.may_take("a", n).right for n in (100, 101, 400, 401, 600, 601)]
    assert rights == [  # half of the shared 600: a's share is 500, its limit 700
        *(Right.GUARANTEED, Right.SHARE, Right.SHARE),
        *(Right.ABOVE_SHARE, Right.ABOVE_SHARE, Right.REFUSED),
    ]
    assert not accounts.may_take("a", 601)
    assert "701 B, over its limit of 700 B" in accounts.may_take("a", 601).reason

    accounts = accounts_of("a:guaranteed=300B;b:guaranteed=100B;c;d:weight=4", b=350, c=300, d=350)

    assert [accounts.over_quota_bytes(t) for t in "abcd"] == [0, 250, 300, 350]
    assert accounts.reclaimable_for("a", 300) == [("c", 300)]
    assert accounts.reclaimable_for("a", 200) == [("c", 200)]
    assert accounts.reclaimable_for("b", 10) == []  # it is over its quota itself

    accounts.note({"b": 350, "c": 100, "d": 550})
    assert accounts.reclaimable_for("a", 300) == [("b", 250), ("d", 50)]


def test_shares_of_absent_and_flooding_tenants_and_of_public_prefixes():
    accounts = accounts_of("a;b:weight=3", a=10)
    assert accounts.share_bytes("a") == POOL
    accounts.note({"a": 10}, waiting=["b"])
    assert (accounts.share_bytes("a"), accounts.share_bytes("b")) == (250, 750)
    accounts = accounts_of("a;b", b=501)
    assert accounts.over_share_bytes("b") == 0  # alone
    assert accounts.reclaimable_for("a", 500) == [("b", 1)]

    accounts = accounts_of("a;b", a=100, b=100, public=200)
    assert accounts.share_bytes("a") == 400
    assert accounts.tenants == ["a", "b"]
    assert accounts.reclaimable_for("a", 50) == []

    accounts = TenantAccounts((), POOL)
    accounts.note({"flood": 1000}, waiting=["flood", "small"])
    assert accounts.may_take("small", 500).right is Right.SHARE
    assert accounts.reclaimable_for("small", 120) == [("flood", 120)]
    assert accounts.reclaimable_for("small", 501) == []  # more than its own share
    assert accounts.over_share_bytes("flood") == 500


weights = st.sampled_from([0.5, 1.0, 2.0, 7.0])


@st.composite
def holdings(draw):
    """Accounts, held bytes, and the names of waiting tenants, for a valid pool."""
    names = "abcd"[: draw(st.integers(1, 4))]
    left, specs = POOL, []
    for name in names:
        guaranteed, weight = draw(st.integers(0, left)), draw(weights)
        left -= guaranteed
        burst = draw(st.none() | st.integers(0, POOL))
        sizes = {"guaranteed_bytes": guaranteed, "burst_bytes": burst}
        specs.append(TenantSpec(name=name, weight=weight, **sizes))
    left, held = POOL, {}
    for name in draw(st.permutations([*names, PUBLIC])):
        held[name] = draw(st.integers(0, left))
        left -= held[name]
    return specs, held, draw(st.sets(st.sampled_from(names)))


def accounts_with(specs, held, waiting):
    accounts = TenantAccounts(specs, POOL)
    accounts.note(held, waiting)
    return accounts


@given(holdings(), st.integers(1, POOL))
@example(([TenantSpec(name=name, weight=0.5) for name in "ab"], {"b": 501}, set()), 500)
def test_guarantee_and_share_can_always_be_reclaimed(account, requested):
    """Free bytes, idle public prefixes and reclaimable bytes cover guarantee and share."""
    accounts, tenant = accounts_with(*account), "a"
    assume(accounts.may_take(tenant, requested).right >= Right.SHARE)
    free = POOL - sum(accounts.held_bytes(t) for t in [*accounts.tenants, PUBLIC])
    found = free + accounts.held_bytes(PUBLIC)

    reclaimed = accounts.reclaimable_for(tenant, requested)

    total = sum(size for _, size in reclaimed)
    assert found + total >= requested or total == requested
    assert len({t for t, _ in reclaimed}) == len(reclaimed)
    _, held, waiting = account
    accounts.note(held, waiting | {tenant})  # shares while it is active
    for other, size in reclaimed:
        assert other != tenant
        remaining = accounts.held_bytes(other) - size
        assert size > 0
        assert remaining >= accounts.spec(other).guaranteed_bytes  # guarantees are not reclaimed
        if accounts.may_take(tenant, requested).right is Right.SHARE:
            assert remaining >= accounts.share_bytes(other)


@given(holdings())
def test_shares_and_idle_guarantees_fit_in_the_pool(account):
    accounts = accounts_with(*account)
    present = [t for t in accounts.tenants if accounts.held_bytes(t)]
    idle = [s.guaranteed_bytes for s in accounts.specs if s.name not in present]
    accounts.note({t: accounts.held_bytes(t) for t in [*present, PUBLIC]})
    assert sum(map(accounts.share_bytes, present)) + sum(idle) <= POOL


# ---- options of tenants --------------------------------------------------------------------------


def test_parse_tenants_with_options():
    specs = parse_tenants(" a:weight=2, guaranteed=64MiB,burst=32MiB; team-b.x ;c:burst=0;")
    sizes = {"guaranteed_bytes": 64 * 2**20, "burst_bytes": 32 * 2**20}
    first = TenantSpec(name="a", weight=2.0, **sizes)
    assert specs == (first, TenantSpec(name="team-b.x"), TenantSpec(name="c", burst_bytes=0))
    assert [spec.limit_bytes for spec in specs] == [96 * 2**20, None, 0]
    assert parse_tenants("  ") == ()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a:weight=0|a:weight=-1|a:weight=nan|a:weight=inf", "a weight above 0"),
        ("a:weight=much", "a weight such as 2"),
        ("a:guaranteed=lots|a:burst=-1", "not a size"),
        ("a:weight|a:weight=", "option=value"),
        ("a:weight=1,weight=2", "option 'weight' is repeated"),
        ("a;b;a:weight=2", "tenant 'a' is repeated"),
        (f":weight=1|a b|a\nb|{'x' * 65}", "expected a tenant name"),
        ("public", "tenant name 'public' is reserved"),
        ("a:garanteed=1MiB", "did you mean guaranteed"),
    ],
)
def test_invalid_tenants_text_is_rejected(texts, message):
    for text in texts.split("|"):
        with pytest.raises((ConfigError, UnknownName), match=message):
            parse_tenants(text)


# ---- bytes of pages by tenant --------------------------------------------------------------------


PAGE_BYTES = 128  # four tokens


def rows_with_a_prefix(memory):
    """The reference to a cached prefix of 8 tokens, and two rows that begin with it."""
    reference = reference_pages(memory, started(memory, 8), 0, 8)
    rows = [start_from_references(memory, [reference]) for _ in range(2)]
    for row in rows:
        grow(memory, row, 3)
    return reference, rows


def test_prefixes_and_first_pages_are_charged_to_their_tenant_if_they_are_not_public():
    memory = one_group(max_rows=8)
    reference, rows = rows_with_a_prefix(memory)
    pages = memory.cached_references[reference.key]

    public = bytes_by_tenant(memory, {"a": rows[:1], "b": rows[1:]}, {"public": [pages]})
    assert public == {"public": 2 * PAGE_BYTES, "a": PAGE_BYTES, "b": PAGE_BYTES}
    private = bytes_by_tenant(memory, {"a": rows[:1]}, {"a": [pages]})
    assert private == {"public": 0, "a": 3 * PAGE_BYTES}

    memory = one_group()
    row = started(memory, 8)
    reference = reference_pages(memory, row, 0, 8)
    memory.release([row])
    held = bytes_by_tenant(memory, {}, {"a": [memory.cached_references[reference.key]]})
    assert held == {"public": 0, "a": 2 * PAGE_BYTES}

    memory = one_group(max_rows=8, num_lanes=2)
    _, rows = rows_with_a_prefix(memory)
    alone = started(memory, 8)  # no other row shares its pages: not a public prefix yet
    owned = {"a": [rows[0], alone], "b": rows[1:]}

    held = bytes_by_tenant(memory, owned, public_tokens={rows[0]: 7, alone: 8})

    first, second = 2 * PAGE_BYTES, 2 * PAGE_BYTES  # of both lanes; 7 tokens are one whole page
    assert held["public"] == first
    assert held["a"] == second + 2 * PAGE_BYTES + 4 * PAGE_BYTES
    assert held["b"] == 2 * PAGE_BYTES  # the prefix's second page is charged to a


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 20), st.booleans()), max_size=6))
def test_bytes_by_tenant_add_up_to_the_used_pages(steps):
    groups = [
        LaneGroup(name="full", page_class=plain_class(), layers=(0, 1)),
        LaneGroup(name="wide", page_class=plain_class(head_dim=16), layers=(2,)),
    ]
    memory, rows = with_groups(*groups, max_rows=16), {}
    for tenant, tokens, forks in steps:
        row = memory.start()
        grow(memory, row, tokens)
        rows.setdefault(tenant, []).append(row)
        if forks:
            rows[tenant].append(fork(memory, row))

    held = bytes_by_tenant(memory, rows)

    for tenant, own in rows.items():
        pages = {
            (name, int(page))
            for name, table in memory.tables.items()
            for page in np.unique(table.pages[own])
            if page >= 0
        }
        size = sum(memory.tables[name].group.page_class.page_bytes for name, _ in pages)
        assert held[tenant] == size
    assert sum(held.values()) == sum(pool.used_bytes for pool in memory.pools.values())
