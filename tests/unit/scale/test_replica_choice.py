"""`ReplicaChoice` ranks replicas and counts open requests, with real routers; loads; scaling."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.scale.autoscaling import KV_USED, LoadScaling
from quire.scale.replica_choice import RECEIVED, REPORT, ReplicaChoice
from quire.scale.routing.base import ReplicaLoad, RoutedRequest
from quire.scale.routing.blocks import block_hashes
from quire.scale.routing.loads import LoadView
from quire.scale.routing.policies import ROUTERS, RouterConfig, make_router

REPLICAS = ("r1", "r2", "r3", "r4", "r5")


def choice_of(name="kv_aware"):
    return ReplicaChoice(make_router(RouterConfig(name=name), block_tokens=4))


def request(start=0, tokens=64, session=None):
    ids = range(start, start + tokens)
    return RoutedRequest(prompt_blocks=block_hashes(ids, 4), prompt_tokens=tokens, session=session)


def reports(*names, **loads):
    """Reports of replicas; replicas without a load have not reported."""
    return {name: loads.get(name, {}) for name in names}


def test_a_repeated_prompt_returns_to_its_replica():
    choice, present = choice_of(), reports(*REPLICAS)
    prompts = [request(1000 * n) for n in range(5)]

    before = [choice.rank(f"a{n}", prompt, present)[0] for n, prompt in enumerate(prompts)]
    for n in range(5):
        choice.ended(f"a{n}")
    after = [choice.rank(f"b{n}", prompt, present)[0] for n, prompt in enumerate(prompts)]

    assert sorted(before) == sorted(REPLICAS)
    assert after == before


@pytest.mark.parametrize("name", ROUTERS)
def test_requests_of_one_moment_are_spread(name):
    choice = choice_of(name)

    chosen = [choice.rank(str(n), request(1000 * n), reports(*REPLICAS))[0] for n in range(50)]

    assert {chosen.count(replica) for replica in REPLICAS} == {10}


def test_a_loaded_replica_is_avoided_until_its_next_report():
    choice = choice_of()
    busy = {"queued_prompt_tokens": 9000, "queued_requests": 9, REPORT: 1, RECEIVED: 9}
    idle = {REPORT: 1, RECEIVED: 0}

    assert choice.rank("a", request(), reports("r1", "r2", r1=busy, r2=idle))[0] == "r2"
    busy_now = {"queued_prompt_tokens": 90000, REPORT: 2, RECEIVED: 1}
    free_now = {REPORT: 2, RECEIVED: 9}
    found = choice.rank("b", request(5000), reports("r1", "r2", r1=free_now, r2=busy_now))
    assert found[0] == "r1"


def test_a_request_that_another_replica_accepts_is_counted_there():
    choice = choice_of("least_loaded")
    present = reports("r1", "r2")
    first = choice.rank("a", request(), present)[0]
    other = "r2" if first == "r1" else "r1"

    choice.accepted("a", other)

    assert choice.rank("b", request(), present)[0] == first
    choice.ended("a", first)  # of the replica that did not accept it
    assert choice.num_open == 2
    choice.ended("a", other)
    assert choice.num_open == 1


def test_a_repeated_ranking_moves_the_request():
    choice = choice_of("round_robin")
    present = reports("r1", "r2")

    found = [choice.rank("a", request(), present)[0] for _ in range(4)]

    assert found == ["r1", "r2", "r1", "r2"]
    assert choice.num_open == 1


def test_requests_of_a_lost_replica_are_forgotten():
    choice, present = choice_of(), reports("r1", "r2")
    own = choice.rank("a", request(), present)[0]

    choice.lost([own])
    choice.ended("a", own)

    left = [name for name in present if name != own]
    assert choice.num_open == 0
    assert choice.rank("b", request(), reports(*left)) == left


def test_refused_requests_do_not_stay_in_the_load():
    """Reports of a replica never include requests that it did not accept."""
    choice = choice_of("least_loaded")
    for n in range(40):
        choice.rank(f"refused{n}", request(), reports("r1", r1={REPORT: 1, RECEIVED: 0}))
        choice.ended(f"refused{n}")

    now = {REPORT: 2, RECEIVED: 1, "running_requests": 1}
    present = reports("r1", "r2", r1={REPORT: 2, RECEIVED: 0}, r2=now)

    assert choice.rank("a", request(), present)[0] == "r1"


calls = st.sampled_from(["rank", "accepted", "ended", "lost", "report"])


@given(
    st.lists(st.tuples(calls, st.integers(0, 5), st.integers(0, 4)), max_size=60),
    st.sampled_from(ROUTERS),
)
def test_any_order_of_calls_ends_without_open_requests(calls, name):
    choice = choice_of(name)
    numbers = dict.fromkeys(REPLICAS, 0)
    for call, number, place in calls:
        replica = REPLICAS[place]
        if call == "rank":
            present = {r: {REPORT: n, RECEIVED: n} for r, n in numbers.items()}
            assert sorted(choice.rank(str(number), request(number), present)) == sorted(REPLICAS)
        elif call == "accepted":
            choice.accepted(str(number), replica)
        elif call == "ended":
            choice.ended(str(number), replica)
        elif call == "lost":
            choice.lost([replica])
        else:
            numbers[replica] += 1
    choice.lost(REPLICAS)

    assert choice.num_open == 0


def test_requests_sent_after_a_report_are_added_until_the_next():
    view = LoadView()
    view.report(ReplicaLoad(replica_id="a", queued_prompt_tokens=100, queued_requests=1))
    view.sent("a", 30)
    view.sent("a", 20)

    assert view.loads()["a"].queued_prompt_tokens == 150
    assert view.loads()["a"].queued_requests == 3

    view.report(ReplicaLoad(replica_id="a", queued_prompt_tokens=7))
    assert view.loads()["a"].queued_prompt_tokens == 7

    # requests that a report does not include are still added
    view = LoadView()
    view.report(ReplicaLoad(replica_id="a"), num_received=0)
    for tokens in (30, 20, 10):
        view.sent("a", tokens)

    view.report(ReplicaLoad(replica_id="a"), num_received=2)
    assert view.loads()["a"].queued_prompt_tokens == 10
    view = LoadView()
    for name in "ab":
        view.report(ReplicaLoad(replica_id=name))
    view.remove("a")
    view.sent("a", 30)
    assert [*view.loads()] == ["b"]  # a removed replica is not offered


@dataclass
class Context:
    total_num_requests: float = 0
    aggregated_metrics: dict | None = field(default_factory=dict)


@pytest.mark.parametrize(
    ("requests", "used", "replicas"),
    [
        *((0, [], 0), (64, [], 1), (65, [], 2), (10, [0.8], 1), (10, [0.9], 2)),
        *((10, [0.9, 0.9], 3), (640, [0.1] * 4, 10)),
    ],
)
def test_the_larger_of_requests_and_memory_counts(requests, used, replicas):
    metrics = {KV_USED: dict(enumerate(used))}
    assert LoadScaling(0.8, 64)(Context(requests, metrics)) == (replicas, {})
    assert LoadScaling(0.8, 4)(Context(9, None)) == (3, {})  # before the first report


@given(st.floats(0, 1e4), st.lists(st.floats(0, 1), max_size=50), st.floats(0.1, 1))
def test_with_that_many_replicas_both_targets_hold(requests, used, target_kv):
    replicas, _ = LoadScaling(target_kv, 16)(Context(requests, {KV_USED: dict(enumerate(used))}))
    assert requests <= 16 * replicas * (1 + 1e-9)
    assert math.fsum(used) <= target_kv * replicas * (1 + 1e-9)
