import asyncio
import gc
import inspect
import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quire import LLM, AsyncLLM, GenerationRequest, KVConfig, SamplingParams, ScheduleConfig
from quire.api.llm import as_options, as_prompts, as_requests, as_token_ids
from quire.config.generation_request import OPTION_KINDS, OptionsOfMany, RequestOptions
from quire.errors import ConfigError, EngineDead, RequestError, StorageError
from quire.layout.options import require_type
from support import engines, zoo
from support.byte_tokenizer import byte_tokenizer

PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12]]
GREEDY = engines.greedy()


@pytest.fixture(scope="module")
def model():
    return engines.load("llama")


@pytest.fixture
def llm(model):
    llm = LLM(model, kv=KVConfig(memory="256KiB", page_tokens=4))
    yield llm
    assert not llm.engine.has_work
    llm.engine.check()


@pytest.fixture(scope="module")
def expected(model):
    llm = LLM(model, kv=KVConfig(memory="256KiB", page_tokens=4))
    return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]


def tokens_of(deltas):
    return tuple(token for delta in deltas for token in delta.token_ids)


def test_evict_applies_to_all_prompts_or_per_prompt(model):
    llm = LLM(model, kv=KVConfig(memory="1MiB", page_tokens=4, evict_allow="recent"))
    prompts = [[3] * 40, [4] * 40]
    capped = "recent:cap=24,every=6"

    def evicted(evict):
        return [o.usage.evicted_tokens > 0 for o in llm.generate(prompts, GREEDY, evict=evict)]

    assert evicted(None) == [False, False]
    assert evicted(capped) == [True, True]
    assert evicted([None, capped]) == [False, True]
    assert any(delta.usage for delta in llm.stream(prompts[0], GREEDY, evict=capped))
    with pytest.raises(ConfigError, match=r"separated by semicolons.*'h2o,snapkv'"):
        LLM(model, kv=KVConfig(memory="1MiB", evict_allow="h2o,snapkv"))
    for evict, message in {3: "a text such as", (capped,): "or 2 of them, got 1"}.items():
        with pytest.raises(RequestError, match=message):
            as_requests(PROMPTS[:2], None, {"evict": evict})
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("memory", "evict", "sampling", "limit"),
    [
        ("1MiB", None, {}, "context"),
        ("64KiB", None, {}, "kv_memory"),
        ("64KiB", None, {"min_tokens": 500}, "kv_memory"),
        ("64KiB", "recent:cap=24,every=6", {}, "context"),
        ("1MiB", None, {"max_tokens": 492}, ""),
        ("64KiB", "recent:cap=24,every=6", {"max_tokens": 492}, ""),
    ],
)
def test_max_tokens_is_limited_to_the_context_and_the_kv_memory(
    model, memory, evict, sampling, limit
):
    llm = LLM(model, kv=KVConfig(memory=memory, page_tokens=4, evict_allow="recent"))
    params = SamplingParams(**{"max_tokens": 1_000} | sampling, ignore_eos=True, temperature=0)

    [output] = llm.generate([3] * 20, params, evict=evict, limit_max_tokens=True)

    assert output.usage.max_tokens_limit == limit
    assert len(output.token_ids) == output.usage.max_tokens == (205 if "kv" in limit else 492)
    assert output.finish_reason == "length"
    if limit:
        with pytest.raises(RequestError):
            llm.generate([3] * 20, params, evict=evict, limit_max_tokens=False)


def test_a_prompt_above_the_context_is_told_what_the_memory_holds(model):
    """A prompt of the context alone would be refused again, for the KV memory."""
    with pytest.raises(RequestError, match=r"context 512; shorten"):
        LLM(model, kv=KVConfig(memory="8MiB", page_tokens=4)).generate([3] * 600)
    small = LLM(model, kv=KVConfig(memory="64KiB", page_tokens=4))
    with pytest.raises(RequestError, match=r"context 512, and the KV memory holds \d+") as refused:
        small.generate([3] * 600)
    held = int(re.search(r"holds (\d+)", str(refused.value))[1])
    small.generate([3] * held, SamplingParams(max_tokens=1))
    with pytest.raises(RequestError):
        small.generate([3] * (held + 1), SamplingParams(max_tokens=1))


def test_max_tokens_is_limited_to_the_memory_of_a_tenant(model):
    schedule = ScheduleConfig(tenants="a:guaranteed=32KiB,burst=0;b")
    llm = LLM(model, kv=KVConfig(memory="64KiB", page_tokens=4), schedule=schedule)
    params = SamplingParams(max_tokens=1_000, ignore_eos=True, temperature=0)
    limited = {"limit_max_tokens": True}

    [[own], [other]] = [llm.generate([3] * 20, params, tenant=t, **limited) for t in "ab"]

    assert own.usage.max_tokens_limit == "tenant_kv_memory"
    assert other.usage.max_tokens_limit == "kv_memory"
    assert len(own.token_ids) < len(other.token_ids)
    assert 28 * 1024 < own.usage.kv_peak_bytes <= 32 * 1024
    params = SamplingParams(max_tokens=own.usage.max_tokens + 1)
    with pytest.raises(RequestError, match="tenant 'a'"):
        llm.generate([3] * 20, params, tenant="a")


@pytest.mark.parametrize(
    "options", [{"priority": [2, 0, 1]}, {"deadline_s": [None, 50.0, 60]}, {"priority": [1, 0, 0]}]
)
def test_priorities_and_deadlines_order_waiting_requests(model, options):
    llm = LLM(model, kv=KVConfig(memory="1MiB"), schedule=ScheduleConfig(max_num_seqs=1))
    prompts, seen = [[3] * 9, [4] * 9, [5] * 9], []
    options["progress"] = lambda _, deltas: seen.extend(deltas)
    outputs = llm.generate(prompts, GREEDY, **options)

    first, second, third = (output.request_id for output in outputs)
    assert [delta.request_id for delta in seen if delta.is_last] == [second, third, first]


def test_one_invalid_option_or_prompt_refuses_all_before_any_request_runs(llm):
    for priority, deadline_s, message in (
        ([1], None, "one priority or 2 of them, got 1"),
        (0.5, None, "priority to be a whole number, got 0.5"),
        (0, "soon", "deadline_s to be a number, got 'soon'"),
        (0, [1.0, True], "deadline_s to be a number, got True"),
    ):
        with pytest.raises(RequestError, match=message):
            as_requests(PROMPTS[:2], None, {"priority": priority, "deadline_s": deadline_s})
    with pytest.raises(RequestError, match="prompt 1: expected deadline_s above 0"):
        llm.generate(PROMPTS[:2], GREEDY, deadline_s=[1.0, 0.0])
    with pytest.raises(RequestError, match=r"^prompt 4: .*empty"):
        llm.generate([*PROMPTS, []], GREEDY)
    assert llm.generate([], GREEDY) == []
    assert llm.stats().num_steps == 0


def test_interleaved_streams_each_yield_their_own_output_also_if_one_is_closed(llm, expected):
    only = llm.stream(PROMPTS[0], GREEDY)
    next(only)
    assert llm.stats().kv_used_bytes
    only.close()
    assert not llm.stats().kv_used_bytes
    closed, other = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(closed)
    first = next(other)
    closed.close()
    assert len(llm.stats().requests) == 1
    assert tokens_of([first, *other]) == expected[1]

    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    with pytest.raises(ZeroDivisionError):  # cancels its own requests
        llm.generate(PROMPTS, GREEDY, progress=lambda *_: 1 // 0)
    rounds = list(itertools.zip_longest(*streams))
    assert [tokens_of(filter(None, deltas)) for deltas in zip(*rounds, strict=True)] == expected


def test_closing_ends_open_requests_and_a_closed_llm_refuses_others(llm, model, monkeypatch):
    output = llm.generate(PROMPTS[0], GREEDY)
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    generated = llm.stats().num_generated_tokens
    for _ in range(2):  # closing twice has no effect
        llm.close()
    assert not llm.stats().requests
    for stream in streams:
        with pytest.raises(EngineDead, match="closed"):
            list(stream)
    other = LLM(model, kv=KVConfig(memory="256KiB"))
    with pytest.raises(EngineDead, match="closed"):  # between two steps
        other.generate(PROMPTS, GREEDY, progress=lambda *_: other.close())
    unwritten = LLM(model, kv=KVConfig(memory="256KiB"))  # its tier cannot be written
    monkeypatch.setattr(unwritten.engine, "close", Mock(side_effect=StorageError("no space left")))
    with pytest.raises(StorageError):
        unwritten.close()
    with pytest.raises(EngineDead, match="closed"):
        unwritten.generate(PROMPTS[0], GREEDY)
    calls = {
        "generate": lambda: llm.generate(PROMPTS[0], GREEDY),
        "generate with no prompts": lambda: llm.generate([], GREEDY),
        "stream": lambda: next(llm.stream(PROMPTS[0], GREEDY)),
    }
    for call in calls.values():
        with pytest.raises(EngineDead, match="the LLM is closed: create a new LLM"):
            call()

    assert output[0].token_ids
    assert llm.stats().num_generated_tokens == generated > len(output[0].token_ids)
    assert llm.ledger()
    assert llm.encode(PROMPTS[0]) == PROMPTS[0]


def test_prompts_and_lists_of_prompts_are_distinguished_and_invalid_types_refused():
    for given, prompts in (
        *(("text", ["text"]), (["a", "b"], ["a", "b"]), (("a", [1, 2]), ["a", [1, 2]])),
        *(([1, 2], [[1, 2]]), (np.array([1, 2]), [[1, 2]]), ((text for text in "ab"), ["a", "b"])),
        ([], []),
    ):
        assert as_prompts(given) == prompts
    for prompt, message in (
        *((b"text", "got bytes; decode it"), (None, "got NoneType")),
        *(({"prompt": "text"}, "got dict"), (1.5, "got float")),
        (torch.tensor([1, 2]), r"got Tensor; pass prompt.tolist\(\)"),
    ):
        for item in as_prompts(prompt):
            with pytest.raises(RequestError, match=message):
                as_token_ids(item)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 3}, "expected SamplingParams, got dict"),
        ([GREEDY, 3], "expected SamplingParams, got int"),
        ([GREEDY], "expected one SamplingParams or 2 of them, got 1"),
    ],
    ids=repr,
)
def test_sampling_options_apply_to_all_prompts_or_per_prompt(sampling, message):
    with pytest.raises(RequestError, match=message):
        as_options(sampling, 2)
    other = SamplingParams(max_tokens=1)
    assert as_options(GREEDY, 2) == [GREEDY, GREEDY]
    assert as_options((GREEDY, other), 2) == [GREEDY, other]
    assert as_options(None, 2) == [None, None]


@pytest.mark.parametrize(
    ("value", "kinds", "message"),
    [
        ("1MiB", (KVConfig, type(None)), "expected kv to be KVConfig or None, got '1MiB'"),
        (True, (int, str), "expected kv to be int or str, got True"),
        (1.5, (int,), "expected kv to be int, got 1.5"),
        ("0.5", (float,), "expected kv to be float, got '0.5'"),
    ],
)
def test_value_of_wrong_type_is_refused_by_parameter_name(value, kinds, message):
    with pytest.raises(ConfigError, match=message):
        require_type("kv", value, *kinds)
    for accepted, kind in ((1, float), (True, bool), (None, type(None))):
        require_type("kv", accepted, kind)


SIZE = "expected a number of bytes from 0 to 2^63 - 1"


def construct(cls, *args, **kwargs):
    """Construct without the type checks of test runs, which would raise first."""
    made = cls.__new__(cls)
    inspect.unwrap(cls.__init__)(made, *args, **kwargs)
    return made


@pytest.mark.parametrize(
    ("cls", "args", "kwargs", "message"),
    [
        (LLM, ("quire-tiny",), {"kv": {"memory": "1MiB"}}, "expected kv to be KVConfig or None"),
        (LLM, ("quire-tiny",), {"schedule": 5}, "expected schedule to be ScheduleConfig or None"),
        (LLM, (None,), {}, "expected model to be str or Path or LoadedModel or PreTrainedModel"),
        (LLM, ("quire-tiny",), {"dtype": float}, "expected dtype to be str"),
        (KVConfig, (), {"memory": 1.5}, f"--kv-memory: 1.5 is not a size: {SIZE}"),
        (KVConfig, (), {"page_tokens": "16"}, "expected page_tokens to be int"),
        (ScheduleConfig, (), {"max_num_seqs": True}, "expected max_num_seqs to be int"),
    ],
)
def test_constructors_name_the_parameter_of_wrong_type(cls, args, kwargs, message):
    with pytest.raises(ConfigError) as raised:
        construct(cls, *args, **kwargs)
    assert str(raised.value).split(",")[0] == message


def test_requests_set_tenants_salts_metadata_and_their_own_options(llm, expected):
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    for tenant, salt, cached in (("a", "", 0), ("b", "", 0), ("a", "x", 0), ("a", "", 8)):
        [output] = llm.generate([prompt], GREEDY, tenant=tenant, cache_salt=salt)
        assert output.usage.cached_tokens == cached
    assert [stats.tenant for stats in llm.stats().served] == ["a", "b"]

    requests = [
        GenerationRequest(prompt, GREEDY, priority=n, cache_salt=str(n), request_id=f"own-{n}")
        for n, prompt in enumerate(PROMPTS)
    ]
    outputs = llm.generate(requests)
    assert [output.request_id for output in outputs] == [f"own-{n}" for n in range(len(PROMPTS))]
    assert [output.token_ids for output in outputs] == expected
    assert tokens_of(llm.stream(requests[0])) == expected[0]

    given = dict(METADATA)
    requests = [GenerationRequest([3, 4, 5], GREEDY, metadata=one) for one in (given, None)]
    given["user"] = "another"  # metadata is copied
    found = [output.request for output in llm.generate(requests)]
    assert [request.metadata for request in found] == [METADATA, None]


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        (GREEDY, {}, "got sampling in addition"),
        (None, {"priority": 1}, "got priority in addition"),
        (None, {"prioritty": 1}, "unknown request option 'prioritty': expected one of request_id"),
    ],
)
def test_options_in_addition_to_a_generation_request_are_refused(sampling, options, message):
    with pytest.raises(RequestError, match=message):
        as_requests([GenerationRequest([3])], sampling, options)
    names = {field.name for field in fields(GenerationRequest)} - {"prompt", "sampling"}
    assert names == set(OPTION_KINDS)
    assert names == RequestOptions.__annotations__.keys() == OptionsOfMany.__annotations__.keys()


def in_memory():
    model = zoo.build("llama")
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"evict": "h2o:recent=8,cap=24,every=8", "codec": "int8"},
        {"evict": "snapkv:window=6,cap=24,every=8,when=prefill_end"},
    ],
)
def test_a_model_in_memory_gives_the_tokens_of_its_folder_and_is_restored(options, model):
    prompts = [[3 + (i * k) % 60 for i in range(40)] for k in (1, 5, 7)]
    kv = KVConfig(memory="1MiB", page_tokens=4, **options)
    expected = [output.token_ids for output in LLM(model, kv=kv).generate(prompts, GREEDY)]
    own = in_memory()
    forward = own.forward
    llm = LLM(own, kv=kv)
    found = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    assert own.forward != forward
    llm.close()
    llm.close()

    assert found == expected
    assert own.forward == forward
    assert own.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2).shape == (1, 5)


def test_a_model_in_memory_is_restored_if_the_engine_cannot_start_or_is_garbage():
    own = in_memory()
    forward = own.forward
    with pytest.raises(ConfigError):
        LLM(own, kv=KVConfig(memory="64B"))
    assert own.forward == forward
    LLM(own, kv=KVConfig(memory="1MiB"))
    gc.collect()

    assert own.forward == forward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "dtype='float32' cannot be set for a model in memory"),
        ({"device": "cpu"}, "device='cpu' cannot be set for a model in memory"),
        ({"model_impl": "native"}, "model_impl='native' cannot be set"),
        ({"weight_codec": "int8"}, "weight_codec='int8' cannot be set"),
        ({"weights_memory": "1GiB"}, "weights_memory cannot be set for a loaded model"),
        ({"tensor_parallel_size": 2}, "got a model in memory, LlamaForCausalLM"),
    ],
)
def test_options_of_loading_are_refused_for_a_model_in_memory(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(in_memory(), **options)
    llm = LLM(in_memory(), tokenizer=byte_tokenizer(), kv=KVConfig(memory="1MiB"))
    [output] = llm.generate("ab", GREEDY)
    assert output.text == llm.model.tokenizer.decode(list(output.token_ids))
    with pytest.raises(ConfigError, match="leave tokenizer out"):
        LLM("quire-tiny", tokenizer=byte_tokenizer())


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if not (loop.last and open) %}"
    "</{{ m.role }}>{% endif %}{% endfor %}{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]
BYE = [{"role": "user", "content": [{"type": "text", "text": "bye"}]}]


@pytest.fixture(scope="module")
def chatting():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return LLM(in_memory(), tokenizer=tokenizer, kv=KVConfig(memory="1MiB", page_tokens=4))


@pytest.mark.parametrize(
    ("messages", "options", "prompts"),
    [
        (HELLO, {}, ["<user>hello</user><assistant>"]),
        ([HELLO, BYE], {}, [f"<user>{text}</user><assistant>" for text in ("hello", "bye")]),
        (HELLO, {"add_generation_prompt": False}, ["<user>hello</user>"]),
        (
            [*HELLO, {"role": "assistant", "content": "I"}],
            {"add_generation_prompt": False, "continue_final_message": True},
            ["<user>hello</user><assistant>I"],
        ),
        (HELLO, {"tools": [{"type": "function"}]}, ["<user>hello</user>1 tools<assistant>"]),
        (HELLO, {"template_kwargs": {"open": True}}, ["<user>hello<assistant>"]),
    ],
)
def test_chat_generates_from_the_prompts_of_the_template(chatting, messages, options, prompts):
    outputs = chatting.chat(messages, GREEDY, **options)
    encoded = [list(output.prompt_token_ids) for output in outputs]
    assert [chatting.model.tokenizer.decode(one) for one in encoded] == prompts
    expected = chatting.generate(encoded, GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "expected messages such as"),
        ([], "expected messages such as"),
        ([HELLO, "hello"], "expected messages such as"),
        ([HELLO, [{"role": "user"}]], "^conversation 1: "),
    ],
)
def test_invalid_conversations_are_refused_before_any_request_runs(chatting, messages, message):
    with pytest.raises(RequestError, match=message):
        inspect.unwrap(LLM.chat)(chatting, messages, GREEDY)
    assert not chatting.engine.has_work


def test_chat_of_an_async_llm_is_that_of_the_llm(chatting):
    async def answer():
        async with AsyncLLM(chatting.engine) as llm:
            with pytest.raises(RequestError, match="expected one conversation, got 2"):
                await inspect.unwrap(AsyncLLM.chat)(llm, [HELLO, HELLO])
            return await llm.chat(HELLO, GREEDY, tools=[{"type": "function"}])

    [expected] = chatting.chat(HELLO, GREEDY, tools=[{"type": "function"}])
    output = asyncio.run(answer())

    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.token_ids == expected.token_ids


METADATA = {"user": "u-1", "trace": "t-9"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "expected metadata to be a dictionary, got 7"),
        ({"n": 1}, "expected metadata with string values, got 'n': 1"),
        ({str(i): "" for i in range(17)}, "16 pairs at most, got 17"),
        ({"n" * 65: ""}, "names of 64 and values of 512 characters at most, got 65 and 0"),
        ({"n": "v" * 513}, "got 1 and 513"),
    ],
)
def test_invalid_metadata_is_refused(given, message):
    with pytest.raises(RequestError, match=message) as refused:
        GenerationRequest([3], metadata=given)
    assert refused.value.param == "metadata"
    with pytest.raises(RequestError, match="expected priority to be a whole number, got 'high'"):
        GenerationRequest([3], priority="high")
    for sampling in ({"max_tokens": 3}, "greedy"):
        with pytest.raises(RequestError, match="expected sampling to be SamplingParams, got"):
            GenerationRequest([3, 4], sampling)


THREADS, PATIENCE_S = 8, 120.0
FOUR = engines.greedy(4)


def prompts_of(thread: int, call: int) -> list[list[int]]:
    """One prompt that other threads also use, and one unique to this call."""
    return [[3 + call % 5, 4, 5], [6 + thread, 7 + call, 8]]


def in_threads(work, count=THREADS):
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(work, number) for number in range(count)]
        return [future.result(timeout=PATIENCE_S) for future in futures]


def streamed(llm, prompt):
    return tuple(t for delta in llm.stream(prompt, FOUR) for t in delta.token_ids)


@pytest.mark.parametrize("num_calls", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_outputs_in_several_threads_equal_those_of_one_thread(llm, num_calls):
    def calls(thread):
        batches = [prompts_of(thread, call) for call in range(num_calls)]
        return [[o.token_ids for o in llm.generate(batch, FOUR)] for batch in batches]

    expected = [calls(thread) for thread in range(THREADS)]

    assert in_threads(calls) == expected


def test_concurrent_stream_generate_and_stats_do_not_interfere(llm):
    def calls(thread):
        first, second = prompts_of(thread, 0)
        results = [streamed(llm, first)]
        results += [output.token_ids for output in llm.generate([second], FOUR)]
        assert llm.ledger()
        assert llm.stats().num_steps
        return results

    expected = [calls(thread) for thread in range(THREADS)]

    assert in_threads(calls) == expected


def test_a_stream_closed_while_another_thread_generates_is_cancelled(llm):
    stream = llm.stream([3, 4], engines.greedy(100))
    next(stream)
    [outputs] = in_threads(lambda _: llm.generate([[5, 6]], FOUR), 1)  # is not blocked
    assert outputs[0].token_ids
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
        llm.generate([[5, 6]], FOUR, progress=progress)
        closing.result(PATIENCE_S)

    assert not llm.engine.has_work


def test_generate_can_be_called_while_iterating_a_stream_and_in_a_progress_callback(llm):
    plain = [output.token_ids for output in llm.generate([[5, 6]], FOUR)]
    inner = []

    def progress(stats, deltas):
        inner.extend(output.token_ids for output in llm.generate([[5, 6]], FOUR))

    for _ in llm.stream([3, 4], FOUR):
        inner.extend(output.token_ids for output in llm.generate([[5, 6]], FOUR))
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
    outputs = llm.generate([[5, 6]], FOUR)

    assert "between two steps, got one from inside a step" in str(listener.result)
    assert outputs[0].token_ids
    llm.engine.events.subscribe(listener := Listener(llm, llm.stats))  # may be read in a step
    llm.generate([[5, 6]], FOUR)
    assert listener.result.kv_total_bytes == llm.stats().kv_total_bytes


def test_stream_garbage_collected_inside_a_step_is_cancelled_after_the_step(llm):
    streams = [llm.stream([3, 4], FOUR)]
    next(streams[0])
    streams.append(streams)  # a cycle: only the garbage collector frees it
    expected = [output.token_ids for output in llm.generate([[5, 6]], FOUR)]

    def collect():
        nonlocal streams
        streams = None
        return gc.collect()

    llm.engine.events.subscribe(listener := Listener(llm, collect))
    outputs = llm.generate([[7, 8], [5, 6]], FOUR)

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
            return (await running.generate([5, 6], FOUR)).token_ids

    generated = asyncio.run(main())

    assert generated == llm.generate([[5, 6]], FOUR)[0].token_ids
