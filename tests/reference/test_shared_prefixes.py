"""Engines that share prefixes through a real Redis server, which dies, stalls or is damaged.

Logits equal those of an engine without a store within 1e-4, and tokens are the same. No step takes
as long as the timeout of the store.
"""

import logging
import time
from functools import cache

import pytest
import redis

from quire.config.generation_request import GenerationRequest
from quire.errors import ConfigError
from quire.kv.prefix import PrefixListener
from quire.offload.tiers.redis_tier import PREFIX
from quire.scheduler.sequence_memory import SequenceMemory
from reference.test_eviction import Recorder, largest_difference
from reference.test_prefix_tier import (
    NEW_TOKENS,
    PROMPTS,
    READ_SLOWLY,
    answer,
    engine_of,
    plain,
    restored,
)
from support.engines import greedy
from support.prefix_index import Listener
from support.redis_servers import start_redis
from unit.offload import test_redis_tier as redis_damage

TIMEOUT_S = 20.0  # of servers that respond
OUTAGE_TIMEOUT_S = 2.0
PREFIX_TIER = "quire.offload.prefix_store"


@pytest.fixture
def server():
    started = start_redis()
    yield started
    started.close()


def shared(server, **options):
    return {"remote": server.url, "remote_timeout_s": TIMEOUT_S} | options


def tokens_of(engine, prompts, **options):
    """Output tokens of each prompt, and the longest step."""
    for name, prompt in prompts.items():
        request = GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=name, **options)
        engine.submit(request)
    found, longest_s = {name: [] for name in prompts}, 0.0
    while engine.has_work:
        started_s = time.monotonic()
        deltas = engine.step()
        longest_s = max(longest_s, time.monotonic() - started_s)
        for delta in deltas:
            assert delta.error is None, delta.error
            found[delta.request_id] += delta.token_ids
    return found, longest_s


def test_tokens_after_a_load_equal_recomputed_ones(server):
    options = {"evict": "snapkv:window=8,cap=120,every=8,when=prefill_end"}
    options |= {"codec": "int8+sinks=2+residual=6"}
    prompts = {"b": PROMPTS["b"], "a": PROMPTS["a"]}
    expected, _ = tokens_of(engine_of("qwen3", **options), prompts)
    first = engine_of("qwen3", **options, **shared(server))
    assert tokens_of(first, prompts)[0] == expected
    first.close()
    second = engine_of("qwen3", prefill=READ_SLOWLY, **options, **shared(server))

    found, longest_s = tokens_of(second, prompts)

    assert found == expected
    assert {event.request_id for event in restored(second)} == {"a", "b"}
    assert longest_s < TIMEOUT_S
    second.close()


def test_an_open_engine_finds_what_another_one_has_just_computed(server):
    """Write-through: neither engine is closed, and nothing was evicted."""
    writer = engine_of("qwen3", **shared(server, kv_write="through"))
    reader = engine_of("qwen3", prefill=READ_SLOWLY, **shared(server))
    answer(writer, {"b": PROMPTS["b"]})
    writer.prefix_loader.tier.transfer_worker.drain()

    logits, usages = answer(reader, {"b": PROMPTS["b"]})

    assert usages["b"].cached_tokens == 148
    assert largest_difference(logits, {"b": plain("qwen3")["b"]}) <= 1e-4
    num_blocks = (len(PROMPTS["b"]) + NEW_TOKENS - 1) // 4  # with one of its output
    assert writer.stats().tier.stored_blocks == num_blocks
    reader.close()
    writer.close()
    assert writer.stats().tier.stored_blocks == num_blocks


def test_flush_writes_what_is_cached(server):
    writer = engine_of("qwen3", **shared(server))
    reader = engine_of("qwen3", prefill=READ_SLOWLY, **shared(server))
    answer(writer, {"b": PROMPTS["b"]})
    assert not writer.stats().tier.stored_blocks
    writer.flush_kv()

    _, usages = answer(reader, {"b": PROMPTS["b"]})

    assert usages["b"].cached_tokens == 148
    reader.close()
    writer.close()


def test_loaded_blocks_are_published_as_events_like_computed_ones(server):
    first = engine_of("qwen3", **shared(server))
    computed = Listener()
    assert isinstance(computed, PrefixListener)
    first.prefix_events.subscribe(computed)
    answer(first, {"b": PROMPTS["b"]})
    first.close()
    second = engine_of("qwen3", prefill=READ_SLOWLY, **shared(server))
    loaded = Listener()
    second.prefix_events.subscribe(loaded)

    answer(second, {"b": PROMPTS["b"]})

    assert restored(second)
    assert loaded.known == computed.known  # the same names: a router compares engines by them
    second.scheduler.sequence_memory.drop_cached()
    assert loaded.known == {}
    second.close()


# ---- outages in mid-run --------------------------------------------------------------------------


def damage(server):
    """Flip a bit of every chunk."""
    client = redis.Redis(port=server.port)
    for name in client.scan_iter(f"{PREFIX}:*:*"):
        if client.type(name) != b"hash" or name.endswith(b":sizes"):
            continue
        for field, value in client.hgetall(name).items():
            if field != b"head":
                changed = bytearray(value)
                changed[len(changed) // 2] ^= 4
                client.hset(name, field, bytes(changed))
    client.close()


def flush(server):
    client = redis.Redis(port=server.port)
    client.flushall()
    client.close()


OUTAGES = {
    "killed": lambda server: server.kill(),
    "paused": lambda server: server.pause(),
    "damaged": damage,
    "flushed": flush,
}


LATER = {f"{name} later": [token + 1 for token in prompt] for name, prompt in PROMPTS.items()}


@cache
def computed():
    """Logits without a tier, of the prompts before and after the outage."""
    return plain("qwen3") | answer(engine_of("qwen3"), LATER)[0]


def submit_all(engine, prompts):
    for name, prompt in prompts.items():
        engine.submit(GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=name))


@pytest.mark.parametrize("at_step", [0, 1, 3])
@pytest.mark.parametrize("outage", OUTAGES)
def test_an_outage_in_mid_run_costs_recompute_and_one_line(server, outage, at_step, caplog):
    first = engine_of("qwen3", **shared(server))
    answer(first, PROMPTS | LATER)
    first.close()
    options = shared(server, kv_write="through", remote_timeout_s=OUTAGE_TIMEOUT_S)
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **options)
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
    caplog.set_level(logging.INFO, PREFIX_TIER)
    longest_s, steps = 0.0, 0
    submit_all(engine, PROMPTS)
    while engine.has_work:
        if steps == at_step:
            OUTAGES[outage](server)
            submit_all(engine, LATER)
        started_s = time.monotonic()
        for delta in engine.step():
            assert delta.error is None, delta.error
        longest_s = max(longest_s, time.monotonic() - started_s)
        engine.check()
        steps += 1

    assert largest_difference(recorder.logits, computed()) <= 1e-4
    assert longest_s < OUTAGE_TIMEOUT_S
    started_s = time.monotonic()
    engine.close()
    assert time.monotonic() - started_s < 3 * OUTAGE_TIMEOUT_S
    lines = [r for r in caplog.records if r.name.startswith(PREFIX_TIER)]
    assert len(lines) <= (0 if outage == "flushed" else 2 if outage == "damaged" else 1), lines
    if outage in ("killed", "paused"):
        assert engine.stats().tier.levels[0].num_outages == 1
    server.resume() if outage == "paused" else None


# ---- at the start --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled():
    """A server with the prefixes of an engine, its client, and a copy of all keys."""
    started = start_redis()
    client = redis.Redis(port=started.port)
    engine = engine_of("qwen3", **shared(started))
    answer(engine)
    engine.close()
    yield started, client, {key: client.dump(key) for key in client.scan_iter()}
    client.close()
    started.close()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=[] if number % 7 == 0 else pytest.mark.slow)
        for number, name in enumerate(redis_damage.DAMAGES)
    ],
)
@pytest.mark.parametrize("at", ["start", "runtime"])
def test_an_engine_with_a_damaged_store_computes_the_same_and_loads_what_is_whole(
    filled, damage, at, caplog
):
    server, client, keys = filled
    client.flushall()
    for key, value in keys.items():
        client.restore(key, 0, value)
    [namespace] = {key.split(b":")[3].decode() for key in keys if key.count(b":") == 4}
    names = client.zrange(f"{PREFIX}:{namespace}", 0, -1)
    assert len(names) > 2
    options = shared(server, kv_write="through")
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **options) if at == "runtime" else None
    redis_damage.damage_store(client, damage, names[0].decode(), namespace)

    engine = engine or engine_of("qwen3", prefill=READ_SLOWLY, **options)
    logits, _ = answer(engine)

    [level] = engine.stats().tier.levels
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    assert len(caplog.records) <= 1
    if at == "runtime":
        engine.close()
        assert "a KV transfer to or from a tier failed" not in caplog.text
        return
    assert restored(engine)
    assert level.found_blocks
    assert not level.num_outages, caplog.text
    assert bool(level.num_damaged) == bool(caplog.records)
    engine.close()


@pytest.mark.parametrize("outage", ["killed", "paused", "wrong password", "read-only"])
def test_an_unusable_store_at_the_start_is_warned_about_or_refused(
    server, outage, caplog, monkeypatch
):
    client = redis.Redis(port=server.port)
    options = shared(server, remote_timeout_s=0.2)
    if outage == "wrong password":
        client.config_set("requirepass", "right")
        monkeypatch.setenv("QUIRE_REMOTE_KV_PASSWORD", "wrong")
    elif outage == "read-only":
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
    else:
        OUTAGES[outage](server)

    engine = engine_of("qwen3", **options)
    logits, _ = answer(engine)
    engine.close()

    [level] = engine.stats().tier.levels
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    assert level.num_outages == 1
    assert caplog.text.count("is not used for now") == len(caplog.records) == 1
    with pytest.raises(ConfigError, match=r"cannot be stored: .* start without --require-tiers"):
        engine_of("qwen3", require_tiers=True, **options)
    client.close()
    server.resume() if outage == "paused" else None


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["at the start", "later"])
def test_a_store_that_comes_back_is_used(server, caplog, outage):
    first = engine_of("qwen3", **shared(server))
    answer(first)
    first.close()
    if outage == "at the start":
        server.pause()
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **shared(server, remote_timeout_s=0.2))
    if outage == "later":
        caplog.set_level(logging.INFO, PREFIX_TIER)
        server.pause()
        answer(engine)
        engine.prefix_loader.tier.transfer_worker.drain()
        assert not restored(engine)
    server.resume()
    sequence_memory: SequenceMemory = engine.scheduler.sequence_memory
    deadline_s = time.monotonic() + 30
    while not restored(engine) and time.monotonic() < deadline_s:
        sequence_memory.drop_cached()
        logits, _ = answer(engine)
        assert largest_difference(logits, plain("qwen3")) <= 1e-4

    assert restored(engine)
    assert caplog.text.count("is used again") == 1
    engine.close()


@pytest.mark.parametrize("outage", ["killed", "paused"])
def test_an_engine_that_loads_whole_prefixes_recomputes_them_in_an_outage(server, outage):
    first = engine_of("qwen3", **shared(server))
    answer(first)
    first.close()
    options = shared(server, remote_timeout_s=OUTAGE_TIMEOUT_S)
    engine = engine_of("qwen3", kv_load="whole", **options)
    OUTAGES[outage](server)

    tokens, longest_s = tokens_of(engine, PROMPTS)

    assert tokens == tokens_of(engine_of("qwen3"), PROMPTS)[0]
    assert longest_s < OUTAGE_TIMEOUT_S
    engine.close()
