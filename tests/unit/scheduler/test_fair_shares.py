"""Tenants that share a memory: a flood, equal shares, guarantees, limits, and recomputed work."""

import random
from dataclasses import replace

import numpy as np
import pytest

from quire.errors import NeverFits
from quire.scheduler.request import Request, RequestGroup, RequestState
from quire.sim.engine import jain_index
from support.scheduler_load import SchedulerLoad, Setting

PROMPT_TOKENS, MAX_TOKENS = 24, 16
SETTING = Setting(page_tokens=8, pages=120, max_num_batched_tokens=64, max_num_seqs=8)
NUM_STEPS = 600


def send(
    load: SchedulerLoad, tenant: str, prompt: int = PROMPT_TOKENS, max_tokens: int = MAX_TOKENS
) -> Request:
    request = load.request(prompt, max_tokens)
    request.spec = replace(request.spec, tenant=tenant)
    load.submit(request)
    return request


def queue_steps(flood_each: int, pages: int) -> np.ndarray:
    """Steps that each request of tenant "small" waits.

    Args:
        flood_each: requests that tenant "flood" sends for each of them.
        pages: size of the memory.
    """
    load = SchedulerLoad(
        Setting(page_tokens=8, pages=pages, max_num_batched_tokens=64, max_num_seqs=8)
    )
    sent: list[tuple[Request, int]] = []
    entered: dict[str, int] = {}
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
    alone = np.percentile(queue_steps(0, pages), 99)
    with_flood = np.percentile(queue_steps(20, pages), 99)

    prefill_steps = -(-PROMPT_TOKENS // SETTING.max_num_batched_tokens)
    assert with_flood <= max(2 * alone, 1 + prefill_steps)


@pytest.mark.parametrize("pages", [24, 120])
def test_tenants_of_equal_weight_are_served_equally_while_both_wait(pages):
    load = SchedulerLoad(
        Setting(page_tokens=8, pages=pages, max_num_batched_tokens=64, max_num_seqs=8)
    )
    rng = random.Random(1)
    for number in range(210):
        send(load, "flood" if number % 21 else "small", rng.randint(1, 2 * PROMPT_TOKENS))
    for _ in range(60):
        send(load, "small", rng.randint(1, 2 * PROMPT_TOKENS))
    served = {"flood": 0.0, "small": 0.0}
    while set(load.scheduler.waiting.backlogged) == set(served):
        load.step(served=served)

    assert sum(served.values()) > 4000
    assert jain_index(served) >= 0.98


@pytest.mark.parametrize("guaranteed", [30, 60])
def test_guaranteed_memory_is_available_within_two_steps(guaranteed):
    load = SchedulerLoad(
        Setting(
            page_tokens=8,
            pages=24,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            guaranteed=guaranteed,
        )
    )
    for _ in range(20):
        send(load, "b", PROMPT_TOKENS, 60)
    for _ in range(20):
        load.step()
    accounts = load.scheduler.fairness.accounts
    available_bytes = load.memory.total_bytes - accounts.held_bytes("b")
    assert available_bytes < accounts.spec("a").guaranteed_bytes // 2
    guaranteed_request = send(load, "a")
    waited = 0
    while guaranteed_request.progress.state is RequestState.WAITING:
        load.step()
        waited += 1

    assert waited <= 2
    load.drain()


@pytest.mark.parametrize(("num_preemptible", "is_admitted"), [(1, False), (4, True)])
def test_no_request_is_preempted_if_that_would_not_admit_the_other(num_preemptible, is_admitted):
    """Resumed requests cannot be preempted: the memory of the others is counted first."""
    load = SchedulerLoad(
        Setting(page_tokens=8, pages=24, max_num_batched_tokens=64, max_num_seqs=8, guaranteed=60)
    )
    for _ in range(20):
        send(load, "b", PROMPT_TOKENS, 60)
    for _ in range(20):
        load.step()
    reasons: list[object] = []
    load.scheduler.sequence_memory.events.subscribe(
        lambda event: reasons.append(event.data.get("reason"))
    )
    for request in load.scheduler.running[num_preemptible:]:
        request.progress.num_admissions, request.progress.admitted_tokens = 2, request.num_tokens
    guaranteed_request = send(load, "a", 12 * 8)
    load.step()

    preempted = "tenant a needs memory of its share" in reasons
    assert (guaranteed_request.progress.state is RequestState.RUNNING, preempted) == (
        is_admitted,
        is_admitted,
    )


@pytest.mark.parametrize("host_pages", [0, 40])
@pytest.mark.parametrize("pages", [8, 12, 20])
def test_preemption_at_high_load_recomputes_at_max_once_on_average(pages, host_pages):
    setting = Setting(pages=pages, page_tokens=8, host_pages=host_pages, preempt="swap")
    load, rng, final_tokens = SchedulerLoad(setting), random.Random(pages), 0
    for _ in range(60):
        request = load.request(rng.randint(1, 40), rng.randint(1, 24))
        assert load.submit(request)
        final_tokens += request.final_tokens
    load.drain()

    assert load.scheduler.num_preemptions > 3
    assert load.without_progress == 0
    assert load.processed_tokens <= 2 * final_tokens


@pytest.mark.parametrize("admission", ["optimistic", "reserved", "estimated"])
def test_tenant_never_exceeds_its_memory_limit(admission):
    """Its requests fit when they are admitted and then grow: the newest are preempted in time."""
    load = SchedulerLoad(
        Setting(
            page_tokens=8,
            pages=24,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            guaranteed=0,
            burst=40,
            admission=admission,
        )
    )
    for _ in range(12):
        send(load, "b", 8, 60)
    fairness, most = load.scheduler.fairness, 0
    while load.scheduler.has_work:
        load.step()
        fairness.recount(load.scheduler.running)
        most = max(most, fairness.accounts.held_bytes("b"))

    assert 0 < most <= fairness.accounts.spec("b").limit_bytes


@pytest.mark.parametrize("num_samples", [2, 6])
def test_parallel_samples_stay_within_the_limit_of_their_tenant(num_samples):
    """Members of a group are not preempted for each other: above the limit they run separately."""
    load = SchedulerLoad(
        Setting(
            page_tokens=8,
            pages=60,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            guaranteed=0,
            burst=40,
        )
    )
    members = [load.request(16, 40) for _ in range(num_samples)]
    for member in members:
        member.spec = replace(member.spec, tenant="b")
    load.submit_group(members, atomic=False)
    fairness, most = load.scheduler.fairness, 0
    while load.scheduler.has_work:
        load.step()
        fairness.recount(load.scheduler.running)
        most = max(most, fairness.accounts.held_bytes("b"))

    assert 0 < most <= fairness.accounts.spec("b").limit_bytes
    assert not load.requests


def test_beams_above_the_limit_of_their_tenant_are_rejected():
    load = SchedulerLoad(
        Setting(
            page_tokens=8,
            pages=60,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            guaranteed=0,
            burst=40,
        )
    )
    members = [load.request(16, 40) for _ in range(6)]
    for member in members:
        member.spec = replace(member.spec, tenant="b")
    group = members[0].group = RequestGroup("r", atomic=True)
    group.members, group.spare = members[:1], members[1:]

    with pytest.raises(NeverFits, match="tenant 'b' may hold"):
        load.scheduler.submit(members[0])
    assert not load.scheduler.has_work
