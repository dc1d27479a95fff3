"""Groups: which member is prefilled, which are forked from it, and the pages they share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config.sampling_params import SamplingParams
from quire.errors import RequestError
from quire.kv.memory import KVMemory
from quire.layout.codec_names import codec_spec
from quire.layout.eviction import PRESSURE, EvictionSpec
from quire.layout.pages import CacheLayout, LaneGroup, kv_pages
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
from support.requests import make_request

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


def entry_at(tokens: int) -> EvictionEntry:
    none = np.zeros(0, dtype=np.int32)
    return EvictionEntry(tokens, none, none)


def prefill(memory, first) -> tuple[list[Request], int]:
    """Prefill from the group's first member until all members are complete; count the tokens."""
    first.memory.row, first.progress.state = memory.start(), RequestState.RUNNING
    sequence_memory = SequenceMemory(memory)
    running, prefilled_tokens = [first], 0
    while any(r.num_uncomputed for r in running) or first.group.forks:
        for request in list(running):
            tokens = prefillable_tokens(request)
            if tokens:
                memory.grow(np.array([request.memory.row]), np.array([tokens], dtype=np.int32))
                request.progress.num_computed += tokens
                prefilled_tokens += tokens
            for planned in due_forks(request):
                sequence_memory.fork(planned.parent, planned.child)
                running.append(planned.child)
    return running, prefilled_tokens


def tree_size(outputs) -> int:
    """The number of distinct prefixes: the least number of tokens to prefill."""
    return len(PROMPT) + len({tuple(o[:n]) for o in outputs for n in range(1, len(o) + 1)})


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=5))
def test_every_distinct_prefix_is_prefilled_once(outputs):
    group, memory = make_group(outputs), make_memory()

    running, prefilled_tokens = prefill(memory, plan_prefill(group.members[0]))

    assert prefilled_tokens == tree_size(outputs)
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


def test_new_members_are_forked_after_the_prompt():
    group = make_group([[], [], []])

    first = plan_prefill(group.members[2])

    assert first is group.members[0]
    assert [(f.parent.request_id, f.tokens) for f in group.forks] == [("r#0", 5)] * 2


def test_beams_prefill_up_to_the_fork_and_compute_the_last_token_together():
    group = make_group([[1, 2], [1, 3]], atomic=True)
    first = plan_prefill(group.members[0])
    assert prefillable_tokens(first) == len(PROMPT) + 1  # up to the fork

    first.progress.num_computed = len(PROMPT) + 1

    assert prefillable_tokens(first) == 0
    assert whole_groups([first]) == []
    assert whole_groups(group.members) == group.members


def test_single_beam_prefills_the_whole_prompt():
    group = make_group([[]], atomic=True, spare=3)

    assert prefillable_tokens(plan_prefill(group.members[0])) == len(PROMPT)
    assert group.num_rows == 4
    assert reserved_rows([group.members[0]]) == 4  # still waiting; one fewer once it runs
    group.members[0].progress.state = RequestState.RUNNING
    assert reserved_rows([group.members[0]]) == 3


def test_member_that_others_are_forked_from_cannot_leave_silently():
    group = make_group([[], [], []])
    first = plan_prefill(group.members[0])
    child = group.members[2]

    assert not leave(child)
    assert [f.child.request_id for f in group.forks] == ["r#1"]
    assert leave(first)


def test_members_share_evictions_from_before_their_fork():
    """Inherited evictions do not require a second prefill of the prompt."""
    group = make_group([[1, 2], [1, 3]])
    first, second = group.members
    spec = EvictionSpec(cap=4, every=2, when=PRESSURE)
    shared, own = (entry_at(tokens) for tokens in (3, 5))
    first.eviction.spec = second.eviction.spec = spec
    first.eviction.trace, second.eviction.trace = [shared], [shared]

    plan_prefill(first)
    together = [planned.tokens for planned in group.forks]
    second.eviction.trace.append(own)
    plan_prefill(first)
    until_own = [planned.tokens for planned in group.forks]
    second.eviction.trace = [entry_at(3)]
    plan_prefill(first)
    apart = [planned.tokens for planned in group.forks]

    assert (together, until_own, apart) == ([6], [5], [3])


def test_branch_keeps_the_row_of_the_first_child_forks_the_next_and_frees_the_rest():
    memory = make_memory()
    sequence_memory = SequenceMemory(memory)
    group = make_group([[1], [2], [3]], atomic=True)
    old = list(group.members)
    for member in old:
        member.memory.row, member.progress.state = memory.start(), RequestState.RUNNING
        memory.grow(np.array([member.memory.row]), np.array([6], dtype=np.int32))
        member.progress.num_computed = 6
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


@pytest.mark.parametrize("option", ["max_num_seqs", "max_num_batched_tokens"])
def test_more_beams_than_fit_in_one_step_are_rejected(option):
    group = make_group([[]], atomic=True, spare=2)

    with pytest.raises(RequestError, match=f"expected at most {option}=2 beams, got 3"):
        refuse_beams(group.members[0], ScheduleConfig(**{option: 2}))


def test_dissolved_parallel_samples_run_separately():
    group = make_group([[], []])
    refuse_beams(group.members[0], ScheduleConfig(max_num_batched_tokens=1, max_num_seqs=1))

    alone = dissolve(group.members[0])

    assert [r.request_id for r in alone] == ["r#0", "r#1"]
    assert all(r.group is None for r in alone)


def test_dissolve_keeps_beams_together():
    group = make_group([[]], atomic=True, spare=1)

    assert dissolve(group.members[0]) == group.members
    assert group.members[0].group is group
