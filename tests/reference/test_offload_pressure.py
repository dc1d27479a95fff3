"""Requests with eviction under pressure in engines with KV offload."""

import random

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import load
from support.kv_options import kv_config

NEW_TOKENS = 15


def test_a_request_whose_offloaded_pages_do_not_fit_evicts_layer_by_layer():
    """More of it is offloaded than device memory holds: its pages are never loaded together."""
    memory = 16_000
    kv = kv_config(
        memory=memory,
        offload_memory=2 * memory,
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
