"""Engines that store cached prefixes in CPU memory, on a disk or a Redis server, and load them.

Logits equal those of an engine without a tier within 1e-4, also with damaged files, stalled links
and a server that dies. Pages are NaN before they are loaded, so attention to a page before its load
is detected. No step takes as long as a server's timeout.
"""

import asyncio
import errno
import itertools
import logging
import os
import random
import shutil
import threading
import time
from dataclasses import replace
from functools import cache

import pytest
import redis

from quire import GenerationRequest, SamplingParams
from quire.api.async_llm import AsyncLLM
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.kv.prefix import PrefixListener
from quire.layout import codec_names
from quire.offload.prefix_store.in_flight_pages import InFlightPages
from quire.offload.prefix_store.prefix_loader import PrefixLoader
from quire.offload.prefix_store.store import PrefixStore
from quire.offload.tiers.file import FileTier
from quire.offload.tiers.redis_tier import PREFIX
from quire.plan.rates import PrefillRates
from quire.scheduler.schedule_config import ScheduleConfig
from support import engines
from support.engines import greedy, largest_difference, load, requests_of
from support.kv_options import kv_config
from support.prefix_index import Listener
from support.redis_servers import start_redis
from unit.offload import test_file_tier as file_damage
from unit.offload import test_redis_tier as redis_damage

MIB = 1 << 20
PROMPTS = {
    "a": [5, 9, 2, 7] * 30,
    "b": [3 + i * i % 60 for i in range(150)],
    "c": [3 + i * i % 60 for i in range(90)] + [8, 8, 4] * 7,
    "d": [11, 4] * 9,
}
NEW_TOKENS = 6
BOTH = PrefillRates(token_s=1e-3, call_s=1e-4)  # as fast as a load that is said to take 1 ms
READ_SLOWLY = PrefillRates(token_s=1e3)
READ_FAST = PrefillRates(token_s=1e-12)


class Rates:
    def __init__(self, prefill, second_s=1.0):
        self.prefill, self.costs = prefill, self
        self.coefficients = (0.0, second_s)

    def read(self, *_):
        """Learns nothing."""

    add = read


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    extend_down = InFlightPages.extend_down

    def poisoned(self, first):
        before = self.first
        extend_down(self, first)
        store = self._memory.store
        for name, numbers in self.block_pages(first, before or self.end).items():
            page_class = self._memory.tables[name].group.page_class
            store.views(page_class).whole[store._index(numbers.reshape(-1))] = 0xFF

    monkeypatch.setattr(InFlightPages, "extend_down", poisoned)


model_of = cache(load)
OPEN: list[Engine] = []


def close_all():
    while OPEN:
        OPEN.pop().close()


@pytest.fixture(autouse=True)
def close_engines():
    yield
    close_all()


def engine_of(name="qwen3", *, prefill=BOTH, token_s=1e-3, schedule=None, **options):
    """An engine whose rates stay as they are; it is closed at the end of the test."""
    options = {"memory": 4 * MIB, "page_tokens": 4} | options
    steps = {"chunk_tokens": 16, "max_num_batched_tokens": 40} | (schedule or {})
    engine = Engine(model_of(name), kv_config(**options), ScheduleConfig(**steps))
    OPEN.append(engine)
    loader = engine.prefix_loader
    if loader is not None and prefill is not None:
        loader.costs = Rates(prefill)
        rates = loader.tier.levels.rates
        for level in range(len(rates)):
            rates[level] = Rates(None, token_s / loader._token_bytes)
    return engine


def answer(engine, prompts=PROMPTS, **options):
    run = {name: options.pop(name) for name in ("cancel", "before_step") if name in options}
    found = engines.answer(engine, requests_of(prompts, NEW_TOKENS, **options), **run)
    return found.logits, found.usages


@cache
def plain(name="qwen3"):
    return answer(engine_of(name))[0]


def check_logits(logits, name="qwen3", only=None):
    """Compare with those without a tier, of all prompts or only of some."""
    expected = {request: plain(name)[request] for request in only or PROMPTS}
    assert largest_difference({request: logits[request] for request in expected}, expected) <= 1e-4


def on_disk(path, **options):
    return {"disk_memory": 32 * MIB, "disk_path": str(path / "kv")} | options


def fill(path, name="qwen3", **options):
    """Answer all prompts with an engine that leaves its prefixes on disk."""
    engine = engine_of(name, **on_disk(path), **options)
    answer(engine)
    engine.close()
    assert engine.stats().tier.stored_blocks


def restored(engine):
    return engine.events.newest(["prefix_loaded"])


def loaded_tokens(engine):
    return [event.data["tokens"] for event in restored(engine)]


def drain(engine):
    engine.prefix_loader.tier.transfer_worker.drain()


B = {"b": PROMPTS["b"]}


@pytest.mark.parametrize("name", ["llama_mha", "qwen3", "gemma2", "opt"])
def test_a_restarted_engine_finds_its_prefixes(name, tmp_path):
    fill(tmp_path, name)
    engine = engine_of(name, **on_disk(tmp_path))
    tier = engine.stats().tier

    logits, usages = answer(engine)

    assert tier.found_blocks > 60
    check_logits(logits, name)
    assert {event.request_id for event in restored(engine)} >= {"a", "b"}
    assert any(event.data["computed_tokens"] for event in restored(engine))
    assert usages["b"].cached_tokens >= 32
    stats = engine.stats().tier
    assert stats.loaded_tokens == sum(event.data["tokens"] for event in restored(engine))
    assert stats.loading_bytes == stats.num_discarded == stats.num_failed == 0


@pytest.mark.parametrize(
    ("prefill", "read"), [(READ_SLOWLY, "none"), (BOTH, "some"), (READ_FAST, "all")]
)
def test_rates_decide_how_much_is_recomputed(prefill, read, tmp_path):
    fill(tmp_path)
    engine = engine_of(prefill=prefill, **on_disk(tmp_path))

    logits, usages = answer(engine, B)

    check_logits(logits, only="b")
    if read == "all":
        assert not restored(engine)
        assert engine.stats().tier.num_declined
    else:
        [event] = restored(engine)
        assert event.data["tokens"] + event.data["computed_tokens"] == 148
        assert bool(event.data["computed_tokens"]) == (read == "some")
        assert usages["b"].cached_tokens == event.data["tokens"]
        assert engine.stats().served[0].cached_tokens == event.data["tokens"]


def test_an_engine_that_only_decodes_recomputes_nothing(tmp_path):
    fill(tmp_path)
    logits, usages = answer(engine_of(prefill=READ_FAST, kv_load="whole", **on_disk(tmp_path)), B)
    assert usages["b"].cached_tokens == 148
    check_logits(logits, only="b")


def test_a_prefix_loaded_after_a_preemption_counts_as_cached(tmp_path):
    """The first load is aborted by the preemption; the second one loads all 148 tokens."""
    fill(tmp_path)
    engine = engine_of(prefill=READ_SLOWLY, **on_disk(tmp_path))
    engine.submit(GenerationRequest(PROMPTS["b"], greedy(NEW_TOKENS), request_id="b"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.prefix_loader.tier.transfer_worker, "urgent", lambda work: None)
        engine.step()
        engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "test")
    usage = answer(engine, {})[1]["b"]

    assert usage.preemptions == 1
    assert loaded_tokens(engine) == [148]
    assert usage.cached_tokens == engine.stats().served[0].cached_tokens == 148


def test_recomputed_tokens_of_a_resumed_request_do_not_count_as_cached(tmp_path):
    engine = engine_of(**on_disk(tmp_path))
    running = engine.scheduler.running
    engine.submit(GenerationRequest(PROMPTS["b"], greedy(NEW_TOKENS), request_id="b"))
    while not running or running[0].progress.num_computed < 100:
        engine.step()
    engine.scheduler.lifecycle.preempt(running[0], "test")
    assert answer(engine, {})[1]["b"].cached_tokens == 0
    assert engine.stats().cached_tokens


@pytest.mark.parametrize(
    ("changed", "found"), [({"summary": "Other words."}, True), ({"group": 16}, False)]
)
def test_stored_prefixes_depend_on_the_codec_and_not_on_its_help_text(changed, found, tmp_path):
    fill(tmp_path)
    codecs = {
        name: replace(codec, **changed) if name == "float32" else codec
        for name, codec in codec_names.CODECS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_names, "CODECS", codecs)
        engine = engine_of(**on_disk(tmp_path))
    assert bool(engine.stats().tier.found_blocks) == found


def test_loaded_prefixes_are_shared(tmp_path):
    fill(tmp_path)
    engine = engine_of(prefill=READ_SLOWLY, **on_disk(tmp_path))
    for _ in range(2):
        logits, usages = answer(engine, B)
    assert len(restored(engine)) == 1
    assert usages["b"].cached_tokens == 148
    check_logits(logits, only="b")


def test_evicted_prefixes_are_loaded_from_the_tier(tmp_path):
    """Also prefixes of requests that were preempted and are recomputed."""
    reserve = {"admission": "optimistic", "preempt": "recompute"}
    engine = engine_of(memory=160 << 10, schedule=reserve, **on_disk(tmp_path))

    for _ in range(3):
        logits, _ = answer(engine)
        drain(engine)
        check_logits(logits)

    assert restored(engine)
    assert engine.events.newest(["prefix_stored"])


# ---- what happens to disks -----------------------------------------------------------------------


def test_an_entry_with_other_tokens_than_its_key_says_is_discarded(tmp_path):
    engine = engine_of(prefill=READ_SLOWLY, **on_disk(tmp_path))
    put = PrefixStore.put

    def put_others(self, keys, records):
        records[:, 0] ^= 1
        return put(self, keys, records)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixStore, "put", put_others)
        answer(engine)
        engine.close()
    engine = engine_of(prefill=READ_SLOWLY, **on_disk(tmp_path))
    logits, _ = answer(engine)

    assert engine.stats().tier.num_discarded
    check_logits(logits)


def test_a_full_disk_stores_nothing_and_fails_no_request(tmp_path, monkeypatch, caplog):
    engine = engine_of(memory=160 << 10, **on_disk(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        logits, _ = answer(engine)
        engine.close()

    check_logits(logits)
    assert engine.stats().tier.num_failed > 1
    assert engine.stats().tier.stored_bytes == 0
    assert caplog.text.count("No space left") == 1


def test_blocks_of_another_model_or_layout_are_never_loaded(tmp_path):
    fill(tmp_path)
    others = ({"codec": "int8"}, {"page_tokens": 8}, {"evict": "h2o:cap=64,every=8"})
    for other in (*others, {"name": "llama_mha"}):
        engine = engine_of(prefill=READ_SLOWLY, **on_disk(tmp_path), **other)
        answer(engine, B)

        assert engine.stats().tier.found_blocks == 0
        assert not restored(engine)
        engine.close()


def test_tenants_find_their_own_prefixes_and_no_others(tmp_path):
    tenants = {"tenants": "red; blue"}
    engine = engine_of(schedule=tenants, **on_disk(tmp_path))
    answer(engine, tenant="red")
    engine.close()

    engine = engine_of(prefill=READ_SLOWLY, schedule=tenants, **on_disk(tmp_path))
    answer(engine, tenant="blue")
    assert not restored(engine)
    engine.scheduler.sequence_memory.drop_cached()
    logits, _ = answer(engine, tenant="red")
    assert restored(engine)
    check_logits(logits)


def hold_reads(monkeypatch, keys: list):
    """Hold all reads of blocks until the returned event is set; keys of blocks that were read."""
    gate, read = threading.Event(), PrefixStore.read

    def read_late(self, blocks, *rest):
        assert gate.wait(30)
        keys.extend(block.key for block in blocks)
        read(self, blocks, *rest)

    monkeypatch.setattr(PrefixStore, "read", read_late)
    return gate


def test_a_request_that_waits_for_its_pages_does_not_delay_others(tmp_path, monkeypatch):
    fill(tmp_path)
    engine = engine_of(prefill=READ_SLOWLY, token_s=100.0, **on_disk(tmp_path))
    gate = hold_reads(monkeypatch, [])
    engine.submit(GenerationRequest(PROMPTS["b"], greedy(NEW_TOKENS), request_id="b"))
    engine.step()
    assert engine.step() == []  # nothing to do but wait, and a step does not wait for long
    owner = engine.ledger()["axes"]["owner"]
    assert engine.stats().tier.loading_bytes == owner["in_flight_loads"] > 0
    engine.submit(GenerationRequest([7] * 40, greedy(NEW_TOKENS), request_id="other"))
    done = set()
    while "other" not in done:
        done |= {delta.request_id for delta in engine.step() if delta.is_last}
    assert done == {"other"}

    gate.set()
    answer(engine, {})
    assert len(restored(engine)) == 1


@pytest.mark.parametrize("when", [2, 3, 5])
def test_cancellation_during_a_load_frees_all_pages(when, tmp_path, monkeypatch):
    fill(tmp_path)
    read, moves = PrefixStore.read, random.Random(when)

    def read_late(self, *arguments):
        time.sleep(0.01 * moves.random())
        read(self, *arguments)

    monkeypatch.setattr(PrefixStore, "read", read_late)
    engine = engine_of(**on_disk(tmp_path))
    logits, _ = answer(engine, cancel=[("b", when), ("a", when + 1)])

    check_logits(logits, only="cd")
    assert engine.stats().tier.loading_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["llama_mha", "qwen3", "gemma2"])
def test_random_delays_and_damage_change_no_logits(name, seed, tmp_path, monkeypatch):
    rng = random.Random(seed)
    fill(tmp_path, name, memory=rng.choice([200 << 10, 4 * MIB]))
    read = FileTier.read

    def read_as_it_likes(self, key, into, first=0):
        time.sleep(0.005 * rng.random())
        if rng.random() < 0.1:
            into[:] = bytes(into.nbytes)  # other tokens than the key says
        else:
            read(self, key, into, first)

    engine = engine_of(
        name, token_s=10 ** rng.uniform(-5, -1), memory=300 << 10, **on_disk(tmp_path)
    )
    monkeypatch.setattr(FileTier, "read", read_as_it_likes)
    for _ in range(2):
        logits, _ = answer(engine)
        check_logits(logits, name)


# ---- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"disk_memory": "8MiB"}, "--disk-kv-path FOLDER too"),
        ({"disk_path": "x"}, "--disk-kv-memory SIZE too"),
        ({"cpu_memory": "900TiB"}, "lower --cpu-kv-memory"),
        ({"remote": "nowhere"}, "redis://HOST:PORT"),
        ({"remote": "redis://127.0.0.1:1", "require_tiers": True}, "start without --require-tiers"),
        ({"require_tiers": True}, "--require-tiers has no effect without a tier"),
        ({"remote": "file:///x"}, "give --remote-kv-memory SIZE too"),
        ({"remote_memory": "8MiB"}, "--remote-kv-memory has no effect alone"),
        ({"kv_write": "through"}, "--kv-write through has no effect without a tier"),
        ({"kv_load": "whole"}, "--kv-load whole has no effect without a tier"),
        ({"remote": "redis://a", "enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"disk_memory": "9B", "disk_path": "x"}, "65,536 B or more"),
        ({"disk_memory": "900TiB", "disk_path": "x"}, "lower --disk-kv-memory"),
    ],
)
def test_invalid_options_are_rejected_at_start(options, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        engine_of(**options)


def test_two_engines_share_a_folder(tmp_path):
    first = engine_of(**on_disk(tmp_path))
    second = engine_of(prefill=READ_SLOWLY, remote=f"file://{tmp_path}/kv", remote_memory=32 * MIB)
    answer(first)
    first.close()

    logits, _ = answer(second)

    assert {event.request_id for event in restored(second)} >= {"a", "b"}
    check_logits(logits)


def test_an_engine_that_fails_to_start_releases_its_folder(tmp_path):
    """The folder is taken before the tenants of the scheduler are checked."""
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="lower guaranteed="):
        engine_of(schedule={"tenants": "a:guaranteed=1GiB"}, **on_disk(tmp_path))
    assert threading.active_count() == threads
    secret = tmp_path / "kv" / "secret"
    secret.unlink()
    secret.mkdir()
    lock = tmp_path / "kv" / "lock"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ConfigError, match=r"Is a directory.*without --require-tiers"):
        engine_of(**on_disk(tmp_path, require_tiers=True))
    assert threading.active_count() == threads
    lock.rmdir()

    engine_of(**on_disk(tmp_path, require_tiers=True)).close()
    assert secret.is_file()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("another version", "index of format 1"),
        ("another program", "index of format 1"),
        ("lock: a folder", "Is a directory"),
        ("index.sqlite3: a folder", "unable to open"),
        ("a file", "Not a directory|File exists"),
        ("an earlier format", "delete its files blocks and index"),
    ],
)
def test_an_unusable_folder_at_the_start_is_warned_about_or_refused(
    tmp_path, damage, reason, caplog
):
    if damage != "a file":
        fill(tmp_path)
    if damage == "a file":
        (tmp_path / "kv").write_text("a file")
    elif damage == "an earlier format":
        for name in ("blocks", "index"):
            (tmp_path / "kv" / name).touch()
    else:
        file_damage.damage_folder(tmp_path / "kv", damage)
    before = sorted(tmp_path.rglob("*.kv"))

    engine = engine_of(**on_disk(tmp_path))
    logits, _ = answer(engine)
    engine.close()

    [level] = engine.stats().tier.levels
    check_logits(logits)
    assert level.num_outages == 1
    assert caplog.text.count("is not used for now") == len(caplog.records) == 1
    assert sorted(tmp_path.rglob("*.kv")) == before  # nothing of another program is deleted
    assert bool(before) == (damage != "a file")
    with pytest.raises(ConfigError, match=f"({reason}).*without --require-tiers"):
        engine_of(**on_disk(tmp_path, require_tiers=True))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled")
    fill(folder)
    return folder / "kv"


def check_damaged(engine, at, caplog):
    """An engine computes the same, and loads what is whole if the damage was before its start."""
    logits, _ = answer(engine)

    [level] = engine.stats().tier.levels
    check_logits(logits)
    if at == "runtime":
        engine.close()
        assert "a KV transfer to or from a tier failed" not in caplog.text
        return
    assert restored(engine)
    assert level.found_blocks
    assert not level.num_outages, caplog.text
    assert bool(level.num_damaged) == bool(caplog.records)


USABLE = [name for name in file_damage.DAMAGES if name not in file_damage.LOSSES]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(name, marks=[] if number % 9 == 0 else pytest.mark.slow)
        for number, name in enumerate(USABLE)
    ],
)
@pytest.mark.parametrize("at", ["start", "runtime"])
def test_an_engine_with_a_damaged_folder_computes_the_same_and_loads_what_is_whole(
    filled, tmp_path, damage, at, caplog
):
    if at == "runtime" and "-shm" in damage:
        pytest.skip("SQLite maps this file: a process ends if another one truncates it")
    shutil.copytree(filled, tmp_path / "kv")
    (entry, *others) = dict(file_damage.rows(filled))
    assert others
    options = on_disk(tmp_path, kv_write="through")
    engine = engine_of(prefill=READ_SLOWLY, **options) if at == "runtime" else None
    file_damage.damage_folder(tmp_path / "kv", damage, entry)

    check_damaged(engine or engine_of(prefill=READ_SLOWLY, **options), at, caplog)


def test_prefixes_of_an_engine_that_was_not_closed_are_found(tmp_path):
    engine = engine_of(**on_disk(tmp_path))
    answer(engine)
    assert isinstance(engine.prefix_loader, PrefixLoader)
    closing = engine._closing
    OPEN.clear()
    del engine
    closing()  # as the process does at its end

    engine = engine_of(**on_disk(tmp_path))
    assert engine.stats().tier.found_blocks


# ---- the hierarchy -------------------------------------------------------------------------------

SMALL = {"memory": 160 << 10}  # holds the prefixes of one or two prompts
FIRST_SECOND = B | {"b2": [*PROMPTS["b"], 9, 9, 1]}


def levels(engine):
    return {level.name: level for level in engine.stats().tier.levels}


@pytest.mark.parametrize("disk", [False, True])
def test_prefixes_evicted_from_kv_memory_are_loaded_from_cpu_memory_which_spills(disk, tmp_path):
    """The smaller CPU memory holds a part of one prompt."""
    options = {"cpu_memory": 16 << 10, **on_disk(tmp_path)} if disk else {"cpu_memory": 8 * MIB}
    engine = engine_of(prefill=READ_SLOWLY, **options, **SMALL)
    for _ in range(3):
        logits, _ = answer(engine)
        drain(engine)

    check_logits(logits)
    assert restored(engine)
    found = levels(engine)
    assert 0 < found["cpu"].stored_bytes <= options["cpu_memory"]
    assert bool(found["cpu"].spilled_bytes) == disk
    assert not disk or found["disk"].stored_blocks


def test_prefixes_loaded_from_the_disk_are_promoted_to_cpu_memory(tmp_path, monkeypatch):
    fill(tmp_path)
    engine = engine_of(prefill=READ_SLOWLY, cpu_memory=8 * MIB, **on_disk(tmp_path))
    answer(engine, B)
    drain(engine)
    assert engine.stats().tier.promoted_blocks == levels(engine)["cpu"].stored_blocks == 148 // 4

    engine.scheduler.sequence_memory.drop_cached()
    monkeypatch.setattr(FileTier, "read", None)  # no read of the disk
    logits, _ = answer(engine, B)

    assert loaded_tokens(engine) == [148, 148]
    check_logits(logits, only="b")


def test_closing_writes_cpu_memory_to_the_disk(tmp_path):
    options = {"cpu_memory": 8 * MIB, **on_disk(tmp_path)}
    engine = engine_of(**options)
    answer(engine)
    engine.close()
    assert levels(engine)["disk"].stored_blocks == levels(engine)["cpu"].stored_blocks

    engine = engine_of(prefill=READ_SLOWLY, **options)
    check_logits(answer(engine)[0])

    assert levels(engine)["disk"].found_blocks
    assert not levels(engine)["cpu"].found_blocks
    assert restored(engine)


def test_a_damaged_disk_below_cpu_memory_changes_no_output(tmp_path):
    fill(tmp_path)
    for path in (tmp_path / "kv" / "entries").iterdir():
        data = bytearray(path.read_bytes())
        data[800::4096] = bytes(len(data[800::4096]))
        path.write_bytes(data)
    engine = engine_of(prefill=READ_SLOWLY, cpu_memory=16 << 10, **on_disk(tmp_path))
    check_logits(answer(engine)[0])
    assert engine.stats().tier.num_discarded


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


def answers(engine, prompts):
    logits, _ = answer(engine, prompts, record_evictions=True)
    return logits, {name: [repr(e) for e in engine.eviction_trace(name)] for name in prompts}


@pytest.mark.parametrize("evict", WITH_STATISTICS)
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_rules_with_statistics_continue_exactly_after_a_load(evict, where, tmp_path):
    """The same tokens are evicted as without a tier."""
    options = {"evict": evict, "record_evictions": True}
    expected = answers(engine_of(**options), B)
    options |= on_disk(tmp_path) if where == "disk" else {"cpu_memory": 16 * MIB}
    engine = engine_of(**options)
    answer(engine, B)
    if where == "disk":
        engine.close()
        engine = engine_of(prefill=READ_SLOWLY, **options)
    else:
        engine.scheduler.sequence_memory.drop_cached()
        drain(engine)
        engine.prefix_loader.costs = Rates(READ_SLOWLY)
    logits, traces = answers(engine, B)

    assert loaded_tokens(engine) == [148]
    assert largest_difference(logits, expected[0]) <= 1e-4
    assert traces == expected[1]
    assert any(traces.values())


@pytest.mark.parametrize("codec", ["int8+sinks=2+residual=6", "int4_page/int8"])
def test_codecs_with_tokens_outside_of_their_pages_are_loaded_with_these(codec, tmp_path):
    expected = answer(engine_of(codec=codec))[0]
    fill(tmp_path, codec=codec)
    engine = engine_of(prefill=READ_SLOWLY, codec=codec, **on_disk(tmp_path))
    assert largest_difference(answer(engine)[0], expected) <= 1e-4
    assert restored(engine)


@pytest.mark.parametrize(
    ("rule", "loads"), [("h2o:cap=152,every=8,when=decode", 0), ("kvzip:cap=50%,chunk=64", 1)]
)
def test_a_request_without_stored_statistics_recomputes_its_prompt(rule, loads, tmp_path):
    """Except if a scoring pass writes all of them."""
    fill(tmp_path, evict_allow="all")  # no statistics were recorded
    engine = engine_of(prefill=READ_SLOWLY, evict_allow="all", **on_disk(tmp_path))
    answer(engine, B, evict=rule)
    assert len(restored(engine)) == loads
    answer(engine, {"full": PROMPTS["b"]}, evict="full")


# ---- one load of two requests --------------------------------------------------------------------


def load_together(engine, prompts, monkeypatch, **options):
    """Hold the reads until the first step has ended; logits, usages and the keys that were read."""
    keys = []
    gate, steps = hold_reads(monkeypatch, keys), itertools.count()

    def open_late(_):
        if next(steps) >= options.get("after", 1):
            gate.set()

    cancel = options.get("cancel", ())
    return *answer(engine, prompts, before_step=open_late, cancel=cancel), keys


@pytest.mark.parametrize(
    "evict", ["full", "h2o:cap=152,every=8,when=decode", "kvzip:cap=152,chunk=64"]
)
def test_two_requests_of_a_prefix_share_one_load(evict, tmp_path, monkeypatch):
    expected = answer(engine_of(evict=evict), FIRST_SECOND)[0]
    fill(tmp_path, evict=evict)
    engine = engine_of(prefill=READ_SLOWLY, evict=evict, **on_disk(tmp_path))
    logits, usages, keys = load_together(engine, FIRST_SECOND, monkeypatch)

    assert engine.stats().tier.num_joined == 1
    assert len(restored(engine)) == 1
    snapshots = 1 if evict.startswith("h2o") else 0
    assert len(keys) == len(set(keys)) + snapshots
    assert usages["b2"].cached_tokens >= 144
    assert largest_difference(logits, expected) <= 1e-4


@pytest.mark.parametrize("when", [2, 3, 4])
def test_a_request_continues_if_the_one_that_loads_its_prefix_is_cancelled(
    when, tmp_path, monkeypatch
):
    expected = answer(engine_of(), FIRST_SECOND)[0]
    fill(tmp_path)
    engine = engine_of(prefill=READ_SLOWLY, **on_disk(tmp_path))
    options = {"cancel": [("b", when + 1)], "after": when}
    logits, _, _ = load_together(engine, FIRST_SECOND, monkeypatch, **options)
    assert engine.stats().tier.num_joined == 1
    assert engine.stats().tier.loading_bytes == 0
    assert largest_difference({"b2": logits["b2"]}, {"b2": expected["b2"]}) <= 1e-4


def test_a_request_that_joins_a_load_also_loads_what_follows(tmp_path, monkeypatch):
    long = {"long": [*PROMPTS["b"], *range(3, 60)]}
    expected = answer(engine_of(), B | long)[0]
    engine = engine_of(**on_disk(tmp_path))
    answer(engine, long)
    engine.close()
    engine = engine_of(prefill=READ_SLOWLY, **on_disk(tmp_path))
    logits, usages, _ = load_together(engine, B | long, monkeypatch)

    assert engine.stats().tier.num_joined == 1
    assert usages["long"].cached_tokens == 204
    assert largest_difference(logits, expected) <= 1e-4


# ---- a store on a server that dies, stalls or is damaged -----------------------------------------


TIMEOUT_S = 20.0  # of servers that respond
OUTAGE_TIMEOUT_S = 2.0
PREFIX_TIER = "quire.offload.prefix_store"


@pytest.fixture
def server():
    started = start_redis()
    yield started
    close_all()
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
    num_blocks = (len(PROMPTS["b"]) + NEW_TOKENS - 1) // 4  # with one of its output
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
            for request in requests_of(LATER, NEW_TOKENS):
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
def filled_server():
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
    filled_server, damage, at, caplog
):
    server, client, keys = filled_server
    client.flushall()
    for key, value in keys.items():
        client.restore(key, 0, value)
    [namespace] = {key.split(b":")[3].decode() for key in keys if key.count(b":") == 4}
    names = client.zrange(f"{PREFIX}:{namespace}", 0, -1)
    assert len(names) > 2
    options = shared(server, kv_write="through")
    engine = engine_of(prefill=READ_SLOWLY, **options) if at == "runtime" else None
    redis_damage.damage_store(client, damage, names[0].decode(), namespace)

    check_damaged(engine or engine_of(prefill=READ_SLOWLY, **options), at, caplog)
    assert len(caplog.records) <= 1


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
