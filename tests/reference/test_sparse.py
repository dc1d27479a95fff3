"""Sparse attention in engines: backends agree, and other features change no output."""

import re
import time
from functools import cache

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import RequestError, UnsoundCombination
from quire.offload.swap.transfer import ThreadTransferWorker
from quire.scheduler.peaks import Need, possible_changes
from quire.scheduler.schedule_config import ScheduleConfig
from support.engines import answer, greedy, largest_difference, load, make_prompts, requests_of
from support.kv_options import kv_config

RULE = "quest:pages=4,recent=2,dense_layers=1"
PAGE_TOKENS, NEW_TOKENS = 4, 12
loaded = cache(load)


def engine_of(architecture="llama", *, memory="4MiB", schedule=None, **kv):
    options = {"memory": memory, "page_tokens": PAGE_TOKENS, "sparse": RULE} | kv
    return Engine(loaded(architecture), kv_config(**options), schedule or ScheduleConfig())


def prompts_of(seed=1, count=4, longest=70):
    return {str(i): prompt for i, prompt in enumerate(make_prompts(count, longest, seed))}


def run(engine, *, new_tokens=NEW_TOKENS, **options):
    return answer(engine, requests_of(prompts_of(), new_tokens, **options))


@cache
def expected_of(architecture, evict, codec):
    """Each request alone in ample memory, by the reference backend."""
    engine = engine_of(
        architecture, evict=evict, codec=codec, attention="reference", enable_prefix_caching=False
    )
    found = {}
    for name, prompt in prompts_of().items():
        found |= answer(engine, requests_of({name: prompt}, NEW_TOKENS)).logits
    reads = engine.stats()
    assert 0 < reads.sparse_pages_read < reads.sparse_pages_held
    return found


CASES = {
    "plain": {},
    "gathered": {"attention": "gathered"},
    "layers in C": {"architecture": "wide_llama"},
    "window layers": {"architecture": "gemma3"},
    "shared KV": {"architecture": "gemma3n"},
    "sinks of the softmax": {"architecture": "gpt_oss"},
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "fp8": {"codec": "fp8"},
    "h2o": {"evict": "h2o:cap=48,every=8,recent=8"},
    "heads apart": {"evict": "keydiff:cap=48,every=8"},
    "unequal heads": {"evict": "h2o:cap=48,every=8,recent=8,budget=ada"},
    "pages evicted": {"evict": "h2o:cap=48,every=8,recent=8,granularity=page"},
    "after the prompt": {"evict": "snapkv:cap=48,window=8,when=prefill_end"},
    "evicted codes": {"evict": "tova:cap=48,every=8", "codec": "int8"},
}


@pytest.mark.parametrize("case", CASES)
def test_batches_equal_single_requests_with_the_reference_backend(case):
    options = dict(CASES[case])
    architecture = options.pop("architecture", "llama")
    by = architecture, options.get("evict", "full"), options.get("codec", "none")
    engine = engine_of(architecture, **options)
    got = run(engine).logits

    near = 5e-3 if "codec" in options else 1e-4
    assert largest_difference(got, expected_of(*by)) < near


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_batches_on_cuda_equal_single_requests_with_the_reference_backend(codec):
    kv = kv_config(memory="4MiB", page_tokens=PAGE_TOKENS, sparse=RULE, codec=codec)
    got = run(Engine(load("llama", "cuda"), kv)).logits
    assert largest_difference(got, expected_of("llama", "full", codec)) < 5e-3


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
@pytest.mark.parametrize("evict", ["full", "tova:cap=48,every=8"])
def test_little_memory_changes_no_output(preempt, evict):
    schedule = ScheduleConfig(preempt=preempt, admission="optimistic")
    swap = {"swap_space": "1MiB"} if preempt == "swap" else {}
    engine = engine_of(memory="24KiB", schedule=schedule, evict=evict, **swap)
    got = run(engine)

    assert engine.stats().num_preemptions
    assert largest_difference(got.logits, expected_of("llama", evict, "none")) < 1e-4


def test_all_pages_and_off_equal_dense_attention_bit_for_bit():
    dense = run(engine_of(sparse="off")).logits
    for engine, options in (
        (engine_of(sparse="quest:budget=100%,dense_layers=0"), {}),
        (engine_of(), {"sparse": "off"}),
        (engine_of(), {"sparse": "quest:pages=64,dense_layers=0"}),
    ):
        assert largest_difference(run(engine, **options).logits, dense) == 0


def test_requests_in_one_batch_have_their_own_rules():
    engine, rules = engine_of(), [RULE, "off", "quest:budget=30%,recent=1,dense_layers=0", None]
    requests = [
        GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=name, sparse=rule)
        for (name, prompt), rule in zip(prompts_of().items(), rules, strict=True)
    ]
    got = answer(engine, requests).logits

    shown = {one.request_id: one.sparse for one in engine.request_log.finished}
    assert shown == {request.request_id: request.sparse or RULE for request in requests}
    for request in requests:
        alone = answer(engine_of(attention="reference"), [request]).logits
        own = {request.request_id: got[request.request_id]}
        assert largest_difference(own, alone) < 1e-4


def test_cached_prefixes_are_computed_by_dense_attention():
    """A dense request after a sparse one finds its prompt in the cache, not its output."""
    engine, prompt = engine_of(), prompts_of()["0"][:40] + list(range(2, 32))
    first = answer(engine, requests_of({"a": prompt}, 24))
    longer = prompt + first.tokens["a", 0]
    second = answer(engine, requests_of({"b": longer}, 4, sparse="off"))
    cold = answer(engine_of(sparse="off"), requests_of({"b": longer}, 4))

    assert second.usages["b"].cached_tokens == len(prompt) // PAGE_TOKENS * PAGE_TOKENS
    assert largest_difference(second.logits, cold.logits) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("llama", {"evict": "streaming:cap=32,sinks=2"}, "before it"),
        ("bloom", {}, "biases of positions"),
        ("deepseek_v3", {}, "hold latents"),
        ("mistral", {}, "sliding window"),
        ("llama", {"evict_allow": "all"}, "without 'streaming'"),
        ("llama", {"sparse": "quest:budget=10%,dense_layers=2"}, "lower dense_layers"),
    ],
)
def test_unsound_combinations_are_refused(architecture, options, message):
    with pytest.raises(UnsoundCombination, match=message):
        engine_of(architecture, **options)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("quest", "expected budget=10%"),
        ("quest:budget=10%,pages=3", "one of them"),
        ("quest:budget=0", "above 0%"),
        ("quest:budget=x", "such as 10%"),
        ("quest:pages=4", "pages from 6"),
        ("quest:pages=9,recent=0", "recent from 1"),
        ("quest:pages=9,sinks=1.5", "whole numbers"),
        ("quest:top=9", "top"),
        ("qest:pages=9", "quest"),
        ("quest:pages=99,dense_layers=90", "lower dense_layers"),
        ("off:pages=9", "without options"),
    ],
)
def test_invalid_rules_and_those_of_an_engine_without_bounds_are_refused(rule, message):
    with pytest.raises(RequestError, match=message):
        engine_of().submit(GenerationRequest([5], greedy(1), sparse=rule))
    with pytest.raises(RequestError, match="start it with --sparse"):
        engine_of(sparse="off").submit(GenerationRequest([5], greedy(1), sparse=RULE))


# ---- offloaded KV --------------------------------------------------------------------------------

LONG = [3 + i * i % 60 for i in range(100)]
deep = cache(lambda architecture: load(architecture, times=3))


@cache
def ample(architecture="llama", rule=RULE, **kv):
    """A prompt in ample memory: engine, answer, and peak KV bytes."""
    options = {"memory": "4MiB", "page_tokens": PAGE_TOKENS, "sparse": rule} | kv
    engine = Engine(deep(architecture), kv_config(**options), ScheduleConfig(chunk_tokens=16))
    found = answer(engine, requests_of({"a": LONG}, 24))
    return engine, found, engine.stats().kv_peak_bytes


def offloaded(
    architecture="llama",
    rule=RULE,
    *,
    room=0.8,
    schedule=None,
    requests=None,
    before_step=None,
    **kv,
):
    """The same in little memory, with the rest offloaded; `room` counts the table of bounds."""
    own = {k: v for k, v in kv.items() if k in ("codec", "evict", "attention")}
    peak_bytes = ample(architecture, rule, **own)[2]
    options = {"memory": int(room * peak_bytes), "page_tokens": PAGE_TOKENS, "sparse": rule}
    # `auto` depends on measured rates, and stored activations take offload memory
    options |= {"offload_memory": peak_bytes, "offload_recompute": "off"}
    options |= {"enable_prefix_caching": False} | kv
    engine = Engine(
        deep(architecture), kv_config(**options), schedule or ScheduleConfig(chunk_tokens=16)
    )
    made = requests or requests_of({"a": LONG}, 24)
    found = answer(engine, made, before_step=before_step or (lambda engine: None))
    assert engine.pool.offload.prefixes.pool.peak_bytes
    engine.pool.offload.check()
    return engine, found


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({}, 0),
        ({"attention": "reference"}, 0),
        ({"architecture": "llama_mha"}, 0),
        ({"rule": "quest:pages=4,recent=2,dense_layers=0"}, 0),
        ({"rule": "quest:pages=5,recent=2,dense_layers=3"}, 0),
        ({"rule": "quest:budget=40%,recent=1,dense_layers=2"}, 0),
        ({"codec": "int8"}, 5e-3),
        ({"codec": "int4"}, 5e-3),
        ({"evict": "h2o:cap=80,every=8,recent=8"}, 1e-4),
        ({"evict": "keydiff:cap=80,every=8"}, 1e-4),
        ({"evict": "recent:cap=80,every=8,granularity=page"}, 1e-4),
    ],
)
def test_selected_pages_of_offloaded_kv_give_the_outputs_of_kv_in_memory(options, near):
    expected = ample(**options)[1]
    engine, got = offloaded(**options)
    stats = engine.stats()

    assert stats.sparse_pages_fetched > 0
    assert stats.sparse_page_hits > 0
    assert stats.sparse_pages_fetched + stats.sparse_page_hits < stats.sparse_pages_read
    assert largest_difference(got.logits, expected.logits) <= near


@pytest.mark.parametrize(
    ("options", "fetches"),
    [
        ({"codec": "int8+sinks=2+residual=8"}, True),
        # pages with positions: a part of a head in the cache has those of another page
        ({"codec": "int8+sinks=2+residual=8", "evict": "h2o:cap=80,every=8,recent=8"}, False),
        ({"codec": "int4_page/int4"}, True),
    ],
)
def test_tokens_in_full_precision_of_offloaded_pages_are_those_in_memory(options, fetches):
    expected = ample(**options)[1]
    engine, got = offloaded(**options, room=0.8 if fetches else 0.95)
    assert (engine.stats().sparse_pages_fetched > 0) == fetches
    assert largest_difference(got.logits, expected.logits) <= 5e-3


def test_budgets_of_all_pages_equal_dense_offloaded_attention_bit_for_bit():
    dense = offloaded(rule="off")[1].logits
    for rule in ("quest:budget=100%", "quest:pages=64,dense_layers=0"):
        engine, got = offloaded(rule=rule)
        assert not engine.stats().sparse_pages_fetched
        assert largest_difference(got.logits, dense) == 0


def test_a_request_may_have_another_rule_or_read_all_pages():
    """Layers of `dense_layers=4` use the staging of the cache, and are loaded as a whole."""
    few = "quest:pages=9,recent=2,dense_layers=0"
    for rule in ("off", "quest:pages=4,recent=2,dense_layers=4", few):
        requests = requests_of({"a": LONG}, 24, sparse=rule)
        engine, got = offloaded(requests=requests)
        assert (engine.stats().sparse_pages_fetched > 0) == (rule == few)
        assert largest_difference(got.logits, ample(rule=rule)[1].logits) == 0


@pytest.mark.parametrize(("swap", "slow"), [(True, False), (False, False), (False, True)])
def test_a_preempted_request_with_offloaded_kv_changes_no_output(swap, slow, monkeypatch):
    """Its cache starts anew; recomputed output tokens read the same pages again."""
    fetched, submit = [], ThreadTransferWorker.submit

    def submit_slow(worker, copy, num_bytes):
        return submit(worker, lambda: (time.sleep(0.004), copy())[1], num_bytes)

    if slow:
        monkeypatch.setattr(ThreadTransferWorker, "submit", submit_slow)

    def preempt_once(engine):
        fetched.append(engine.stats().sparse_pages_fetched)
        if fetched[-1] and not engine.stats().num_preemptions:
            [request] = engine.scheduler.running
            engine.scheduler.lifecycle.preempt(request, "test", swap_all=swap)

    space = {"swap_space": "1MiB"} if swap else {}
    schedule = ScheduleConfig(chunk_tokens=16, preempt="swap" if swap else "recompute")
    engine, got = offloaded(before_step=preempt_once, schedule=schedule, **space)

    assert engine.stats().num_preemptions == 1
    assert engine.stats().num_swaps == swap
    assert engine.stats().sparse_pages_fetched > fetched[-1] // 2
    assert largest_difference({"a": got.logits["a"][-8:]}, {"a": ample()[1].logits["a"][-8:]}) <= (
        0 if swap else 1e-4
    )


def test_outputs_that_share_offloaded_pages_share_a_cache():
    params = SamplingParams(max_tokens=24, n=2, seed=1, temperature=1.0, ignore_eos=True)
    alone = Engine(deep("llama"), kv_config(memory="4MiB", page_tokens=4, sparse=RULE))
    expected = answer(alone, [GenerationRequest(LONG, params, request_id="a")])
    engine, got = offloaded(requests=[GenerationRequest(LONG, params, request_id="a")])

    stats = engine.stats()
    assert 0 < stats.sparse_pages_fetched < stats.sparse_page_hits
    assert got.tokens == expected.tokens
    assert largest_difference(got.logits, expected.logits) < 1e-4


def test_a_prompt_that_starts_from_offloaded_cached_pages_fetches_selected_ones():
    engine, first = offloaded(enable_prefix_caching=True)
    second = answer(engine, requests_of({"c": LONG}, 24))

    assert second.usages["c"].cached_tokens
    assert second.tokens["c", 0] == first.tokens["a", 0]


def test_bounds_of_offloaded_pages_are_a_part_of_the_kv_memory(caplog):
    engine, _ = offloaded()
    pool, memory = engine.pool.offload.kv_offload.bounds, engine.pool.kv.memory
    total_bytes = int(0.8 * ample()[2])

    assert pool.num_bytes > 0
    assert total_bytes - 4096 < memory.total_bytes + pool.num_bytes <= total_bytes

    engine, got = offloaded(offload_memory="64MiB")  # more than has room for staging and bounds
    assert engine.pool.offload.prefixes.pool.total_bytes < 4 << 20
    assert "raise --kv-memory to use all of it" in caplog.text
    assert largest_difference(got.logits, ample()[1].logits) == 0


@pytest.mark.parametrize(("tokens", "offload_memory"), [(150, 4096), (400, 1 << 26)])
def test_sizes_of_an_error_have_room_for_the_bounds_of_offloaded_pages(tokens, offload_memory):
    options = {"memory": 128 << 10, "offload_memory": offload_memory, "sparse": RULE}
    options |= {"page_tokens": PAGE_TOKENS, "offload_recompute": "off"}
    peaks = Engine(deep("llama"), kv_config(**options), ScheduleConfig()).scheduler.peaks
    need = Need(tokens, may_offload=True)
    sizes = re.findall(r"--kv-((?:offload-)?memory) to (\w+)", possible_changes(peaks, need, 1))

    assert len(sizes) == (2 if offload_memory == 4096 else 1)
    for name, size in sizes:
        larger = kv_config(**options | {name.replace("-", "_"): size})
        assert Engine(deep("llama"), larger, ScheduleConfig()).scheduler.peaks.fits_alone(need)
