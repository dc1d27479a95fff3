"""KV offload with eviction, several outputs of a prompt, beams, and preemption.

Outputs and logits equal those of an engine with enough memory.
"""

from functools import cache

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_eviction import Recorder, largest_difference
from support.engines import greedy, load
from support.exact_products import use_exact_products
from support.kv_options import kv_config

LONG = [3 + i * i % 60 for i in range(150)]
SHORT = [[5, 9, 2, 7] * 12, [11, 4] * 20]
NEW_TOKENS = 24
ROW_TOKENS = len(LONG) + NEW_TOKENS


@cache
def model_of(name: str):
    """A model with six layers or more."""
    return load(name, times=3)


@cache
def row_bytes(name: str, **options) -> int:
    """Bytes of the KV of `ROW_TOKENS` tokens."""
    engine = Engine(model_of(name), kv_config(memory="16MiB", page_tokens=4, **options))
    groups = engine.pool.kv.memory.layout.groups
    return sum(group.bytes_at_most(ROW_TOKENS, 16) for group in groups)


def run(name, rows, requests, *, codec="none", evict="", offload="4MiB", schedule=None, **options):
    """Run requests in KV memory for `rows` long sequences; return engine, logits and tokens.

    By default no KV is recomputed: `auto` depends on measured rates, and stored activations take
    offload memory.
    """
    memory = int(rows * row_bytes(name, codec=codec))
    if offload:
        options = {"offload_recompute": "off"} | options
    rule = {"evict": evict} if evict else {}
    config = kv_config(
        memory=memory, page_tokens=4, codec=codec, offload_memory=offload, **rule, **options
    )
    steps = {"chunk_tokens": 16, "max_num_batched_tokens": 40} | (schedule or {})
    engine = Engine(model_of(name), config, ScheduleConfig(**steps))
    recorder = Recorder(engine.sampling_step.sampler)
    if not any(params.use_beam_search for _, params in requests):  # beams need a real sampler
        engine.sampling_step.sampler = recorder
    for number, (prompt, params) in enumerate(requests):
        engine.submit(GenerationRequest(prompt, params, request_id=f"r{number}"))
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
        engine.check()
    return engine, recorder.logits, tokens


def peak_offloaded_bytes(engine: Engine) -> int:
    """Most bytes of KV in offload memory."""
    return engine.pool.offload.prefixes.pool.peak_bytes


def assert_all_free(engine: Engine) -> None:
    """Only cached prefixes are left in offload memory and in the arena."""
    engine.scheduler.sequence_memory.drop_cached()
    assert not engine.pool.offload.prefixes.pool.used_bytes
    assert not engine.pool.offload.prefixes.rows
    if engine.pool.host is not None:
        assert not engine.pool.host.used_bytes


CRUSHED = "kvcrush:base=(h2o:recent=3),share=0.5"

# ---- eviction ------------------------------------------------------------------------------------

ALONE = [(LONG, greedy(NEW_TOKENS))]
TOGETHER = [(prompt, greedy(NEW_TOKENS)) for prompt in (LONG, *(LONG[i:][:10] for i in range(4)))]


@pytest.mark.parametrize(
    ("name", "rule", "when", "codec", "rows", "requests"),
    [
        ("llama", "tova", "decode", "none", 0.6, ALONE),
        ("llama_mha", "recent", "prefill_end", "none", 0.6, ALONE),
        ("qwen3", "h2o", "decode", "none", 0.75, ALONE),
        ("qwen3", "average", "prefill_end", "int8", 0.9, ALONE),
        ("llama", "recent", "prefill_and_decode", "none", 0.5, TOGETHER),
        ("llama", "recent", "pressure", "none", 0.5, TOGETHER),
    ],
)
def test_evicting_requests_are_offloaded_in_every_schedule(
    name, rule, when, codec, rows, requests, monkeypatch
):
    """With `decode` and `prefill_end` the whole prompt is computed before the first eviction."""
    if codec != "none":
        use_exact_products(monkeypatch)
    evict = f"{rule}:cap=40,every=8,when={when}"
    schedule = {"admission": "optimistic"}
    engine, logits, _ = run(name, rows, requests, codec=codec, evict=evict, schedule=schedule)

    assert peak_offloaded_bytes(engine)
    assert engine.stats().num_evictions or when == "pressure"  # offload may suffice
    assert_all_free(engine)
    if when != "pressure":  # what pressure evicts depends on the memory
        expected = run(name, 16, requests, codec=codec, evict=evict, offload=0)[1]
        assert largest_difference(logits, expected) <= 1e-4


@pytest.mark.parametrize("kind", ["tova", "streaming:sinks=4", "recent:granularity=page"])
def test_an_evicting_prompt_larger_than_the_memory_fits_with_offload(kind):
    """Without offload memory its peak is the whole prompt; with it, the retained tokens."""
    rule, _, rest = kind.partition(":")
    options = ",".join(filter(None, (rest, "cap=32,every=8", "when=decode")))
    evict = f"{rule}:{options}"
    with pytest.raises(NeverFits, match="--kv-offload-memory"):
        run("llama", 0.6, ALONE, evict=evict, offload=0)

    engine, logits, _ = run("llama", 0.6, ALONE, evict=evict)

    assert peak_offloaded_bytes(engine)
    assert engine.stats().num_preemptions == 0
    expected = run("llama", 16, ALONE, evict=evict, offload=0)[1]
    assert largest_difference(logits, expected) <= 1e-4


@pytest.mark.parametrize("rule", ["recent", "tova", CRUSHED])
def test_retained_tokens_of_offloaded_requests_may_exceed_the_kv_memory(rule):
    """The tokens that an eviction retains stay offloaded: 88 to 96 in memory for 52."""
    evict = f"{rule}{',' if ':' in rule else ':'}cap=96,every=8"
    engine, logits, _ = run("llama", 0.3, ALONE, evict=evict)

    assert engine.stats().num_evictions
    assert engine.stats().num_preemptions == 0
    expected = run("llama", 16, ALONE, evict=evict, offload=0)[1]
    assert largest_difference(logits, expected) <= 1e-4


def test_evicting_requests_run_together_by_what_must_be_in_the_kv_memory():
    """Twelve requests in KV memory for the retained tokens of one, with 16 layers."""
    model, evict = load("llama", times=8), "recent:cap=96,when=prefill_and_decode"
    prompts = [[3 + (i + n) * i % 60 for i in range(140)] for n in range(12)]
    most, logits = {}, {}
    for memory, offload in (("330KiB", "8MiB"), ("8MiB", 0)):
        options = {"offload_recompute": "off"} if offload else {}
        kv = kv_config(memory=memory, page_tokens=8, offload_memory=offload, evict=evict, **options)
        engine = Engine(model, kv, ScheduleConfig())
        recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
        for number, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(prompt, greedy(20), request_id=f"r{number}"))
        most[memory] = 0
        while engine.has_work:
            most[memory] = max(most[memory], len(engine.scheduler.running))
            assert not [delta.error for delta in engine.step() if delta.error]
            engine.check()
        logits[memory] = recorder.logits

    assert most["330KiB"] >= 4
    assert largest_difference(logits["330KiB"], logits["8MiB"]) <= 1e-4


def test_a_prompt_that_evicts_only_in_the_kv_memory_is_refused_when_submitted():
    """Pages with common scales are not cut layer by layer."""
    evict, codec = "tova:cap=32,every=8,when=decode", "int4_page"

    with pytest.raises(NeverFits) as refused:
        run("llama", 0.6, ALONE, codec=codec, evict=evict)
    assert "staging" not in str(refused.value)

    engine, _, _ = run("llama", 1.5, ALONE, codec=codec, evict=evict)
    assert engine.stats().num_evictions


@pytest.mark.parametrize("rule", ["tova:", f"{CRUSHED},"])
def test_evictions_of_offloaded_requests_are_replayed_after_a_preemption(rule):
    schedule = {"preempt": "recompute", "admission": "optimistic"}
    evict = f"{rule}cap=40,every=8,when=decode"
    requests = [(LONG, greedy(NEW_TOKENS)), (LONG[::-1], greedy(NEW_TOKENS))]
    engine, logits, _ = run(
        "llama", 0.75, requests, evict=evict, schedule=schedule, offload="96KiB"
    )

    assert peak_offloaded_bytes(engine)
    expected = run("llama", 16, requests, evict=evict, offload=0)[1]
    assert largest_difference(logits, expected) <= 1e-4


# ---- several sequences of a prompt ---------------------------------------------------------------

SEVERAL = SamplingParams(max_tokens=NEW_TOKENS, n=3, temperature=1.0, seed=1, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=NEW_TOKENS, use_beam_search=True, beam_width=3, ignore_eos=True)


@pytest.mark.parametrize("params", [SEVERAL, BEAMS], ids=["n", "beams"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("llama", {}), ("llama_mha", {"offload_recompute": "0.5"}), ("qwen3", {"codec": "int8"})],
)
def test_sequences_of_one_prompt_share_its_offloaded_pages(name, options, params, monkeypatch):
    """A group that does not fit in the KV memory without offload."""
    if "codec" in options:
        use_exact_products(monkeypatch)
    requests = [(LONG, params)]
    codec = options.get("codec", "none")
    plain = {key: value for key, value in options.items() if not key.startswith("offload")}
    with pytest.raises(NeverFits):
        run(name, 0.8, requests, offload=0, **plain)

    engine, _, tokens = run(name, 0.8, requests, **options)

    assert peak_offloaded_bytes(engine)
    assert peak_offloaded_bytes(engine) < 2 * row_bytes(name, codec=codec)  # the prompt once
    assert bool(engine.stats().recomputed_tokens) == ("offload_recompute" in options)
    assert tokens == run(name, 16, requests, offload=0, **plain)[2]
    assert_all_free(engine)


@pytest.mark.parametrize("params", [SEVERAL, BEAMS], ids=["n", "beams"])
def test_sequences_of_one_prompt_and_others_are_offloaded_together(params):
    requests = [(LONG, params), (LONG[::-1], greedy(NEW_TOKENS)), (SHORT[0], params)]
    schedule = {"admission": "optimistic"}
    engine, _, tokens = run("llama", 0.9, requests, schedule=schedule)

    assert peak_offloaded_bytes(engine)
    assert tokens == run("llama", 16, requests, offload=0)[2]
    assert_all_free(engine)


@pytest.mark.parametrize("rule", ["tova:", "recent:granularity=page,", f"{CRUSHED},"])
def test_evicting_sequences_of_one_prompt_are_offloaded(rule):
    """Each sequence evicts its own tokens; the prompt does not fit without offload."""
    requests, evict = [(LONG, SEVERAL)], f"{rule}cap=24,every=8,when=decode"
    with pytest.raises(NeverFits, match="--kv-offload-memory"):
        run("llama", 0.85, requests, evict=evict, offload=0)

    engine, _, tokens = run("llama", 0.85, requests, evict=evict)

    assert 0 < peak_offloaded_bytes(engine) < 2 * row_bytes("llama")  # the prompt once
    assert engine.stats().num_evictions >= 3
    assert tokens == run("llama", 16, requests, evict=evict, offload=0)[2]
    assert_all_free(engine)


@pytest.mark.parametrize(
    ("rule", "when"),
    [("tova:", "decode"), (f"{CRUSHED},", "decode")],
)
def test_evicting_beams_fit_in_less_memory_with_offload(rule, when):
    """Their prompt counts once, and its offloaded part as staging; then the retained tokens."""
    requests, evict = [(LONG, BEAMS)], f"{rule}cap=16,every=8,when={when}"
    expected = run("llama", 16, requests, evict=evict, offload=0)[2]

    def fits(rows: float, offload: str | int) -> bool:
        try:
            engine, _, tokens = run("llama", rows, requests, evict=evict, offload=offload)
        except NeverFits:
            return False
        assert tokens == expected
        if offload:
            assert_all_free(engine)
        return True

    sizes = [0.7 + 0.1 * n for n in range(12)]
    least = next(rows for rows in sizes if fits(rows, "4MiB"))
    assert not fits(least, 0)
    assert next(rows for rows in sizes if fits(rows, 0)) < 2  # not one prompt for each beam


def test_requests_with_a_common_prefix_share_its_offloaded_pages():
    """The second request finds the prefix of the first in the cache; both continue."""
    requests = [([*LONG[:100], 7 + i, *LONG[:20]], greedy(NEW_TOKENS)) for i in range(3)]
    schedule = {"admission": "optimistic", "max_num_batched_tokens": 16}
    engine, logits, _ = run("llama", 0.95, requests, schedule=schedule)

    assert peak_offloaded_bytes(engine)
    assert largest_difference(logits, run("llama", 16, requests, offload=0)[1]) <= 1e-4
    assert_all_free(engine)


# ---- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "recompute"),
    [(greedy(NEW_TOKENS), "off"), (greedy(NEW_TOKENS), "0.5"), (SEVERAL, "off"), (BEAMS, "0.5")],
    ids=["one", "recompute", "n", "beams"],
)
def test_a_preempted_request_with_offloaded_kv_is_swapped(params, recompute):
    """Its offloaded pages stay in offload memory; only resident pages go to the swap space."""
    requests = [(LONG, params), (LONG[::-1], params), (LONG[1:], params)]
    options = {"swap_space": "4MiB", "offload_recompute": recompute}
    schedule = {"admission": "optimistic", "preempt": "swap"}
    engine, _, tokens = run(
        "llama_mha", 1.2, requests, offload="512KiB", schedule=schedule, **options
    )

    swapped = engine.events.newest(["swapped_out"])
    assert swapped
    assert {event.data["how"] for event in engine.events.newest(["preempted"])} == {"swap"}
    assert peak_offloaded_bytes(engine)
    assert tokens == run("llama_mha", 16, requests, offload=0)[2]
    assert_all_free(engine)


def test_a_cancelled_swapped_request_frees_its_offloaded_pages():
    kv = kv_config(
        memory=int(0.9 * row_bytes("llama")),
        page_tokens=4,
        offload_memory="4MiB",
        swap_space="4MiB",
    )
    engine = Engine(model_of("llama"), kv, ScheduleConfig(chunk_tokens=16, preempt="swap"))
    engine.submit(GenerationRequest(LONG, greedy(NEW_TOKENS), request_id="a"))
    while not engine.pool.offload.prefixes.rows or not engine.num_generated_tokens:
        engine.step()
    [request] = engine.scheduler.running
    engine.scheduler.lifecycle.preempt(request, "test", swap_all=True)
    engine.check()
    assert request.memory.swapped is not None
    assert engine.pool.offload.prefixes.pool.used_bytes
    engine.cancel("a")
    engine.check()

    assert_all_free(engine)
