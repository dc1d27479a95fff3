import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import RequestError
from quire.kv.memory import KVMemory
from quire.layout.codec_names import codec_spec
from quire.layout.eviction import PRESSURE, EvictionSpec
from quire.layout.pages import CacheLayout, LaneGroup, kv_pages
from quire.offload.swap.host_pool import NoCopies
from quire.offload.swap.transfer import StreamedCopies
from quire.plan.preemption_costs import LearnedCosts
from quire.sampling.outputs import OutputBuilder
from quire.scheduler.eviction_trace import EvictionEntry
from quire.scheduler.request import (
    Request,
    RequestGroup,
    RequestState,
    branch,
    dissolve,
    distinct_bytes,
    due_forks,
    leave,
    not_continued,
    plan_prefill,
    prefillable_tokens,
    refuse_beams,
    reserved_rows,
    whole_groups,
)
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory
from support import engines
from support.kv_options import kv_config
from support.lazy_copies import LazyWorker
from support.pairwise import every_pair
from support.requests import make_request
from support.scheduler_load import SchedulerLoad, Setting

PROMPT = [7] * 5
PAGE_TOKENS = 4


def make_group(outputs, *, atomic=False, spare=0) -> RequestGroup:
    group = RequestGroup("r", atomic=atomic)
    for number, output in enumerate([*outputs, *[[]] * spare]):
        request = make_request(f"r#{number}", PROMPT, SamplingParams(max_tokens=9), arrival=number)
        request.group, request.progress.output_token_ids = group, list(output)
        (group.members if number < len(outputs) else group.spare).append(request)
    return group


def make_memory(max_rows=8) -> KVMemory:
    numbers = codec_spec("float32")
    page = kv_pages(key=numbers, value=numbers, head_dim=4, heads=1, tokens=PAGE_TOKENS)
    group = LaneGroup(name="kv", page_class=page, layers=(0,))
    return KVMemory(CacheLayout((group,)), 64 * page.page_bytes, max_rows)


def grow(memory, request, tokens) -> None:
    memory.grow(np.array([request.memory.row]), np.array([tokens], dtype=np.int32))
    request.progress.num_computed += tokens


def prefill(memory, first) -> tuple[list[Request], int]:
    """Prefill from the group's first member until all members are complete; count the tokens."""
    first.memory.row, first.progress.state = memory.start(), RequestState.RUNNING
    sequence_memory = SequenceMemory(memory)
    running, prefilled_tokens = [first], 0
    while any(r.num_uncomputed for r in running) or first.group.forks:
        for request in list(running):
            tokens = prefillable_tokens(request)
            if tokens:
                grow(memory, request, tokens)
                prefilled_tokens += tokens
            for planned in due_forks(request):
                sequence_memory.fork(planned.parent, planned.child)
                running.append(planned.child)
    return running, prefilled_tokens


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=5))
def test_every_distinct_prefix_is_prefilled_once(outputs):
    group, memory = make_group(outputs), make_memory()
    running, prefilled_tokens = prefill(memory, plan_prefill(group.members[0]))

    prefixes = {tuple(o[:n]) for o in outputs for n in range(1, len(o) + 1)}
    assert prefilled_tokens == len(PROMPT) + len(prefixes)
    assert sorted(r.request_id for r in running) == sorted(m.request_id for m in group.members)
    assert all(memory.lengths[r.memory.row] == r.num_tokens for r in running)
    memory.check()


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=2, max_size=4), st.integers(2, 12)
)
def test_members_with_different_outputs_share_at_max_the_cap(outputs, cap):
    group = make_group(outputs)
    for member in group.members:
        member.eviction.spec = EvictionSpec(cap=cap, every=1)
    plan_prefill(group.members[0])

    for planned in group.forks:
        child, parent = planned.child.output_token_ids, planned.parent.output_token_ids
        shared = planned.tokens - len(PROMPT)
        assert child[: max(0, shared)] == parent[: max(0, shared)]
        assert planned.tokens <= cap or planned.tokens == planned.child.num_tokens


def test_members_are_forked_after_the_prompt_and_beams_prefill_up_to_the_fork():
    group = make_group([[], [], []])
    first = plan_prefill(group.members[2])
    assert first is group.members[0]
    assert [(f.parent.request_id, f.tokens) for f in group.forks] == [("r#0", 5)] * 2

    assert not leave(group.members[2])
    assert [f.child.request_id for f in group.forks] == ["r#1"]
    assert leave(first)

    group = make_group([[1, 2], [1, 3]], atomic=True)
    first = plan_prefill(group.members[0])
    assert prefillable_tokens(first) == len(PROMPT) + 1  # up to the fork

    first.progress.num_computed = len(PROMPT) + 1

    assert prefillable_tokens(first) == 0
    assert whole_groups([first]) == []
    assert whole_groups(group.members) == group.members

    group = make_group([[]], atomic=True, spare=3)

    assert prefillable_tokens(plan_prefill(group.members[0])) == len(PROMPT)
    assert group.num_rows == 4
    assert reserved_rows([group.members[0]]) == 4  # still waiting; one fewer once it runs
    group.members[0].progress.state = RequestState.RUNNING
    assert reserved_rows([group.members[0]]) == 3


def test_members_share_evictions_from_before_their_fork():
    """Inherited evictions do not require a second prefill of the prompt."""
    group = make_group([[1, 2], [1, 3]])
    first, second = group.members
    none, spec = np.zeros(0, dtype=np.int32), EvictionSpec(cap=4, every=2, when=PRESSURE)
    shared, apart, own = (EvictionEntry(tokens, none, none) for tokens in (3, 3, 5))
    first.eviction.spec = second.eviction.spec = spec
    first.eviction.trace, found = [shared], []
    for trace in ([shared], [shared, own], [apart]):
        second.eviction.trace = trace
        plan_prefill(first)
        found.append([planned.tokens for planned in group.forks])

    assert found == [[6], [5], [3]]


def test_branch_keeps_the_row_of_the_first_child_forks_the_next_and_frees_the_rest():
    memory = make_memory()
    sequence_memory = SequenceMemory(memory)
    group = make_group([[1], [2], [3]], atomic=True)
    old = list(group.members)
    for member in old:
        member.memory.row, member.progress.state = memory.start(), RequestState.RUNNING
        grow(memory, member, 6)
    pages = [memory.tables["kv"].row_pages(m.memory.row).tolist() for m in old]

    assert not_continued(group, [2, 0, 2]) == [old[1]]
    sequence_memory.free(old[1], "dropped")
    branch(group, [2, 0, 2], sequence_memory.fork)

    assert [m.output_token_ids for m in group.members] == [[3], [1], [3]]
    assert group.members[:2] == [old[2], old[0]]
    pages_after = [memory.tables["kv"].row_pages(m.memory.row).tolist() for m in group.members]
    assert pages_after == [pages[2], pages[0], pages[2]]
    page_bytes = memory.layout.page_classes[0].page_bytes
    assert group.kv_peak_bytes == 3 * 2 * page_bytes
    assert distinct_bytes(memory, [m.memory.row for m in group.members]) == 2 * 2 * page_bytes
    memory.check()


def test_dissolved_parallel_samples_run_separately_and_beams_that_fit_together():
    too_many = make_group([[]], atomic=True, spare=2).members[0]
    for option in ("max_num_seqs", "max_num_batched_tokens"):
        with pytest.raises(RequestError, match=f"expected at most {option}=2 beams, got 3"):
            refuse_beams(too_many, ScheduleConfig(**{option: 2}))
    group, beams = make_group([[], []]), make_group([[]], atomic=True, spare=1)
    refuse_beams(group.members[0], ScheduleConfig(max_num_batched_tokens=1, max_num_seqs=1))
    alone = dissolve(group.members[0])
    assert [(r.request_id, r.group) for r in alone] == [("r#0", None), ("r#1", None)]
    assert dissolve(beams.members[0]) == beams.members
    assert beams.members[0].group is beams


# ---- preempted in a scheduler without bytes ------------------------------------------------------


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


# ---- swapped in an engine ------------------------------------------------------------------------

TEXT = list(range(20, 41))


@pytest.fixture(scope="module")
def llama():
    return engines.load("llama")


def engine_of(model, ratio: float, *, chunk_tokens: int = 2048, preempt: str = "swap") -> Engine:
    sized = engines.engine_for(model, room=ratio, longest=40, page_tokens=PAGE_TOKENS)
    kv = kv_config(
        memory=sized.pool.kv.memory.total_bytes,
        page_tokens=PAGE_TOKENS,
        swap_space="4MiB" if preempt == "swap" else 0,
        enable_prefix_caching=False,
    )
    return Engine(model, kv, ScheduleConfig(preempt=preempt, chunk_tokens=chunk_tokens))


def sampling(**options) -> SamplingParams:
    defaults = {"max_tokens": 16, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return SamplingParams(**defaults | options)


def outputs_of(engine: Engine, requests, act=lambda engine: []) -> list[list[tuple[int, ...]]]:
    """Tokens of each sequence of each request; `act` returns deltas that it causes at the start."""
    builders, done = {}, {}
    for prompt, params in requests:
        request_id = engine.submit(GenerationRequest(prompt, params))
        builders[request_id] = OutputBuilder(request_id, tuple(prompt))
    deltas = act(engine)
    while engine.has_work:
        deltas += engine.step()
    for delta in deltas:
        whole = builders[delta.request_id].add(delta)
        if whole is not None:
            done[delta.request_id] = whole
    engine.check()
    assert engine.pool.host is None or engine.pool.host.used_bytes == 0
    return [[choice.token_ids for choice in done[key].choices] for key in builders]


@pytest.mark.parametrize("name", ["llama", "qwen2_window"])
def test_swapped_groups_resume_with_the_same_outputs(name):
    rng, model = random.Random(3), engines.load(name)
    prompts = [[rng.randrange(2, 128) for _ in range(rng.randint(3, 24))] for _ in range(8)]
    options = [sampling(n=rng.randint(1, 4), seed=seed) for seed in range(4)]
    beams = {"max_tokens": 12, "use_beam_search": True, "ignore_eos": True}
    options += [SamplingParams(n=2, beam_width=width, **beams) for width in (2, 3, 4, 3)]
    requests, engine = list(zip(prompts, options, strict=True)), engine_of(model, 4.6)
    outputs = outputs_of(engine, requests)
    assert engine.scheduler.preempter.swapper.num_swaps > 3
    assert outputs == outputs_of(engine_of(model, 60.0, preempt="recompute"), requests)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_group_preempted_at_any_step_has_the_same_outputs(llama, steps):
    """Also while its prompt is recomputed and some of its members wait to be forked."""

    def preempt_thrice(engine):
        deltas = []
        for number in range(3):
            deltas += [delta for _ in range(steps) for delta in engine.step()]
            if engine.scheduler.running:
                last, recompute = engine.scheduler.running[-1], number % 2 == 1
                engine.scheduler.lifecycle.preempt(last, "forced", recompute=recompute)
        return deltas

    requests = [(TEXT, sampling(n=4, max_tokens=8))]
    expected = outputs_of(engine_of(llama, 60.0, preempt="recompute"), requests)
    engine = engine_of(llama, 60.0, chunk_tokens=4)
    assert outputs_of(engine, requests, preempt_thrice) == expected


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("back", [0, 1, 4])
def test_member_of_a_swapped_group_can_be_cancelled(llama, index, back):
    def cancel_preempted(engine):
        [group] = {request.request_id.partition("#")[0] for request in engine.requests()}
        deltas = [delta for _ in range(9) for delta in engine.step()]
        running, preempt = engine.scheduler.running, engine.scheduler.lifecycle.preempt
        preempt(running[0], "forced", recompute=True)
        deltas += [delta for _ in range(back) for delta in engine.step()]
        if running:
            preempt(running[0], "forced")
        engine.cancel(group, index)
        return deltas

    requests = [(TEXT, sampling(n=3, max_tokens=8))]
    [found] = outputs_of(engine_of(llama, 60.0, chunk_tokens=4), requests, cancel_preempted)
    [expected] = outputs_of(engine_of(llama, 60.0), requests)
    for number, (tokens, whole) in enumerate(zip(found, expected, strict=True)):
        assert tokens == whole[: len(tokens) if number == index else None]
