"""KV offload with eviction, several outputs of a prompt, beams, and preemption.

Outputs and logits equal those of an engine with enough memory.
"""

import random
from collections import Counter
from functools import cache

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import answer, greedy, largest_difference, load, requests_of
from support.exact_products import use_exact_products
from support.kv_options import kv_config

LONG = [3 + i * i % 60 for i in range(150)]
SHORT = [[5, 9, 2, 7] * 12, [11, 4] * 20]
NEW_TOKENS = 24
ROW_TOKENS = len(LONG) + NEW_TOKENS


@cache
def model_of(name: str):
    return load(name, times=3)


@cache
def row_bytes(name: str, **options) -> int:
    engine = Engine(model_of(name), kv_config(memory="16MiB", page_tokens=4, **options))
    groups = engine.pool.kv.memory.layout.groups
    return sum(group.bytes_at_most(ROW_TOKENS, 16) for group in groups)


def run(name, rows, requests, *, codec="none", evict="", offload="4MiB", schedule=None, **options):
    """Run requests in KV memory for `rows` long sequences; return engine, logits and tokens.

    By default no KV is recomputed: `auto` depends on measured rates, and stored activations take
    offload memory.
    """
    kv = {"memory": int(rows * row_bytes(name, codec=codec)), "page_tokens": 4, "codec": codec}
    kv |= {"offload_memory": offload} | ({"evict": evict} if evict else {})
    kv |= ({"offload_recompute": "off"} if offload else {}) | options
    steps = {"chunk_tokens": 16, "max_num_batched_tokens": 40} | (schedule or {})
    engine = Engine(model_of(name), kv_config(**kv), ScheduleConfig(**steps))
    made = (
        GenerationRequest(prompt, params, request_id=f"r{number}")
        for number, (prompt, params) in enumerate(requests)
    )
    found = answer(engine, made)
    return engine, found.logits, found.tokens


def check_ample(name, requests, logits, **options) -> None:
    assert largest_difference(logits, run(name, 16, requests, offload=0, **options)[1]) <= 1e-4


def refuses(says, name, rows, requests, **options) -> str:
    with pytest.raises(NeverFits, match=says) as refused:
        run(name, rows, requests, **options)
    return str(refused.value)


def peak_offloaded_bytes(engine: Engine) -> int:
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
        check_ample(name, requests, logits, codec=codec, evict=evict)


@pytest.mark.parametrize("rule", ["tova:", "streaming:sinks=4,", "recent:granularity=page,"])
def test_an_evicting_prompt_larger_than_the_memory_fits_with_offload(rule):
    """Without offload memory its peak is the whole prompt; with it, the retained tokens."""
    evict = f"{rule}cap=32,every=8,when=decode"
    refuses("--kv-offload-memory", "llama", 0.6, ALONE, evict=evict, offload=0)
    engine, logits, _ = run("llama", 0.6, ALONE, evict=evict)
    assert peak_offloaded_bytes(engine)
    assert engine.stats().num_preemptions == 0
    check_ample("llama", ALONE, logits, evict=evict)


@pytest.mark.parametrize("rule", ["recent", "tova", CRUSHED])
def test_retained_tokens_of_offloaded_requests_may_exceed_the_kv_memory(rule):
    """The tokens that an eviction retains stay offloaded: 88 to 96 in memory for 52."""
    evict = f"{rule}{',' if ':' in rule else ':'}cap=96,every=8"
    engine, logits, _ = run("llama", 0.3, ALONE, evict=evict)
    assert engine.stats().num_evictions
    assert engine.stats().num_preemptions == 0
    check_ample("llama", ALONE, logits, evict=evict)


@pytest.mark.slow
def test_evicting_requests_count_what_must_be_in_the_kv_memory():
    """Twelve requests in KV memory for the retained tokens of one, with 16 layers."""
    model, logits, running = load("llama", times=8), [], [0]
    prompts = {f"r{n}": [3 + (i + n) * i % 60 for i in range(140)] for n in range(12)}
    options = {"page_tokens": 8, "evict": "recent:cap=96,when=prefill_and_decode"}
    small = {"memory": "330KiB", "offload_memory": "8MiB", "offload_recompute": "off"}
    for memory in (small, {"memory": "8MiB"}):
        engine = Engine(model, kv_config(**options, **memory), ScheduleConfig())

        def note(engine):
            running.append(len(engine.scheduler.running))

        act = {"before_step": note} if memory is small else {}
        logits.append(answer(engine, requests_of(prompts, 20), **act).logits)

    assert max(running) >= 4
    assert largest_difference(*logits) <= 1e-4

    # pages with common scales are not cut layer by layer
    options = {"evict": "tova:cap=32,every=8,when=decode", "codec": "int4_page"}
    assert "staging" not in refuses(".", "llama", 0.6, ALONE, **options)
    assert run("llama", 1.5, ALONE, **options)[0].stats().num_evictions


@pytest.mark.parametrize("rule", ["tova:", f"{CRUSHED},"])
def test_evictions_of_offloaded_requests_are_replayed_after_a_preemption(rule):
    evict = f"{rule}cap=40,every=8,when=decode"
    options = {"schedule": {"preempt": "recompute", "admission": "optimistic"}, "offload": "96KiB"}
    requests = [(LONG, greedy(NEW_TOKENS)), (LONG[::-1], greedy(NEW_TOKENS))]
    engine, logits, _ = run("llama", 0.75, requests, evict=evict, **options)
    assert peak_offloaded_bytes(engine)
    check_ample("llama", requests, logits, evict=evict)


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
    refuses(".", name, 0.8, requests, offload=0, **plain)
    engine, _, tokens = run(name, 0.8, requests, **options)

    assert 0 < peak_offloaded_bytes(engine) < 2 * row_bytes(name, codec=codec)  # the prompt once
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
    refuses("--kv-offload-memory", "llama", 0.85, requests, evict=evict, offload=0)
    engine, _, tokens = run("llama", 0.85, requests, evict=evict)
    assert 0 < peak_offloaded_bytes(engine) < 2 * row_bytes("llama")  # the prompt once
    assert engine.stats().num_evictions >= 3
    assert tokens == run("llama", 16, requests, evict=evict, offload=0)[2]
    assert_all_free(engine)


@pytest.mark.parametrize("rule", ["tova:", f"{CRUSHED},"])
def test_evicting_beams_fit_in_less_memory_with_offload(rule):
    """Their prompt counts once, and its offloaded part as staging; then the retained tokens."""
    requests, evict = [(LONG, BEAMS)], f"{rule}cap=16,every=8,when=decode"
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
    requests = [([*LONG[:100], 7 + i, *LONG[:20]], greedy(NEW_TOKENS)) for i in range(3)]
    schedule = {"admission": "optimistic", "max_num_batched_tokens": 16}
    engine, logits, _ = run("llama", 0.95, requests, schedule=schedule)
    assert peak_offloaded_bytes(engine)
    check_ample("llama", requests, logits)
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
    options = {"swap_space": "4MiB", "offload_recompute": recompute, "offload": "512KiB"}
    schedule = {"admission": "optimistic", "preempt": "swap"}
    engine, _, tokens = run("llama_mha", 1.2, requests, schedule=schedule, **options)
    assert engine.events.newest(["swapped_out"])
    assert {event.data["how"] for event in engine.events.newest(["preempted"])} == {"swap"}
    assert peak_offloaded_bytes(engine)
    assert tokens == run("llama_mha", 16, requests, offload=0)[2]
    assert_all_free(engine)


def test_a_cancelled_swapped_request_frees_its_offloaded_pages():
    memory = {"memory": int(0.9 * row_bytes("llama")), "offload_memory": "4MiB"}
    kv = kv_config(page_tokens=4, swap_space="4MiB", **memory)
    engine = Engine(model_of("llama"), kv, ScheduleConfig(chunk_tokens=16, preempt="swap"))
    engine.submit(*requests_of({"a": LONG}, NEW_TOKENS))
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


# ---- eviction in the least memory ----------------------------------------------------------------

FEW_TOKENS = 15


def drawn(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, zoo.VOCAB_SIZE) for _ in range(count)]


def small_engine(model, chunk_tokens, **options) -> Engine:
    kv = {"offload_recompute": "off", "page_tokens": 4} | options
    return Engine(model, kv_config(**kv), ScheduleConfig(chunk_tokens=chunk_tokens))


def least(sizes, make, requests) -> Engine:
    """The engine of the least memory that takes all these requests, none of which is submitted."""
    for size in sizes:
        try:
            for request in requests:
                make(size).submit(request)
        except (ConfigError, NeverFits):
            continue
        return make(size)
    raise AssertionError("no memory is enough")


def finish(engine, requests) -> Counter:
    found: Counter[str] = Counter()

    def note(event):
        found.update([event.kind, *[event.data.get("reason")] * (event.kind == "preempted")])

    engine.events.subscribe(note)
    tokens = answer(engine, requests).tokens
    assert [len(ids) for ids in tokens.values()] == [r.sampling.max_tokens for r in requests]
    return found


@pytest.mark.parametrize("offload_memory", [32_000, 26_000])
def test_a_request_whose_offloaded_pages_do_not_fit_evicts_layer_by_layer(offload_memory):
    """More of it is offloaded than device memory holds: its pages are never loaded together.

    With the smaller offload memory it fills both memories, and no page is free for an eviction.
    """
    memory = {"memory": 16_000, "offload_memory": offload_memory}
    evict = "recent:cap=16,every=8,when=pressure"
    engine = small_engine(load("llama", times=2), 8, evict=evict, **memory)
    found = finish(engine, requests_of({"r": drawn(150)}, FEW_TOKENS))
    assert not found["preempted"]
    assert peak_offloaded_bytes(engine) > memory["memory"]
    assert engine.scheduler.capacities.num_evictions > 0


PAGED = "sinks:sinks=2,cap=31,every=2,when=prefill_end,granularity=page"
EVICTING = {  # model, rule, offload memory, tokens of a page and of a chunk
    "decode": ("llama", "recent:cap=14,every=3,when=decode", 16_000, 4, 8),
    "prefill_end": ("llama", "recent:cap=31,every=3,when=prefill_end", 16_000, 2, 8),
    "window": ("gemma2", PAGED, 200_000, 2, 16),
}


@pytest.mark.parametrize("name", EVICTING)
def test_an_offloaded_prompt_evicts_in_the_min_memory_that_admits_it(name):
    """The cut of the first layer holds copies of what it retains beside the whole layer.

    A chunk of the prompt holds more pages of window lanes than the eviction leaves.
    """
    architecture, evict, offload_memory, page_tokens, chunk_tokens = EVICTING[name]
    model, options = model_of(architecture), {"evict": evict, "page_tokens": page_tokens}

    def make(memory):
        sizes = {"memory": memory, "offload_memory": offload_memory}
        return small_engine(model, chunk_tokens, **sizes, **options)

    requests = requests_of({"r": drawn(46)}, FEW_TOKENS)
    found = finish(least(range(20_000, 150_000, 1_000), make, requests), requests)

    assert found["offloaded"] > 0
    assert found["evicted"] > 0
    assert found["preempted"] == 0


@pytest.mark.parametrize("shared_tokens", [4, 8, 20])
def test_a_prompt_fits_alone_also_after_one_whose_offloaded_pages_it_shares(shared_tokens):
    """The pages of the first prompt were offloaded together, and are freed together."""
    both = drawn(80)
    prompts = {"first": both[:40], "second": [*both[:shared_tokens], *both[40:]]}
    first, second = requests_of(prompts, 4)

    def make(offload_memory):
        sizes = {"memory": 22_000, "offload_memory": offload_memory}
        return small_engine(model_of("llama"), 8, enable_prefix_caching=True, **sizes)

    engine = least(range(4_000, 80_000, 1_000), make, [second])
    found = finish(engine, [first, second])

    assert found["preempted"] == found["its cached prefix leaves no pages"] == 1
