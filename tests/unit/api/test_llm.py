"""The Python entry: what it refuses, and callers that share one engine."""

import itertools
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch

from quire.api.inputs import as_options, as_prompts, as_requests, as_token_ids
from quire.api.llm import LLM
from quire.config.generation_request import (
    OPTION_KINDS,
    GenerationRequest,
    OptionsOfMany,
    RequestOptions,
)
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError, EngineDead, RequestError, StorageError
from quire.layout.options import require_type
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines

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


def test_one_policy_for_all_prompts_or_one_for_each(model):
    llm = LLM(model, kv=KVConfig(memory="1MiB", page_tokens=4, evict_allow="recent"))
    prompts = [[3] * 40, [4] * 40]
    capped = "recent:cap=24,every=6"

    def evicted(evict):
        return [a.usage.evicted_tokens > 0 for a in llm.generate(prompts, GREEDY, evict=evict)]

    assert evicted(None) == [False, False]
    assert evicted(capped) == [True, True]
    assert evicted([None, capped]) == [False, True]
    assert any(delta.usage for delta in llm.stream(prompts[0], GREEDY, evict=capped))
    for wrong, says in {3: "a text such as", (capped,): "or 2 of them, got 1"}.items():
        with pytest.raises(RequestError, match=says):
            as_requests(PROMPTS[:2], None, {"evict": wrong})
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "places",
    [{"priority": [2, 0, 1]}, {"deadline_s": [None, 50.0, 60]}, {"priority": [1, 0, 0]}],
)
def test_priorities_and_deadlines_order_the_line(model, places):
    llm = LLM(model, kv=KVConfig(memory="1MiB"), schedule=ScheduleConfig(max_num_seqs=1))
    ended = []

    def note(stats, deltas):
        ended.extend(delta.request_id for delta in deltas if delta.is_last)

    answers = llm.generate([[3] * 9, [4] * 9, [5] * 9], GREEDY, progress=note, **places)

    first, second, third = (answer.request_id for answer in answers)
    assert ended == [second, third, first]


def test_wrong_places_in_line_are_refused_before_anything_runs(llm):
    for priority, deadline_s, says in (
        ([1], None, "one priority or 2 of them, got 1"),
        (0.5, None, "priority to be a whole number, got 0.5"),
        (0, "soon", "deadline_s to be a number, got 'soon'"),
        (0, [1.0, True], "deadline_s to be a number, got True"),
    ):
        with pytest.raises(RequestError, match=says):
            as_requests(PROMPTS[:2], None, {"priority": priority, "deadline_s": deadline_s})
    with pytest.raises(RequestError, match="prompt 1: expected deadline_s above 0"):
        llm.generate(PROMPTS[:2], GREEDY, deadline_s=[1.0, 0.0])
    assert not llm.engine.has_work


def test_streams_that_are_read_in_turns_each_get_their_own_answer(llm, expected):
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    rounds = list(itertools.zip_longest(*streams))
    assert [tokens_of(filter(None, deltas)) for deltas in zip(*rounds, strict=True)] == expected


def test_generate_runs_beside_an_open_stream(llm, expected):
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    answers = llm.generate(PROMPTS[1:], GREEDY)
    assert [answer.token_ids for answer in answers] == expected[1:]
    assert tokens_of([first, *stream]) == expected[0]


def test_closing_a_stream_leaves_the_others_alone(llm, expected):
    closed, kept = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    next(closed)
    first = next(kept)
    closed.close()
    assert len(llm.stats().requests) == 1
    assert tokens_of([first, *kept]) == expected[1]


def test_closing_the_only_stream_frees_its_memory(llm):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert llm.stats().kv_used_bytes
    stream.close()
    assert not llm.stats().kv_used_bytes


def test_a_closed_llm_takes_no_request_and_says_so(llm):
    answer = llm.generate(PROMPTS[0], GREEDY)
    for _ in range(2):  # twice does no harm
        llm.close()
    calls = {
        "generate": lambda: llm.generate(PROMPTS[0], GREEDY),
        "generate of nothing": lambda: llm.generate([], GREEDY),
        "stream": lambda: next(llm.stream(PROMPTS[0], GREEDY)),
    }
    for call in calls.values():
        with pytest.raises(EngineDead, match="the LLM is closed: make a new LLM"):
            call()

    assert answer[0].token_ids
    assert llm.stats().num_generated_tokens == len(answer[0].token_ids)
    assert llm.ledger()
    assert llm.encode(PROMPTS[0]) == PROMPTS[0]


def test_closing_ends_open_streams(llm):
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    for stream in streams:
        next(stream)
    llm.close()

    assert not llm.stats().requests
    for stream in streams:
        with pytest.raises(EngineDead, match="closed"):
            list(stream)


def test_closing_between_the_steps_of_generate_ends_it(llm):
    with pytest.raises(EngineDead, match="closed"):
        llm.generate(PROMPTS, GREEDY, progress=lambda *_: llm.close())


def test_an_llm_whose_tier_cannot_be_written_is_closed_all_the_same(llm, monkeypatch):
    def refuse():
        raise StorageError("no space left")

    monkeypatch.setattr(llm.engine, "_closing", refuse)
    with pytest.raises(StorageError):
        llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate(PROMPTS[0], GREEDY)


def test_a_progress_function_that_raises_leaves_nothing_behind(llm, expected):
    def progress(stats, deltas):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, GREEDY, progress=progress)
    assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == expected


def test_one_wrong_prompt_of_many_runs_none(llm):
    with pytest.raises(RequestError, match=r"^prompt 4: .*empty"):
        llm.generate([*PROMPTS, []], GREEDY)
    assert llm.stats().num_steps == 0


def test_no_prompts_have_no_answers(llm):
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        (("a", [1, 2]), ["a", [1, 2]]),
        ([1, 2], [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        ((text for text in "ab"), ["a", "b"]),
        ([], []),
    ],
    ids=["text", "texts", "text and ids", "ids", "array", "generator", "nothing"],
)
def test_one_prompt_and_many_are_told_apart(given, prompts):
    assert as_prompts(given) == prompts


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"text", "got bytes; decode it"),
        (None, "got NoneType"),
        ({"prompt": "text"}, "got dict"),
        (1.5, "got float"),
        (torch.tensor([1, 2]), r"got Tensor; pass prompt.tolist\(\)"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused(prompt, message):
    for one in as_prompts(prompt):
        with pytest.raises(RequestError, match=message):
            as_token_ids(one)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"max_tokens": 3}, "expected SamplingParams, got dict"),
        ([GREEDY, 3], "expected SamplingParams, got int"),
        ([GREEDY], "expected one SamplingParams or 2 of them, got 1"),
    ],
    ids=repr,
)
def test_what_are_no_options_is_refused(sampling, message):
    with pytest.raises(RequestError, match=message):
        as_options(sampling, 2)


def test_options_are_one_for_all_or_one_for_each():
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
def test_a_value_of_another_type_is_refused_by_name(value, kinds, message):
    with pytest.raises(ConfigError, match=message):
        require_type("kv", value, *kinds)


def test_a_value_of_its_type_is_taken():
    require_type("share", 1, float)
    require_type("flag", True, bool)
    require_type("kv", None, KVConfig, type(None))


def test_constructors_name_what_has_the_wrong_type():
    # a process of its own: the type checks of test runs would answer first
    program = """
from quire import LLM, KVConfig, ScheduleConfig
from quire.errors import ConfigError
for make in (
    lambda: LLM("quire-tiny", kv={"memory": "1MiB"}),
    lambda: LLM("quire-tiny", schedule=5),
    lambda: LLM(None),
    lambda: LLM("quire-tiny", dtype=float),
    lambda: KVConfig(memory=1.5),
    lambda: KVConfig(page_tokens="16"),
    lambda: ScheduleConfig(max_num_seqs=True),
):
    try:
        make()
    except ConfigError as error:
        print(str(error).split(",")[0])
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines() == [
        "expected kv to be KVConfig or None",
        "expected schedule to be ScheduleConfig or None",
        "expected model to be str or Path",
        "expected dtype to be str",
        "--kv-memory: 1.5 is not a size: expected a number of bytes of 0 or more",
        "expected page_tokens to be int",
        "expected max_num_seqs to be int",
    ]


def test_prompts_run_on_the_account_they_are_given(llm):
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    for tenant, salt, cached in (("a", "", 0), ("b", "", 0), ("a", "x", 0), ("a", "", 8)):
        [answer] = llm.generate([prompt], GREEDY, tenant=tenant, cache_salt=salt)
        assert answer.usage.cached_tokens == cached

    assert [stats.tenant for stats in llm.stats().served] == ["a", "b"]


def test_a_request_brings_its_own_options(llm, expected):
    requests = [
        GenerationRequest(prompt, GREEDY, priority=n, cache_salt=str(n), request_id=f"own-{n}")
        for n, prompt in enumerate(PROMPTS)
    ]
    answers = llm.generate(requests)
    assert [answer.request_id for answer in answers] == [f"own-{n}" for n in range(len(PROMPTS))]
    assert [answer.token_ids for answer in answers] == expected
    assert tokens_of(llm.stream(requests[0])) == expected[0]


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        (GREEDY, {}, "got sampling in addition"),
        (None, {"priority": 1}, "got priority in addition"),
        (None, {"prioritty": 1}, "unknown request option 'prioritty': expected one of request_id"),
    ],
)
def test_options_beside_a_request_are_refused(sampling, options, message):
    with pytest.raises(RequestError, match=message):
        as_requests([GenerationRequest([3])], sampling, options)


def test_every_option_of_a_request_has_its_kinds_and_types():
    names = {field.name for field in fields(GenerationRequest)} - {"prompt", "sampling"}
    assert names == set(OPTION_KINDS)
    assert names == RequestOptions.__annotations__.keys() == OptionsOfMany.__annotations__.keys()
