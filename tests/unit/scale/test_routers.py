"""Routers: valid choices, affinity within bounds, fairness among tenants, bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError, UnknownName
from quire.scale.routing.base import ReplicaLoad, RoutedRequest, Router
from quire.scale.routing.policies import ROUTERS, RouterConfig, make_router

BLOCK = 16


def request(blocks=(), tokens=100, session=None, tenant="default"):
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
        value = request(*drawn) if kind == "send" else drawn
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


@pytest.mark.parametrize("name", ROUTERS)
def test_no_replicas_and_empty_blocks_are_refused(name):
    router = make_router(RouterConfig(name=name), block_tokens=BLOCK)
    assert isinstance(router, Router)
    with pytest.raises(ConfigError, match="expected at least one replica"):
        router.choose(request(), [])
    with pytest.raises(ConfigError, match="block_tokens of 1 or more, got 0"):
        make_router(RouterConfig(name=name), block_tokens=0)


def test_round_robin_takes_turns_and_least_loaded_counts_requests_then_tokens_then_kv():
    router = make_router(RouterConfig(name="round_robin"), block_tokens=BLOCK)
    assert [send(router, request(), [idle("a"), idle("b")]) for _ in range(4)] == [*"abab"]
    router = make_router(RouterConfig(name="least_loaded"), block_tokens=BLOCK)

    assert router.choose(request(), [idle("a", running_requests=2), idle("b")]) == "b"
    busy = idle("a", queued_prompt_tokens=9)
    assert router.choose(request(), [busy, idle("b", active_kv_bytes=9)]) == "b"
    assert router.choose(request(), [idle("a", active_kv_bytes=10), idle("b")]) == "b"


def test_requests_go_to_cached_prefixes_and_kv_counts_by_its_share():
    router = kv_aware()
    router.note_sent(request((1, 2)), "a")
    router.note_sent(request((1, 2, 3)), "b")
    router.note_sent(request((1,)), "c")

    replicas = [idle("a"), idle("b"), idle("c")]
    assert router.choose(request((1, 2, 3, 4), tokens=70), replicas) == "b"
    assert router.uncached_tokens(request((1, 2, 3, 4), tokens=70), "b") == 70 - 3 * BLOCK
    replicas = [idle("a", active_kv_bytes=500), idle("b", queued_prompt_tokens=60)]
    assert kv_aware(kv_weight=100).choose(request(), replicas) == "a"
    assert kv_aware(kv_weight=140).choose(request(), replicas) == "b"


@given(queued=st.integers(0, 200), weight=st.sampled_from([0.5, 1.0, 3.0]))
def test_cached_prefix_is_left_when_its_queue_costs_more(queued, weight):
    router = kv_aware(prefix_weight=weight)
    router.note_sent(request((1, 2, 3, 4)), "a")

    replicas = [idle("a", queued_prompt_tokens=queued), idle("b")]
    chosen = router.choose(request((1, 2, 3, 4)), replicas)

    assert chosen == ("a" if queued < weight * 4 * BLOCK else "b") or queued == weight * 4 * BLOCK


@given(extra=st.integers(0, 1000))
def test_session_stays_on_its_replica_within_the_imbalance(extra):
    router = kv_aware(max_imbalance_tokens=300)
    router.note_sent(request(session="x"), "b")

    chosen = router.choose(request(session="x"), [idle("a"), idle("b", queued_prompt_tokens=extra)])

    assert chosen == ("b" if extra <= 300 else "a")


def test_events_and_losses_say_which_blocks_are_cached():
    router = kv_aware()
    router.note_sent(request((1, 2, 3, 4)), "a")
    router.note_lost("a")
    router.note_finished(request((1, 2, 3, 4)), "a")

    assert router.uncached_tokens(request((1, 2, 3, 4)), "a") == 100
    router = kv_aware()
    router.note_block_events("a", [{"type": "BlockStored", "block_hashes": [1, 2, 3]}])
    assert router.uncached_tokens(request((1, 2, 3)), "a") == 100 - 3 * BLOCK

    router.note_block_events("a", [{"type": "BlockRemoved", "block_hashes": [3]}])
    assert router.uncached_tokens(request((1, 2, 3)), "a") == 100 - 2 * BLOCK


def test_backlog_of_a_flooding_tenant_does_not_drive_others_from_their_prefix():
    router = kv_aware()
    router.note_sent(request((1, 2, 3, 4), tenant="small"), "a")
    router.note_finished(request((1, 2, 3, 4), tenant="small"), "a")
    for _ in range(10):
        router.note_sent(request(tenant="flood"), "a")
    replicas = [idle("a", queued_prompt_tokens=1000), idle("b")]

    # an engine serves at most 36 tokens of the flood before the 36 uncached tokens
    assert router.choose(request((1, 2, 3, 4), tenant="small"), replicas) == "a"
    assert router.choose(request((1, 2, 3, 4), tenant="flood"), replicas) == "b"


@given(count=st.integers(20, 60))
def test_memory_of_the_router_is_bounded(count):
    router = kv_aware(max_blocks=8, max_sessions=5)
    replicas = [idle("a"), idle("b")]
    for number in range(count):
        sent = request(range(number * 10, number * 10 + 5), session=str(number))
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
