"""Charges and accounts of tenants when their requests are preempted, resumed and finished."""

import hashlib

import pytest

from quire.config.sampling_params import SamplingParams
from quire.kv.memory import KVMemory
from quire.kv.prefix import PrefixIndex
from quire.layout.eviction import KEEP_ALL, PREFILL_END, EvictionSpec
from quire.layout.statistics import AttentionMax, ScoringPass
from quire.scheduler import fairness as fairness_module
from quire.scheduler.fairness import FORGET_FROM, OTHERS
from quire.scheduler.request import Request
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.scheduler import scheduler_of
from quire.scheduler.sequence_memory import SequenceMemory
from quire.scheduler.step import StepPlan
from support.requests import make_request
from support.scheduler_load import make_layout

PAGE_TOKENS = 2


class Service:
    """A scheduler over ample memory, with or without a prefix cache."""

    def __init__(self, *, prefix=False, **schedule):
        layout = make_layout(PAGE_TOKENS, None, evicting=False)
        self.memory = KVMemory(layout, 400 * layout.smallest_sequence_bytes, 8)
        self.index = PrefixIndex(self.memory) if prefix else None
        config = ScheduleConfig(**schedule)
        sequence_memory = SequenceMemory(self.memory, self.index)
        self.scheduler = scheduler_of(config, sequence_memory)
        self.arrivals = 0

    def submit(self, prompt_tokens=6, max_tokens=8, **options) -> Request:
        self.arrivals += 1
        request = make_request(
            request_id=f"r{self.arrivals}",
            prompt_token_ids=list(range(prompt_tokens)),
            params=SamplingParams(max_tokens=max_tokens),
            arrival=self.arrivals,
            **options,
        )
        self.scheduler.submit(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan)
        for request in plan.requests:
            if request.num_uncomputed == 0:
                request.output_token_ids.append(2)
        return plan

    def tenant_report(self, tenant):
        report = self.scheduler.fairness.report(self.scheduler.running)
        return next(row for row in report if row.tenant == tenant)


def test_recomputed_output_tokens_are_charged_once():
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
        scheduler.submit(
            make_request(
                request_id=tenant,
                prompt_token_ids=list(range(tokens)),
                arrival=number,
                tenant=tenant,
                eviction=spec if tenant == "a" else KEEP_ALL,
            )
        )

    plan = scheduler.schedule()

    computed = spec.scoring_tokens(20)
    assert [r.tenant for r in plan.requests] == ["a", "b"]
    assert sum(plan.tokens) + computed == config.max_num_batched_tokens
    paid = {tenant: scheduler.waiting.virtual_time(tenant) for tenant in "ab"}
    assert paid["a"] / paid["b"] == (20 + computed) / plan.tokens[1]


def test_cached_prompt_tokens_count_once_after_a_preemption():
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


def test_waiting_request_is_hashed_once_over_repeated_lookups(monkeypatch):
    num_hashes, blake2b = [0], hashlib.blake2b

    def counting_hash(*arguments, **options):
        num_hashes[0] += 1
        return blake2b(*arguments, **options)

    service = Service(prefix=True)
    first = service.submit(prompt_tokens=60)
    service.step()
    waiting = service.submit(prompt_tokens=61)
    service.scheduler.waiting.pop(waiting)
    monkeypatch.setattr(hashlib, "blake2b", counting_hash)
    sequence_memory = service.scheduler.sequence_memory
    for _ in range(5):  # as admission does in every step while memory is full
        lease = sequence_memory.look_up(waiting)
        assert lease.tokens == 60
        sequence_memory.release(lease)
    assert num_hashes[0] == 60 // PAGE_TOKENS

    service.scheduler.waiting.push(waiting)
    service.step()
    assert first.progress.cached_tokens == 0
    assert waiting.progress.cached_tokens == 60
    assert waiting.memory.chain is None  # released after admission


def test_prompt_is_hashed_again_after_its_prefix_became_public():
    service = Service(prefix=True)
    request = service.submit(prompt_tokens=20, tenant="mine")
    sequence_memory = service.scheduler.sequence_memory
    identities = sequence_memory.identities
    sequence_memory.release(sequence_memory.look_up(request))
    before = request.memory.chain

    identities.register_public(list(range(10)))
    sequence_memory.release(sequence_memory.look_up(request))

    assert request.memory.chain is not before
    assert request.memory.chain.identity.public_tokens == 10


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


def test_has_several_tenants_only_while_two_have_requests():
    service = Service()
    request = service.submit(tenant="mine")
    assert not service.scheduler.fairness.has_several

    other = service.submit(tenant="theirs")
    assert service.scheduler.fairness.has_several  # before the first step
    service.step()
    assert service.scheduler.fairness.has_several
    assert (
        service.tenant_report("mine").held_bytes == service.tenant_report("theirs").held_bytes > 0
    )

    service.scheduler.finish(other)
    service.step()
    assert not service.scheduler.fairness.has_several
    assert service.tenant_report("mine").held_bytes == service.memory.row_bytes(request.memory.row)
    assert service.tenant_report("theirs").held_bytes == 0


def test_estimated_rule_learns_only_from_outputs_that_were_not_cancelled():
    service = Service(admission="estimated")
    cancelled, ended = service.submit(), service.submit()
    service.step()

    service.scheduler.finish(cancelled, "cancelled")
    assert service.scheduler.admission.rule.ratio == 1

    service.scheduler.finish(ended)
    assert service.scheduler.admission.rule.ratio < 1
