"""Causes of waiting, and that asking for them changes nothing."""

import pytest

from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.waiting import (
    LIMIT,
    MEMORY,
    NEXT_STEP,
    PREFILL,
    QUEUE,
    SLABS,
    SLOTS,
    TOKENS,
)

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return LLM("quire-tiny", dtype="float32", kv=KVConfig(memory="4MiB"), verify=False).model


def engine_of(model, memory="4MiB", kv=None, **schedule):
    from quire.engine.core import Engine

    return Engine(model, KVConfig(memory=memory, **(kv or {})), ScheduleConfig(**schedule))


def submit(engine, prompts, tenant="default", tokens=40):
    for number in range(prompts):
        ids = [(7 * number + i) % 200 + 10 for i in range(tokens)]
        engine.submit(GenerationRequest(ids, LONG, tenant=tenant))


def causes(engine, **options):
    found = list(engine.scheduler.waiting_causes.first(100, **options))
    return [(why.cause, why.ahead) for _, why in found]


def drain(engine):
    for request in engine.requests():
        engine.cancel(request.request_id)
    while engine.has_work:
        engine.step()
    engine.check()


def test_new_requests_wait_for_the_next_step(model):
    engine = engine_of(model)
    submit(engine, 2)

    assert causes(engine) == [(NEXT_STEP, 0), (QUEUE, 1)]
    drain(engine)


def test_request_waits_for_a_batch_slot(model):
    engine = engine_of(model, max_num_seqs=2)
    submit(engine, 4)
    engine.step()

    assert causes(engine) == [(SLOTS, 0), (QUEUE, 1)]
    [(_, first), _] = engine.scheduler.waiting_causes.first(2)
    assert first.needed_bytes == engine.scheduler.memory.row_bytes(
        engine.scheduler.running[0].memory.row
    )
    drain(engine)


def test_request_waits_for_pages(model):
    engine = engine_of(model, memory="2MiB")
    submit(engine, 8)
    engine.step()

    found = causes(engine)
    assert found[0] == (MEMORY, 0)
    first, second = (why for _, why in engine.scheduler.waiting_causes.first(2))
    assert first.free_bytes < first.needed_bytes + first.promised_bytes
    assert second.after is next(engine.scheduler.fairness.waiting.heads())
    assert [cause for cause, _ in found[1:]] == [QUEUE] * (len(found) - 1)
    drain(engine)


def test_request_waits_for_the_limit_of_its_tenant(model):
    engine = engine_of(model, tenants="red:guaranteed=0,burst=1200KiB; blue")
    submit(engine, 4, tenant="red")
    submit(engine, 1, tenant="blue")
    engine.step()

    assert causes(engine, tenant="red")[0] == (LIMIT, 0)
    assert causes(engine, tenant="blue") == []
    drain(engine)


@pytest.mark.parametrize(
    ("cause", "memory", "kv", "schedule"),
    [
        (SLABS, "1200KiB", {"evict": "h2o:cap=64", "evict_allow": "all"}, {}),
        (PREFILL, "2MiB", {"evict": "recent:cap=64,every=16,sinks=4"}, {}),
        (TOKENS, "4MiB", {}, {"max_num_batched_tokens": 24}),
    ],
)
def test_request_that_would_fit_waits_for_another_reason(model, cause, memory, kv, schedule):
    engine = engine_of(model, memory, kv, **schedule)
    for number in range(14):
        ids = [
            *range(20, 68),
            *((7 * number + i) % 200 + 10 for i in range(20 + 40 * (number % 4))),
        ]
        engine.submit(GenerationRequest(ids, LONG))
    found, waits = None, 0
    while found is None and engine.has_work:
        engine.step()
        for head, why in engine.scheduler.waiting_causes.first(1):
            found = why if why.cause == cause else None
            waits = waits + 1 if why.cause == NEXT_STEP else 0
            assert waits < 3, f"{head.request_id} was not tried in the next step"

    if cause == SLABS:
        assert found.free_bytes < found.needed_bytes
    elif cause == PREFILL:
        assert found.after in engine.scheduler.running
    else:
        assert found.cause == TOKENS
    drain(engine)


def test_asking_for_causes_changes_nothing(model):
    engine = engine_of(model, memory="2MiB")
    submit(engine, 6)
    engine.step()
    before = engine.stats().as_dict() | {"times": None}
    events = engine.events.num_events

    causes(engine)

    assert engine.stats().as_dict() | {"times": None} == before
    assert engine.events.num_events == events
    engine.pool.kv.memory.check()
    drain(engine)
