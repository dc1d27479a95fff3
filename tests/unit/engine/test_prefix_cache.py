"""Cached prefixes in the engine: what is found, that answers do not change, who may share."""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import RequestError
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines
from support.kv_options import kv_config

PAGE = 4
PROMPT = [5, 9, 13, 2, 7, 21, 3, 3, 8, 30, 11, 6, 19]  # 13 tokens: three whole pages and one more
KV = {"memory": "512KiB", "page_tokens": PAGE}


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2"])
def model(request):
    return engines.load(request.param)


def engine_of(model, *, kv=None, **schedule):
    return Engine(model, kv_config(**KV | (kv or {})), ScheduleConfig(**schedule))


def ask(engine, prompts, params=None, **options):
    """Submit all at once; return answers by their order, and their usages."""
    ids = [
        engine.submit(GenerationRequest(prompt, params or engines.greedy(), **options))
        for prompt in prompts
    ]
    tokens, usages = {i: [] for i in ids}, {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
            if delta.usage is not None:
                usages[delta.request_id] = delta.usage
        engine.check()
    return [tokens[i] for i in ids], [usages[i] for i in ids]


def test_a_prompt_asked_again_is_read_from_its_last_page_on(model):
    engine = engine_of(model)
    [first], [before] = ask(engine, [PROMPT])
    processed = engine.num_processed_tokens
    [second], [after] = ask(engine, [PROMPT])

    assert (before.cached_tokens, after.cached_tokens) == (0, 12)
    assert second == first
    assert engine.num_processed_tokens - processed == len(PROMPT) - 12 + engines.NEW_TOKENS - 1


def test_requests_of_one_step_share_what_one_of_them_reads(model):
    alone, _ = ask(
        engine_of(model, kv={"enable_prefix_caching": False}), [[*PROMPT, i] for i in range(3)]
    )
    engine = engine_of(model)

    answers, usages = ask(engine, [[*PROMPT, i] for i in range(3)])

    assert [usage.cached_tokens for usage in usages] == [0, 12, 12]
    assert answers == alone
    assert engine.num_steps == engines.NEW_TOKENS


def test_a_prompt_that_is_still_being_read_is_shared_as_far_as_it_is(model):
    engine = engine_of(model, chunk_tokens=4, max_num_batched_tokens=8)

    answers, usages = ask(engine, [PROMPT, PROMPT])

    assert answers[0] == answers[1]
    assert usages[1].cached_tokens == 4


def test_answers_are_part_of_what_is_found(model):
    engine = engine_of(model)
    [answer], _ = ask(engine, [PROMPT])
    whole = [*PROMPT, *answer, 4]
    found = (len(PROMPT) + len(answer) - 1) // PAGE * PAGE  # the last token was never processed

    [after], [usage] = ask(engine, [whole])

    assert usage.cached_tokens == found
    [alone], _ = ask(engine_of(model, kv={"enable_prefix_caching": False}), [whole])
    assert after == alone


def test_logits_behind_a_cached_prefix_are_those_of_a_whole_read(model):
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=3)

    def logprobs(engine):
        engine.submit(GenerationRequest(PROMPT, params))
        found = []
        while engine.has_work:
            for delta in engine.step():
                found += [token.logprob for token in delta.logprobs or ()]
        return torch.tensor(found)

    engine = engine_of(model)
    first, second = logprobs(engine), logprobs(engine)

    assert torch.allclose(first, second, atol=1e-4)


def test_a_prompt_whose_tokens_are_scored_is_read_whole(model):
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    engine = engine_of(model)
    ask(engine, [PROMPT])

    _, [usage] = ask(engine, [PROMPT], params)

    assert usage.cached_tokens == 0


def test_without_the_cache_nothing_is_kept(model):
    engine = engine_of(model, kv={"enable_prefix_caching": False})
    ask(engine, [PROMPT])
    _, [usage] = ask(engine, [PROMPT])

    assert usage.cached_tokens == 0
    assert engine.stats().kv_used_bytes == engine.stats().cached_bytes == 0


def test_nobody_finds_what_another_tenant_or_salt_has_read():
    engine = engine_of(engines.load("llama"))
    ask(engine, [PROMPT], tenant="a")
    found = {
        name: ask(engine, [PROMPT], **options)[1][0].cached_tokens
        for name, options in {
            "other tenant": {"tenant": "b"},
            "nobody": {},
            "salted": {"tenant": "a", "cache_salt": "x"},
            "same": {"tenant": "a"},
        }.items()
    }

    assert found == {"other tenant": 0, "nobody": 0, "salted": 0, "same": 12}


def test_a_prefix_registered_as_public_is_shared_by_all_tenants():
    engine = engine_of(engines.load("llama"))
    engine.share_publicly(PROMPT[:9])
    ask(engine, [PROMPT], tenant="a")

    _, [usage] = ask(engine, [PROMPT], tenant="b")

    assert usage.cached_tokens == 8


@pytest.mark.parametrize("salt", ["a\nb", "a\x00", "x" * 129])
def test_a_salt_that_is_no_plain_text_is_refused(salt):
    engine = engine_of(engines.load("llama"))
    with pytest.raises(RequestError, match="salt"):
        engine.submit(GenerationRequest(PROMPT, cache_salt=salt))


def test_nothing_is_published_after_an_eviction():
    """At most 8 tokens a lane: what is published is what was read before the first eviction."""
    model = engines.load("llama")
    engine = engine_of(model, kv={"evict": "recent:cap=8,every=2"})
    [first], _ = ask(engine, [PROMPT])
    [second], [usage] = ask(engine, [PROMPT])
    [other], _ = ask(
        engine_of(model, kv={"evict": "recent:cap=8,every=2", "enable_prefix_caching": False}),
        [PROMPT],
    )

    assert usage.cached_tokens == 8
    assert first == second == other


def test_nothing_is_evicted_that_the_same_step_has_yet_to_write():
    """The second finds 8 tokens, its cap, that the first reads in this step: it waits for them."""
    model = engines.load("llama")
    evict = "recent:cap=8,every=2,sinks=2"
    prompts = [PROMPT, [*PROMPT[:8], 4, 4, 4, 4]]
    alone = [ask(engine_of(model, kv={"evict": evict}), [prompt])[0][0] for prompt in prompts]

    answers, usages = ask(engine_of(model, kv={"evict": evict}), prompts)

    assert usages[1].cached_tokens == 8
    assert answers == alone


def test_cached_prefixes_give_way_to_whoever_needs_the_room():
    model = engines.load("llama")
    engine = engines.engine_for(model, room=1.0, longest=24, page_tokens=PAGE)
    for start in range(6):
        prompt = [start + 2] * 16
        [answer], _ = ask(engine, [prompt])
        [alone], _ = ask(engine_of(model, kv={"enable_prefix_caching": False}), [prompt])
        assert answer == alone

    assert engine.stats().num_preemptions == 0


def test_what_happens_to_kv_is_told():
    """13 tokens in chunks of 8: two chunks, then 7 of 8 answer tokens; 5 blocks of 4 in 20."""
    engine = engine_of(engines.load("llama"), chunk_tokens=8)
    ask(engine, [PROMPT])
    ask(engine, [PROMPT])
    told = {}
    for event in engine.events.newest():
        told.setdefault(event.kind, []).append(event.data)

    assert [data["tokens"] for data in told["chunk"]] == [8, 5, 1]
    assert sum(data["blocks"] for data in told["cached"]) == 5
    assert [data["tokens"] for data in told["shared"]] == [12]
    assert [data["reason"] for data in told["freed"]] == ["finished", "finished"]
    assert sum(data["kv_bytes"] for data in told["cached"]) == engine.stats().cached_bytes
