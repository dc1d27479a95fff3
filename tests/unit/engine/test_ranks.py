from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from quire import GenerationRequest, KVConfig, SamplingParams, ScheduleConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, EngineDead, InvariantError, RequestError, UnsoundCombination
from support import zoo
from support.engines import load
from support.kv_options import kv_config
from support.ranks import rank_engines

LENGTHS = (5, 33, 60, 21, 47, 60, 12, 38)
NEW_TOKENS = 16
H2O = "h2o:cap=24,every=8,recent=4"
CRUSH = "kvcrush:cap=32,every=8"
EVICTING = (
    *(H2O, CRUSH, f"{CRUSH},sets=head", f"{H2O},budget=squeeze"),
    "snapkv:cap=32,every=8,window=4,when=prefill_end",
    "snapkv:cap=32,every=8,window=4,budget=pyramid",
    *("recent:cap=24,every=8", "recent:cap=24,every=8,granularity=page", "sinks:cap=24,every=8"),
    *("tova:cap=24,every=8", "tova:cap=24,every=8,scope=lane"),
    *("random:cap=24,every=8,scope=lane", "knorm:cap=24,every=8", "criticalkv:cap=24,every=8"),
    *(f"{CRUSH},base=criticalkv", "threshold:cap=24,every=8,base=tova,tau=0.9"),
    *("keydiff:cap=24,every=8", "triattention:cap=24,every=8", "streaming:cap=24,every=8"),
)
CODECS = ("int8", "int4", "int8/int4")
SCHEDULE = ScheduleConfig(max_num_batched_tokens=48)
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)


def prompts(seed: int = 0, shared: int = 0) -> list[list[int]]:
    """Prompts of different lengths, after `shared` equal tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(2, zoo.VOCAB_SIZE, (length,), generator=generator).tolist()

    prefix = draw(shared)
    return [prefix + draw(length) for length in LENGTHS]


def outputs(engine, requests, sampling=GREEDY, **options):
    """Tokens of all requests, run in one batch; those of all completions one after the other."""
    ids = [engine.submit(GenerationRequest(prompt, sampling, **options)) for prompt in requests]
    found: dict[str, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            found[delta.request_id] += delta.token_ids
    return [found[request_id] for request_id in ids]


def engine_of_one_rank(architecture: str, kv: KVConfig, schedule=SCHEDULE) -> Engine:
    return Engine(load(architecture, impl="transformers"), kv, schedule)


def tables_of(engine: Engine) -> dict[str, tuple[object, ...]]:
    memory = engine.pool.kv.memory
    return {
        name: (table.num_slots.tolist(), table.num_pages.tolist(), table.pages.tolist())
        for name, table in memory.tables.items()
    }


def require_equal_tables(engines: Sequence[Engine]) -> None:
    """Check the page tables of ranks that have ended: until then, a rank may be behind."""
    for engine in engines:
        engine.check()
        assert tables_of(engine) == tables_of(engines[0])


def compare(
    architecture, *, ranks=2, memory=1 << 20, schedule=SCHEDULE, shared=0, **options
) -> tuple[Engine, Engine]:
    """Compare the tokens of a batch on one rank and on several; return rank 0 of both.

    With `shared` tokens, a second batch finds the prefixes of the first.
    """
    batches = [prompts(0, shared)] * (2 if shared else 1)
    options = {"page_tokens": 4, "codec": "float32"} | options
    alone = engine_of_one_rank(architecture, kv_config(memory=memory, **options), schedule)
    expected = [outputs(alone, batch) for batch in batches]
    kv = kv_config(memory=memory // ranks, **options)
    with rank_engines(architecture, kv, schedule, size=ranks) as engines:
        leader = engines[0]
        assert [outputs(leader, batch) for batch in batches] == expected
    require_equal_tables(engines)
    return alone, leader


@pytest.mark.parametrize(
    "architecture",
    ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "minicpm3", "youtu"],
)
def test_tokens_of_two_ranks_equal_those_of_one(architecture: str) -> None:
    alone, leader = compare(architecture)
    whole, part = alone.pool.kv.memory.layout, leader.pool.kv.memory.layout
    for one, other in zip(whole.groups, part.groups, strict=True):
        halves = 1 if one.page_class.joined else 2  # each rank stores the latents of all heads
        assert other.page_class.heads * halves == one.page_class.heads


@pytest.mark.parametrize(
    ("architecture", "evict"),
    [
        *(("llama_mha", evict) for evict in EVICTING),
        *(("minicpm3", f"{rule}:cap=24,every=8") for rule in ("sinks", "random", "keydiff")),
        ("minicpm3", "streaming:cap=24,every=8"),
        ("minicpm3", "keydiff:cap=24,every=8,budget=squeeze"),
    ],
)
def test_ranks_retain_what_one_rank_retains(architecture: str, evict: str) -> None:
    ranks = 4 if (architecture, evict) == ("llama_mha", H2O) else 2
    alone, leader = compare(architecture, ranks=ranks, evict=evict)
    assert alone.stats().num_evictions > 0
    assert leader.stats().num_evictions == alone.stats().num_evictions
    assert leader.stats().evicted_tokens == alone.stats().evicted_tokens


@pytest.mark.slow
def test_ranks_evict_the_same_under_pressure_and_by_named_rules():
    kv = kv_config(memory=40 << 10, page_tokens=4, evict=f"{H2O},when=pressure")
    with rank_engines("llama_mha", kv, SCHEDULE) as engines:
        outputs(engines[0], prompts())
    require_equal_tables(engines)
    assert engines[0].stats().num_evictions > 0

    kv = {"page_tokens": 4, "evict_allow": "all"}
    alone = engine_of_one_rank("llama", kv_config(memory=1 << 20, **kv))

    with rank_engines("llama", kv_config(memory=1 << 19, **kv), SCHEDULE) as engines:
        for evict in (H2O, CRUSH):
            expected = outputs(alone, prompts(shared=20), evict=evict)
            assert outputs(engines[0], prompts(shared=20), evict=evict) == expected
    require_equal_tables(engines)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("evict", ["full", H2O, CRUSH])
def test_tokens_with_quantized_kv_equal_those_of_one_rank(codec: str, evict: str) -> None:
    compare("qwen3", codec=codec, evict=evict)


@pytest.mark.parametrize("evict", ["full", H2O, CRUSH, "recent:cap=24,every=8"])
@pytest.mark.parametrize(
    "preempt", ["recompute", "swap", pytest.param("auto", marks=pytest.mark.slow)]
)
def test_ranks_preempt_the_same_requests(evict: str, preempt: str) -> None:
    schedule = ScheduleConfig(max_num_batched_tokens=48, preempt=preempt)

    options = {"evict": evict, "swap_space": 0 if preempt == "recompute" else 1 << 20}
    alone, leader = compare("llama", memory=48 << 10, schedule=schedule, **options)

    if evict == "full":
        assert alone.scheduler.num_preemptions > 0
        assert leader.scheduler.num_preemptions > 0


@pytest.mark.parametrize("evict", ["full", H2O, "knorm:cap=24,every=8", CRUSH])
def test_ranks_share_prefixes(evict: str) -> None:
    alone, leader = compare("qwen2", shared=20, evict=evict)
    assert leader.stats().cached_tokens > 0
    assert leader.stats().cached_tokens == alone.stats().cached_tokens


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=12, temperature=1.0, seed=3),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2),
        SamplingParams(max_tokens=8, use_beam_search=True, beam_width=3, temperature=0.0),
    ],
)
def test_sampled_tokens_and_beams_equal_those_of_one_rank(sampling: SamplingParams) -> None:
    alone = engine_of_one_rank("llama", kv_config(memory=1 << 20))
    expected = outputs(alone, prompts(), sampling)

    with rank_engines("llama", kv_config(memory=1 << 19), SCHEDULE) as engines:
        assert outputs(engines[0], prompts(), sampling) == expected
        outputs(engines[0], prompts(), replace(sampling, seed=None))
    require_equal_tables(engines)


@pytest.mark.parametrize("rule", ["ngram:tokens=4,min=1,max=2", "suffix:tokens=4,factor=4"])
def test_ranks_verify_the_same_proposals(rule: str) -> None:
    loops = [prompt[:4] * 6 for prompt in prompts()]
    expected = outputs(engine_of_one_rank("llama", kv_config(memory=1 << 20)), loops)

    schedule = replace(SCHEDULE, speculative=rule)
    with rank_engines("llama", kv_config(memory=1 << 19), schedule) as engines:
        assert outputs(engines[0], loops) == expected
        assert engines[0].stats().draft_tokens
    require_equal_tables(engines)


def test_refused_and_cancelled_requests_leave_all_ranks_idle() -> None:
    kv = kv_config(memory=1 << 19, page_tokens=4, evict_allow="all")
    with rank_engines("llama", kv, SCHEDULE) as engines:
        leader = engines[0]
        with pytest.raises(RequestError, match="from 0 to 127"):
            leader.submit(GenerationRequest(prompt=[zoo.VOCAB_SIZE]))
        with pytest.raises(RequestError, match="budget"):  # of unequal heads
            leader.submit(GenerationRequest(prompt=[5, 6], evict=f"{H2O},budget=ada"))
        with pytest.raises(ConfigError, match="lockstep"):
            Engine(leader.model, kv)
        first = leader.submit(GenerationRequest(prompt=[5, 6, 7], sampling=GREEDY))
        leader.step()
        leader.cancel(first)
        deltas = leader.step()
        assert [delta.finish_reason for delta in deltas] == ["abort"]
        leader.share_publicly([5, 6, 7])
        assert len(outputs(leader, [[5, 6, 7]])[0]) == NEW_TOKENS
    for engine in engines:
        engine.check()
        assert not engine.has_work


def test_ranks_that_plan_other_steps_end_the_engine() -> None:
    with rank_engines("llama", kv_config(memory=1 << 19), SCHEDULE) as engines:
        leader, other = engines
        outputs(leader, [[5, 6, 7]])
        other.submit(GenerationRequest(prompt=[8, 9]))  # behind the back of rank 0
        leader.submit(GenerationRequest(prompt=[5, 6], request_id="mine", sampling=GREEDY))
        with pytest.raises(InvariantError, match="planned another step"):
            leader.step()
        with pytest.raises(EngineDead, match="restart"):
            leader.step()
        with pytest.raises(EngineDead, match="restart"):
            leader.submit(GenerationRequest(prompt=[5]))
        leader.cancel("mine")
        assert [delta.finish_reason for delta in leader.step()] == ["abort"]
        assert not leader.has_work


@pytest.mark.parametrize(
    ("options", "schedule", "match"),
    [
        ({"evict": H2O, "model": "minicpm3"}, {}, "statistics of its own query heads"),
        ({"evict": f"{H2O},budget=ada"}, {}, "budget"),
        ({"evict": "threshold:base=h2o,cap=24,every=8"}, {}, "use a base with one set per layer"),
        ({"evict": f"{H2O},granularity=page"}, {}, "granularity"),
        ({"cpu_memory": "1MiB"}, {}, "--cpu-kv-memory"),
        ({"offload_memory": "1MiB"}, {}, "--kv-offload-memory"),
        ({}, {"batch_invariant": True}, "--batch-invariant"),
    ],
)
def test_unsupported_options_are_refused(options, schedule, match):
    options = {"model": "llama"} | options
    model, kv = options.pop("model"), kv_config(memory=1 << 19, page_tokens=4, **options)
    refused = pytest.raises(UnsoundCombination, match=match)

    with refused as error, rank_engines(model, kv, ScheduleConfig(**schedule)):
        pass

    assert "--tensor-parallel-size 1" in str(error.value)
