"""Groups that are preempted or cancelled during prefill, and chunks that are not divided."""

import pytest

from quire.offload.swap.host_pool import NoCopies
from quire.offload.swap.transfer import StreamedCopies
from quire.plan.preemption_costs import LearnedCosts
from quire.scheduler.request import RequestState
from support.lazy_copies import LazyWorker
from support.pairwise import every_pair
from support.scheduler_load import SchedulerLoad, Setting


def group_in_prefill(**setting):
    """Two members with different outputs while the second of them is prefilled.

    The second is first in the order of outputs; the first is to be forked from it.
    """
    load = SchedulerLoad(Setting(pages=60, chunk_tokens=2, **setting))
    members = [load.request(6, 9) for _ in range(2)]
    for member, token in zip(members, (5, 4), strict=True):
        member.output_token_ids.append(token)
    load.submit_group(members, atomic=False)
    load.step()
    assert [member.progress.state is RequestState.RUNNING for member in members] == [False, True]
    assert members[0].group.forks[0].parent is members[1]
    return load, members


@every_pair(cancelled=[0, 1], preempted=[False, True], host_pages=[0, 60])
def test_member_is_cancelled_while_its_group_is_in_prefill_or_preempted(
    host_pages, preempted, cancelled
):
    load, members = group_in_prefill(host_pages=host_pages, preempt="swap")
    if preempted:
        load.scheduler.preempt_one()
    load.scheduler.finish(load.requests.pop(members[cancelled].request_id))

    load.check()
    load.drain()


@pytest.mark.parametrize("host_pages", [0, 60])
def test_group_preempted_before_its_forks_completes(host_pages):
    load, members = group_in_prefill(host_pages=host_pages, preempt="swap")
    load.scheduler.preempt_one()
    load.check()
    load.step()

    load.check()
    load.drain()
    assert all(len(member.output_token_ids) == 9 for member in members)


def test_atomic_chunk_is_not_divided_among_tenants():
    """Under eviction a step of 7 tokens holds one chunk of 7, even if other tenants wait."""
    setting = Setting(cap=20, pages=60, max_num_batched_tokens=7, max_num_seqs=2, guaranteed=0)
    load = SchedulerLoad(setting)
    for text in (1, 2, 1, 2):
        load.submit(load.request(60, 1, text=text))
    load.drain()

    assert load.scheduler.num_preemptions == 0
    assert load.processed_tokens == 4 * 60


def test_costs_are_learned_from_swap_copies_once_they_have_ended(monkeypatch):
    load = SchedulerLoad(Setting(pages=60, host_pages=60, preempt="swap"))
    memory, worker, learned = load.scheduler.memory, LazyWorker(), []
    load.pool.copies = StreamedCopies(NoCopies(), worker, memory.arena.fences)
    for name in ("copied_out", "copied_back"):

        def learn(costs, num_bytes, seconds, name=name):
            learned.append((name, num_bytes, seconds > 0))

        monkeypatch.setattr(LearnedCosts, name, learn)
    for _ in range(2):
        load.submit(load.request(6, 9))
    for _ in range(3):
        load.step()

    load.scheduler.preempt_one()
    assert (len(worker.queued), learned) == (1, [])  # it has not ended
    load.drain()

    first, *_ = learned
    assert (first[0], first[2]) == ("copied_out", True)
    assert first[1] > 0
