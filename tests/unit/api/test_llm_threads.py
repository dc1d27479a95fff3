"""One `LLM` in several threads: calls run one after the other, and no call blocks forever."""

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
    """One prompt that other threads also use, and one unique to this call."""
    return [[3 + call % 5, 4, 5], [6 + thread, 7 + call, 8]]


def in_threads(work, count=THREADS):
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(work, number) for number in range(count)]
        return [future.result(timeout=PATIENCE_S) for future in futures]


def streamed(llm, prompt):
    return tuple(t for delta in llm.stream(prompt, GREEDY) for t in delta.token_ids)


@pytest.mark.parametrize("num_calls", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_outputs_in_several_threads_equal_those_of_one_thread(llm, num_calls):
    def calls(thread):
        batches = [prompts(thread, call) for call in range(num_calls)]
        return [[o.token_ids for o in llm.generate(batch, GREEDY)] for batch in batches]

    expected = [calls(thread) for thread in range(THREADS)]

    assert in_threads(calls) == expected


def test_concurrent_stream_generate_and_stats_do_not_interfere(llm):
    def calls(thread):
        results = []
        for call in range(1):
            first, second = prompts(thread, call)
            results.append(streamed(llm, first))
            results.extend(output.token_ids for output in llm.generate([second], GREEDY))
            assert llm.ledger()
            assert llm.stats().num_steps
        return results

    expected = [calls(thread) for thread in range(THREADS)]

    assert in_threads(calls) == expected


def test_partly_read_stream_does_not_block_other_threads(llm):
    stream = llm.stream([3, 4], GREEDY)
    next(stream)

    [outputs] = in_threads(lambda _: llm.generate([[5, 6]], GREEDY), 1)

    assert outputs[0].token_ids
    stream.close()


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


def test_generate_can_be_called_while_iterating_a_stream_and_in_a_progress_callback(llm):
    plain = [output.token_ids for output in llm.generate([[5, 6]], GREEDY)]
    inner = []

    def progress(stats, deltas):
        inner.extend(output.token_ids for output in llm.generate([[5, 6]], GREEDY))

    for _ in llm.stream([3, 4], GREEDY):
        inner.extend(output.token_ids for output in llm.generate([[5, 6]], GREEDY))
    llm.generate([[7]], engines.greedy(3), progress=progress)

    assert len(inner) > 3
    assert inner == plain * len(inner)


class Listener:
    """Calls `work` at the first event, which occurs inside a step."""

    def __init__(self, llm, work):
        self.llm, self.work, self.result = llm, work, None

    def __call__(self, event):
        self.llm.engine.events.unsubscribe(self)
        try:
            self.result = self.work()
        except RequestError as error:
            self.result = error


@pytest.mark.parametrize("call", ["generate", "stream", "close"])
def test_call_inside_a_step_is_refused(llm, call):
    def work():
        results = llm.close() if call == "close" else getattr(llm, call)([3, 4])
        return list(results)

    llm.engine.events.subscribe(listener := Listener(llm, work))
    outputs = llm.generate([[5, 6]], GREEDY)

    assert "between two steps, got one from inside a step" in str(listener.result)
    assert outputs[0].token_ids


def test_stats_can_be_read_inside_a_step(llm):
    llm.engine.events.subscribe(listener := Listener(llm, llm.stats))
    llm.generate([[5, 6]], GREEDY)

    assert listener.result.kv_total_bytes == llm.stats().kv_total_bytes


def test_stream_garbage_collected_inside_a_step_is_cancelled_after_the_step(llm):
    streams = [llm.stream([3, 4], GREEDY)]
    next(streams[0])
    streams.append(streams)  # a cycle: only the garbage collector frees it
    expected = [output.token_ids for output in llm.generate([[5, 6]], GREEDY)]

    def collect():
        nonlocal streams
        streams = None
        return gc.collect()

    llm.engine.events.subscribe(listener := Listener(llm, collect))
    outputs = llm.generate([[7, 8], [5, 6]], GREEDY)

    assert listener.result
    assert outputs[1].token_ids == expected[0]
    assert not llm.engine.has_work


def test_engine_run_by_an_async_llm_is_refused(llm):
    async def main():
        async with AsyncLLM(llm.engine) as running:
            for call in (llm.generate, llm.stream):
                with pytest.raises(RequestError, match="submit to the AsyncLLM"):
                    list(call([3, 4]))
            with pytest.raises(ConfigError, match="thread of another AsyncLLM"):
                AsyncLLM(llm.engine)
            return (await running.generate([5, 6], GREEDY)).token_ids

    generated = asyncio.run(main())

    assert generated == llm.generate([[5, 6]], GREEDY)[0].token_ids
