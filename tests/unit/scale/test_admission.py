"""Admission at the router: order, limits, fairness among tenants; loads between reports."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.scale.routing.admission import FairAdmission, ImmediateAdmission, make_admission
from quire.scale.routing.base import ReplicaLoad, RoutedRequest
from quire.scale.routing.loads import LoadView
from quire.scale.routing.registry import RouterConfig, make_router


def request(tokens=10, tenant="default"):
    return RoutedRequest(prompt_blocks=(), prompt_tokens=tokens, tenant=tenant)


def admission(limit=2, **options):
    return FairAdmission(
        make_router(RouterConfig(name="least_loaded"), block_tokens=16), limit, **options
    )


def replica(name="a", queued=0):
    return ReplicaLoad(replica_id=name, queued_requests=queued)


def test_requests_wait_while_all_queues_are_full():
    held = admission(limit=2)
    held.submit("1", request())

    assert held.next([replica(queued=2), replica("b", queued=3)]) is None
    assert held.next([replica(queued=2), replica("b", queued=1)]).replica_id == "b"
    assert len(held) == 0


@given(flood=st.integers(20, 60), small=st.integers(3, 10))
def test_flooding_tenant_does_not_delay_others(flood, small):
    held = admission()
    for number in range(flood):
        held.submit(f"flood{number}", request(tenant="flood"))
    for number in range(small):
        held.submit(f"small{number}", request(tenant="small"))

    tenants = [held.next([replica()]).request.tenant for _ in range(2 * small)]

    assert Counter(tenants) == {"flood": small, "small": small}


def test_weights_and_outputs_count():
    held = admission(weights={"heavy": 3.0})
    for number in range(20):
        for tenant in ("heavy", "light"):
            held.submit(f"{tenant}{number}", request(tenant=tenant))
    sent = Counter()
    for _ in range(16):
        dispatch = held.next([replica()])
        held.finished(dispatch, output_tokens=5)
        sent[dispatch.request.tenant] += 1

    assert sent == {"heavy": 12, "light": 4}


def test_priority_orders_requests_of_a_tenant():
    held = admission()
    held.submit("late", request(), priority=1)
    held.submit("soon", request(), priority=0)

    assert held.next([replica()]).request_id == "soon"


@pytest.mark.parametrize("limit", [None, 3])
def test_cancelled_request_is_not_sent(limit):
    held = make_admission(make_router(RouterConfig(), block_tokens=16), limit)
    held.submit("1", request())

    assert held.cancel("1")
    assert not held.cancel("1")
    assert held.next([replica()]) is None


@pytest.mark.parametrize("limit", [None, 3])
def test_waiting_names_are_distinct(limit):
    held = make_admission(make_router(RouterConfig(), block_tokens=16), limit)
    held.submit("1", request())

    with pytest.raises(ConfigError, match="request 1 is waiting already"):
        held.submit("1", request())


def test_without_a_limit_requests_are_sent_in_order():
    held = make_admission(make_router(RouterConfig(), block_tokens=16), None)
    assert isinstance(held, ImmediateAdmission)
    for name in "cab":
        held.submit(name, request())

    assert [held.next([replica(queued=99)]).request_id for _ in range(3)] == [*"cab"]
    assert held.next([replica()]) is None


def test_limit_below_one_is_refused():
    with pytest.raises(ConfigError, match="max_queued_requests from 1, got 0"):
        admission(limit=0)


# ---- loads -------------------------------------------------------------------------------------


def test_requests_sent_after_a_report_are_added_until_the_next():
    view = LoadView()
    view.report(ReplicaLoad(replica_id="a", queued_prompt_tokens=100, queued_requests=1))
    view.sent("a", 30)
    view.sent("a", 20)

    assert view.loads()["a"].queued_prompt_tokens == 150
    assert view.loads()["a"].queued_requests == 3

    view.report(ReplicaLoad(replica_id="a", queued_prompt_tokens=7))
    assert view.loads()["a"].queued_prompt_tokens == 7


def test_requests_that_a_report_does_not_include_are_still_added():
    view = LoadView()
    view.report(ReplicaLoad(replica_id="a"), num_received=0)
    for tokens in (30, 20, 10):
        view.sent("a", tokens)

    view.report(ReplicaLoad(replica_id="a"), num_received=2)

    assert view.loads()["a"].queued_prompt_tokens == 10


def test_removed_replicas_are_not_offered():
    view = LoadView()
    for name in "ab":
        view.report(ReplicaLoad(replica_id=name))
    view.remove("a")
    view.sent("a", 30)

    assert [*view.loads()] == ["b"]
