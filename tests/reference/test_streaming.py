"""`streaming` compared with a reference StreamingLLM, and streams longer than the context."""

import itertools
from dataclasses import replace

import pytest
import torch

from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.engine.shared_pool import SharedPool
from quire.errors import ConfigError, RequestError, UnsoundCombination
from quire.models.loader import LoadedModel
from quire.models.rotary import Rotary
from quire.scheduler.schedule_config import ScheduleConfig
from quire.serve.config import ServerConfig
from quire.serve.service import Service
from reference.streaming_llm import PlainStream, Stream
from support import zoo
from support.engines import (
    Recorder,
    answer,
    greedy,
    largest_difference,
    load,
    make_prompts,
    requests_of,
)
from support.kv_options import kv_config

STREAM = Stream(cap=24, every=6, sinks=4)
EVICT = f"streaming:cap={STREAM.cap},every={STREAM.every},sinks={STREAM.sinks}"
SINKS = EVICT.replace("streaming", "sinks")
NEW_TOKENS = 20
TOLERANCE = 1e-4
PLAIN = ("llama", "llama_mqa", "stablelm")  # GQA, one KV head, partial rotary

Logits = dict[str, torch.Tensor]


def engine_of(model, *, evict=EVICT, memory="2MiB", page_tokens=4, kv=None, pool=None, **schedule):
    config = kv_config(memory=memory, page_tokens=page_tokens, evict=evict, **(kv or {}))
    return Engine(model, config, ScheduleConfig(**schedule), pool=pool)


def run(engine: Engine, prompts, *, new_tokens=NEW_TOKENS, evict=None, each_step=None) -> Logits:
    """Logits [tokens, vocab] of the output of each prompt."""
    requests = requests_of(numbered(prompts), new_tokens, evict=evict)
    found = answer(engine, requests, before_step=lambda _: each_step and each_step())
    assert {d.finish_reason for d in found.deltas} <= {None, "length"}
    return stacked(found.logits)


def numbered(prompts) -> dict[str, list[int]]:
    return {f"r{i}": prompt for i, prompt in enumerate(prompts)}


def record(engine: Engine, prompts) -> Recorder:
    """Submit prompts; what keeps the logits of their answers."""
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
    for request in requests_of(numbered(prompts), NEW_TOKENS):
        engine.submit(request)
    return recorder


def stacked(logits) -> Logits:
    return {key: torch.stack(rows) for key, rows in logits.items()}


def short_context(name: str, tokens: int) -> LoadedModel:
    model = load(name)
    return replace(model, spec=replace(model.spec, max_positions=tokens))


@pytest.fixture(scope="module")
def llama():
    return load("llama")


@pytest.fixture(scope="module")
def expected(llama, prompts):
    return run(engine_of(llama), prompts)


@pytest.fixture(scope="module")
def prompts():
    return [*make_prompts(3, 30, seed=5), list(range(2, 72))]


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama_mha", "qwen3", "gemma2", "gemma3", "gpt_oss", "gemma4", "bloom"),
        *("falcon_alibi", "deepseek_v3", "deepseek_v2"),  # the last has a complex RoPE
    ],
)
def test_under_the_cap_it_is_plain_rope(name):
    """Also with softcap, learned sinks, ALiBi, and layers with windows whose pages are freed."""
    model, short = load(name), make_prompts(6, 40, seed=1)
    full = run(engine_of(model, evict="full"), short)
    streamed = run(engine_of(model, evict="streaming:cap=100,every=10", chunk_tokens=7), short)
    assert largest_difference(full, streamed) <= TOLERANCE


@pytest.mark.parametrize(
    ("evict", "prompt_tokens", "variant"),
    [
        ("streaming:cap=100,every=10", 10, 0),
        ("streaming:cap=100,every=10", 40, 1),
        ("streaming:cap=20,every=6", 40, 0),
        ("streaming:cap=20,every=6,when=prefill_end", 40, 1),
    ],
)
def test_rope_frequencies_are_those_of_the_largest_position_of_a_stream(
    evict, prompt_tokens, variant
):
    """Long-RoPE: up to 24 positions are short. Without evictions, logits equal those of `full`."""
    model, prompt = load("phi3_longrope"), list(range(2, 2 + prompt_tokens))
    engine = engine_of(model, evict=evict)
    engine.submit(GenerationRequest(prompt, greedy(8)))
    engine.step()

    assert engine.scheduler.running[0].spec.rope_variant == variant
    if "cap=100" in evict:
        full = run(engine_of(model, evict="full"), [prompt], new_tokens=8)
        got = run(engine_of(model, evict=evict), [prompt], new_tokens=8)
        assert largest_difference(full, got) <= TOLERANCE


@pytest.mark.parametrize("name", PLAIN)
def test_logits_equal_the_reference_implementation(name, prompts):
    got = run(engine_of(load(name)), prompts)
    transformers_model = zoo.build(name)
    for i, prompt in enumerate(prompts):
        plain = PlainStream(transformers_model, STREAM)
        tokens, logits = plain.answer(prompt, NEW_TOKENS)
        ours = got[f"r{i}"]

        assert plain.max_held == min(STREAM.cap, len(prompt) + NEW_TOKENS - 1)
        assert ours.argmax(dim=-1).tolist() == tokens
        assert float((ours - logits).abs().max()) <= TOLERANCE


def test_logits_differ_from_sinks_without_rerotation(llama, prompts, expected):
    kept = run(engine_of(llama, evict=SINKS), prompts)
    assert largest_difference(expected, kept) > 100 * TOLERANCE


def test_log_probabilities_of_a_prompt_equal_those_without_eviction(llama):
    """In chunks, so that a row's logical position is neither 0 nor its place in the batch."""
    prompt, scored = [3 + i * i % 60 for i in range(STREAM.cap)], []
    for evict in (EVICT, "full"):
        engine = engine_of(llama, evict=evict, chunk_tokens=7)
        engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)))
        deltas = [delta for _ in range(4) for delta in engine.step()]
        scored.append([score.logprob for score in deltas[-1].prompt_logprobs[1:]])
    assert len(scored[0]) == len(prompt) - 1
    assert scored[0] == pytest.approx(scored[1], abs=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        *({"page_tokens": 1}, {"page_tokens": 16}, {"max_num_seqs": 1}),
        {"chunk_tokens": 7, "max_num_batched_tokens": 40},
        {"kv": {"scratch": 2048}},
    ],
    ids=str,
)
def test_pages_batches_chunks_and_scratch_change_no_logits(llama, prompts, expected, options):
    got = run(engine_of(llama, **options), prompts)
    assert largest_difference(expected, got) <= TOLERANCE


def test_a_stream_and_an_engine_of_other_rules_share_a_pool(llama, prompts, expected):
    """Pages with keys before RoPE and after it, of one size, in slabs of one arena."""
    plain = run(engine_of(llama, evict=SINKS), prompts)
    pool = SharedPool("40KiB", slab_bytes=2048)
    engines = {}
    for evict in (EVICT, SINKS):
        own = pool.join(evict.partition(":")[0], guaranteed="12KiB")
        engines[evict] = engine_of(llama, evict=evict, memory="auto", pool=own)
    recorders = {evict: record(engine, prompts) for evict, engine in engines.items()}
    while any(engine.has_work for engine in engines.values()):
        for engine in engines.values():
            if engine.has_work:
                engine.step()
            pool.check()
    got = {evict: stacked(recorder.logits) for evict, recorder in recorders.items()}

    assert sum(engine.scheduler.num_preemptions for engine in engines.values()) > 0
    assert largest_difference(got[EVICT], expected) <= TOLERANCE
    assert largest_difference(got[SINKS], plain) <= TOLERANCE


@pytest.mark.parametrize("granularity", ["page", "chunk,chunk_tokens=2"])
def test_positions_are_contiguous_after_evicting_pages_and_chunks(llama, granularity):
    """Caps that a page divides: retained tokens equal those of granularity token."""
    prompts = make_prompts(4, 100, seed=3)
    sizes = "streaming:cap=32,every=8,sinks=4"
    expected = run(engine_of(llama, evict=sizes), prompts)
    got = run(engine_of(llama, evict=f"{sizes},granularity={granularity}"), prompts)
    assert largest_difference(expected, got) <= TOLERANCE


@pytest.mark.parametrize("swap_space", ["0", "1MiB"])
def test_preemption_of_a_stream_changes_no_logits(llama, swap_space):
    growing = make_prompts(12, 12, seed=2)
    expected = run(engine_of(llama), growing)
    engine = engine_of(
        llama,
        memory=4 * 24 * 2 * 2 * 2 * 8 * 4,
        kv={"swap_space": swap_space},
        low_watermark=1.0,
        preempt="recompute" if swap_space == "0" else "swap",
    )
    got = run(engine, growing)

    assert engine.scheduler.num_preemptions > 0
    assert largest_difference(expected, got) <= TOLERANCE


def test_several_outputs_share_the_prompt_of_a_stream(llama, prompts, expected):
    """Forks copy what they write: each answer is what it would be alone."""
    params = replace(greedy(NEW_TOKENS), n=3)
    found = answer(engine_of(llama), [GenerationRequest(prompts[-1], params, request_id="r")])

    alone = expected["r3"].argmax(dim=-1).tolist()
    assert found.tokens == {("r", i): alone for i in range(3)}


# ---- streams longer than the context -------------------------------------------------------------


def seen_positions(monkeypatch) -> list[int]:
    """The largest position of each call that rotates queries or keys."""
    found, rotate = [], Rotary.rotate_pre_rope

    def watched(rotary, pre_rope, positions):
        found.append(int(positions.max()))
        return rotate(rotary, pre_rope, positions)

    monkeypatch.setattr(Rotary, "rotate_pre_rope", watched)
    return found


def test_a_stream_of_four_contexts_runs_in_the_memory_of_its_cap(monkeypatch):
    context = 48
    uncached = {"enable_prefix_caching": False}  # cached prefixes would count in `held`
    engine = engine_of(short_context("llama", context), evict=EVICT, page_tokens=4, kv=uncached)
    prompt, new_tokens = make_prompts(1, 1, seed=0)[0] + list(range(2, 102)), 4 * context - 101
    memory, seen, held = engine.pool.kv.memory, seen_positions(monkeypatch), []
    got = run(
        engine, [prompt], new_tokens=new_tokens, each_step=lambda: held.append(memory.used_bytes)
    )
    tokens, logits = PlainStream(zoo.build("llama"), STREAM).answer(prompt, new_tokens)

    assert len(prompt) + new_tokens == 4 * context
    assert got["r0"].argmax(dim=-1).tolist() == tokens
    assert float((got["r0"] - logits).abs().max()) <= TOLERANCE
    assert max(seen) == STREAM.cap - 1
    group = memory.layout.groups[0]
    assert max(held) == STREAM.cap // 4 * group.page_class.page_bytes * group.num_lanes
    assert len(set(held[20:-1])) <= 3  # 18 to 24 tokens in pages of 4: it goes up and down


def test_positions_in_windows_of_a_stream_start_at_the_window(monkeypatch):
    """gemma3: half of its layers have a window of 8 tokens; positions in it change in each step."""
    engine = engine_of(short_context("gemma3", 48), evict=EVICT)
    seen = seen_positions(monkeypatch)
    got = run(engine, [list(range(2, 102))], new_tokens=92)
    assert len(got["r0"]) == 92
    assert got["r0"].isfinite().all()
    assert max(seen) == STREAM.cap - 1


@pytest.mark.parametrize(
    ("when", "prompt", "goes_on"),
    [
        ("prefill_and_decode", [*range(2, 102)] * 2, True),
        ("decode", [7] * 40, True),
        ("prefill_end", [7] * 40, False),  # the answer grows without end
        ("pressure", [7] * 40, False),  # lanes may hold more than the cap
    ],
)
def test_only_streams_with_a_cap_below_the_context_may_exceed_it(when, prompt, goes_on):
    engine = engine_of(short_context("llama", 48), evict=f"{EVICT},when={when}")
    got = run(engine, [prompt], new_tokens=30)
    assert len(got["r0"]) == (30 if goes_on else 8)


def test_an_output_is_as_long_as_the_context_and_what_cannot_stream_is_refused():
    """Decoding reads the whole prompt, the cap is over the context, or nothing leaves."""
    for evict in (f"{EVICT},when=decode", "streaming:cap=60,every=6", "full"):
        engine = engine_of(short_context("llama", 48), evict=evict)
        with pytest.raises(RequestError, match=r"100 tokens, the model's context 48"):
            engine.submit(GenerationRequest([7] * 100, greedy(4)))
    engine = engine_of(load("gpt2"), evict="full", kv={"evict_allow": "all"})
    with pytest.raises(RequestError, match=r"adds learned positions.*use .sinks."):
        engine.submit(GenerationRequest(list(range(2, 42)), greedy(4), evict=EVICT))

    def llm(evict):
        kv = KVConfig(memory="1MiB", page_tokens=4, evict=evict)
        return LLM(short_context("llama", 48), kv=kv)

    stream, ends = llm(EVICT), llm(f"{EVICT},when=prefill_end")
    assert stream.context_tokens(1000) > 1 << 40
    assert stream.context_tokens(1000, "full") == ends.context_tokens(10) == 48
    for prompt_tokens in (10, 1000):
        assert Service(stream, ServerConfig()).available_tokens(prompt_tokens) == 48
    assert Service(ends, ServerConfig()).available_tokens(10) == 38


# ---- what does not go together -------------------------------------------------------------------


def test_requests_choose_sizes_or_full_but_not_keys_before_and_after_rope(llama):
    engine = engine_of(llama)
    with pytest.raises(RequestError, match=r"'recent' needs keys stored after RoPE.*'streaming'"):
        engine.submit(GenerationRequest([5] * 9, greedy(4), evict="recent:cap=24,every=6"))
    for evict in ("full", "sinks:cap=24,every=6"):
        with pytest.raises(RequestError, match="start one with --evict streaming"):
            engine_of(llama, evict=evict).submit(GenerationRequest([5] * 9, greedy(4), evict=EVICT))
    with pytest.raises(UnsoundCombination, match=r"'streaming' needs keys .* 'h2o' after it"):
        engine_of(llama, kv={"evict_allow": "h2o"})

    [prompt] = [list(range(2, 62))]
    wide = run(engine_of(llama), [prompt], evict="streaming:cap=48,every=8")
    own = run(engine_of(llama, evict="streaming:cap=48,every=8"), [prompt])
    full = run(engine_of(llama), [prompt], evict="full")
    plain = run(engine_of(llama, evict="full"), [prompt])

    assert largest_difference(wide, own) <= TOLERANCE
    assert largest_difference(full, plain) <= TOLERANCE


@pytest.mark.parametrize("codec", ["none", "int8", "int4+residual=6"])
@pytest.mark.parametrize("default", ["sinks:cap=24,every=6", EVICT])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_streams_run_beside_requests_with_keys_after_rope(name, default, codec):
    """Each request as in an engine of its own rule; they are batched and preempted together."""
    model, kv, steps = load(name), {"codec": codec}, itertools.count()
    rules = {"r0": EVICT, "r1": SINKS, "r2": "h2o:cap=30,every=5", "r3": "full", "r4": EVICT}
    prompts = [list(range(2 + i, 50 + 3 * i)) for i in range(5)]
    allowed = kv | {"evict_allow": "all", "swap_space": "4MiB"}
    engine = engine_of(model, evict=default, kv=allowed, chunk_tokens=7, preempt="swap")
    requests = [
        replace(request, evict=rules[request.request_id])
        for request in requests_of(numbered(prompts), NEW_TOKENS)
    ]

    def preempt(engine):
        if next(steps) == 12:
            for request in list(engine.scheduler.running)[:2]:
                engine.scheduler.lifecycle.preempt(request, "for the test")

    found = stacked(answer(engine, requests, before_step=preempt).logits)
    tolerance = TOLERANCE if codec == "none" else 3e-2
    for request_id, prompt in numbered(prompts).items():
        [expected] = run(engine_of(model, evict=rules[request_id], kv=kv), [prompt]).values()
        assert float((found[request_id] - expected).abs().max()) <= tolerance


def test_streams_share_prefixes_with_streams_only(llama):
    engine, cached = engine_of(llama, evict="full", kv={"evict_allow": "all"}), {}
    for name, evict in (("a", EVICT), ("b", "full"), ("c", EVICT), ("d", "full")):
        found = answer(engine, requests_of({name: list(range(2, 42))}, 4, evict=evict))
        cached[name] = found.usages[name].cached_tokens
    assert cached["a"] == cached["b"] == 0
    assert 0 < cached["c"] <= STREAM.cap
    assert cached["d"] > STREAM.cap


def test_models_without_rope_and_attention_that_needs_keys_after_it_are_rejected(llama):
    for name in ("gpt2", "opt"):
        with pytest.raises(UnsoundCombination, match=r"adds learned positions.*use 'sinks'"):
            engine_of(load(name))
    for name in ("gathered", "reference", "native"):
        with pytest.raises(ConfigError, match=rf"attention={name} needs keys stored after RoPE"):
            engine_of(llama, kv={"attention": name})


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_streams_share_a_prefix_up_to_their_first_eviction(name):
    """A prompt longer than the cap shares its tokens below the cap; later tokens are recomputed."""
    model = load(name)
    shared = [3 + i * i % 60 for i in range(20)]
    prompts = [[*shared, 7, 9], [*shared, 11], [*shared, *range(4, 40)]]
    without = engine_of(model, kv={"enable_prefix_caching": False})
    expected = [run(without, [prompt], new_tokens=40)["r0"] for prompt in prompts]
    engine = engine_of(model)
    got = [run(engine, [prompt], new_tokens=40)["r0"] for prompt in prompts]

    assert engine.stats().cached_tokens >= 2 * 16
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4
    again = run(engine, [prompts[0]], new_tokens=40)["r0"]  # no later token was published
    assert (again - expected[0]).abs().max() <= 1e-4
    engine.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_streams_on_cuda_have_the_logits_of_the_cpu(name, prompts):
    expected = run(engine_of(load(name)), prompts)
    got = run(engine_of(load(name, "cuda")), prompts)

    on_cpu = {key: rows.cpu() for key, rows in got.items()}
    assert largest_difference(expected, on_cpu) <= 1e-3
