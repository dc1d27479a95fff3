"""Engines that offload the oldest KV pages of running requests when device KV memory is full.

Logits equal those of an engine with enough memory within 1e-4, with chunked prefill, batches,
cached prefixes, quantized KV, preemption, cancellation and delayed copies.
"""

import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits
from quire.offload.kv.cuda_transfer import StreamTransferWorker
from quire.offload.kv.offloaded_prefixes import OffloadedPrefixes
from quire.offload.kv.prefix_splits import PrefixSplits
from quire.offload.split import COPY
from quire.offload.step_log import HOST_ATTEND, PROJECT
from quire.scheduler.schedule_config import ScheduleConfig
from support.engines import answer, largest_difference, load, requests_of
from support.exact_products import use_exact_products
from support.kv_options import kv_config
from support.streamed import DelayedTransfers

NEW_TOKENS = 14
PROMPTS = {
    "a": [5, 9, 2, 7] * 12,
    "b": [3 + i * i % 60 for i in range(70)],
    "c": [3 + i * i % 60 for i in range(40)] + [8, 8, 4] * 7,
    "d": [11, 4] * 9,
}
RECOMPUTED = ("opt", "llama", "gemma2", "gpt_neox", "phi3", "stablelm", "gpt_oss")
C = {"c": PROMPTS["c"]}
MODELS = ("llama_mha", "qwen3", "gemma2", "opt", "mimo_v2_flash", "deepseek_v3", "glm_moe_dsa")
ROW_TOKENS = 96


@cache
def model_of(name: str, device: str = "cpu"):
    """Three times a model's layers ("name*n": n times): two layers would be staged at once."""
    architecture, _, times = name.partition("*")
    return load(architecture, device, times=int(times or 3))


@cache
def row_bytes(name: str, codec: str = "none") -> int:
    engine = Engine(model_of(name), KVConfig(memory="16MiB", page_tokens=4, codec=codec))
    groups = engine.pool.kv.memory.layout.groups
    return sum(group.bytes_at_most(ROW_TOKENS, 16) for group in groups)


def engine_of(name="qwen3", *, rows=None, device="cpu", schedule=None, **options) -> Engine:
    """An engine with KV offload, in KV memory for `rows` sequences or for `memory` bytes."""
    kv = {"memory": "8MiB", "page_tokens": 4, "offload_memory": "1MiB"} | options
    if rows is not None:
        kv["memory"] = int(rows * row_bytes(name, options.get("codec", "none")))
    steps = ScheduleConfig(**{"chunk_tokens": 16} | (schedule or {}))
    return Engine(model_of(name, device), kv_config(**kv), steps)


def run(name: str, rows: float, *, stream="4MiB", cancel=(), prompts=PROMPTS, **options):
    """Generate for all prompts in KV memory for `rows` sequences; return engine, logits, usages."""
    new_tokens = options.pop("new_tokens", NEW_TOKENS)
    schedule = {"max_num_batched_tokens": 40} | options.pop("schedule", {})
    engine = engine_of(name, rows=rows, schedule=schedule, offload_memory=stream, **options)
    if engine.pool.kv.offload is not None and options.get("device", "cpu") == "cpu":
        engine.pool.kv.offload.transfer_worker = DelayedTransfers(max_s=0.002)
    found = answer(engine, requests_of(prompts, new_tokens), cancel=cancel)
    return engine, found.logits, found.usages


@cache
def ample_memory_logits(name: str, codec: str = "none"):
    return run(name, 16, codec=codec, stream=0)[1]


def check_logits(name: str, logits, only=PROMPTS) -> None:
    expected = {request: ample_memory_logits(name)[request] for request in only}
    assert largest_difference({request: logits[request] for request in only}, expected) <= 1e-4


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def offloaded(engine: Engine) -> int:
    return len(engine.events.newest(["offloaded"]))


def assert_all_free(engine: Engine) -> None:
    """Only cached prefixes are left in offload memory."""
    engine.scheduler.sequence_memory.drop_cached()
    assert not engine.pool.offload.prefixes.pool.used_bytes
    assert not engine.pool.offload.prefixes.rows


def most_running(engine: Engine) -> int:
    count = most = 0
    for event in engine.events.newest(["admitted", "freed"]):
        count += 1 if event.kind == "admitted" else -1
        most = max(most, count)
    return most


@pytest.mark.parametrize(
    ("name", "rows"),
    [*((name, 0.6) for name in MODELS), ("llama_mha", 1.2), *slow(*((n, 1.2) for n in MODELS[1:]))],
)
def test_logits_equal_those_with_enough_memory(name, rows):
    engine, logits, usages = run(name, rows)
    assert offloaded(engine)
    assert set(usages) == set(PROMPTS)
    check_logits(name, logits)
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("name", "part", "attended"),
    [
        *((name, "1", "auto") for name in ("llama_mha", "bloom", "qwen3", "mimo_v2_flash")),
        *((name, "1", "auto") for name in ("deepseek_v3", "deepseek_v2", "glm_moe_dsa")),
        ("gpt2", "0.5", "auto"),
        *slow(("deepseek_v32", "0.5", "auto"), *product(RECOMPUTED, ("0", "0.5", "1"), ["auto"])),
        *(("llama", "off", "1"), ("falcon_alibi", "off", "0.5"), ("mimo_v2_flash", "off", "0.5")),
        ("deepseek_v3", "off", "0.5"),
        *slow(*product(("gpt2", "llama_mqa", "gemma2", "gpt_oss"), ["off"], ("0.5", "1"))),
    ],
)
def test_recomputed_kv_and_cpu_attention_give_equal_logits(name, part, attended):
    engine, logits, _ = run(name, 0.8, offload_recompute=part, offload_cpu_attention=attended)
    assert offloaded(engine)
    assert bool(engine.stats().recomputed_tokens) == (part not in ("0", "off"))
    assert bool(engine.stats().cpu_attended_tokens) == (attended != "auto")
    check_logits(name, logits)


@pytest.mark.parametrize(
    ("parts", "tolerance"),
    [({"offload_recompute": "1"}, 1e-4), *slow(({"offload_cpu_attention": "0.5"}, 2e-2))],
)
@pytest.mark.parametrize(("name", "codec"), [("llama_mha", "int8"), ("deepseek_v3", "int8/int8")])
def test_quantized_kv_is_recomputed_and_attended_to_on_the_cpu(
    name, codec, parts, tolerance, monkeypatch
):
    """With exact products recomputed KV has equal codes.

    Attention that is split between CPU and device rounds differently, which later codes amplify.
    """
    use_exact_products(monkeypatch)
    expected = run(name, 16, codec=codec, stream=0)[1]
    engine, logits, _ = run(name, 0.7, codec=codec, **parts)

    stats = engine.stats()
    assert stats.recomputed_tokens or stats.cpu_attended_tokens
    assert largest_difference(logits, expected) <= tolerance


def test_quantized_activations_use_less_memory_with_small_error():
    """int8 in groups of 64 elements with a float16 scale each: about a quarter of the bytes."""
    (plain_run, _), (coded_run, logits) = (
        run("llama_mha", 0.8, offload_recompute="1", offload_activation_codec=codec)[:2]
        for codec in ("none", "int8")
    )
    plain, coded = (
        engine.pool.offload.kv_offload.kv_recompute.store for engine in (plain_run, coded_run)
    )
    assert coded.codec.row_bytes < 0.3 * plain.codec.row_bytes
    sizes = [store.allocator.num_blocks * store.block_bytes for store in (coded, plain)]
    assert sizes[0] < sizes[1]
    assert coded_run.stats().recomputed_tokens
    differences = []
    for request, steps in logits.items():
        for got, wanted in zip(steps, ample_memory_logits("llama_mha")[request], strict=True):
            differences.append(float((got - wanted).abs().max()))
            if got.argmax() != wanted.argmax():  # later ones follow other tokens
                break
    assert 0 < max(differences) <= 0.1


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
    [("int8", 0.7), *slow(("int4+sinks=2+residual=6", 1.0), ("int4_page/int8", 0.9))],
)
def test_quantized_pages_are_offloaded_without_change(codec, rows, monkeypatch):
    """With exact products the order of sums does not change a bit."""
    use_exact_products(monkeypatch)
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
        *(("qwen3", 0.6, {}), ("llama_mha", 0.3, {"offload_recompute": "0.5"})),
        *slow(("gemma2", 0.75, {}), ("llama", 0.3, {"offload_cpu_attention": "0.5"})),
    ],
)
def test_a_prefill_chunk_is_limited_to_free_memory(name, rows, parts):
    """The default chunk is longer than these prompts; 0.3 rows cannot hold two staging slots."""
    schedule = {"chunk_tokens": 2048, "max_num_batched_tokens": 2048}
    engine, logits, _ = run(name, rows, schedule=schedule, **parts)
    assert offloaded(engine)
    assert set(logits) == set(PROMPTS)
    check_logits(name, logits)
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("rows", "page_tokens", "stream_bytes"), [(0.5, 4, 61440), (0.6, 4, 43008), (0.7, 8, 24576)]
)
def test_a_request_runs_in_the_min_offload_memory_that_fits(rows, page_tokens, stream_bytes):
    """Its last pages are offloaded too, in page groups that fit in offload memory."""
    options = {"rows": rows, "page_tokens": page_tokens, "offload_recompute": "off"}
    requests = requests_of({"b": PROMPTS["b"]}, 8)
    answers = answer(engine_of(offload_memory=stream_bytes, **options), requests)
    assert answers.deltas[-1].finish_reason == "length"
    with pytest.raises(NeverFits):
        engine_of(offload_memory=stream_bytes - 512, **options).submit(*requests)


def test_staging_frees_slabs_for_pages_of_other_sizes():
    """Staging must not hold pages in all 10 slabs, or plain layers have no free slab."""
    options = {"codec": "int8+plain_layers=1", "offload_recompute": "off", "memory": 40960}
    options |= {"enable_prefix_caching": False, "schedule": {"chunk_tokens": 5}}
    requests = requests_of({"b": PROMPTS["b"][:51]}, 7)
    answers = answer(engine_of("llama_mha", **options), requests)
    assert answers.deltas[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "rows", "part", "first", "cached"),
    [
        ("qwen3", 0.8, "off", {"first": PROMPTS["b"][:40]}, {"first": 0, "b": 40}),
        ("qwen3", 0.8, "1", {"first": PROMPTS["b"][:40]}, {"first": 0, "b": 40}),
        ("qwen3", 0.7, "off", {"first": PROMPTS["b"], **C}, {"first": 0, "c": 40, "b": 52}),
        ("llama_mha", 0.7, "0.5", {"first": PROMPTS["b"], **C}, {"first": 0, "c": 40, "b": 52}),
    ],
)
def test_a_request_with_a_cached_prefix_is_offloaded(name, rows, part, first, cached):
    """Cached pages remain on the device while they are shared; the request's copy is offloaded.

    Only tokens after the cached prefix have stored activations. Offloaded prefixes are cached too:
    the second prompt shares a part of the offloaded pages, the third one all.
    """
    engine, logits, found = engine_of(name, rows=rows, offload_recompute=part), {}, {}
    for request, prompt in (first | {"b": PROMPTS["b"]}).items():
        tokens = 1 if len(prompt) == 40 else NEW_TOKENS
        answers = answer(engine, requests_of({request: prompt}, tokens))
        logits |= answers.logits
        found[request] = answers.usages[request].cached_tokens

    assert found == cached
    check_logits(name, logits, only=cached.keys() - {"first"})
    if len(cached) == 2:
        assert {event.request_id for event in engine.events.newest(["offloaded"])} == {"b"}
    assert_all_free(engine)


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_a_request_with_an_offloaded_prefix_can_be_preempted(preempt):
    """It is recomputed, since its pages are in two memories."""
    options = {"swap_space": "4MiB" if preempt == "swap" else 0, "stream": "48KiB"}
    schedule = {"admission": "optimistic", "preempt": preempt}
    engine, logits, _ = run("qwen3", 0.9, schedule=schedule, **options)
    assert offloaded(engine)
    assert engine.stats().num_preemptions
    check_logits("qwen3", logits)


def test_requests_with_several_sequences_are_not_offloaded_and_cancelled_ones_freed():
    engine, logits, _ = run("qwen3", 0.7, cancel=[("b", 7), ("a", 9)])
    assert offloaded(engine)
    assert_all_free(engine)
    check_logits("qwen3", logits, only="cd")
    engine = engine_of(rows=1.5)
    several = SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=1)
    requests = requests_of({"long": PROMPTS["b"]}, 40)
    answer(engine, [*requests, GenerationRequest(PROMPTS["d"], several)])
    assert {event.request_id for event in engine.events.newest(["offloaded"])} <= {"long"}


@pytest.mark.parametrize(
    ("name", "rule", "codec", "rows", "recomputes"),
    [
        ("llama_mha", "tova", "none", 1.1, True),
        ("qwen3", "average", "int8", 1.1, False),
        ("glm_moe_dsa", "h2o", "none", 1.1, True),
        *slow(
            *(
                ("llama_mqa", "average", "none", 1.1, True),
                ("llama_mha", "tova", "int8", 0.8, True),
            ),
            *(("opt", "recent", "none", 1.1, True), ("gemma2", "h2o", "none", 1.1, False)),
        ),
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


NO_MEMORY, PART = {"offload_memory": 0}, {"offload_recompute": "0.5"}
INT8_X, HALF = {"offload_activation_codec": "int8"}, {"offload_cpu_attention": "0.5"}
H2O, WINDOW = {"evict": "h2o:cap=32,every=8"}, {"codec": "int8+sinks=2+residual=4"}
PAGES, STREAMING = {"codec": "int4_page"}, {"evict": "streaming:cap=32,every=8,sinks=4"}
OWN_TOKENS = "0.5 cannot recompute any KV: each KV head retains tokens of its own; use eviction"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("qwen3", {"offload_memory": "900TiB"}, "lower --kv-offload-memory"),
        ("qwen3", {"offload_memory": "much"}, "much"),
        ("qwen3", NO_MEMORY | PART, "set --kv-offload-memory"),
        ("qwen3", NO_MEMORY | INT8_X, "set --kv-offload-memory"),
        ("qwen3", {"offload_recompute": "2"}, "a fraction from 0 to 1, got '2'"),
        ("qwen3", {"offload_cpu_attention": "some"}, "cpu-attention: expected auto, off"),
        ("llama_mha", PART | H2O, OWN_TOKENS),
        ("llama_mha", PART | PAGES, "use a codec such as int8"),
        ("llama_mha", WINDOW | {"offload_recompute": "1"}, "use a codec such as int8"),
        ("llama_mha", PART | {"offload_memory": "25KiB"}, "0.5, a page of activations.*: raise it"),
        ("llama_mha", PART | {"scratch": 100}, "expected --scratch of .* or more"),
        ("llama_mha", INT8_X | {"offload_recompute": "off"}, "is off; leave out --kv-offload"),
        ("llama_mha", INT8_X | PAGES, "leave out --kv-offload-activation-codec"),
        ("llama", HALF | WINDOW, "use a codec without .sinks"),
        ("llama", HALF | STREAMING, "a rule other than streaming"),
        ("llama", HALF | H2O, "needs statistics of the attention to every token; use a rule"),
        ("llama", PART | {"offload_cpu_attention": "0.6"}, "at most 1, got 0.5 and 0.6: lower one"),
        ("llama", {"offload_memory": "1KiB"}, "expected --kv-offload-memory of .* or more"),
        ("glm_moe_dsa", HALF, "an index selects tokens by the scores of the whole sequence"),
    ],
)
def test_options_without_effect_are_rejected(name, options, says):
    with pytest.raises(ConfigError, match=says):
        engine_of(name, **options, page_tokens=16)


def min_bytes(name, says=r"of [\d,]+ B or more", **options) -> int:
    with pytest.raises(ConfigError, match=says) as refused:
        engine_of(name, page_tokens=16, **options)
    return int(re.search(r"of ([\d,]+) B or more", str(refused.value))[1].replace(",", ""))


@pytest.mark.parametrize("name", ["llama", "llama_mha"])
@pytest.mark.parametrize("fraction", ["off", "0.01", "0.5", "1"])
def test_the_min_memory_of_an_error_is_accepted(name, fraction):
    options = {"offload_recompute": fraction}
    least = min_bytes(name, offload_memory=1024, **options)
    pool = engine_of(name, page_tokens=16, offload_memory=least, **options).pool
    offload, groups = pool.offload, [table.group for table in pool.kv.memory.tables.values()]
    page_bytes = sum(group.num_lanes * group.page_class.page_bytes for group in groups)
    assert offload.prefixes.pool.total_bytes >= page_bytes
    if fraction != "off":
        assert offload.kv_offload.kv_recompute.store.allocator.num_blocks
    assert min_bytes(name, offload_memory=least - 64, **options) == least
    if (name, fraction) == ("llama_mha", "0.5"):
        scratch = min_bytes(name, "--scratch of", scratch=100, **options)
        engine_of(name, page_tokens=16, scratch=scratch, **options)


def test_what_auto_leaves_out_is_logged_once(caplog):
    caplog.set_level("INFO", logger="quire")
    engine_of("llama_mha", codec="int4_page+plain=float32", page_tokens=16)
    said = [record.getMessage() for record in caplog.records]
    said = [text for text in said if "--kv-offload-" in text]
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
    check_logits("llama_mha", logits)


def test_models_with_few_full_layers_are_rejected_and_plans_without_recompute_explained():
    for name, options, says in (
        ("llama", {}, "activations are 1.0x the KV of this model: KV alone"),
        ("llama_mha", H2O, "each KV head retains tokens of its own"),
        ("llama_mha", PAGES, "not written one by one"),
        ("llama_mha", {"offload_recompute": "off"}, "--kv-offload-recompute off"),
        ("llama", PART, "recomputed from activations, as requested"),
    ):
        assert says in engine_of(name, **options, page_tokens=16).pool.offload.why
    with pytest.raises(ConfigError, match="layers with full attention and pages of one size"):
        Engine(load("qwen3"), kv_config(memory="8MiB", offload_memory="1MiB"), ScheduleConfig())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "parts",
    [
        *({"offload_recompute": part} for part in ("off", "1", "0.5")),
        *({"offload_recompute": "off", "offload_cpu_attention": "0.5"}, {}),
    ],
)
@pytest.mark.parametrize("name", ["llama_mha", "llama", "opt"])
def test_logits_on_cuda_equal_those_with_enough_memory(name, parts, monkeypatch):
    """Pinned memory, a copy stream and events; no device sync."""
    monkeypatch.setattr(torch.cuda, "synchronize", pytest.fail)
    engine, logits, _ = run(name, 0.8, device="cuda", **parts)

    assert isinstance(engine.pool.offload.kv_offload.transfer_worker, StreamTransferWorker)
    assert offloaded(engine)
    expected = run(name, 16, device="cuda", stream=0)[1]
    assert largest_difference(logits, expected) <= 1e-3
