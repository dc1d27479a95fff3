"""Codecs in the engine: batching and preemption change no logits; bytes are as counted.

Every codec x rules of eviction, pairwise. Products are exact
(tests/support/exact_products.py), so that what should be equal is.
"""

from functools import cache
from itertools import cycle

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, UnknownName
from quire.layout.codec_names import CODECS
from quire.layout.kv_format import fill_plain, read_format
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_eviction import largest_difference
from reference.test_eviction_engine import Run, run
from support.engines import greedy, load, make_prompts
from support.exact_products import use_exact_products
from support.kv_options import kv_config

MODEL = "qwen3"  # heads of 16 numbers
BY_TOKEN = [
    name
    for name, codec in CODECS.items()
    if not (codec.is_plain or codec.constants or codec.per_page)
]
PLAIN_BYTES = [*BY_TOKEN, "int8/int4:group=8", "none/int4_outliers", "int4_hadamard/none"]
KEEPING = ["int4+sinks=2+residual=6", "int2_page/int2", "int4_page/int4+sinks=1+residual=9"]
CODECS_HERE = [*PLAIN_BYTES, *KEEPING]
RULES = {
    "full": "full",
    "recent": "recent:cap=24,every=6,sinks=2",
    "h2o": "h2o:cap=24,every=6,recent=4",
    "keydiff": "keydiff:cap=24,every=6",
    "statistics": "roco:cap=24,every=6",
    "ragged": "h2o:cap=24,every=6,recent=4,budget=ada",
    "in order": "h2o:cap=24,every=6,recent=4,granularity=chunk,chunk_tokens=2",
    "by page": "h2o:cap=40,every=8,recent=4,granularity=page",
    "once": "snapkv:cap=24,window=6,when=prefill_end",
}
PROMPTS = [make_prompts(1, 60, seed=3)[0], [3 + i * i % 60 for i in range(60)]]


def covering() -> list[tuple[str, str]]:
    """Each codec with a rule, and each rule with a codec."""
    rules, pairs = list(RULES), []
    for i, codec in enumerate(CODECS_HERE):
        own = ["full", "by page"] if "_page" in codec else rules
        pairs.append((codec, own[(3 * i + 1) % len(own)]))
    usual = cycle(("int8", "int4+sinks=2+residual=6", "int4_outliers"))
    return list(dict.fromkeys([*pairs, *zip(usual, rules, strict=False)]))


@pytest.fixture(scope="module", autouse=True)
def _exact_products():
    with pytest.MonkeyPatch.context() as patch:
        use_exact_products(patch)
        yield


def answer(codec: str, rule: str, model: str = MODEL, **options) -> Run:
    jobs = {f"r{i}": (prompt, RULES[rule]) for i, prompt in enumerate(PROMPTS)}
    kv = {"codec": codec, "evict": RULES[rule], "evict_allow": "", "enable_prefix_caching": False}
    return run(jobs, model=model, kv=kv | options.pop("kv", {}), **options)


@cache
def undisturbed(codec: str, rule: str, model: str = MODEL) -> Run:
    return answer(codec, rule, model, max_num_seqs=1)


def assert_undisturbed(codec: str, rule: str, other: Run) -> None:
    expected = undisturbed(codec, rule)
    assert other.traces() == expected.traces()
    assert largest_difference(other.logits, expected.logits) <= 1e-4


@pytest.mark.parametrize(("codec", "rule"), covering())
def test_batches_and_chunks_change_no_logits(codec, rule):
    """Prefill attends to stored codes, for every chunk size."""
    assert_undisturbed(codec, rule, answer(codec, rule, chunk_tokens=7, max_num_batched_tokens=20))


def preempted() -> list:
    """Every second pair is preempted in both ways; one of them is fast."""
    found = []
    for number, (codec, rule) in enumerate(covering()[::2]):
        for preempt in ("swap", "recompute"):
            is_fast = preempt == ("swap", "recompute")[number % 2]
            marks = [] if is_fast else [pytest.mark.slow]
            found.append(pytest.param(codec, rule, preempt, marks=marks))
    return found


@pytest.mark.parametrize(("codec", "rule", "preempt"), preempted())
def test_preemption_changes_no_logits(codec, rule, preempt):
    """Codes are swapped in unchanged, or recomputed from equal keys and values."""
    host = "4MiB" if preempt == "swap" else 0
    often = answer(codec, rule, host=host, preempt=preempt, preempts=2)

    assert_undisturbed(codec, rule, often)
    if rule != "full":  # preempted after evictions
        assert sum(usage.preemptions for usage in often.usages.values()) >= 2


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codec, marks=[pytest.mark.slow] if i % 2 else [])
        for i, codec in enumerate(CODECS_HERE)
    ],
)
def test_a_shared_prefix_gives_the_logits_of_an_own_one(codec):
    jobs = {f"r{i}": ([*PROMPTS[-1][:40], 5 + i], "full") for i in range(3)}
    kv = {"codec": codec, "evict_allow": ""}
    alone = run(jobs, model=MODEL, kv=kv | {"enable_prefix_caching": False})
    shared = run(jobs, model=MODEL, kv=kv | {"enable_prefix_caching": True}, max_num_seqs=1)

    assert sum(usage.cached_tokens for usage in shared.usages.values()) == 2 * 40
    assert largest_difference(shared.logits, alone.logits) <= 1e-4
    cached = shared.engine.ledger()["prefix_cache"]
    assert "approximate" in {extent["exactness"] for extent in cached}


@pytest.mark.parametrize(
    "codec", ["int4", "int8+plain_layers=1", "int4_page/int4+sinks=1+residual=3"]
)
def test_quantized_kv_with_a_window_and_logit_soft_caps(codec):
    """Four layers, alternating sliding window and full attention, as in Gemma 2."""
    chunked = answer(codec, "full", "gemma2", chunk_tokens=7, max_num_batched_tokens=20)

    expected = undisturbed(codec, "full", "gemma2")
    assert largest_difference(chunked.logits, expected.logits) <= 1e-4


def test_outputs_of_one_prompt_share_codes():
    """Forks: each output equals that of a separate request with the same seed."""
    params = SamplingParams(max_tokens=12, temperature=1.0, n=3, seed=4, ignore_eos=True)
    together = answers_to(PROMPTS[-1], params, enable_prefix_caching=False)
    with_prefix = answers_to(PROMPTS[-1], params, enable_prefix_caching=True)

    assert together == with_prefix
    assert len(set(map(tuple, together.values()))) > 1


def answers_to(prompt, params, **kv) -> dict:
    config = kv_config(memory="4MiB", page_tokens=4, codec="int4", **kv)
    engine = Engine(load(MODEL), config, ScheduleConfig())
    engine.submit(GenerationRequest(prompt, params, request_id="r"))
    found: dict = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            found.setdefault(delta.index, []).extend(delta.token_ids)
        engine.check()
    return found


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", PLAIN_BYTES)
def test_a_request_uses_the_bytes_of_its_codecs(codec):
    """Key and value of 16 elements, two heads, two layers; pages are rounded up to 64 bytes."""
    prompt = PROMPTS[-1]
    done = run({"r": (prompt, "full")}, model=MODEL, kv={"codec": codec, "evict_allow": ""})
    form = read_format(fill_plain(codec, "float32"))
    slot_bytes = sum(side.vector_bytes(16, 4) for side in (form.key, form.value))
    page_bytes = -(-4 * 2 * slot_bytes // 64) * 64

    pages = -(-(len(prompt) + len(done.logits["r"]) - 1) // 4)
    assert done.usages["r"].kv_peak_bytes == 2 * pages * page_bytes
    ledger = done.engine.ledger()
    assert ledger["used_bytes"] + ledger["free_bytes"] == ledger["total_bytes"]


@pytest.mark.parametrize(
    ("codec", "key_bytes", "value_bytes"),
    [("none", 48 * 4, 32 * 4), ("int8", 48 + 2, 32 + 2), ("int4", 24 + 4, 16 + 4)],
)
def test_keys_and_values_of_unequal_width_are_not_padded(codec, key_bytes, value_bytes):
    """Keys of 48 elements, values of 32: 2 KV heads with full attention, 4 in windows of 8.

    int8 has a scale of 2 bytes for each vector, int4 a scale and a zero.
    """
    kv = {"codec": codec, "evict_allow": ""}
    done = run({"r": (PROMPTS[-1], "full")}, model="mimo_v2_flash", kv=kv, page_tokens=32)
    layout, token_bytes = done.engine.pool.kv.memory.layout, key_bytes + value_bytes
    pages = -(-(len(PROMPTS[-1]) + len(done.logits["r"]) - 1) // 32)

    assert [group.page_class.page_bytes for group in layout.groups] == [
        heads * 32 * token_bytes for heads in (2, 4)
    ]
    assert done.usages["r"].kv_peak_bytes == (2 * pages + 4 * 2) * 32 * token_bytes


@pytest.mark.parametrize(
    ("codec", "token_bytes"),
    [
        ("none", 4 * (16 + 8)),
        ("int8/int8", (16 + 2) + (8 + 2)),
        ("none/int8", (16 + 2) + 4 * 8),
        ("int4/int4", (8 + 4) + (4 + 4)),
    ],
)
def test_latents_are_stored_once_for_all_heads(codec, token_bytes):
    """16 numbers of a latent and 8 of the rotated part, in each of two layers of four heads."""
    kv = {"codec": codec, "evict_allow": ""}
    done = run({"r": (PROMPTS[-1], "full")}, model="deepseek_v3", kv=kv, page_tokens=32)
    [group] = done.engine.pool.kv.memory.layout.groups
    pages = -(-(len(PROMPTS[-1]) + len(done.logits["r"]) - 1) // 32)

    assert group.page_class.page_bytes == 32 * token_bytes
    assert done.usages["r"].kv_peak_bytes == 2 * pages * 32 * token_bytes


def test_full_precision_tokens_are_counted():
    """2 sinks and 6 newest tokens, or a page minus one: key and value of 16 floats, two heads."""
    for codec, records in (("int4+sinks=2+residual=6", 8), ("int4_page/int4", 3)):
        done = run({"r": ([5, 6, 7], "full")}, model=MODEL, kv={"codec": codec, "evict_allow": ""})
        layout = done.engine.pool.kv.memory.layout
        coded, kept = (group.page_class.page_bytes for group in layout.groups)

        assert kept == records * 2 * 2 * 16 * 4
        pages = -(-(3 + len(done.logits["r"]) - 1) // 4)
        assert done.usages["r"].kv_peak_bytes == 2 * (pages * coded + kept)


def test_the_ledger_names_the_codecs():
    engine = Engine(load(MODEL), KVConfig(memory="1MiB", codec="int8/int4"), ScheduleConfig())
    engine.submit(GenerationRequest([3, 4, 5], greedy(), request_id="r"))
    engine.step()

    assert list(engine.ledger()["axes"]["codec"]) == ["int8/int4"]
    [request] = engine.ledger()["requests"]
    assert not request["exact"]
    assert "int8/int4" in engine.pool.explanation
    assert "C extension" in engine.pool.reason


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "error", "message"),
    [
        ("int5", UnknownName, "unknown codec 'int5': did you mean"),
        (
            "int4:group=5",
            ConfigError,
            "groups of 5 do not divide head_dim 16; choose group=8 or 16",
        ),
        ("int8/float16", ConfigError, "the model computes in float32, .* --dtype float16"),
        ("kivi4", ConfigError, "groups of 32 do not divide head_dim 16"),
        ("int8_channel", ConfigError, "needs constants that are measured .* or use int8"),
        ("int4+sink=3", UnknownName, "unknown option of a KV codec 'sink': did you mean sinks"),
        (
            "int4+residual=few",
            ConfigError,
            "expected residual to be an integer from 0 .*, got 'few'",
        ),
        ("none+sinks=4", ConfigError, "is unquantized: remove sinks"),
        ("int4+plain=float16", ConfigError, "the model computes in float32, .* --dtype float16"),
    ],
)
def test_an_invalid_codec_is_rejected_at_start(codec, error, message):
    with pytest.raises(error, match=message):
        Engine(load(MODEL), KVConfig(memory="1MiB", codec=codec), ScheduleConfig())


def test_fp8_without_its_type_is_rejected_at_start(monkeypatch):
    monkeypatch.delattr(torch, "float8_e4m3fn")

    with pytest.raises(ConfigError, match="'fp8' cannot run on cpu: this build of torch has no"):
        Engine(load(MODEL), KVConfig(memory="1MiB", codec="fp8"), ScheduleConfig())


def test_native_attention_is_rejected_for_codecs_that_only_torch_decodes():
    config = KVConfig(memory="1MiB", codec="int4_hadamard", attention="native")
    with pytest.raises(ConfigError, match="attention=native cannot run here"):
        Engine(load(MODEL), config, ScheduleConfig())
