"""The prefix cache in the engine: hits, unchanged outputs, and isolation of tenants."""

import pytest

from quire import GenerationRequest, SamplingParams, ScheduleConfig
from quire.engine.core import Engine
from quire.errors import RequestError
from quire.scheduler.peaks import Need
from support import engines
from support.kv_options import kv_config

PAGE = 4
PROMPT = [5, 9, 13, 2, 7, 21, 3, 3, 8, 30, 11, 6, 19]  # 13 tokens: three whole pages and one more
KV = {"memory": "512KiB", "page_tokens": PAGE}
NO_CACHE = {"enable_prefix_caching": False}


@pytest.fixture(scope="module", params=["llama", "gemma3", "gpt2", "gemma3n", "llama4"])
def model(request):
    return engines.load(request.param)


def engine_of(model, *, kv=None, **schedule):
    return Engine(model, kv_config(**KV | (kv or {})), ScheduleConfig(**schedule))


def generate(engine, prompts, params=None, **options):
    """Submit all prompts at once; return the outputs in order, and their usages."""
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


def test_repeated_prompts_prefill_after_their_last_page_unless_nothing_is_cached(model):
    engine = engine_of(model)
    [first], [before] = generate(engine, [PROMPT])
    processed = engine.num_processed_tokens
    [second], [after] = generate(engine, [PROMPT])

    assert (before.cached_tokens, after.cached_tokens) == (0, 12)
    assert second == first
    assert engine.num_processed_tokens - processed == len(PROMPT) - 12 + engines.NEW_TOKENS - 1

    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    for engine, second in ((engine_of(model), params), (engine_of(model, kv=NO_CACHE), None)):
        generate(engine, [PROMPT])
        _, [usage] = generate(engine, [PROMPT], second)
        assert usage.cached_tokens == 0
    assert engine.stats().kv_used_bytes == engine.stats().cached_bytes == 0


def test_repeated_prompt_hits_in_a_memory_that_holds_one_request():
    """A block that the first request decoded is published twice: the older copy is evicted."""
    model = engines.load("llama")
    tokens = len(PROMPT) + 6  # the block after the prompt's whole ones is filled in decoding
    fitting = engine_of(model).scheduler.peaks.fitting_bytes(Need(tokens))
    engine = engine_of(model, kv={"memory": f"{fitting}B"})

    found = [generate(engine, [PROMPT], engines.greedy(7)) for _ in range(4)]

    assert [usage.cached_tokens for _, [usage] in found] == [0, 12, 12, 12]
    assert all(outputs == found[0][0] for outputs, _ in found)
    assert engine.stats().num_preemptions == 0


def test_requests_of_one_step_share_the_prefix_that_one_of_them_prefills(model):
    prompts = [[*PROMPT, i] for i in range(3)]
    alone, _ = generate(engine_of(model, kv=NO_CACHE), prompts)
    engine = engine_of(model)

    outputs, usages = generate(engine, prompts)

    assert [usage.cached_tokens for usage in usages] == [0, 12, 12]
    assert outputs == alone
    assert engine.num_steps == engines.NEW_TOKENS
    in_chunks = engine_of(model, chunk_tokens=4, max_num_batched_tokens=8)
    outputs, usages = generate(in_chunks, [PROMPT, PROMPT])  # up to the computed tokens
    assert outputs[0] == outputs[1]
    assert usages[1].cached_tokens == 4


def test_output_tokens_are_cached_too(model):
    engine = engine_of(model)
    [output], _ = generate(engine, [PROMPT])
    whole = [*PROMPT, *output, 4]
    found = (len(PROMPT) + len(output) - 1) // PAGE * PAGE  # the last token has no KV

    [after], [usage] = generate(engine, [whole])

    assert usage.cached_tokens == found
    [alone], _ = generate(engine_of(model, kv=NO_CACHE), [whole])
    assert after == alone


def test_only_a_public_prefix_is_shared_across_tenants_or_salts():
    engine = engine_of(engines.load("llama"))
    generate(engine, [PROMPT], tenant="a")
    others = {"tenant": "b"}, {}, {"tenant": "a", "cache_salt": "x"}, {"tenant": "a"}

    found = [generate(engine, [PROMPT], **options)[1][0].cached_tokens for options in others]

    assert found == [0, 0, 0, 12]
    for salt in ("a\nb", "a\x00", "x" * 129):
        with pytest.raises(RequestError, match="salt"):
            engine.submit(GenerationRequest(PROMPT, cache_salt=salt))
    public = engine_of(engines.load("llama"))
    public.share_publicly(PROMPT[:9])
    generate(public, [PROMPT], tenant="a")
    _, [usage] = generate(public, [PROMPT], tenant="b")
    assert usage.cached_tokens == 8


def test_blocks_are_not_cached_after_an_eviction():
    """A cap of 8 tokens per lane: only blocks from before the first eviction are cached."""
    model = engines.load("llama")
    kv = {"evict": "recent:cap=8,every=2"}
    engine = engine_of(model, kv=kv)
    [first], _ = generate(engine, [PROMPT])
    [second], [usage] = generate(engine, [PROMPT])
    [other], _ = generate(engine_of(model, kv=kv | NO_CACHE), [PROMPT])
    assert usage.cached_tokens == 8
    assert first == second == other


def test_tokens_that_the_same_step_has_yet_to_write_are_not_evicted():
    """The second request matches 8 tokens, its cap, that the first computes in this step."""
    model = engines.load("llama")
    evict = "recent:cap=8,every=2,sinks=2"
    prompts = [PROMPT, [*PROMPT[:8], 4, 4, 4, 4]]
    alone = [generate(engine_of(model, kv={"evict": evict}), [prompt])[0][0] for prompt in prompts]

    outputs, usages = generate(engine_of(model, kv={"evict": evict}), prompts)

    assert usages[1].cached_tokens == 8
    assert outputs == alone


def test_cached_prefixes_are_evicted_before_a_request_is_preempted():
    model = engines.load("llama")
    engine = engines.engine_for(model, room=1.0, longest=24, page_tokens=PAGE)
    for start in range(6):
        prompt = [start + 2] * 16
        [output], _ = generate(engine, [prompt])
        [alone], _ = generate(engine_of(model, kv=NO_CACHE), [prompt])
        assert output == alone
    assert engine.stats().num_preemptions == 0


def test_kv_events_of_two_requests_with_a_shared_prefix():
    """13 tokens in chunks of 8: two chunks, then 7 of 8 output tokens; 5 blocks of 4 in 20."""
    engine = engine_of(engines.load("llama"), chunk_tokens=8)
    generate(engine, [PROMPT])
    generate(engine, [PROMPT])
    events = {}
    for event in engine.events.newest():
        events.setdefault(event.kind, []).append(event.data)

    assert [data["tokens"] for data in events["chunk"]] == [8, 5, 1]
    assert sum(data["blocks"] for data in events["prefix_cached"]) == 5
    assert [data["tokens"] for data in events["shared"]] == [12]
    assert [data["reason"] for data in events["freed"]] == ["finished", "finished"]
    assert sum(data["kv_bytes"] for data in events["prefix_cached"]) == engine.stats().cached_bytes
