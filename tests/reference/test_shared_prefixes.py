"""Engines that share prefixes through a real Redis server, which dies, stalls or is damaged.

Logits equal those without a store within 1e-4. No step takes as long as the store's timeout.
"""

import asyncio
import itertools
import logging
import time
from functools import cache

import pytest
import redis

from quire import GenerationRequest, SamplingParams
from quire.api.async_llm import AsyncLLM
from quire.errors import ConfigError
from quire.kv.prefix import PrefixListener
from quire.offload.tiers.redis_tier import PREFIX
from quire.plan.rates import PrefillRates
from reference import test_prefix_tier as tiers
from reference.test_prefix_tier import (
    PROMPTS,
    READ_SLOWLY,
    SMALL,
    B,
    answer,
    check_logits,
    drain,
    engine_of,
    levels,
    on_disk,
    plain,
    restored,
)
from support.engines import greedy, largest_difference, requests_of
from support.prefix_index import Listener
from support.redis_servers import start_redis
from unit.offload import test_redis_tier as redis_damage

close_engines = tiers.close_engines
TIMEOUT_S = 20.0  # of servers that respond
OUTAGE_TIMEOUT_S = 2.0
PREFIX_TIER = "quire.offload.prefix_store"


@pytest.fixture
def server():
    started = start_redis()
    yield started
    tiers.close_all()
    started.close()


def shared(server, **options):
    return {"remote": server.url, "remote_timeout_s": TIMEOUT_S} | options


def write(server, prompts=PROMPTS, **options):
    engine = engine_of(**shared(server, **options))
    answer(engine, prompts)
    engine.close()
    return engine


def reader_of(server, **options):
    return engine_of(prefill=READ_SLOWLY, **shared(server, **options))


class Longest:
    def __init__(self, engine):
        self.seconds, self._step, engine.step = 0.0, engine.step, self

    def __call__(self):
        started_s = time.monotonic()
        deltas = self._step()
        self.seconds = max(self.seconds, time.monotonic() - started_s)
        return deltas


def test_logits_after_a_load_equal_recomputed_ones(server):
    options = {"evict": "snapkv:window=8,cap=120,every=8,when=prefill_end"}
    options |= {"codec": "int8+sinks=2+residual=6"}
    prompts = B | {"a": PROMPTS["a"]}
    expected, _ = answer(engine_of(**options), prompts)
    write(server, prompts, **options)
    reader = reader_of(server, **options)
    longest = Longest(reader)
    found, _ = answer(reader, prompts)

    assert largest_difference(found, expected) <= 1e-4
    assert {event.request_id for event in restored(reader)} == {"a", "b"}
    assert longest.seconds < TIMEOUT_S


def test_a_store_serves_several_engines(server):
    """The second one is open while the first one writes; blocks are published as computed ones."""
    second, first = reader_of(server), engine_of(**shared(server))
    computed, loaded = Listener(), Listener()
    assert isinstance(computed, PrefixListener)
    first.prefix_events.subscribe(computed)
    second.prefix_events.subscribe(loaded)
    answer(first)
    first.close()
    logits, _ = answer(second)

    assert {event.request_id for event in restored(second)} >= {"a", "b"}
    check_logits(logits)
    assert loaded.known == computed.known  # the same names: a router compares engines by them
    second.scheduler.sequence_memory.drop_cached()
    assert loaded.known == {}


def test_an_open_engine_finds_what_another_one_has_just_computed_or_flushed(server):
    """Write-through: neither engine is closed, and nothing was evicted."""
    writer, reader = engine_of(**shared(server, kv_write="through")), reader_of(server)
    answer(writer, B)
    drain(writer)
    logits, usages = answer(reader, B)

    assert usages["b"].cached_tokens == 148
    check_logits(logits, only="b")
    num_blocks = (len(PROMPTS["b"]) + tiers.NEW_TOKENS - 1) // 4  # with one of its output
    assert writer.stats().tier.stored_blocks == num_blocks
    writer.close()
    assert writer.stats().tier.stored_blocks == num_blocks
    flush(server)
    writer, reader = engine_of(**shared(server)), reader_of(server)
    answer(writer, B)
    assert not writer.stats().tier.stored_blocks
    writer.flush_kv()
    assert answer(reader, B)[1]["b"].cached_tokens == 148


def test_an_engine_in_a_thread_decodes_what_another_one_has_prefilled(server):
    """As behind `quire serve`: the first token of one engine, then the whole output of another."""

    async def run():
        prefill = AsyncLLM(engine_of(remote=server.url, kv_write="through"))
        decode = AsyncLLM(engine_of(remote=server.url, kv_load="whole"))
        async with prefill, decode:
            first = await prefill.generate(PROMPTS["b"], SamplingParams(max_tokens=1))
            await prefill.inspect(lambda engine: engine.flush_kv())
            return first, await decode.generate(GenerationRequest(PROMPTS["b"], greedy(6)))

    first, found = asyncio.run(run())
    assert first.usage.cached_tokens == 0
    assert found.usage.cached_tokens == 148
    assert len(found.token_ids) == len(plain()["b"])


def test_three_tiers_spill_in_order_and_another_engine_finds_the_remote_ones(server, tmp_path):
    options = {"cpu_memory": 16 << 10, **on_disk(tmp_path, disk_memory=64 << 10)} | SMALL
    engine = reader_of(server, **options)
    for shift in range(6):
        answer(engine, {name: [token + shift for token in PROMPTS[name]] for name in PROMPTS})
        drain(engine)
    engine.close()
    found = levels(engine)
    assert found["cpu"].spilled_bytes
    assert found["disk"].spilled_bytes
    assert found["remote"].stored_blocks

    other = reader_of(server)
    assert levels(other)["remote"].found_blocks == found["remote"].stored_blocks
    check_logits(answer(other)[0])
    assert restored(other)


# ---- outages in mid-run --------------------------------------------------------------------------


def damage(server):
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
    return plain() | answer(engine_of(), LATER)[0]


@pytest.mark.parametrize("at_step", [0, 1, 3])
@pytest.mark.parametrize("outage", OUTAGES)
def test_an_outage_in_mid_run_costs_recompute_and_one_line(server, outage, at_step, caplog):
    expected = computed()
    write(server, PROMPTS | LATER)
    engine = reader_of(server, kv_write="through", remote_timeout_s=OUTAGE_TIMEOUT_S)
    caplog.set_level(logging.INFO, PREFIX_TIER)
    longest, steps = Longest(engine), itertools.count()

    def fail(engine):
        if next(steps) == at_step:
            OUTAGES[outage](server)
            for request in requests_of(LATER, tiers.NEW_TOKENS):
                engine.submit(request)

    logits, _ = answer(engine, before_step=fail)

    assert largest_difference(logits, expected) <= 1e-4
    assert longest.seconds < OUTAGE_TIMEOUT_S
    started_s = time.monotonic()
    engine.close()
    assert time.monotonic() - started_s < 3 * OUTAGE_TIMEOUT_S
    lines = [r for r in caplog.records if r.name.startswith(PREFIX_TIER)]
    assert len(lines) <= (0 if outage == "flushed" else 2 if outage == "damaged" else 1), lines
    if outage in ("killed", "paused"):
        assert engine.stats().tier.levels[0].num_outages == 1
    server.resume() if outage == "paused" else None


def test_prefixes_are_recomputed_if_the_link_stalls(server):
    """Two requests whose prefixes are there, one whose is not: all end before the link moves."""
    write(server, {name: PROMPTS[name] for name in "ab"})
    options = {"prefill": PrefillRates(token_s=1e-4), "token_s": 1e-5}
    engine = engine_of(**options, **shared(server))
    server.pause()
    logits, _ = answer(engine)

    assert not restored(engine)
    assert engine.stats().tier.loading_bytes == 0
    check_logits(logits)
    server.resume()


# ---- at the start --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filled():
    """A server with the prefixes of an engine, its client, and a copy of all keys."""
    started = start_redis()
    client = redis.Redis(port=started.port)
    write(started)
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
    engine = engine_of(prefill=READ_SLOWLY, **options) if at == "runtime" else None
    redis_damage.damage_store(client, damage, names[0].decode(), namespace)

    engine = engine or engine_of(prefill=READ_SLOWLY, **options)
    logits, _ = answer(engine)

    [level] = engine.stats().tier.levels
    check_logits(logits)
    assert len(caplog.records) <= 1
    if at == "runtime":
        engine.close()
        assert "a KV transfer to or from a tier failed" not in caplog.text
        return
    assert restored(engine)
    assert level.found_blocks
    assert not level.num_outages, caplog.text
    assert bool(level.num_damaged) == bool(caplog.records)


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

    engine = engine_of(**options)
    logits, _ = answer(engine)
    engine.close()

    [level] = engine.stats().tier.levels
    check_logits(logits)
    assert level.num_outages == 1
    assert caplog.text.count("is not used for now") == len(caplog.records) == 1
    with pytest.raises(ConfigError, match=r"cannot be stored: .* start without --require-tiers"):
        engine_of(require_tiers=True, **options)
    client.close()
    server.resume() if outage == "paused" else None


@pytest.mark.slow
@pytest.mark.parametrize("outage", ["at the start", "later"])
def test_a_store_that_comes_back_is_used(server, caplog, outage):
    write(server)
    if outage == "at the start":
        server.pause()
    engine = reader_of(server, remote_timeout_s=0.2)
    if outage == "later":
        caplog.set_level(logging.INFO, PREFIX_TIER)
        server.pause()
        answer(engine)
        drain(engine)
        assert not restored(engine)
    server.resume()
    deadline_s = time.monotonic() + 30
    while not restored(engine) and time.monotonic() < deadline_s:
        engine.scheduler.sequence_memory.drop_cached()
        check_logits(answer(engine)[0])

    assert restored(engine)
    assert caplog.text.count("is used again") == 1


@pytest.mark.parametrize("outage", ["killed", "paused"])
def test_an_engine_that_loads_whole_prefixes_recomputes_them_in_an_outage(server, outage):
    write(server)
    engine = engine_of(kv_load="whole", **shared(server, remote_timeout_s=OUTAGE_TIMEOUT_S))
    longest = Longest(engine)
    OUTAGES[outage](server)
    check_logits(answer(engine)[0])
    assert longest.seconds < OUTAGE_TIMEOUT_S
