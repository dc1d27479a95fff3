"""`ReplicaChoice` ranks replicas and counts open requests; loads, scaling, and routers."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, UnknownName
from quire.scale.autoscaling import KV_USED, LoadScaling
from quire.scale.replica_choice import RECEIVED, REPORT, ReplicaChoice
from quire.scale.routing.base import ReplicaLoad, RoutedRequest, Router
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
def test_requests_are_spread_and_no_replicas_or_empty_blocks_refused(name):
    choice = choice_of(name)

    chosen = [choice.rank(str(n), request(1000 * n), reports(*REPLICAS))[0] for n in range(50)]

    assert {chosen.count(replica) for replica in REPLICAS} == {10}

    router = make_router(RouterConfig(name=name), block_tokens=BLOCK)
    assert isinstance(router, Router)
    with pytest.raises(ConfigError, match="expected at least one replica"):
        router.choose(asking(), [])
    with pytest.raises(ConfigError, match="block_tokens of 1 or more, got 0"):
        make_router(RouterConfig(name=name), block_tokens=0)


def test_a_loaded_replica_is_avoided_but_lost_ones_and_refusals_leave_no_load():
    choice = choice_of()
    busy = {"queued_prompt_tokens": 9000, "queued_requests": 9, REPORT: 1, RECEIVED: 9}
    idle = {REPORT: 1, RECEIVED: 0}

    assert choice.rank("a", request(), reports("r1", "r2", r1=busy, r2=idle))[0] == "r2"
    busy_now = {"queued_prompt_tokens": 90000, REPORT: 2, RECEIVED: 1}
    free_now = {REPORT: 2, RECEIVED: 9}
    found = choice.rank("b", request(5000), reports("r1", "r2", r1=free_now, r2=busy_now))
    assert found[0] == "r1"

    choice, present = choice_of(), reports("r1", "r2")
    own = choice.rank("a", request(), present)[0]

    choice.lost([own])
    choice.ended("a", own)

    left = [name for name in present if name != own]
    assert choice.num_open == 0
    assert choice.rank("b", request(), reports(*left)) == left

    # reports of a replica never include requests that it did not accept
    choice = choice_of("least_loaded")
    for n in range(40):
        choice.rank(f"refused{n}", request(), reports("r1", r1={REPORT: 1, RECEIVED: 0}))
        choice.ended(f"refused{n}")

    now = {REPORT: 2, RECEIVED: 1, "running_requests": 1}
    present = reports("r1", "r2", r1={REPORT: 2, RECEIVED: 0}, r2=now)

    assert choice.rank("a", request(), present)[0] == "r1"


def test_loads_are_counted_between_reports_and_moved_by_repeated_rankings():
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

    choice = choice_of("round_robin")
    present = reports("r1", "r2")

    found = [choice.rank("a", request(), present)[0] for _ in range(4)]

    assert found == ["r1", "r2", "r1", "r2"]
    assert choice.num_open == 1


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


# ---- routers -------------------------------------------------------------------------------------


BLOCK = 16


def asking(blocks=(), tokens=100, session=None, tenant="default"):
    return RoutedRequest(
        prompt_blocks=tuple(blocks), prompt_tokens=tokens, session=session, tenant=tenant
    )


def idle(name, **load):
    return ReplicaLoad(replica_id=name, kv_capacity_bytes=1000, **load)


def kv_aware(prefix_weight=1.0, **options):
    return make_router(RouterConfig(prefix_weight=prefix_weight, **options), block_tokens=BLOCK)


def send(router, sent, replicas):
    chosen = router.choose(sent, replicas)
    router.note_sent(sent, chosen)
    return chosen


# tuples, because run-time type checks of dataclasses draw random numbers
requests = st.tuples(
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(1, 500),
    st.none() | st.sampled_from("xyz"),
    st.sampled_from(["t", "u", "v"]),
)
loads = st.tuples(
    *(st.integers(0, 1000), st.sampled_from([0, 1000]), st.integers(0, 10_000)),
    *(st.integers(0, 5), st.integers(0, 5)),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), requests),
        st.tuples(st.just("finish"), st.integers(0, 20)),
        st.tuples(st.just("lost"), st.sampled_from("abcdef")),
    ),
    max_size=30,
)


@given(name=st.sampled_from(ROUTERS), steps=steps, numbers=st.lists(loads, min_size=1, max_size=6))
def test_choice_is_a_given_replica_and_equal_calls_give_equal_choices(name, steps, numbers):
    names = ["active_kv_bytes", "kv_capacity_bytes", "queued_prompt_tokens", "running_requests"]
    fields = [*names, "queued_requests"]
    replicas = [
        ReplicaLoad(replica_id=name, **dict(zip(fields, load, strict=True)))
        for name, load in zip("abcdef", numbers, strict=False)
    ]
    pair = [make_router(RouterConfig(name=name), block_tokens=BLOCK) for _ in range(2)]
    sent = []
    for kind, drawn in steps:
        value = asking(*drawn) if kind == "send" else drawn
        if kind == "send":
            choices = {send(router, value, replicas) for router in pair}
            assert len(choices) == 1
            assert choices <= {load.replica_id for load in replicas}
            sent.append((value, *choices))
        for router in pair:
            if kind == "finish" and value < len(sent):
                router.note_finished(*sent[value])
            elif kind == "lost":
                router.note_lost(value)
        if kind == "finish" and value < len(sent):
            del sent[value]


def test_round_robin_takes_turns_and_least_loaded_counts_requests_then_tokens_then_kv():
    router = make_router(RouterConfig(name="round_robin"), block_tokens=BLOCK)
    assert [send(router, asking(), [idle("a"), idle("b")]) for _ in range(4)] == [*"abab"]
    router = make_router(RouterConfig(name="least_loaded"), block_tokens=BLOCK)

    assert router.choose(asking(), [idle("a", running_requests=2), idle("b")]) == "b"
    busy = idle("a", queued_prompt_tokens=9)
    assert router.choose(asking(), [busy, idle("b", active_kv_bytes=9)]) == "b"
    assert router.choose(asking(), [idle("a", active_kv_bytes=10), idle("b")]) == "b"


def test_requests_go_to_cached_prefixes_also_in_the_backlog_of_a_flooding_tenant():
    router = kv_aware()
    router.note_sent(asking((1, 2)), "a")
    router.note_sent(asking((1, 2, 3)), "b")
    router.note_sent(asking((1,)), "c")

    replicas = [idle("a"), idle("b"), idle("c")]
    assert router.choose(asking((1, 2, 3, 4), tokens=70), replicas) == "b"
    assert router.uncached_tokens(asking((1, 2, 3, 4), tokens=70), "b") == 70 - 3 * BLOCK
    replicas = [idle("a", active_kv_bytes=500), idle("b", queued_prompt_tokens=60)]
    assert kv_aware(kv_weight=100).choose(asking(), replicas) == "a"
    assert kv_aware(kv_weight=140).choose(asking(), replicas) == "b"

    router = kv_aware()
    router.note_sent(asking((1, 2, 3, 4)), "a")
    router.note_lost("a")
    router.note_finished(asking((1, 2, 3, 4)), "a")

    assert router.uncached_tokens(asking((1, 2, 3, 4)), "a") == 100
    router = kv_aware()
    router.note_block_events("a", [{"type": "BlockStored", "block_hashes": [1, 2, 3]}])
    assert router.uncached_tokens(asking((1, 2, 3)), "a") == 100 - 3 * BLOCK

    router.note_block_events("a", [{"type": "BlockRemoved", "block_hashes": [3]}])
    assert router.uncached_tokens(asking((1, 2, 3)), "a") == 100 - 2 * BLOCK

    router = kv_aware()
    router.note_sent(asking((1, 2, 3, 4), tenant="small"), "a")
    router.note_finished(asking((1, 2, 3, 4), tenant="small"), "a")
    for _ in range(10):
        router.note_sent(asking(tenant="flood"), "a")
    replicas = [idle("a", queued_prompt_tokens=1000), idle("b")]
    # an engine serves at most 36 tokens of the flood before the 36 uncached tokens
    assert router.choose(asking((1, 2, 3, 4), tenant="small"), replicas) == "a"
    assert router.choose(asking((1, 2, 3, 4), tenant="flood"), replicas) == "b"


@given(queued=st.integers(0, 200), weight=st.sampled_from([0.5, 1.0, 3.0]))
def test_cached_prefix_is_left_when_its_queue_costs_more(queued, weight):
    router = kv_aware(prefix_weight=weight)
    router.note_sent(asking((1, 2, 3, 4)), "a")

    replicas = [idle("a", queued_prompt_tokens=queued), idle("b")]
    chosen = router.choose(asking((1, 2, 3, 4)), replicas)

    assert chosen == ("a" if queued < weight * 4 * BLOCK else "b") or queued == weight * 4 * BLOCK


@given(extra=st.integers(0, 1000))
def test_session_stays_on_its_replica_within_the_imbalance(extra):
    router = kv_aware(max_imbalance_tokens=300)
    router.note_sent(asking(session="x"), "b")

    chosen = router.choose(asking(session="x"), [idle("a"), idle("b", queued_prompt_tokens=extra)])

    assert chosen == ("b" if extra <= 300 else "a")


@given(count=st.integers(20, 60))
def test_memory_of_the_router_is_bounded(count):
    router = kv_aware(max_blocks=8, max_sessions=5)
    replicas = [idle("a"), idle("b")]
    for number in range(count):
        sent = asking(range(number * 10, number * 10 + 5), session=str(number))
        router.note_finished(sent, send(router, sent, replicas))
    assert len(router._sessions) == 5
    assert router.index.num_hashes <= 16


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"name": "kv_awre"}, "kv_aware"),
        ({"kv_weight": -1.0}, "--router-kv-weight from 0, got -1"),
        ({"prefix_weight": float("inf")}, "--router-prefix-weight from 0"),
        ({"max_blocks": 0}, "--router-max-blocks from 1, got 0"),
    ],
)
def test_invalid_options_are_refused(option, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        RouterConfig(**option)
