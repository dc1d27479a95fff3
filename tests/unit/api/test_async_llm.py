"""Many callers of one engine: concurrent streams, cancelling, refusals, and a dead engine."""

import asyncio
import inspect
import threading
import time
from contextlib import aclosing, closing
from functools import wraps
from unittest.mock import Mock

import pytest

from quire import AsyncLLM, GenerationRequest, KVConfig, SamplingParams, ScheduleConfig
from quire.engine.core import Engine
from quire.errors import EngineDead, InvariantError, NeverFits, RequestError, StorageError
from support import engines

LONG = engines.greedy(max_tokens=200)
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


@pytest.fixture
def engine(request, model):
    schedule = ScheduleConfig(max_num_seqs=getattr(request, "param", 64))
    return Engine(model, KVConfig(memory="96KiB", page_tokens=8), schedule)


def run(main):
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


def with_llm(test):
    """Run the coroutine of a test with an `AsyncLLM` of the fixture `engine`."""

    @wraps(test)
    def run_test(engine, **options):
        async def main():
            async with AsyncLLM(engine) as llm:
                await test(llm, **options)

        run(main())

    own = inspect.signature(test)
    engine = inspect.Parameter("engine", inspect.Parameter.KEYWORD_ONLY)
    run_test.__signature__ = own.replace(parameters=[*list(own.parameters.values())[1:], engine])
    return run_test


def long(prompt, request_id=None):
    return GenerationRequest(prompt, LONG, request_id=request_id)


async def check_cancelled(llm):
    """Check that the engine becomes idle before the long request has ended."""
    await idle(llm)
    assert llm.engine.num_generated_tokens < LONG.max_tokens


async def until(llm, condition):
    deadline = time.monotonic() + PATIENCE_S / 2
    while not condition(await llm.stats()):
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.005)


async def idle(llm):
    await until(llm, lambda stats: not stats.num_running and not stats.num_waiting)
    llm.engine.check()


@with_llm
async def test_concurrent_streams_equal_streams_run_alone(llm):
    prompts = engines.make_prompts(6, 12, seed=1)

    async def tokens_of(prompt):
        return [t async for d in llm.stream(prompt, engines.greedy()) for t in d.token_ids]

    named = await llm.generate([3, 4], engines.greedy(2), request_id="mine")
    unnamed = await llm.generate([3, 4], engines.greedy(2))
    assert named.request_id == "mine"
    assert unnamed.request_id.startswith("request-")
    assert named.token_ids == unnamed.token_ids
    assert named.usage.completion_tokens == 2
    alone = [await tokens_of(prompt) for prompt in prompts]
    together = await asyncio.gather(*map(tokens_of, prompts))
    await idle(llm)

    assert together == alone
    assert all(len(tokens) == engines.NEW_TOKENS for tokens in alone)


@with_llm
async def test_outputs_of_one_submission_are_in_submission_order(llm):
    prompts, lengths = [[3, 4, 5], [6], [7, 8]], [6, 1, 3]  # the first ends last
    requests = [
        GenerationRequest(prompt, engines.greedy(length))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    outputs = await llm.submit(requests)
    collected = await outputs.collect()

    assert [output.request_id for output in collected] == list(outputs.request_ids)
    assert [list(output.prompt_token_ids) for output in collected] == prompts
    assert [len(output.token_ids) for output in collected] == lengths


@with_llm
async def test_leaving_a_stream_and_cancelling_its_task_or_request_end_it(llm):
    async for _ in llm.stream([3, 4], LONG):
        break
    await check_cancelled(llm)
    async with aclosing(llm.stream([3, 4], LONG)) as deltas:
        await anext(deltas)
    await check_cancelled(llm)

    task = asyncio.create_task(llm.generate([3, 4], LONG))
    await until(llm, lambda stats: stats.num_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await check_cancelled(llm)

    outputs = await llm.submit([long([3, 4])])
    await anext(outputs)
    outputs.cancel()
    *others, last = [delta.finish_reason async for delta in outputs]
    assert last == "abort"
    assert set(others) <= {None}


@pytest.mark.parametrize("submitted", [True, False])
@with_llm
async def test_task_cancelled_during_submission_leaves_no_request(llm, submitted, monkeypatch):
    """The engine's thread is blocked before or after the submission while the task is cancelled."""
    reached, go_on = threading.Event(), threading.Event()
    submit = llm.engine.submit

    def slow_submit(*args, **options):
        reached.set()
        go_on.wait(PATIENCE_S)
        return submit(*args, **options)

    if submitted:
        llm.engine.submit = slow_submit
        task = asyncio.create_task(llm.generate([3, 4], LONG))
        await asyncio.to_thread(reached.wait, PATIENCE_S)
    else:
        monkeypatch.setattr(llm.engine, "ledger", lambda: go_on.wait(PATIENCE_S))
        blocker = asyncio.create_task(llm.ledger())
        await asyncio.sleep(0.01)
        task = asyncio.create_task(llm.generate([3, 4], LONG))
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    if not submitted:
        await blocker
    await check_cancelled(llm)


@with_llm
async def test_refused_requests_affect_their_own_submission_only(llm):
    running = asyncio.create_task(llm.generate([3, 4], engines.greedy(20)))
    with pytest.raises(RequestError, match="empty"):
        await llm.generate([])
    with pytest.raises(NeverFits, match="whole KV memory"):
        await llm.generate([3] * 100, SamplingParams(max_tokens=1000))
    with pytest.raises(RequestError, match=r"only LLM\.generate takes several prompts"):
        await llm.generate(["one", "two"])
    for prompt in (7, None, b"text"):
        with pytest.raises(RequestError, match="expected a prompt of token ids, got"):
            await llm.submit([GenerationRequest(prompt)])

    assert len((await running).token_ids) == 20
    assert llm.is_alive

    with pytest.raises(RequestError, match="is in use: use another id"):
        await llm.submit([long([3], "same"), long([4], "same")])
    await check_cancelled(llm)


@with_llm
async def test_duplicate_ids_and_late_cancels_do_not_affect_the_request_with_the_id(llm):
    unread = await llm.submit([GenerationRequest([3], engines.greedy(1), request_id="same")])
    await idle(llm)
    outputs = await llm.submit([GenerationRequest([3], engines.greedy(30), request_id="same")])
    unread.cancel()
    with pytest.raises(RequestError, match="is in use: use another id"):
        await llm.generate([4], LONG, request_id="same")
    assert (await outputs.collect())[0].finish_reason == "length"


@pytest.mark.parametrize("engine", [1], indirect=True)
@with_llm
async def test_lower_priority_values_run_first(llm):
    requests = [GenerationRequest([3], engines.greedy(2), priority=n) for n in (2, 0, 1)]
    outputs = await llm.submit(requests)
    last, first, second = outputs.request_ids
    assert [d.request_id async for d in outputs if d.finish_reason] == [first, second, last]


@with_llm
async def test_dead_engine_is_reported_to_every_caller(llm, caplog):
    async def outcome(awaitable):
        with pytest.raises(EngineDead, match="InvariantError") as error:
            await awaitable
        return str(error.value.__cause__)

    text = "the ledger is off by one page"
    streams = [await llm.submit([long(prompt)]) for prompt in ([3], [4])]
    await anext(streams[0])
    llm.engine.step = Mock(side_effect=InvariantError(text))
    open_streams = await asyncio.gather(*(outcome(s.collect()) for s in streams))
    late = [await outcome(llm.generate([3])), await outcome(llm.stats())]

    assert not llm.is_alive
    assert open_streams + late == [text] * 4
    assert "off by one page" in caplog.text


@with_llm
async def test_exception_in_submit_is_raised_to_its_caller_and_ends_the_engine(llm):
    llm.engine.submit = Mock(side_effect=ZeroDivisionError("a bug"))
    for error, match in ((ZeroDivisionError, "a bug"), (EngineDead, "ZeroDivisionError")):
        with pytest.raises(error, match=match):
            await llm.generate([3])


@with_llm
async def test_queued_commands_fail_when_the_engine_dies(llm):
    reached, go_on = threading.Event(), threading.Event()

    def step_that_dies():
        reached.set()
        go_on.wait(PATIENCE_S)
        raise InvariantError("too late")

    llm.engine.step = step_that_dies
    first = asyncio.create_task(llm.generate([3]))
    await asyncio.to_thread(reached.wait, PATIENCE_S)
    queued = asyncio.create_task(llm.stats())
    await asyncio.sleep(0.01)
    go_on.set()
    results = await asyncio.gather(first, queued, return_exceptions=True)

    assert [type(result) for result in results] == [EngineDead, EngineDead]


@with_llm
async def test_closing_ends_open_requests_and_the_engine_is_idle(llm):
    outputs = await llm.submit([long([3])])
    await anext(outputs)
    await asyncio.to_thread(llm.close)
    for call in (outputs.collect(), llm.generate([3])):
        with pytest.raises(EngineDead, match="closed"):
            await call
    assert not llm.is_alive
    llm.close()  # closing twice has no effect

    assert not llm.engine.has_work
    llm.engine.check()


def test_engine_survives_a_closed_event_loop(engine):
    with closing(AsyncLLM(engine)) as llm:
        stream = run(llm.submit([long([3])]))  # its event loop is closed while it is open
        output = run(llm.generate([3], engines.greedy(4)))
        run(check_cancelled(llm))
    assert stream.request_ids
    assert len(output.token_ids) == 4


def test_closing_twice_does_not_affect_an_engine_run_by_another_async_llm(engine, monkeypatch):
    first = AsyncLLM(engine)
    first.close()
    second = AsyncLLM(engine)
    first.close()

    assert engine.runs_in_thread
    with pytest.raises(EngineDead, match="closed"):
        run(first.stats())
    second.close()
    assert not engine.runs_in_thread
    third = AsyncLLM(engine)  # its thread ends even if closing the engine fails
    monkeypatch.setattr(engine, "close", Mock(side_effect=StorageError("no space left")))
    with pytest.raises(StorageError):
        third.close()
    assert not engine.runs_in_thread
