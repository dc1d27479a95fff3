import hashlib
import random
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from quire.config.sampling_params import SamplingParams
from quire.errors import NeverFits
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIndex
from quire.layout.eviction import KEEP_ALL, PREFILL_END, EvictionSpec
from quire.layout.statistics import AttentionMax, ScoringPass
from quire.scheduler import fairness as fairness_module
from quire.scheduler.fairness import FORGET_FROM, IDLE_KEPT, OTHERS, TenantMeter, TenantStats
from quire.scheduler.request import Request, RequestGroup, RequestState
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import scheduler_of
from quire.scheduler.sequence_memory import SequenceMemory
from quire.sim.engine import jain_index
from quire.tenancy.accounts import TenantAccounts
from quire.tenancy.tenants import parse_tenants
from support.requests import make_request
from support.scheduler_load import SchedulerLoad, Setting, advance, make_layout

PAGE_TOKENS = 2


class Service:
    """A scheduler over ample memory, with or without a prefix cache."""

    def __init__(self, *, prefix=False, **schedule):
        layout = make_layout(PAGE_TOKENS, None, evicting=False)
        self.memory = KVMemory(layout, 400 * layout.smallest_sequence_bytes, 8)
        index = PrefixIndex(self.memory) if prefix else None
        self.sequence_memory = SequenceMemory(self.memory, index)
        self.scheduler = scheduler_of(ScheduleConfig(**schedule), self.sequence_memory)
        self.arrivals = 0

    def submit(self, prompt_tokens=6, max_tokens=8, **options) -> Request:
        self.arrivals += 1
        params, name = SamplingParams(max_tokens=max_tokens), f"r{self.arrivals}"
        request = make_request(name, range(prompt_tokens), params, arrival=self.arrivals, **options)
        self.scheduler.submit(request)
        return request

    def step(self) -> None:
        advance(self.scheduler, share=np.inf)

    def tenant_report(self, tenant):
        report = self.scheduler.fairness.report(self.scheduler.running)
        return next(row for row in report if row.tenant == tenant)


def test_recomputed_and_cached_tokens_are_charged_once():
    service = Service(tenants="a;b")
    request = service.submit(tenant="a")
    for _ in range(4):
        service.step()
    before, paid = service.tenant_report("a"), service.scheduler.waiting.virtual_time("a")

    assert service.scheduler.preempt_one()  # after three output tokens
    service.step()  # recomputes the prompt and the output tokens; the last had no KV before

    after = service.tenant_report("a")
    assert request.progress.num_preemptions == 1
    assert request.progress.num_computed == 6 + 4
    assert before.prompt_tokens == after.prompt_tokens == 6
    assert service.scheduler.waiting.virtual_time("a") == paid + 1

    service = Service(prefix=True, tenants="a;b")
    service.submit(tenant="a")
    service.step()
    second = service.submit(tenant="a")
    service.step()
    assert second.progress.cached_tokens == 4

    assert service.scheduler.preempt_one()
    service.step()

    assert second.progress.num_admissions == 2
    assert service.tenant_report("a").cached_tokens == 4


@pytest.mark.parametrize("chunk_tokens", [10, 20])
def test_scoring_pass_is_charged_and_counts_in_the_step(chunk_tokens):
    """The pass takes a part of the step, and is paid as prompt tokens."""
    scores = AttentionMax(of=ScoringPass("", "", "", "", chunk_tokens=chunk_tokens, overlap=1))
    spec = EvictionSpec(cap=10, when=PREFILL_END, statistics=(scores,))
    layout = make_layout(PAGE_TOKENS, None, evicting=True)
    memory = KVMemory(layout, 400 * layout.smallest_sequence_bytes, 8)
    config = ScheduleConfig(tenants="a;b", max_num_batched_tokens=100)
    scheduler = scheduler_of(config, SequenceMemory(memory), by_layer=False)
    for number, (tenant, tokens) in enumerate({"a": 20, "b": 90}.items()):
        options = {"tenant": tenant, "eviction": spec if tenant == "a" else KEEP_ALL}
        scheduler.submit(make_request(tenant, range(tokens), arrival=number, **options))
    plan, computed = scheduler.schedule(), spec.scoring_tokens(20)

    assert [r.tenant for r in plan.requests] == ["a", "b"]
    assert sum(plan.tokens) + computed == config.max_num_batched_tokens
    paid = {tenant: scheduler.waiting.virtual_time(tenant) for tenant in "ab"}
    assert paid["a"] / paid["b"] == (20 + computed) / plan.tokens[1]


def test_waiting_request_is_hashed_once_unless_its_prefix_becomes_public(monkeypatch):
    service = Service(prefix=True)
    request = service.submit(prompt_tokens=20, tenant="mine")
    sequence_memory = service.sequence_memory
    sequence_memory.release(sequence_memory.look_up(request))
    before = request.memory.chain
    sequence_memory.identities.register_public(list(range(10)))
    sequence_memory.release(sequence_memory.look_up(request))
    assert request.memory.chain is not before
    assert request.memory.chain.identity.public_tokens == 10

    hashes = Mock(wraps=hashlib.blake2b)
    service = Service(prefix=True)
    first = service.submit(prompt_tokens=60)
    service.step()
    waiting = service.submit(prompt_tokens=61)
    service.scheduler.waiting.pop(waiting)
    monkeypatch.setattr(hashlib, "blake2b", hashes)
    for _ in range(5):  # as admission does in every step while memory is full
        lease = service.sequence_memory.look_up(waiting)
        assert lease.tokens == 60
        service.sequence_memory.release(lease)
    assert hashes.call_count == 60 // PAGE_TOKENS

    service.scheduler.waiting.push(waiting)
    service.step()
    assert first.progress.cached_tokens == 0
    assert waiting.progress.cached_tokens == 60
    assert waiting.memory.chain is None  # released after admission


def test_accounts_of_many_client_chosen_tenants_are_bounded(monkeypatch):
    monkeypatch.setattr(fairness_module, "IDLE_KEPT", 20)
    service = Service()
    for number in range(300):
        request = service.submit(tenant=f"user-{number}", max_tokens=1)
        service.step()
        service.scheduler.finish(request)

    fairness, rows = service.scheduler.fairness, service.scheduler.fairness.report([])
    assert fairness.waiting.num_tracked <= 2 * FORGET_FROM
    assert len(rows) == 20 + 2  # the last one still counts as busy
    assert rows[-1].tenant == OTHERS
    assert sum(row.num_requests for row in rows) == 300
    assert sum(row.prompt_tokens for row in rows) == 300 * 6
    assert not fairness.accounts.held_bytes("user-0")


def test_tenants_are_several_while_two_have_requests_and_estimates_skip_cancelled():
    service = Service()
    request, fairness = service.submit(tenant="mine"), service.scheduler.fairness
    assert not fairness.has_several
    other = service.submit(tenant="theirs")
    assert fairness.has_several  # before the first step
    service.step()
    assert fairness.has_several
    mine, theirs = (service.tenant_report(name).held_bytes for name in ("mine", "theirs"))
    assert mine == theirs > 0

    service.scheduler.finish(other)
    service.step()
    assert not fairness.has_several
    assert service.tenant_report("mine").held_bytes == service.memory.row_bytes(request.memory.row)
    assert service.tenant_report("theirs").held_bytes == 0

    service = Service(admission="estimated")
    cancelled, ended = service.submit(), service.submit()
    service.step()

    service.scheduler.finish(cancelled, "cancelled")
    assert service.scheduler.admission.rule.ratio == 1

    service.scheduler.finish(ended)
    assert service.scheduler.admission.rule.ratio < 1


# ---- meters --------------------------------------------------------------------------------------


def test_report_counts_each_tenant_includes_accounts_and_folds_idle_ones():
    accounts = TenantAccounts(parse_tenants("a:guaranteed=200B;b"), 1000)
    accounts.note({"b": 300, "public": 100}, waiting=["a"])
    meter = TenantMeter()
    meter.submitted("b")
    assert meter.report(accounts) == (
        TenantStats(tenant="a", guaranteed_bytes=200, share_bytes=550),
        TenantStats(tenant="b", num_requests=1, held_bytes=300, share_bytes=350),
    )

    meter = TenantMeter()
    for number in range(IDLE_KEPT + 3):
        meter.submitted(f"t{number}")
        meter.admitted(f"t{number}", 0.5)
    meter.served("t0", output_tokens=3)  # the most recent one
    meter.fold(busy={"t1"})

    rows = {row.tenant: row for row in meter.report()}
    assert len(rows) == meter.num_tenants == IDLE_KEPT + 2
    assert rows.keys().isdisjoint({"t2", "t3"})
    assert {"t0", "t1", "t4"} < rows.keys()
    others = TenantStats(tenant=OTHERS, num_requests=2, num_admitted=2, queue_s=1.0)
    assert rows[OTHERS] == others
    assert meter.report(TenantAccounts((), 1000))[-1] == others  # without bytes

    meter = TenantMeter()
    for tenant in "aab":
        meter.submitted(tenant)
    meter.admitted("a", 1.5)
    meter.cached("a", 16)
    meter.served("a", prompt_tokens=100)
    meter.served("a", output_tokens=3)
    meter.preempted("a")
    meter.admitted("a", 0.5)
    counts = {"num_requests": 2, "num_admitted": 2, "num_preemptions": 1, "queue_s": 2.0}
    tokens = {"prompt_tokens": 100, "cached_tokens": 16, "output_tokens": 3}

    expected = (
        TenantStats(tenant="a", **counts, **tokens),
        TenantStats(tenant="b", num_requests=1),
    )
    assert meter.report() == expected


# ---- shares of a memory --------------------------------------------------------------------------

PROMPT_TOKENS, MAX_TOKENS = 24, 16
NUM_STEPS = 600


def load_of(pages: int, **setting) -> SchedulerLoad:
    shape = {"page_tokens": 8, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    return SchedulerLoad(Setting(pages=pages, **shape | setting))


def send(load, tenant, prompt=PROMPT_TOKENS, max_tokens=MAX_TOKENS) -> Request:
    request = load.request(prompt, max_tokens)
    request.spec = replace(request.spec, tenant=tenant)
    load.submit(request)
    return request


def group_of_b(load: SchedulerLoad, num_samples: int) -> list[Request]:
    members = [load.request(16, 40) for _ in range(num_samples)]
    for member in members:
        member.spec = replace(member.spec, tenant="b")
    return members


def fill_with_b(load: SchedulerLoad) -> None:
    for _ in range(20):
        send(load, "b", PROMPT_TOKENS, 60)
    for _ in range(20):
        load.step()


def check_limit_of_b(load: SchedulerLoad) -> None:
    """Run to the end; tenant b never holds more than its limit."""
    fairness, most = load.scheduler.fairness, 0
    while load.scheduler.has_work:
        load.step()
        fairness.recount(load.scheduler.running)
        most = max(most, fairness.accounts.held_bytes("b"))
    assert 0 < most <= fairness.accounts.spec("b").limit_bytes
    assert not load.requests


def queue_steps(flood_each: int, pages: int) -> np.ndarray:
    """Steps that each request of tenant "small" waits; "flood" sends `flood_each` for each."""
    load, sent, entered = load_of(pages), [], {}
    for step in range(NUM_STEPS):
        if step % 10 == 0:
            for _ in range(flood_each):
                send(load, "flood")
            sent.append((send(load, "small"), step))
        load.step()
        for request, _ in sent:
            if request.progress.num_admissions:
                entered.setdefault(request.request_id, step)
    return np.array([entered.get(r.request_id, NUM_STEPS) - start for r, start in sent])


# limited by memory, limited by rows
@pytest.mark.parametrize("pages", [24, pytest.param(120, marks=pytest.mark.slow)])
def test_small_tenant_does_not_wait_behind_a_tenant_with_20_times_the_load(pages):
    alone, with_flood = (np.percentile(queue_steps(each, pages), 99) for each in (0, 20))
    assert with_flood <= max(2 * alone, 1 + -(-PROMPT_TOKENS // 64))


@pytest.mark.parametrize("pages", [24, 120])
def test_tenants_of_equal_weight_are_served_equally_while_both_wait(pages):
    load, rng = load_of(pages), random.Random(1)
    for tenant in (*("flood" if n % 21 else "small" for n in range(210)), *["small"] * 60):
        send(load, tenant, rng.randint(1, 2 * PROMPT_TOKENS))
    served = {"flood": 0.0, "small": 0.0}
    while set(load.scheduler.waiting.backlogged) == set(served):
        load.step(served=served)
    assert sum(served.values()) > 4000
    assert jain_index(served) >= 0.98


@pytest.mark.parametrize("guaranteed", [30, 60])
def test_guaranteed_memory_is_available_within_two_steps(guaranteed):
    load = load_of(24, guaranteed=guaranteed)
    fill_with_b(load)
    accounts = load.scheduler.fairness.accounts
    available_bytes = load.memory.total_bytes - accounts.held_bytes("b")
    assert available_bytes < accounts.spec("a").guaranteed_bytes // 2
    request = send(load, "a")
    for _ in range(2):
        load.step()

    assert request.progress.state is not RequestState.WAITING
    load.drain()


@pytest.mark.parametrize(("num_preemptible", "is_admitted"), [(1, False), (4, True)])
def test_no_request_is_preempted_if_that_would_not_admit_the_other(num_preemptible, is_admitted):
    """Resumed requests cannot be preempted: the memory of the others is counted first."""
    load, reasons = load_of(24, guaranteed=60), []
    fill_with_b(load)
    events = load.scheduler.sequence_memory.events
    events.subscribe(lambda event: reasons.append(event.data.get("reason")))
    for request in load.scheduler.running[num_preemptible:]:
        request.progress.num_admissions, request.progress.admitted_tokens = 2, request.num_tokens
    guaranteed_request = send(load, "a", 12 * 8)
    load.step()

    assert (guaranteed_request.progress.state is RequestState.RUNNING) == is_admitted
    assert ("tenant a needs memory of its share" in reasons) == is_admitted


@pytest.mark.parametrize("host_pages", [0, 40])
@pytest.mark.parametrize("pages", [8, 12, 20])
def test_preemption_at_high_load_recomputes_at_max_once_on_average(pages, host_pages):
    setting = Setting(pages=pages, page_tokens=8, host_pages=host_pages, preempt="swap")
    load, rng = SchedulerLoad(setting), random.Random(pages)
    requests = [load.request(rng.randint(1, 40), rng.randint(1, 24)) for _ in range(60)]
    assert all(map(load.submit, requests))
    load.drain()

    assert load.scheduler.num_preemptions > 3
    assert load.without_progress == 0
    assert load.processed_tokens <= 2 * sum(request.final_tokens for request in requests)


@pytest.mark.parametrize("admission", ["optimistic", "reserved", "estimated"])
def test_tenant_never_exceeds_its_memory_limit(admission):
    """Its requests fit when they are admitted and then grow: the newest are preempted in time."""
    load = load_of(24, guaranteed=0, burst=40, admission=admission)
    for _ in range(12):
        send(load, "b", 8, 60)
    check_limit_of_b(load)


@pytest.mark.parametrize("num_samples", [2, 6])
def test_parallel_samples_stay_within_the_limit_of_their_tenant(num_samples):
    """Members of a group are not preempted for each other: above the limit they run separately."""
    load = load_of(60, guaranteed=0, burst=40)
    load.submit_group(group_of_b(load, num_samples), atomic=False)
    check_limit_of_b(load)


def test_beams_above_the_limit_of_their_tenant_are_rejected():
    load = load_of(60, guaranteed=0, burst=40)
    first, *spare = group_of_b(load, 6)
    group = first.group = RequestGroup("r", atomic=True)
    group.members, group.spare = [first], spare
    with pytest.raises(NeverFits, match="tenant 'b' may hold"):
        load.scheduler.submit(first)
    assert not load.scheduler.has_work
