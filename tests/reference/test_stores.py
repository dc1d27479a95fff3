"""Logits do not depend on the store: every store equals Transformers under memory pressure."""

from bisect import bisect_left
from functools import cache

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import ConfigError, NeverFits, UnsoundCombination
from quire.kv.stores.registry import NO_WINDOW, STORES, UNSOUND
from quire.models.loader import LoadedModel
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_equality import TOLERANCE, Forced, drive
from support import zoo
from support.engines import (
    NEW_TOKENS,
    Expected,
    engine_for,
    expect,
    greedy,
    load,
    make_prompts,
    stored_in,
)
from support.kv_options import kv_config

LONGEST = 40
STORE_TOKENS = LONGEST + NEW_TOKENS
ARCHITECTURES = ("llama", "mistral", "gemma3")  # no window, only windows, both


def engine_of(architecture, store, **options):
    return engine_for(
        model_of(architecture),
        longest=STORE_TOKENS,
        page_tokens=4,
        **stored_in(store, STORE_TOKENS),
        **options,
    )


CASES = [
    (architecture, store)
    for architecture in ARCHITECTURES
    for store in STORES
    if architecture != "llama" or (store, NO_WINDOW) not in UNSOUND
]


@cache
def reference(architecture: str) -> list[Expected]:
    return expect(architecture, make_prompts(10, LONGEST, seed=5))


@cache
def model_of(architecture: str) -> LoadedModel:
    return load(architecture)


@pytest.mark.parametrize("room", [1.6, 6.0])
@pytest.mark.parametrize(("architecture", "store"), CASES)
def test_logits_equal_transformers_with_its_tokens_forced(architecture, store, room):
    expected = reference(architecture)
    engine = engine_of(architecture, store, room=room, chunk_tokens=7)
    forced = Forced({f"r{i}": wanted for i, wanted in enumerate(expected)})
    engine.sampling_step.sampler = forced

    drive(engine, expected, seed=11)

    assert forced.worst <= TOLERANCE
    assert store != "ring" or LONGEST > 4 * zoo.WINDOW_TOKENS  # it has gone round
    engine.check()


def test_a_model_without_windows_has_no_ring():
    with pytest.raises(UnsoundCombination, match=r"no layer has a sliding window.*use 'paged'"):
        engine_of("llama", "ring", room=2.0)


def test_a_request_longer_than_its_run_is_rejected_with_the_reason():
    engine = engine_of("llama", "contiguous_max", room=2.0)

    with pytest.raises(NeverFits, match=r"the store reserves 48 per sequence.*--kv-store-tokens"):
        engine.submit(GenerationRequest([5] * STORE_TOKENS, greedy(3)))


@pytest.mark.parametrize("store", ["contiguous_max", "contiguous_growing"])
def test_a_contiguous_store_reports_that_the_prefix_cache_is_off(store):
    engine = engine_of("llama", store, room=2.0)

    assert "prefix cache off: pages of a contiguous run cannot be shared" in engine.pool.explanation
    for _ in range(2):
        engine.submit(GenerationRequest([7] * 30, greedy(2)))
        while engine.has_work:
            usage = [delta.usage for delta in engine.step() if delta.usage]
    assert usage[0].cached_tokens == 0


def test_an_unknown_store_is_rejected_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"expected kv-store .* got .pages.: did you mean paged"):
        engine_of("llama", "pages", room=2.0)


def test_contiguous_runs_larger_than_the_memory_are_rejected():
    with pytest.raises(
        ConfigError, match=r"the runs of one sequence do not fit: .* --kv-store-tokens"
    ):
        Engine(load("llama"), KVConfig(memory="16KiB", store="contiguous_max"))


BUDGETS = {
    "ada": "prefill_and_decode",
    "squeeze": "prefill_and_decode",  # divided again at each eviction
    "(fastgen:share=0.6)": "prefill_end",
}


@pytest.mark.parametrize("store", ["contiguous_max", "contiguous_growing"])
@pytest.mark.parametrize(("budget", "when"), BUDGETS.items())
def test_a_contiguous_store_reserves_the_longest_lane_of_a_budget(store, budget, when):
    evict = f"h2o:recent=3,cap=16,every=4,budget={budget},when={when}"
    found = []
    for options in ({"store": store, "store_tokens": 70}, {}):
        kv = kv_config(memory="1MiB", evict=evict, page_tokens=4, **options)
        engine = Engine(load("llama"), kv, ScheduleConfig(chunk_tokens=16))
        outputs = {}
        for i in range(4):
            prompt = [3 + (7 * i + j * j) % 60 for j in range(50)]
            engine.submit(GenerationRequest(prompt, greedy(12), request_id=str(i)))
        for step in range(10_000):
            if not engine.has_work:
                break
            if step in (6, 9) and engine.scheduler.running:
                engine.scheduler.lifecycle.preempt(engine.scheduler.running[-1], "for the test")
            for delta in engine.step():
                outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            engine.check()
        found.append(outputs)

    assert found[0] == found[1]
    assert all(len(tokens) == 12 for tokens in found[0].values())


def test_a_contiguous_store_refuses_all_rules_and_serves_a_list_of_them():
    options = {"memory": "1MiB", "store": "contiguous_growing", "store_tokens": 70}
    with pytest.raises(UnsoundCombination, match="list the rules in --evict-allow"):
        Engine(load("llama"), kv_config(evict="h2o:cap=16,every=4", evict_allow="all", **options))
    engine = Engine(
        load("llama"), kv_config(evict="h2o:cap=16,every=4", evict_allow="keydiff", **options)
    )

    engine.submit(GenerationRequest([7] * 50, greedy(8), evict="keydiff:cap=40,every=4"))
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.num_generated_tokens == 8


@pytest.mark.parametrize("store", ["contiguous_max", "contiguous_growing"])
def test_a_swapped_tail_is_appended_in_the_pages_that_its_lanes_have_reserved(store):
    """The KV memory holds one sequence: with `contiguous_max` its runs occupy all pages."""
    prompt, found = [7, 8, 9, 10] * 9, []
    for memory, preempted in (("1MiB", False), (_of_one_sequence(store), True)):
        kv = kv_config(
            memory=memory,
            swap_space=3_000 if preempted else 0,
            page_tokens=4,
            **stored_in(store, STORE_TOKENS),
        )
        schedule = {"preempt": "hybrid"} if preempted else {}
        engine = Engine(load("llama"), kv, ScheduleConfig(chunk_tokens=4, **schedule))
        kinds, deltas = [], []
        engine.events.subscribe(lambda event, kinds=kinds: kinds.append(event.kind))
        engine.submit(GenerationRequest(prompt, greedy(8)))
        while engine.has_work:
            [running] = engine.scheduler.running or [None]
            if preempted and running is not None and running.progress.num_computed == 20:
                preempted = False
                engine.scheduler.lifecycle.preempt(running, "for the test")
            deltas += engine.step()
            engine.check()
        assert [delta.error for delta in deltas if delta.error] == []
        found.append([token for delta in deltas for token in delta.token_ids])

    assert found[0] == found[1]
    assert kinds.count("swapped_in") == 1


def _of_one_sequence(store: str) -> int:
    """The least bytes, in steps of 500 B, of a KV memory with this store that takes a request."""

    def takes(memory: int) -> bool:
        kv = kv_config(memory=memory, page_tokens=4, **stored_in(store, STORE_TOKENS))
        try:
            engine = Engine(load("llama"), kv, ScheduleConfig(chunk_tokens=4))
            engine.submit(GenerationRequest([7] * 36, greedy(8)))
        except (ConfigError, NeverFits):
            return False
        return True

    sizes = range(1_000, 200_000, 500)
    return sizes[bisect_left(sizes, True, key=takes)]
