"""`python -m benchmarks cluster`: the loads it simulates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster.runs import at_load, for_replicas
from support.sim_traces import request, trace

TALK = trace(*(request(i, i * 0.5, 9, 20, shared=[(0, 32), (1 + i % 8, 32)]) for i in range(1, 41)))


@given(factor=st.sampled_from([0.5, 1.0, 3.0]))
def test_load_scales_arrivals_only(factor):
    faster = at_load(TALK, factor)
    assert [r.arrival_s * factor for r in faster.requests] == pytest.approx(
        [r.arrival_s for r in TALK.requests]
    )
    assert [r.prompt for r in faster.requests] == [r.prompt for r in TALK.requests]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16, 64])
def test_load_of_more_replicas_has_more_conversations(replicas):
    load = for_replicas(TALK, replicas, 8)

    assert len(load.requests) == 40 * replicas / 8
    assert len({r.prompt[1].content for r in load.requests}) == replicas
    assert [r.arrival_s for r in load.requests] == sorted(r.arrival_s for r in load.requests)
    assert load.requests[0].arrival_s == 0
    # every conversation is whole
    assert {sum(r.prompt[1] == q.prompt[1] for r in load.requests) for q in load.requests} == {5}
