"""Answers do not know that their KV has been away: swapped between any two steps, logits agree."""

import random

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.engine import kv_memory
from quire.engine.core import Engine
from quire.kv.swap import append_tail, can_split, swap_in, swap_out
from quire.offload.swap.host_pool import HostPool
from quire.offload.swap.host_store import host_copies
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_equality import TOLERANCE, Forced
from support.engines import NEW_TOKENS, engine_for, expect, greedy, load, make_prompts
from support.kv_options import kv_config
from support.lazy_copies import LazyWorker

LONGEST = 60
# full attention, windows, shared or unequal lanes, chunks, ALiBi, widths, latents, states
ARCHITECTURES = (
    *("llama", "gemma2", "mistral", "gemma4", "llama4", "falcon_alibi", "mimo_v2_flash"),
    *("deepseek_v3", "qwen3_next", "jamba"),
)


def swapped_between_steps(architecture: str, device: str) -> tuple[float, int]:
    """The worst difference of logits from Transformers', and how many swaps there were."""
    rng = random.Random(architecture)
    expected = expect(architecture, make_prompts(12, LONGEST, seed=5))
    engine = engine_for(
        load(architecture, device),
        room=20.0,
        longest=LONGEST + NEW_TOKENS,
        page_tokens=4,
        chunk_tokens=16,
        attention="auto",
        enable_prefix_caching=False,  # it holds pages, which are poisoned here
    )
    forced = Forced({f"r{i}": wanted for i, wanted in enumerate(expected)})
    engine.sampling_step.sampler = forced
    memory, store = engine.pool.kv.memory, engine.pool.kv.store
    largest = max(page_class.page_bytes for page_class in memory.layout.page_classes)
    pool = HostPool(memory.total_bytes, host_copies(store, memory.total_bytes, largest))
    for i, wanted in enumerate(expected):
        engine.submit(GenerationRequest(wanted.prompt, greedy(), request_id=f"r{i}"))
    swaps = poisoned = 0
    while engine.has_work:
        engine.step()
        running = engine.scheduler.running
        away = rng.sample(running, rng.randint(0, len(running)))
        gone = [(request, swap_out(memory, [request.memory.row], pool)) for request in away]
        swaps += len(gone)
        if not memory.used_bytes:
            store.arena.fill_(0xFF)  # NaN in every page: what is read next came from the host
            poisoned += 1
        rng.shuffle(gone)
        for request, swapped in gone:
            [request.memory.row] = swap_in(memory, swapped)
        pool.check()
        memory.check()
    assert pool.used_bytes == 0
    assert poisoned
    return forced.worst, swaps


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers_whenever_sequences_are_swapped(architecture):
    worst, swaps = swapped_between_steps(architecture, "cpu")

    assert worst <= TOLERANCE
    assert swaps > 20


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logits_equal_transformers_when_a_head_is_recomputed_before_its_tail(architecture):
    """Of about 50 tokens the first 16, one chunk, are recomputed; later pages are swapped in."""
    [wanted] = expect(architecture, [list(range(3, 48))])
    engine = engine_for(
        load(architecture),
        room=2.0,
        longest=LONGEST + NEW_TOKENS,
        page_tokens=4,
        chunk_tokens=16,
        attention="auto",
        enable_prefix_caching=False,  # it holds pages, which are poisoned here
    )
    forced = Forced({"r": wanted})
    engine.sampling_step.sampler = forced
    memory = engine.pool.kv.memory
    engine.submit(GenerationRequest(wanted.prompt, greedy(), request_id="r"))
    splits = 0
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            length = int(memory.lengths[request.memory.row])
            if request.num_uncomputed > 1 or not can_split(memory, request.memory.row, 16):
                continue
            swapped = swap_out(memory, [request.memory.row], keep_from=16)
            engine.pool.kv.store.arena.fill_(0xFF)
            request.memory.row, request.progress.num_computed = memory.start(), 0
            engine.step()
            assert request.progress.num_computed == 16
            append_tail(memory, request.memory.row, swapped)
            request.progress.num_computed = length
            splits += 1
            memory.check()
    assert forced.worst <= TOLERANCE
    assert splits == NEW_TOKENS - 1


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_logits_equal_transformers_when_swap_copies_run_as_late_as_they_may(
    monkeypatch, prefix_caching
):
    """The copies stand in for those of a stream next to the computation."""
    worker = LazyWorker()
    monkeypatch.setattr(kv_memory, "swap_worker", lambda device: worker)
    expected = expect("llama", make_prompts(8, LONGEST, seed=5))
    memory = kv_config(
        memory="48KiB",
        page_tokens=4,
        attention="auto",
        swap_space="4MiB",
        enable_prefix_caching=prefix_caching,
    )
    schedule = ScheduleConfig(
        max_num_seqs=8, chunk_tokens=16, admission="optimistic", preempt="swap"
    )
    engine = Engine(load("llama"), memory, schedule)
    forced = Forced({f"r{i}": wanted for i, wanted in enumerate(expected)})
    engine.sampling_step.sampler = forced
    for i, wanted in enumerate(expected):
        engine.submit(GenerationRequest(wanted.prompt, greedy(), request_id=f"r{i}"))
    late = steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preempt_one()
        late = max(late, worker.num_waiting)
        engine.check()

    assert forced.worst <= TOLERANCE
    assert len(worker.queued) > 4
    assert late > 0  # a step ran before the copies of the pages it did not use
    assert engine.pool.host.used_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers_when_swapped_to_pinned_memory(architecture):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    worst, swaps = swapped_between_steps(architecture, "cuda")

    assert worst <= 1e-3
    assert swaps > 20
