"""Many callers of one engine: concurrent streams, cancelling, refusals, and a dead engine."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

from quire.api.async_llm import AsyncLLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import EngineDead, InvariantError, NeverFits, RequestError, StorageError
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines

LONG = engines.greedy(max_tokens=200)
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


def small_engine(model, max_num_seqs=64):
    schedule = ScheduleConfig(max_num_seqs=max_num_seqs)
    return Engine(model, KVConfig(memory="96KiB", page_tokens=8), schedule)


@pytest.fixture
def engine(model):
    return small_engine(model)


def run(main):
    """Run a coroutine; a test that hangs fails."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


async def until(condition):
    deadline = time.monotonic() + PATIENCE_S / 2
    while not await condition():
        assert time.monotonic() < deadline, "timed out"
        await asyncio.sleep(0.005)


async def idle(llm):
    async def is_idle():
        stats = await llm.stats()
        return not stats.num_running and not stats.num_waiting

    await until(is_idle)
    llm.engine.check()


def test_concurrent_streams_equal_streams_run_alone(engine):
    prompts = engines.make_prompts(6, 12, seed=1)

    async def tokens_of(llm, prompt):
        return [t async for d in llm.stream(prompt, engines.greedy()) for t in d.token_ids]

    async def main():
        async with AsyncLLM(engine) as llm:
            alone = [await tokens_of(llm, prompt) for prompt in prompts]
            together = await asyncio.gather(*(tokens_of(llm, prompt) for prompt in prompts))
            await idle(llm)
        return alone, together

    alone, together = run(main())

    assert together == alone
    assert all(len(tokens) == engines.NEW_TOKENS for tokens in alone)


def test_output_has_the_id_of_its_request(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            named = await llm.generate([3, 4], engines.greedy(2), request_id="mine")
            unnamed = await llm.generate([3, 4], engines.greedy(2))
        return named, unnamed

    named, unnamed = run(main())

    assert named.request_id == "mine"
    assert unnamed.request_id.startswith("request-")
    assert named.token_ids == unnamed.token_ids
    assert named.usage.completion_tokens == 2


def test_outputs_of_one_submission_are_in_submission_order(engine):
    prompts = [[3, 4, 5], [6], [7, 8]]
    lengths = [6, 1, 3]  # the first ends last

    async def main():
        async with AsyncLLM(engine) as llm:
            outputs = await llm.submit(
                [
                    GenerationRequest(prompt=prompt, sampling=engines.greedy(length))
                    for prompt, length in zip(prompts, lengths, strict=True)
                ]
            )
            return outputs.request_ids, await outputs.collect()

    request_ids, collected = run(main())

    assert [output.request_id for output in collected] == list(request_ids)
    assert [list(output.prompt_token_ids) for output in collected] == prompts
    assert [len(output.token_ids) for output in collected] == lengths


def test_breaking_out_of_the_stream_loop_cancels_the_request(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            async for _ in llm.stream([3, 4], LONG):
                break
            await idle(llm)
            return engine.num_generated_tokens

    assert run(main()) < LONG.max_tokens


def test_closing_the_stream_cancels_the_request_at_once(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            async with aclosing(llm.stream([3, 4], LONG)) as deltas:
                await anext(deltas)
            await idle(llm)
            return engine.num_generated_tokens

    assert run(main()) < LONG.max_tokens


def test_cancelling_a_task_cancels_its_request(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            task = asyncio.create_task(llm.generate([3, 4], LONG))

            async def is_running():
                return (await llm.stats()).num_running

            await until(is_running)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await idle(llm)
            return engine.num_generated_tokens

    assert run(main()) < LONG.max_tokens


@pytest.mark.parametrize("submitted", [True, False])
def test_task_cancelled_during_submission_leaves_no_request(engine, submitted, monkeypatch):
    """The engine's thread is blocked before or after the submission while the task is cancelled."""
    reached, go_on = threading.Event(), threading.Event()
    submit = engine.submit

    def slow_submit(*args, **options):
        reached.set()
        go_on.wait(PATIENCE_S)
        return submit(*args, **options)

    async def main():
        async with AsyncLLM(engine) as llm:
            if submitted:
                engine.submit = slow_submit
                task = asyncio.create_task(llm.generate([3, 4], LONG))
                await asyncio.to_thread(reached.wait, PATIENCE_S)
            else:
                monkeypatch.setattr(engine, "ledger", lambda: go_on.wait(PATIENCE_S))
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
            await idle(llm)
            return engine.num_generated_tokens

    assert run(main()) < LONG.max_tokens


def test_cancelled_stream_ends_with_abort(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            outputs = await llm.submit([GenerationRequest(prompt=[3, 4], sampling=LONG)])
            await anext(outputs)
            outputs.cancel()
            return [delta.finish_reason async for delta in outputs]

    reasons = run(main())

    assert reasons[-1] == "abort"
    assert set(reasons[:-1]) <= {None}


def test_refused_request_does_not_affect_running_requests(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            running = asyncio.create_task(llm.generate([3, 4], engines.greedy(20)))
            with pytest.raises(RequestError, match="empty"):
                await llm.generate([])
            with pytest.raises(NeverFits, match="whole KV memory"):
                await llm.generate([3] * 100, SamplingParams(max_tokens=1000))
            output = await running
            assert llm.is_alive
        return output

    assert len(run(main()).token_ids) == 20


def test_one_refused_request_cancels_the_rest_of_its_submission(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            with pytest.raises(RequestError, match="is in use: use another id"):
                await llm.submit(
                    [
                        GenerationRequest(prompt=[3], sampling=LONG, request_id="same"),
                        GenerationRequest(prompt=[4], sampling=LONG, request_id="same"),
                    ]
                )
            await idle(llm)
            return engine.num_generated_tokens

    assert run(main()) < LONG.max_tokens


def test_request_with_duplicate_id_is_refused_and_the_first_continues(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            outputs = await llm.submit(
                [GenerationRequest(prompt=[3], sampling=engines.greedy(30), request_id="same")]
            )
            with pytest.raises(RequestError, match="is in use: use another id"):
                await llm.generate([4], LONG, request_id="same")
            return (await outputs.collect())[0]

    assert run(main()).finish_reason == "length"


def test_late_cancel_does_not_affect_a_new_request_with_the_same_id(engine):
    def submission(max_tokens):
        params = engines.greedy(max_tokens)
        return GenerationRequest(prompt=[3], sampling=params, request_id="same")

    async def main():
        async with AsyncLLM(engine) as llm:
            unread = await llm.submit([submission(1)])
            await idle(llm)
            outputs = await llm.submit([submission(30)])
            unread.cancel()
            return (await outputs.collect())[0]

    assert run(main()).finish_reason == "length"


def test_lower_priority_values_run_first(model):
    engine = small_engine(model, max_num_seqs=1)
    ended = []

    async def main():
        async with AsyncLLM(engine) as llm:
            submissions = [
                GenerationRequest(prompt=[3], sampling=engines.greedy(2), priority=priority)
                for priority in (2, 0, 1)
            ]
            outputs = await llm.submit(submissions)
            ended.extend([d.request_id async for d in outputs if d.finish_reason])
            return outputs.request_ids

    last, first, second = run(main())

    assert ended == [first, second, last]


def test_dead_engine_is_reported_to_every_caller(engine, caplog):
    def broken_step():
        raise InvariantError("the ledger is off by one page")

    async def outcome(awaitable):
        try:
            await awaitable
        except EngineDead as error:
            return error

    async def main():
        async with AsyncLLM(engine) as llm:
            streams = [await llm.submit([GenerationRequest(prompt=[3], sampling=LONG)])]
            streams += [await llm.submit([GenerationRequest(prompt=[4], sampling=LONG)])]
            await anext(streams[0])
            engine.step = broken_step
            open_streams = await asyncio.gather(*(outcome(s.collect()) for s in streams))
            late = [await outcome(llm.generate([3])), await outcome(llm.stats())]
            assert not llm.is_alive
        return open_streams + late

    errors = run(main())

    assert [str(error.__cause__) for error in errors] == ["the ledger is off by one page"] * 4
    assert all("InvariantError" in str(error) for error in errors)
    assert "off by one page" in caplog.text


def test_exception_in_submit_is_raised_to_its_caller_and_ends_the_engine(engine):
    def broken_submit(*_args, **_options):
        raise ZeroDivisionError("a bug")

    engine.submit = broken_submit

    async def main():
        async with AsyncLLM(engine) as llm:
            with pytest.raises(ZeroDivisionError):
                await llm.generate([3])
            with pytest.raises(EngineDead, match="ZeroDivisionError"):
                await llm.generate([3])

    run(main())


def test_queued_commands_fail_when_the_engine_dies(engine):
    reached, go_on = threading.Event(), threading.Event()

    def step_that_dies():
        reached.set()
        go_on.wait(PATIENCE_S)
        raise InvariantError("too late")

    engine.step = step_that_dies

    async def main():
        async with AsyncLLM(engine) as llm:
            first = asyncio.create_task(llm.generate([3]))
            await asyncio.to_thread(reached.wait, PATIENCE_S)
            queued = asyncio.create_task(llm.stats())
            await asyncio.sleep(0.01)
            go_on.set()
            return await asyncio.gather(first, queued, return_exceptions=True)

    assert [type(result) for result in run(main())] == [EngineDead, EngineDead]


def test_closing_ends_open_requests_and_the_engine_is_idle(engine):
    async def main():
        llm = AsyncLLM(engine)
        outputs = await llm.submit([GenerationRequest(prompt=[3], sampling=LONG)])
        await anext(outputs)
        await asyncio.to_thread(llm.close)
        with pytest.raises(EngineDead, match="closed"):
            await outputs.collect()
        with pytest.raises(EngineDead, match="closed"):
            await llm.generate([3])
        assert not llm.is_alive
        llm.close()  # closing twice has no effect

    run(main())

    assert not engine.has_work
    engine.check()


def test_engine_survives_a_closed_event_loop(engine):
    llm = AsyncLLM(engine)
    streams = []

    async def submit():
        streams.append(await llm.submit([GenerationRequest(prompt=[3], sampling=LONG)]))

    try:
        run(submit())  # its event loop is closed while the request is open
        output = run(llm.generate([3], engines.greedy(4)))
        run(idle(llm))
    finally:
        llm.close()

    assert len(output.token_ids) == 4
    assert engine.num_generated_tokens < LONG.max_tokens


def test_engine_thread_ends_even_if_closing_the_engine_fails(engine, monkeypatch):
    def refuse():
        raise StorageError("no space left")

    llm = AsyncLLM(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "close", refuse)
        with pytest.raises(StorageError):
            llm.close()

    assert not engine.runs_in_thread
    AsyncLLM(engine).close()


def test_closing_twice_does_not_affect_an_engine_run_by_another_async_llm(engine):
    first = AsyncLLM(engine)
    first.close()
    second = AsyncLLM(engine)
    first.close()

    assert engine.runs_in_thread
    with pytest.raises(EngineDead, match="closed"):
        run(first.stats())
    second.close()
    assert not engine.runs_in_thread


@pytest.mark.parametrize("sampling", [{"max_tokens": 3}, "greedy"])
def test_request_with_invalid_sampling_is_refused_on_construction(sampling):
    with pytest.raises(RequestError, match="expected sampling to be SamplingParams, got"):
        GenerationRequest([3, 4], sampling)


@pytest.mark.parametrize("prompt", [7, None, b"text"])
def test_submitted_prompt_of_invalid_type_is_refused_and_the_engine_continues(engine, prompt):
    async def main():
        async with AsyncLLM(engine) as llm:
            with pytest.raises(RequestError, match="expected a prompt of token ids, got"):
                await llm.submit([GenerationRequest(prompt)])
            return (await llm.generate([3, 4, 5], engines.greedy(2))).token_ids

    assert len(run(main())) == 2


def test_several_prompts_are_refused_with_a_hint_to_generate(engine):
    async def main():
        async with AsyncLLM(engine) as llm:
            await llm.generate(["one", "two"])

    with pytest.raises(RequestError, match=r"only LLM\.generate takes several prompts"):
        run(main())
