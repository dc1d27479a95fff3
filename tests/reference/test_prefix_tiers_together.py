"""Tiers for cached prefixes as one hierarchy, statistics beside prefixes, and shared loads.

Logits equal those of an engine without a tier within 1e-4.
"""

import threading

import pytest

from quire.config.generation_request import GenerationRequest
from quire.offload.prefix_store.store import PrefixStore
from quire.offload.tiers.file import FileTier
from quire.plan.rates import PrefillRates
from reference.test_eviction import Recorder, largest_difference
from reference.test_prefix_tier import (
    MIB,
    NEW_TOKENS,
    PROMPTS,
    READ_SLOWLY,
    answer,
    engine_of,
    fill,
    on_disk,
    plain,
    restored,
)
from support.engines import greedy
from support.redis_servers import start_redis

FIRST_SECOND = {"b": PROMPTS["b"], "b2": [*PROMPTS["b"], 9, 9, 1]}
SMALL = {"memory": 160 << 10}  # holds the prefixes of one or two prompts


def levels(engine):
    return {level.name: level for level in engine.stats().tier.levels}


@pytest.fixture
def remote():
    server = start_redis()
    yield server.url
    server.close()


# ---- the hierarchy -------------------------------------------------------------------------------


def test_prefixes_evicted_from_kv_memory_are_loaded_from_cpu_memory():
    engine = engine_of("qwen3", prefill=READ_SLOWLY, cpu_memory=8 * MIB, **SMALL)
    for _ in range(2):
        logits, _ = answer(engine)
        engine.prefix_loader.tier.transfer_worker.drain()

    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    assert restored(engine)
    assert levels(engine)["cpu"].stored_bytes
    engine.close()


def test_full_cpu_memory_spills_to_the_disk(tmp_path):
    options = {"cpu_memory": 16 << 10, **on_disk(tmp_path)}  # holds a part of one prompt
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **options, **SMALL)
    for _ in range(3):
        logits, _ = answer(engine)
        engine.prefix_loader.tier.transfer_worker.drain()

    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    assert restored(engine)
    found = levels(engine)
    assert 0 < found["cpu"].stored_bytes <= 16 << 10
    assert found["cpu"].spilled_bytes
    assert found["disk"].stored_blocks
    engine.close()


def test_prefixes_loaded_from_the_disk_are_promoted_to_cpu_memory(tmp_path, monkeypatch):
    fill("qwen3", tmp_path)
    options = {"cpu_memory": 8 * MIB, **on_disk(tmp_path)}
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **options)
    answer(engine, {"b": PROMPTS["b"]})
    engine.prefix_loader.tier.transfer_worker.drain()
    assert engine.stats().tier.promoted_blocks == levels(engine)["cpu"].stored_blocks == 148 // 4

    engine.scheduler.sequence_memory.drop_cached()
    monkeypatch.setattr(FileTier, "read", None)  # no read of the disk
    logits, _ = answer(engine, {"b": PROMPTS["b"]})

    assert [event.data["tokens"] for event in restored(engine)] == [148, 148]
    assert largest_difference(logits, {"b": plain("qwen3")["b"]}) <= 1e-4
    engine.close()


def test_closing_writes_cpu_memory_to_the_disk(tmp_path):
    options = {"cpu_memory": 8 * MIB, **on_disk(tmp_path)}
    engine = engine_of("qwen3", **options)
    answer(engine)
    engine.close()
    assert levels(engine)["disk"].stored_blocks == levels(engine)["cpu"].stored_blocks

    engine = engine_of("qwen3", prefill=READ_SLOWLY, **options)
    logits, _ = answer(engine)

    assert levels(engine)["disk"].found_blocks
    assert not levels(engine)["cpu"].found_blocks
    assert restored(engine)
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    engine.close()


def test_three_tiers_spill_in_order_and_another_engine_finds_the_remote_ones(remote, tmp_path):
    options = {"cpu_memory": 16 << 10, **on_disk(tmp_path, disk_memory=64 << 10), "remote": remote}
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **options, **SMALL)
    for shift in range(6):
        prompts = {name: [token + shift for token in PROMPTS[name]] for name in PROMPTS}
        answer(engine, prompts)
        engine.prefix_loader.tier.transfer_worker.drain()
    engine.close()
    found = levels(engine)
    assert found["cpu"].spilled_bytes
    assert found["disk"].spilled_bytes
    assert found["remote"].stored_blocks

    other = engine_of("qwen3", prefill=READ_SLOWLY, remote=remote)
    assert levels(other)["remote"].found_blocks == found["remote"].stored_blocks
    logits, _ = answer(other)
    assert restored(other)
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    other.close()


def test_a_damaged_disk_below_cpu_memory_changes_no_output(tmp_path):
    options = {"cpu_memory": 16 << 10, **on_disk(tmp_path)}
    fill("qwen3", tmp_path)
    for path in (tmp_path / "kv" / "entries").iterdir():
        data = bytearray(path.read_bytes())
        data[800::4096] = bytes(len(data[800::4096]))
        path.write_bytes(data)

    engine = engine_of("qwen3", prefill=READ_SLOWLY, **options)
    logits, _ = answer(engine)

    assert engine.stats().tier.num_discarded
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    engine.close()


# ---- statistics ----------------------------------------------------------------------------------

WITH_STATISTICS = [
    "h2o:cap=152,every=8,when=decode",
    "snapkv:window=8,cap=120,every=8,when=prefill_end",
    "kvcrush:base=h2o,cap=100,every=8,when=prefill_end",
    "roco:cap=152,every=4,when=decode",
    "expected_attention:cap=100,when=prefill_end",
    "tova:cap=120,when=prefill_end",
    "kvzip:cap=100,chunk=64",
    "kvzip:cap=100,chunk=64,budget=squeeze",
]


@pytest.mark.parametrize("evict", WITH_STATISTICS)
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_rules_with_statistics_continue_exactly_after_a_load(evict, where, tmp_path):
    """The same tokens are evicted as without a tier."""
    prompts = {"b": PROMPTS["b"]}
    options = {"evict": evict, "record_evictions": True}
    expected = _answers(engine_of("qwen3", **options), prompts)
    tier = on_disk(tmp_path) if where == "disk" else {"cpu_memory": 16 * MIB}
    engine = engine_of("qwen3", **options, **tier)
    answer(engine, prompts)
    if where == "disk":
        engine.close()
        engine = engine_of("qwen3", prefill=READ_SLOWLY, **options, **tier)
    else:
        engine.scheduler.sequence_memory.drop_cached()
        engine.prefix_loader.tier.transfer_worker.drain()
        engine.prefix_loader.costs = engine_of(
            "qwen3", prefill=READ_SLOWLY, cpu_memory=MIB
        ).prefix_loader.costs
    logits, traces = _answers(engine, prompts)

    assert [event.data["tokens"] for event in restored(engine)] == [148]
    assert largest_difference(logits, expected[0]) <= 1e-4
    assert traces == expected[1]
    assert any(traces.values())
    engine.close()


@pytest.mark.parametrize("codec", ["int8+sinks=2+residual=6", "int4_page/int8"])
def test_codecs_with_tokens_outside_of_their_pages_are_loaded_with_these(codec, tmp_path):
    expected = answer(engine_of("qwen3", codec=codec))[0]
    fill("qwen3", tmp_path, codec=codec)
    engine = engine_of("qwen3", prefill=READ_SLOWLY, codec=codec, **on_disk(tmp_path))
    logits, _ = answer(engine)

    assert restored(engine)
    assert largest_difference(logits, expected) <= 1e-4
    engine.close()


@pytest.mark.parametrize(
    ("rule", "loads"), [("h2o:cap=152,every=8,when=decode", 0), ("kvzip:cap=50%,chunk=64", 1)]
)
def test_a_request_without_stored_statistics_recomputes_its_prompt(rule, loads, tmp_path):
    """Except if a scoring pass writes all of them."""
    fill("qwen3", tmp_path, evict_allow="all")  # no statistics were recorded
    engine = engine_of("qwen3", prefill=READ_SLOWLY, evict_allow="all", **on_disk(tmp_path))
    answer(engine, {"b": PROMPTS["b"]}, evict=rule)
    assert len(restored(engine)) == loads
    answer(engine, {"full": PROMPTS["b"]}, evict="full")
    engine.close()


def _answers(engine, prompts):
    """Logits, and the retained sets after each eviction, by request."""
    logits, _ = answer(engine, prompts, record_evictions=True)
    traces = {}
    for name in prompts:
        found = engine.eviction_trace(name)
        traces[name] = [repr(entry) for entry in found]
    return logits, traces


def hold_reads(monkeypatch, keys):
    """Hold all reads of blocks until the returned event is set; keys of blocks that were read."""
    gate, read = threading.Event(), PrefixStore.read

    def read_late(self, blocks, *rest):
        assert gate.wait(30)
        keys.extend(block.key for block in blocks)
        read(self, blocks, *rest)

    monkeypatch.setattr(PrefixStore, "read", read_late)
    return gate


def submit_all(engine, prompts):
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
    for name, prompt in prompts.items():
        engine.submit(GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=name))
    return recorder


def finish(engine):
    usages = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            if delta.usage is not None:
                usages[delta.request_id] = delta.usage
        engine.check()
    return usages


# ---- one load ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "evict", ["full", "h2o:cap=152,every=8,when=decode", "kvzip:cap=152,chunk=64"]
)
def test_two_requests_of_a_prefix_share_one_load(evict, tmp_path, monkeypatch):
    expected = answer(engine_of("qwen3", evict=evict), FIRST_SECOND)[0]
    fill("qwen3", tmp_path, evict=evict)
    engine = engine_of("qwen3", prefill=READ_SLOWLY, evict=evict, **on_disk(tmp_path))
    keys = []
    gate = hold_reads(monkeypatch, keys)
    recorder = submit_all(engine, FIRST_SECOND)
    engine.step()
    gate.set()
    usages = finish(engine)

    assert engine.stats().tier.num_joined == 1
    assert len(restored(engine)) == 1
    snapshots = 1 if evict.startswith("h2o") else 0
    assert len(keys) == len(set(keys)) + snapshots
    assert usages["b2"].cached_tokens >= 144
    assert largest_difference(recorder.logits, expected) <= 1e-4
    engine.close()


@pytest.mark.parametrize("when", [2, 3, 4])
def test_a_request_continues_if_the_one_that_loads_its_prefix_is_cancelled(
    when, tmp_path, monkeypatch
):
    fill("qwen3", tmp_path)
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **on_disk(tmp_path))
    gate = hold_reads(monkeypatch, [])
    recorder = submit_all(engine, FIRST_SECOND)
    for _ in range(when):
        engine.step()
        engine.check()
    engine.cancel("b")
    gate.set()
    finish(engine)

    assert engine.stats().tier.num_joined == 1
    assert engine.stats().tier.loading_bytes == 0
    expected = answer(engine_of("qwen3"), FIRST_SECOND)[0]
    assert largest_difference({"b2": recorder.logits["b2"]}, {"b2": expected["b2"]}) <= 1e-4
    engine.close()


def test_a_request_that_joins_a_load_also_loads_what_follows(tmp_path, monkeypatch):
    long = {"long": [*PROMPTS["b"], *range(3, 60)]}
    engine = engine_of("qwen3", **on_disk(tmp_path))
    answer(engine, long)
    engine.close()
    engine = engine_of("qwen3", prefill=PrefillRates(token_s=1e3), **on_disk(tmp_path))
    both = {"b": PROMPTS["b"], **long}
    gate = hold_reads(monkeypatch, [])
    recorder = submit_all(engine, both)
    engine.step()
    gate.set()
    usages = finish(engine)

    assert engine.stats().tier.num_joined == 1
    assert usages["long"].cached_tokens == 204
    assert largest_difference(recorder.logits, answer(engine_of("qwen3"), both)[0]) <= 1e-4
    engine.close()
