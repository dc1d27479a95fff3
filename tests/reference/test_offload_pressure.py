"""Requests with eviction under pressure in engines with KV offload."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import load
from support.kv_options import kv_config

NEW_TOKENS = 15


@pytest.mark.parametrize("offload_memory", [32_000, 26_000])
def test_a_request_whose_offloaded_pages_do_not_fit_evicts_layer_by_layer(offload_memory):
    """More of it is offloaded than device memory holds: its pages are never loaded together.

    With the smaller offload memory it fills both memories, and no page is free for an eviction.
    """
    memory = 16_000
    kv = kv_config(
        memory=memory,
        offload_memory=offload_memory,
        offload_recompute="off",
        page_tokens=4,
        evict="recent:cap=16,every=8,when=pressure",
    )
    engine = Engine(load("llama", times=2), kv, ScheduleConfig(max_num_seqs=2, chunk_tokens=8))
    why: list[str] = []
    engine.events.subscribe(
        lambda event: why.append(event.data["reason"]) if event.kind == "preempted" else None
    )
    rng = random.Random(1)
    prompt = [rng.randrange(2, zoo.VOCAB_SIZE) for _ in range(150)]
    engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)))

    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.check()

    assert [delta.error for delta in deltas if delta.error] == []
    assert sum(len(delta.token_ids) for delta in deltas) == NEW_TOKENS
    assert why == []
    assert engine.pool.offload.prefixes.pool.peak_bytes > memory
    assert engine.scheduler.capacities.num_evictions > 0


@dataclass(frozen=True)
class Evicting:
    """A prompt that is offloaded before its first eviction.

    Attributes:
        architecture: of the model.
        evict: its rule.
        offload_memory, page_tokens, chunk_tokens: options.
    """

    architecture: str
    evict: str
    offload_memory: int
    page_tokens: int
    chunk_tokens: int


EVICTING = {
    "decode": Evicting("llama", "recent:cap=14,every=3,when=decode", 16_000, 4, 8),
    "prefill_end": Evicting("llama", "recent:cap=31,every=3,when=prefill_end", 16_000, 2, 8),
    "window": Evicting(
        "gemma2",
        "sinks:sinks=2,cap=31,every=2,when=prefill_end,granularity=page",
        200_000,
        2,
        16,
    ),
}


def in_min_memory(case: Evicting, prompt: list[int]) -> Engine:
    """An engine with the request in the least memory, in steps of 1,000 B, that takes it."""
    model = load(case.architecture, times=3)
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for memory in range(20_000, 150_000, 1_000):
        kv = kv_config(
            memory=memory,
            offload_memory=case.offload_memory,
            offload_recompute="off",
            page_tokens=case.page_tokens,
            evict=case.evict,
        )
        try:
            engine = Engine(model, kv, ScheduleConfig(chunk_tokens=case.chunk_tokens))
            engine.submit(GenerationRequest(prompt, params))
        except (ConfigError, NeverFits):
            continue
        return engine
    raise AssertionError("no memory is enough")


@pytest.mark.parametrize("name", EVICTING)
def test_an_offloaded_prompt_evicts_in_the_min_memory_that_admits_it(name):
    """The cut of the first layer holds copies of what it retains beside the whole layer.

    A chunk of the prompt holds more pages of window lanes than the eviction leaves.
    """
    rng = random.Random(1)
    prompt = [rng.randrange(2, zoo.VOCAB_SIZE) for _ in range(46)]
    engine = in_min_memory(EVICTING[name], prompt)
    kinds: Counter[str] = Counter()
    engine.events.subscribe(lambda event: kinds.update([event.kind]))

    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.check()

    assert [delta.error for delta in deltas if delta.error] == []
    assert sum(len(delta.token_ids) for delta in deltas) == NEW_TOKENS
    assert kinds["offloaded"] > 0
    assert kinds["evicted"] > 0
    assert kinds["preempted"] == 0


@pytest.mark.parametrize("shared_tokens", [4, 8, 20])
def test_a_prompt_fits_alone_also_after_one_whose_offloaded_pages_it_shares(shared_tokens):
    """The pages of the first prompt were offloaded together, and are freed together."""
    model, rng = load("llama", times=3), random.Random(1)
    first, other = ([rng.randrange(2, zoo.VOCAB_SIZE) for _ in range(40)] for _ in range(2))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    second = GenerationRequest([*first[:shared_tokens], *other], params)

    def engine_of(offload_memory):
        kv = kv_config(
            memory=22_000,
            offload_memory=offload_memory,
            offload_recompute="off",
            page_tokens=4,
            enable_prefix_caching=True,
        )
        return Engine(model, kv, ScheduleConfig(chunk_tokens=8))

    def fits(offload_memory):
        engine = engine_of(offload_memory)
        try:
            engine.submit(second)
        except NeverFits:
            return False
        return True

    engine = engine_of(next(filter(fits, range(4_000, 80_000, 1_000))))
    reasons: list[str] = []
    engine.events.subscribe(
        lambda event: reasons.append(event.data["reason"]) if event.kind == "preempted" else None
    )
    engine.submit(GenerationRequest(first, params))
    engine.submit(second)

    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.check()

    assert [delta.error for delta in deltas if delta.error] == []
    assert sum(len(delta.token_ids) for delta in deltas) == 2 * params.max_tokens
    assert reasons == ["its cached prefix leaves no pages"]
