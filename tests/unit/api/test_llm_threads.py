"""One `LLM` in several threads: calls run one after the other, and no call waits for ever."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.api.async_llm import AsyncLLM
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError, RequestError
from support import engines

THREADS, PATIENCE_S = 8, 120.0
GREEDY = engines.greedy(4)


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


@pytest.fixture
def llm(model):
    llm = LLM(model, kv=KVConfig(memory="256KiB", page_tokens=4))
    yield llm
    assert not llm.engine.has_work
    llm.engine.check()


def prompts(thread: int, call: int) -> list[list[int]]:
    """Some that other threads ask too, and one of this call alone."""
    return [[3 + call % 5, 4, 5], [6 + thread, 7 + call, 8]]


def in_threads(work, count=THREADS):
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(work, number) for number in range(count)]
        return [future.result(timeout=PATIENCE_S) for future in futures]


def streamed(llm, prompt):
    return tuple(t for delta in llm.stream(prompt, GREEDY) for t in delta.token_ids)


@pytest.mark.parametrize("num_calls", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_threads_get_the_answers_of_one_thread(llm, num_calls):
    def calls(thread):
        requested = [prompts(thread, call) for call in range(num_calls)]
        return [[a.token_ids for a in llm.generate(some, GREEDY)] for some in requested]

    expected = [calls(thread) for thread in range(THREADS)]

    assert in_threads(calls) == expected


def test_streams_generate_and_stats_in_threads_do_not_disturb_each_other(llm):
    def calls(thread):
        made = []
        for call in range(1):
            first, second = prompts(thread, call)
            made.append(streamed(llm, first))
            made.extend(answer.token_ids for answer in llm.generate([second], GREEDY))
            assert llm.ledger()
            assert llm.stats().num_steps
        return made

    expected = [calls(thread) for thread in range(THREADS)]

    assert in_threads(calls) == expected


def test_a_stream_left_half_way_blocks_no_other_thread(llm):
    stream = llm.stream([3, 4], GREEDY)
    next(stream)

    [answers] = in_threads(lambda _: llm.generate([[5, 6]], GREEDY), 1)

    assert answers[0].token_ids
    stream.close()


def test_a_stream_may_be_closed_in_another_thread(llm):
    stream = llm.stream([3, 4], GREEDY)
    next(stream)

    in_threads(lambda _: stream.close(), 1)

    assert not llm.stats().requests


def test_a_stream_closed_while_another_thread_generates_is_cancelled(llm):
    stream = llm.stream([3, 4], engines.greedy(100))
    next(stream)
    running, closed = threading.Event(), threading.Event()

    def progress(stats, deltas):
        running.set()
        assert closed.wait(PATIENCE_S)

    def close(number):
        assert running.wait(PATIENCE_S)
        stream.close()  # must not wait for `generate`
        closed.set()

    with ThreadPoolExecutor(1) as other:
        closing = other.submit(close, 0)
        llm.generate([[5, 6]], GREEDY, progress=progress)
        closing.result(PATIENCE_S)

    assert not llm.engine.has_work


def test_generate_may_be_called_inside_the_loop_over_a_stream_and_in_progress(llm):
    plain = [answer.token_ids for answer in llm.generate([[5, 6]], GREEDY)]
    inner = []

    def progress(stats, deltas):
        inner.extend(answer.token_ids for answer in llm.generate([[5, 6]], GREEDY))

    for _ in llm.stream([3, 4], GREEDY):
        inner.extend(answer.token_ids for answer in llm.generate([[5, 6]], GREEDY))
    llm.generate([[7]], engines.greedy(3), progress=progress)

    assert len(inner) > 3
    assert inner == plain * len(inner)


class Listener:
    """Does something at the first event, which happens inside a step."""

    def __init__(self, llm, work):
        self.llm, self.work, self.result = llm, work, None

    def __call__(self, event):
        self.llm.engine.events.unsubscribe(self)
        try:
            self.result = self.work()
        except RequestError as error:
            self.result = error


@pytest.mark.parametrize("call", ["generate", "stream", "close"])
def test_a_call_from_inside_a_step_is_refused(llm, call):
    def work():
        made = llm.close() if call == "close" else getattr(llm, call)([3, 4])
        return list(made)

    llm.engine.events.subscribe(listener := Listener(llm, work))
    answers = llm.generate([[5, 6]], GREEDY)

    assert "between two steps, got one from inside a step" in str(listener.result)
    assert answers[0].token_ids


def test_numbers_may_be_read_inside_a_step(llm):
    llm.engine.events.subscribe(listener := Listener(llm, llm.stats))
    llm.generate([[5, 6]], GREEDY)

    assert listener.result.kv_total_bytes == llm.stats().kv_total_bytes


def test_a_stream_that_python_closes_inside_a_step_is_cancelled_after_it(llm):
    streams = [llm.stream([3, 4], GREEDY)]
    next(streams[0])
    streams.append(streams)  # a cycle: only a collection finds it
    expected = [answer.token_ids for answer in llm.generate([[5, 6]], GREEDY)]

    def collect():
        nonlocal streams
        streams = None
        return gc.collect()

    llm.engine.events.subscribe(listener := Listener(llm, collect))
    answers = llm.generate([[7, 8], [5, 6]], GREEDY)

    assert listener.result
    assert answers[1].token_ids == expected[0]
    assert not llm.engine.has_work


def test_an_engine_that_an_async_llm_runs_is_refused(llm):
    async def main():
        async with AsyncLLM(llm.engine) as running:
            for call in (llm.generate, llm.stream):
                with pytest.raises(RequestError, match="submit to the AsyncLLM"):
                    list(call([3, 4]))
            with pytest.raises(ConfigError, match="thread of another AsyncLLM"):
                AsyncLLM(llm.engine)
            return (await running.generate([5, 6], GREEDY)).token_ids

    requested = asyncio.run(main())

    assert requested == llm.generate([[5, 6]], GREEDY)[0].token_ids
