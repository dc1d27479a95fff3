"""Engines that offload the oldest KV pages of running requests when device KV memory is full.

Logits equal those of an engine with enough memory within 1e-4, with chunked prefill, batches,
cached prefixes, quantized KV, preemption, cancellation and delayed copies.
"""

import random
import re
import time
from dataclasses import replace
from functools import cache

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.prefix_splits import PrefixSplits
from quire.offload.split import COPY
from quire.offload.step_log import HOST_ATTEND, PROJECT
from quire.offload.swap.transfer import ThreadTransferWorker
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_eviction import Recorder, largest_difference
from support.engines import greedy, load
from support.exact_products import use_exact_products
from support.kv_options import kv_config

NEW_TOKENS = 14
PROMPTS = {
    "a": [5, 9, 2, 7] * 12,
    "b": [3 + i * i % 60 for i in range(70)],
    "c": [3 + i * i % 60 for i in range(40)] + [8, 8, 4] * 7,
    "d": [11, 4] * 9,
}
MODELS = ("llama_mha", "qwen3", "gemma2", "opt", "mimo_v2_flash", "deepseek_v3", "glm_moe_dsa")
ROW_TOKENS = 96


class DelayedTransfers(ThreadTransferWorker):
    """A transfer worker that delays each copy by a random time."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self.num_bytes = 0

    def submit(self, copy, num_bytes):
        self.num_bytes += num_bytes
        delay_s = self._rng.random() * 0.002

        def late():
            time.sleep(delay_s)
            copy()

        return super().submit(late, num_bytes)


@cache
def model_of(name: str):
    """Model with three times its layers ("name*n": n times): with two layers all offloaded pages
    would be staged at once.
    """
    architecture, _, times = name.partition("*")
    return load(architecture, times=int(times or 3))


@cache
def row_bytes(name: str, codec: str = "none") -> int:
    """Bytes of the KV of one sequence of `ROW_TOKENS` tokens."""
    engine = Engine(model_of(name), KVConfig(memory="16MiB", page_tokens=4, codec=codec))
    groups = engine.pool.kv.memory.layout.groups
    return sum(group.bytes_at_most(ROW_TOKENS, 16) for group in groups)


def run(
    name: str, rows: float, *, codec="none", stream="4MiB", cancel=(), prompts=PROMPTS, **options
):
    """Generate for all prompts in KV memory for `rows` sequences; return engine, logits, usages."""
    new_tokens = options.pop("new_tokens", NEW_TOKENS)
    schedule = {"chunk_tokens": 16, "max_num_batched_tokens": 40} | options.pop("schedule", {})
    config = kv_config(
        memory=int(rows * row_bytes(name, codec)),
        page_tokens=4,
        codec=codec,
        offload_memory=stream,
        **options,
    )
    engine = Engine(model_of(name), config, ScheduleConfig(**schedule))
    if engine.pool.kv.offload is not None:
        engine.pool.kv.offload.transfer_worker = DelayedTransfers()
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
    for request, prompt in prompts.items():
        engine.submit(GenerationRequest(prompt, greedy(new_tokens), request_id=request))
    usages, steps = {}, 0
    while engine.has_work:
        steps += 1
        for request, at in cancel:
            if steps == at:
                engine.cancel(request)
        for delta in engine.step():
            if delta.usage is not None:
                assert delta.error is None, delta.error
                usages[delta.request_id] = delta.usage
        engine.check()
    return engine, recorder.logits, usages


@cache
def ample_memory_logits(name: str, codec: str = "none"):
    """Logits of an engine with KV memory for all requests."""
    return run(name, 16, codec=codec, stream=0)[1]


def offloaded(engine: Engine) -> int:
    """Number of offload events."""
    return len(engine.events.newest(["offloaded"]))


def assert_all_free(engine: Engine) -> None:
    """Only cached prefixes are left in offload memory."""
    engine.scheduler.sequence_memory.drop_cached()
    assert not engine.pool.offload.prefixes.pool.used_bytes
    assert not engine.pool.offload.prefixes.rows


def most_running(engine: Engine) -> int:
    """Largest number of sequences with KV at the same time."""
    count = most = 0
    for event in engine.events.newest(["admitted", "freed"]):
        count += 1 if event.kind == "admitted" else -1
        most = max(most, count)
    return most


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, 0.6) for name in MODELS),
        ("llama_mha", 1.2),
        *(pytest.param(name, 1.2, marks=pytest.mark.slow) for name in MODELS[1:]),
    ],
)
def test_logits_equal_those_with_enough_memory(name, rows):
    engine, logits, usages = run(name, rows)

    assert offloaded(engine)
    assert set(usages) == set(PROMPTS)
    assert largest_difference(logits, ample_memory_logits(name)) <= 1e-4
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama_mha", "1"),
        ("gpt2", "0.5"),
        ("bloom", "1"),
        ("qwen3", "1"),
        ("mimo_v2_flash", "1"),
        ("deepseek_v3", "1"),
        ("deepseek_v2", "1"),
        ("glm_moe_dsa", "1"),
        *(
            pytest.param(name, part, marks=pytest.mark.slow)
            for name in ("opt", "llama", "gemma2", "gpt_neox", "phi3", "stablelm", "gpt_oss")
            for part in ("0", "0.5", "1")
        ),
        pytest.param("deepseek_v32", "0.5", marks=pytest.mark.slow),
    ],
)
def test_recomputed_kv_gives_equal_logits(name, part):
    engine, logits, _ = run(name, 0.8, offload_recompute=part)

    assert offloaded(engine)
    assert bool(engine.stats().recomputed_tokens) == (part != "0")
    assert largest_difference(logits, ample_memory_logits(name)) <= 1e-4


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama", "1"),
        ("falcon_alibi", "0.5"),
        ("mimo_v2_flash", "0.5"),
        ("deepseek_v3", "0.5"),
        *(
            pytest.param(name, part, marks=pytest.mark.slow)
            for name in ("gpt2", "llama_mqa", "gemma2", "gpt_oss")
            for part in ("0.5", "1")
        ),
    ],
)
def test_cpu_attention_gives_equal_logits(name, part):
    engine, logits, _ = run(name, 0.8, offload_recompute="off", offload_cpu_attention=part)

    assert offloaded(engine)
    assert engine.stats().cpu_attended_tokens
    assert largest_difference(logits, ample_memory_logits(name)) <= 1e-4


@pytest.mark.parametrize(
    ("parts", "tolerance"),
    [
        ({"offload_recompute": "1"}, 1e-4),
        pytest.param({"offload_cpu_attention": "0.5"}, 2e-2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("name", "codec"), [("llama_mha", "int8"), ("deepseek_v3", "int8/int8")])
def test_quantized_kv_is_recomputed_and_attended_to_on_the_cpu(name, codec, parts, tolerance):
    """With exact products recomputed KV has equal codes.

    Attention that is split between CPU and device rounds differently, which later codes amplify.
    """
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        expected = run(name, 16, codec=codec, stream=0)[1]
        engine, logits, _ = run(name, 0.7, codec=codec, **parts)

    stats = engine.stats()
    assert stats.recomputed_tokens or stats.cpu_attended_tokens
    assert largest_difference(logits, expected) <= tolerance


def test_quantized_activations_use_less_memory_with_small_error():
    """int8 in groups of 64 elements with a float16 scale each: about a quarter of the bytes."""
    runs = {
        codec: run("llama_mha", 0.8, offload_recompute="1", offload_activation_codec=codec)
        for codec in ("none", "int8")
    }

    plain, coded = (runs[codec][0].pool.offload.kv_offload.kv_recompute.store for codec in runs)
    assert coded.codec.row_bytes < 0.3 * plain.codec.row_bytes
    assert (
        coded.allocator.num_blocks * coded.block_bytes
        < plain.allocator.num_blocks * plain.block_bytes
    )
    assert runs["int8"][0].stats().recomputed_tokens
    assert (
        0 < difference_until_tokens_differ(runs["int8"][1], ample_memory_logits("llama_mha")) <= 0.1
    )


def difference_until_tokens_differ(logits, expected):
    """Largest difference of logits up to the first step with different tokens."""
    differences = []
    for request, steps in logits.items():
        for got, wanted in zip(steps, expected[request], strict=True):
            differences.append(float((got - wanted).abs().max()))
            if got.argmax() != wanted.argmax():
                break
    return max(differences)


@pytest.mark.parametrize("parts", [{"offload_recompute": "0.5"}, {"offload_cpu_attention": "1"}])
def test_layers_with_different_codecs_have_separate_offloaded_prefixes(parts, monkeypatch):
    """Activations of both kinds of layers are prefetched together.

    One page fewer of the plain layers is offloaded, as happens when offload memory fills up.
    """
    use_exact_products(monkeypatch)
    options = {"codec": "int8+plain_layers=2", "prompts": {"c": PROMPTS["c"]}, "new_tokens": 6}
    expected = run("gpt2*4", 4, stream=0, **options)[1]
    movable_pages = OffloadedPrefixes.movable_pages

    def one_plain_page_fewer(prefixes, row, slots):
        for table, first, columns in movable_pages(prefixes, row, slots):
            left = columns - (table.group.name == "full.plain")
            if left:
                yield table, first, left

    monkeypatch.setattr(OffloadedPrefixes, "movable_pages", one_plain_page_fewer)
    engine, logits, _ = run("gpt2*4", 0.7, **options, **parts)

    stats = engine.stats()
    assert stats.recomputed_tokens or stats.cpu_attended_tokens
    assert largest_difference(logits, expected) <= 1e-4


@pytest.mark.parametrize(
    ("codec", "rows"),
    [
        ("int8", 0.7),
        pytest.param("int4+sinks=2+residual=6", 1.0, marks=pytest.mark.slow),
        pytest.param("int4_page/int8", 0.9, marks=pytest.mark.slow),
    ],
)
def test_quantized_pages_are_offloaded_without_change(codec, rows):
    """With exact products the order of sums does not change a bit."""
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        expected = run("qwen3", 16, codec=codec, stream=0)[1]
        engine, logits, _ = run("qwen3", rows, codec=codec)

    assert offloaded(engine)
    assert largest_difference(logits, expected) <= 1e-4


def test_offload_memory_admits_more_requests():
    """No admitted request is preempted: reserved pages count offloaded prefixes as staged."""
    reserved = {"admission": "reserved"}
    with_host, _, usages = run("qwen3", 1.3, schedule=reserved)
    without, _, _ = run("qwen3", 1.3, stream=0, schedule=reserved)

    assert offloaded(with_host)
    assert with_host.stats().num_preemptions == 0
    assert most_running(with_host) > most_running(without)
    assert all(usage.kv_peak_bytes for usage in usages.values())


@pytest.mark.parametrize(
    ("name", "rows", "parts"),
    [
        ("qwen3", 0.6, {}),
        ("llama_mha", 0.3, {"offload_recompute": "0.5"}),
        pytest.param("gemma2", 0.75, {}, marks=pytest.mark.slow),
        pytest.param("llama", 0.3, {"offload_cpu_attention": "0.5"}, marks=pytest.mark.slow),
    ],
)
def test_a_prefill_chunk_is_limited_to_free_memory(name, rows, parts):
    """The default chunk is longer than these prompts; 0.3 rows cannot hold two staging slots."""
    schedule = {"chunk_tokens": 2048, "max_num_batched_tokens": 2048}
    engine, logits, _ = run(name, rows, schedule=schedule, **parts)

    assert offloaded(engine)
    assert set(logits) == set(PROMPTS)
    assert largest_difference(logits, ample_memory_logits(name)) <= 1e-4
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("rows", "page_tokens", "stream_bytes"), [(0.5, 4, 61440), (0.6, 4, 43008), (0.7, 8, 24576)]
)
def test_a_request_runs_in_the_min_offload_memory_that_fits(rows, page_tokens, stream_bytes):
    """Its last pages are offloaded too, in page groups that fit in offload memory."""
    memory = {"memory": int(rows * row_bytes("qwen3")), "page_tokens": page_tokens}
    kv = kv_config(offload_memory=stream_bytes, offload_recompute="off", **memory)
    less = kv_config(offload_memory=stream_bytes - 512, offload_recompute="off", **memory)
    engine = Engine(model_of("qwen3"), kv, ScheduleConfig(chunk_tokens=16))
    engine.submit(GenerationRequest(PROMPTS["b"], greedy(8)))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.check()

    assert deltas[-1].finish_reason == "length"
    with pytest.raises(NeverFits):
        Engine(model_of("qwen3"), less, ScheduleConfig(chunk_tokens=16)).submit(
            GenerationRequest(PROMPTS["b"], greedy(8))
        )


def test_staging_frees_slabs_for_pages_of_other_sizes():
    """Staging must not hold pages in all 10 slabs, or plain layers have no free slab."""
    kv = {"codec": "int8+plain_layers=1", "page_tokens": 4, "offload_recompute": "off"}
    config = kv_config(memory=40960, offload_memory="1MiB", enable_prefix_caching=False, **kv)
    engine = Engine(model_of("llama_mha"), config, ScheduleConfig(chunk_tokens=5))
    engine.submit(GenerationRequest(PROMPTS["b"][:51], greedy(7)))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.check()

    assert (deltas[-1].finish_reason, deltas[-1].error) == ("length", None)


@pytest.mark.parametrize("part", ["off", "1"])
def test_a_request_with_a_cached_prefix_is_offloaded(part):
    """Cached pages remain on the device while they are shared; the request's copy is offloaded.

    Only tokens after the cached prefix have stored activations.
    """
    memory = int(0.8 * row_bytes("qwen3"))
    config = kv_config(memory=memory, page_tokens=4, offload_memory="1MiB", offload_recompute=part)
    engine = Engine(model_of("qwen3"), config, ScheduleConfig(chunk_tokens=16))
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
    usages = {}
    for request, prompt, count in (
        ("first", PROMPTS["b"][:40], 1),
        ("b", PROMPTS["b"], NEW_TOKENS),
    ):
        engine.submit(GenerationRequest(prompt, greedy(count), request_id=request))
        while engine.has_work:
            usages |= {d.request_id: d.usage for d in engine.step() if d.usage is not None}
            engine.check()

    assert usages["b"].cached_tokens == 40
    assert {event.request_id for event in engine.events.newest(["offloaded"])} == {"b"}
    logits = {"b": recorder.logits["b"]}
    assert largest_difference(logits, {"b": ample_memory_logits("qwen3")["b"]}) <= 1e-4


@pytest.mark.parametrize(("name", "part"), [("qwen3", "off"), ("llama_mha", "0.5")])
def test_offloaded_prefixes_are_cached_in_offload_memory(name, part):
    """The second prompt shares a part of the offloaded pages, the third one all."""
    memory = int(0.7 * row_bytes(name))
    config = kv_config(memory=memory, page_tokens=4, offload_memory="1MiB", offload_recompute=part)
    engine = Engine(model_of(name), config, ScheduleConfig(chunk_tokens=16))
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
    usages = {}
    prompts = {"first": PROMPTS["b"], "c": PROMPTS["c"], "b": PROMPTS["b"]}
    for request, prompt in prompts.items():
        engine.submit(GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=request))
        while engine.has_work:
            usages |= {d.request_id: d.usage for d in engine.step() if d.usage is not None}
            engine.check()

    cached = {request: usage.cached_tokens for request, usage in usages.items()}
    assert cached == {"first": 0, "c": 40, "b": 52}
    logits = {request: recorder.logits[request] for request in "bc"}
    expected = {request: ample_memory_logits(name)[request] for request in "bc"}
    assert largest_difference(logits, expected) <= 1e-4
    assert_all_free(engine)


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_a_request_with_an_offloaded_prefix_can_be_preempted(preempt):
    """It is recomputed, since its pages are in two memories."""
    host = "4MiB" if preempt == "swap" else 0
    engine, logits, _ = run(
        "qwen3",
        0.9,
        stream="48KiB",
        swap_space=host,
        schedule={"admission": "optimistic", "preempt": preempt},
    )

    assert offloaded(engine)
    assert engine.stats().num_preemptions
    assert largest_difference(logits, ample_memory_logits("qwen3")) <= 1e-4


def test_cancelled_requests_free_their_offloaded_pages():
    engine, logits, _ = run("qwen3", 0.7, cancel=[("b", 7), ("a", 9)])

    assert offloaded(engine)
    assert_all_free(engine)
    kept = {name: ample_memory_logits("qwen3")[name] for name in ("c", "d")}
    assert largest_difference({name: logits[name] for name in kept}, kept) <= 1e-4


def test_requests_with_several_sequences_are_not_offloaded():
    config = kv_config(memory=int(1.5 * row_bytes("qwen3")), page_tokens=4, offload_memory="1MiB")
    engine = Engine(model_of("qwen3"), config, ScheduleConfig(chunk_tokens=16))
    engine.submit(GenerationRequest(PROMPTS["b"], greedy(40), request_id="long"))
    engine.submit(
        GenerationRequest(PROMPTS["d"], SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=1))
    )
    while engine.has_work:
        engine.step()
        engine.check()

    assert {event.request_id for event in engine.events.newest(["offloaded"])} <= {"long"}


@pytest.mark.parametrize(
    ("name", "rule", "codec", "rows", "recomputes"),
    [
        ("llama_mha", "tova", "none", 1.1, True),
        ("qwen3", "average", "int8", 1.1, False),
        ("glm_moe_dsa", "h2o", "none", 1.1, True),
        pytest.param("llama_mqa", "average", "none", 1.1, True, marks=pytest.mark.slow),
        pytest.param("llama_mha", "tova", "int8", 0.8, True, marks=pytest.mark.slow),
        pytest.param("opt", "recent", "none", 1.1, True, marks=pytest.mark.slow),
        pytest.param("gemma2", "h2o", "none", 1.1, False, marks=pytest.mark.slow),
    ],
)
def test_evicting_requests_are_offloaded_between_evictions(
    name, rule, codec, rows, recomputes, monkeypatch
):
    """Prefix hits, swaps, cancels and delays together; activations of a token move with its KV.

    If each KV head retains different tokens, no activations are stored and `auto` transfers all KV.
    """
    if codec != "none":  # other batches round differently, and codes amplify that
        use_exact_products(monkeypatch)
    options = {"codec": codec, "evict": f"{rule}:cap=40,every=8", "cancel": [("c", 9)]}
    options |= {"new_tokens": 24}
    host = {"swap_space": "4MiB", "schedule": {"preempt": "swap", "admission": "optimistic"}}
    recompute = "1" if recomputes else "auto"
    engine, logits, _ = run(name, rows, offload_recompute=recompute, **options, **host)
    expected = run(name, 16, stream=0, **options)[1]

    assert offloaded(engine)
    assert engine.stats().num_evictions
    assert bool(engine.stats().recomputed_tokens) == recomputes
    logits.pop("c", None), expected.pop("c", None)
    assert largest_difference(logits, expected) <= 1e-4


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"offload_memory": "900TiB"}, ConfigError, "lower --kv-offload-memory"),
        ({"offload_memory": "much"}, ConfigError, "much"),
        (
            {"offload_memory": 0, "offload_recompute": "0.5"},
            ConfigError,
            "set --kv-offload-memory",
        ),
        (
            {"offload_memory": 0, "offload_activation_codec": "int8"},
            ConfigError,
            "set --kv-offload-memory",
        ),
        ({"offload_recompute": "2"}, ConfigError, "a fraction from 0 to 1, got '2'"),
        (
            {"offload_cpu_attention": "some"},
            ConfigError,
            "--kv-offload-cpu-attention: expected auto, off",
        ),
    ],
)
def test_invalid_options_are_rejected_at_start(options, error, says):
    options = {"memory": "8MiB", "offload_memory": "1MiB"} | options
    with pytest.raises(error, match=says):
        Engine(model_of("qwen3"), kv_config(**options), ScheduleConfig())


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "llama_mha",
            {"offload_recompute": "0.5", "evict": "h2o:cap=32,every=8"},
            "0.5 cannot recompute any KV: each KV head retains tokens of its own; "
            "use eviction rules",
        ),
        (
            "llama_mha",
            {"offload_recompute": "0.5", "codec": "int4_page"},
            "use a codec such as int8",
        ),
        (
            "llama_mha",
            {"offload_recompute": "1", "codec": "int8+sinks=2+residual=4"},
            "use a codec such as int8",
        ),
        (
            "llama_mha",
            {"offload_recompute": "0.5", "offload_memory": "25KiB"},
            "0.5, a page of activations.*: raise it or leave it out",
        ),
        (
            "llama_mha",
            {"offload_recompute": "0.5", "scratch": 100},
            "expected --scratch of .* or more",
        ),
        (
            "llama_mha",
            {"offload_activation_codec": "int8", "offload_recompute": "off"},
            "none is: --kv-offload-recompute is off; leave out --kv-offload-activation-codec",
        ),
        (
            "llama_mha",
            {"offload_activation_codec": "int8", "codec": "int4_page"},
            "leave out --kv-offload-activation-codec",
        ),
        (
            "llama",
            {"offload_cpu_attention": "0.5", "codec": "int8+sinks=2+residual=4"},
            "use a codec without .sinks",
        ),
        (
            "llama",
            {"offload_cpu_attention": "0.5", "evict": "streaming:cap=32,every=8,sinks=4"},
            "a rule other than streaming",
        ),
        (
            "llama",
            {"offload_cpu_attention": "0.5", "evict": "h2o:cap=32,every=8"},
            "needs statistics of the attention to every token; use a rule without them",
        ),
        (
            "llama",
            {"offload_recompute": "0.5", "offload_cpu_attention": "0.6"},
            "of at most 1, got 0.5 and 0.6: lower one",
        ),
        ("llama", {"offload_memory": "1KiB"}, "expected --kv-offload-memory of .* or more"),
        (
            "glm_moe_dsa",
            {"offload_cpu_attention": "0.5"},
            "an index selects tokens by the scores of the whole sequence",
        ),
    ],
)
def test_options_without_effect_are_rejected(name, options, says):
    options = {"memory": "8MiB", "offload_memory": "1MiB"} | options
    with pytest.raises(ConfigError, match=says):
        Engine(model_of(name), kv_config(**options), ScheduleConfig())


@pytest.mark.parametrize("name", ["llama", "llama_mha"])
@pytest.mark.parametrize("fraction", ["off", "0.01", "0.5", "1"])
def test_the_min_offload_memory_of_an_error_is_accepted(name, fraction):
    options = {"memory": "8MiB", "offload_recompute": fraction}
    with pytest.raises(ConfigError, match=r"of [\d,]+ B or more") as refused:
        Engine(model_of(name), kv_config(offload_memory=1024, **options), ScheduleConfig())
    min_bytes = _expected_bytes(refused)

    pool = Engine(
        model_of(name), kv_config(offload_memory=min_bytes, **options), ScheduleConfig()
    ).pool
    offload, groups = pool.offload, [table.group for table in pool.kv.memory.tables.values()]
    page_bytes = sum(group.num_lanes * group.page_class.page_bytes for group in groups)
    assert offload.prefixes.pool.total_bytes >= page_bytes
    if fraction != "off":
        assert offload.kv_offload.kv_recompute.store.allocator.num_blocks
    with pytest.raises(ConfigError, match=r"of [\d,]+ B or more"):
        Engine(
            model_of(name), kv_config(offload_memory=min_bytes - 64, **options), ScheduleConfig()
        )


def test_the_min_scratch_memory_of_an_error_is_accepted():
    options = {"memory": "8MiB", "offload_memory": "1MiB", "offload_recompute": "0.5"}
    with pytest.raises(ConfigError, match="--scratch of") as refused:
        Engine(model_of("llama_mha"), kv_config(scratch=100, **options), ScheduleConfig())
    Engine(
        model_of("llama_mha"),
        kv_config(scratch=_expected_bytes(refused), **options),
        ScheduleConfig(),
    )


def _expected_bytes(refused) -> int:
    """The number of bytes that an error expects."""
    return int(re.search(r"of ([\d,]+) B or more", str(refused.value))[1].replace(",", ""))


def test_what_auto_leaves_out_is_logged_once(caplog):
    caplog.set_level("INFO", logger="quire")
    why("llama_mha", codec="int4_page+plain=float32")

    said = [
        record.getMessage() for record in caplog.records if "--kv-offload-" in record.getMessage()
    ]
    assert [text.partition(":")[0] for text in said] == [
        "--kv-offload-recompute auto recomputes no KV",
        "--kv-offload-cpu-attention auto attends on the device alone",
    ]
    assert "not written one by one" in said[0]


def as_on_a_fast_link(timed):
    """The operations of a step with the times of a machine with a fast link and slow products.

    Each lane does its operations one after the other, so neither this machine's load nor the
    threads that copy change anything.
    """
    seconds = {"in": lambda item: item.num_bytes / 1e9, "device": lambda item: item.tokens * 1e-6}
    free_s, retimed = dict.fromkeys(seconds, 0.0), []
    for item in sorted(timed, key=lambda item: item.start_s):
        lane = "in" if item.num_bytes else "device"
        start_s = free_s[lane]
        free_s[lane] += seconds[lane](item)
        retimed.append(replace(item, start_s=start_s, end_s=free_s[lane]))
    return retimed


def test_the_recomputed_fraction_follows_measured_rates(monkeypatch):
    """The assumed link is slow and the measured link is fast, so the fraction falls."""
    slow = {COPY: (0.0, 1e-6), PROJECT: (0.0, 1e-9), HOST_ATTEND: (0.0, 1.0)}
    monkeypatch.setattr("quire.offload.kv.build.measure_offload_speeds", lambda *_, **__: slow)
    parts, learn = [], PrefixSplits.learn

    def learn_of_a_fast_link(splits, timed):
        parts.append(splits.recomputed_tokens / splits.tokens)
        learn(splits, as_on_a_fast_link(timed))

    monkeypatch.setattr(PrefixSplits, "learn", learn_of_a_fast_link)
    engine, logits, _ = run("llama_mha", 0.8)

    offload = engine.pool.offload
    assert "activations are 0.5x the KV of this model: part" in offload.why
    assert engine.stats().recomputed_tokens
    assert offload.splits.rates.call_and_unit_s(COPY)[1] < slow[COPY][1] / 100
    assert parts[0] > 0.5 > parts[-1]
    assert offload.kv_offload.kv_recompute.store.allocator.peak_blocks
    assert largest_difference(logits, ample_memory_logits("llama_mha")) <= 1e-4


def why(name: str, **options) -> str:
    """The engine's explanation of how much KV is recomputed."""
    config = kv_config(**{"memory": "8MiB", "offload_memory": "1MiB"} | options)
    return Engine(model_of(name), config, ScheduleConfig()).pool.offload.why


def test_the_explanation_says_why_no_kv_is_recomputed():
    assert "activations are 1.0x the KV of this model: KV alone" in why("llama")
    assert "each KV head retains tokens of its own" in why("llama_mha", evict="h2o:cap=32,every=8")
    assert "not written one by one" in why("llama_mha", codec="int4_page")
    assert "--kv-offload-recompute off" in why("llama_mha", offload_recompute="off")
    assert "recomputed from activations, as requested" in why("llama", offload_recompute="0.5")


def test_a_model_without_enough_full_attention_layers_is_rejected():
    with pytest.raises(ConfigError, match="layers with full attention and pages of one size"):
        Engine(load("qwen3"), kv_config(memory="8MiB", offload_memory="1MiB"), ScheduleConfig())
