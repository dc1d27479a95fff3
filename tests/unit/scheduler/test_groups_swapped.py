"""Groups that are swapped out and in: the same outputs, pages shared as before."""

import random

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.sampling.outputs import OutputBuilder
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines
from support.kv_options import kv_config

PROMPT = list(range(20, 41))
PAGE_TOKENS = 4


@pytest.fixture(scope="module", params=["llama", "qwen2_window"])
def model(request):
    return engines.load(request.param)


@pytest.fixture(scope="module")
def llama():
    return engines.load("llama")


def engine_of(
    model, *, memory_ratio: float, chunk_tokens: int = 2048, preempt: str = "swap"
) -> Engine:
    sized = engines.engine_for(model, room=memory_ratio, longest=40, page_tokens=PAGE_TOKENS)
    kv = kv_config(
        memory=sized.pool.kv.memory.total_bytes,
        page_tokens=PAGE_TOKENS,
        swap_space="4MiB" if preempt == "swap" else 0,
        enable_prefix_caching=False,
    )
    return Engine(model, kv, ScheduleConfig(preempt=preempt, chunk_tokens=chunk_tokens))


def sampling(**options) -> SamplingParams:
    defaults = {"max_tokens": 16, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return SamplingParams(**defaults | options)


def beams(**options) -> SamplingParams:
    defaults = {"max_tokens": 12, "use_beam_search": True, "ignore_eos": True}
    return SamplingParams(**defaults | options)


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 128) for _ in range(rng.randint(3, 24))] for _ in range(8)]
    options = [sampling(n=rng.randint(1, 4), seed=seed) for seed in range(4)]
    options += [beams(n=2, beam_width=width) for width in (2, 3, 4, 3)]
    return list(zip(prompts, options, strict=True))


def run(engine: Engine, requests) -> list[list[tuple[int, ...]]]:
    builders, done = {}, {}
    for prompt, params in requests:
        request_id = engine.submit(GenerationRequest(prompt, params))
        builders[request_id] = OutputBuilder(request_id, tuple(prompt))
    finish(engine, builders, done)
    return [[choice.token_ids for choice in done[key].choices] for key in builders]


def finish(engine, builders, done) -> None:
    while engine.has_work:
        for delta in engine.step():
            whole = builders[delta.request_id].add(delta)
            if whole is not None:
                done[delta.request_id] = whole
    engine.check()
    assert engine.pool.host is None or engine.pool.host.used_bytes == 0


def test_swapped_groups_resume_with_the_same_outputs(model):
    requests = mixed_requests()
    engine = engine_of(model, memory_ratio=4.6)

    outputs = run(engine, requests)

    assert engine.scheduler.preempter.swapper.num_swaps > 3
    assert outputs == run(engine_of(model, memory_ratio=60.0, preempt="recompute"), requests)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_group_preempted_at_any_step_has_the_same_outputs(llama, steps):
    """Also while its prompt is recomputed and some of its members wait to be forked."""
    requests = [(PROMPT, sampling(n=4, max_tokens=8))]
    expected = run(engine_of(llama, memory_ratio=60.0, preempt="recompute"), requests)
    engine = engine_of(llama, memory_ratio=60.0, chunk_tokens=4)
    [(prompt, params)] = requests
    builder = OutputBuilder(
        engine.submit(GenerationRequest(prompt, params, request_id="r")), tuple(prompt)
    )
    deltas = []
    for number in range(3):
        for _ in range(steps):
            deltas += engine.step()
        if engine.scheduler.running:
            last, recompute = engine.scheduler.running[-1], number % 2 == 1
            engine.scheduler.lifecycle.preempt(last, "forced", recompute=recompute)
    while engine.has_work:
        deltas += engine.step()

    [whole] = [whole for delta in deltas if (whole := builder.add(delta)) is not None]
    assert [choice.token_ids for choice in whole.choices] == expected[0]
    assert engine.pool.host.used_bytes == 0
    engine.check()


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("back", [0, 1, 4])
def test_member_of_a_swapped_group_can_be_cancelled(llama, index, back):
    engine = engine_of(llama, memory_ratio=60.0, chunk_tokens=4)
    builder = OutputBuilder(
        engine.submit(GenerationRequest(PROMPT, sampling(n=3, max_tokens=8), request_id="r")),
        tuple(PROMPT),
    )
    deltas = [delta for _ in range(9) for delta in engine.step()]
    first = engine.scheduler.running[0]
    engine.scheduler.lifecycle.preempt(first, "forced", recompute=True)
    deltas += [delta for _ in range(back) for delta in engine.step()]
    if engine.scheduler.running:
        engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "forced")
    engine.cancel("r", index)
    while engine.has_work:
        deltas += engine.step()

    [whole] = [whole for delta in deltas if (whole := builder.add(delta)) is not None]
    [expected] = run(engine_of(llama, memory_ratio=60.0), [(PROMPT, sampling(n=3, max_tokens=8))])
    for choice, tokens in zip(whole.choices, expected, strict=True):
        cut = len(choice.token_ids) if choice.index == index else len(tokens)
        assert choice.token_ids == tokens[:cut]
    assert engine.pool.host.used_bytes == 0
    engine.check()
