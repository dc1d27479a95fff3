"""Engines that store cached prefixes on a disk or in Redis and load them after a restart.

Logits equal those of an engine without a tier within 1e-4, also with damaged files and stalled
links. Pages are NaN before they are loaded, so attention to a page before its load is detected.
"""

import errno
import os
import random
import shutil
import threading
import time
from dataclasses import replace
from functools import cache

import pytest

from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.errors import ConfigError
from quire.layout import codec_names
from quire.offload.prefix_store.in_flight_pages import InFlightPages
from quire.offload.prefix_store.prefix_loader import PrefixLoader
from quire.offload.prefix_store.store import PrefixStore
from quire.offload.tiers.file import FileTier
from quire.plan.rates import PrefillRates
from quire.scheduler.schedule_config import ScheduleConfig
from reference.test_eviction import Recorder, largest_difference
from support.engines import greedy, load
from support.kv_options import kv_config
from support.redis_servers import start_redis
from unit.offload import test_file_tier as file_damage

MIB = 1 << 20
PROMPTS = {
    "a": [5, 9, 2, 7] * 30,
    "b": [3 + i * i % 60 for i in range(150)],
    "c": [3 + i * i % 60 for i in range(90)] + [8, 8, 4] * 7,
    "d": [11, 4] * 9,
}
NEW_TOKENS = 6
SHARED = {"remote_memory": 32 * MIB}
BOTH = PrefillRates(token_s=1e-3, call_s=1e-4)  # as fast as a load that is said to take 1 ms
READ_SLOWLY = PrefillRates(token_s=1e3)
READ_FAST = PrefillRates(token_s=1e-12)


class Rates:
    """Costs that stay as they are."""

    def __init__(self, prefill):
        self.prefill, self.costs = prefill, self
        self.coefficients = (0.0, 1.0)

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


@cache
def model_of(name):
    return load(name)


def engine_of(name, *, prefill=BOTH, token_s=1e-3, schedule=None, **options):
    options = {"memory": 4 * MIB, "page_tokens": 4} | options
    config = ScheduleConfig(
        **({"chunk_tokens": 16, "max_num_batched_tokens": 40} | (schedule or {}))
    )
    engine = Engine(model_of(name), kv_config(**options), config)
    prefix_loader = engine.prefix_loader
    if prefix_loader is not None and prefill is not None:
        prefix_loader.costs = Rates(prefill)
        rates = prefix_loader.tier.levels.rates
        for level in range(len(rates)):
            rates[level] = Rates(None)
            rates[level].coefficients = (0.0, token_s / prefix_loader._token_bytes)
    return engine


def answer(engine, prompts=PROMPTS, cancel=(), **options):
    """Answer prompts; logits and usages."""
    recorder = engine.sampling_step.sampler = Recorder(engine.sampling_step.sampler)
    for request, prompt in prompts.items():
        engine.submit(GenerationRequest(prompt, greedy(NEW_TOKENS), request_id=request, **options))
    usages, steps = {}, 0
    while engine.has_work:
        steps += 1
        assert steps < 20_000
        for request, at in cancel:
            if steps == at:
                engine.cancel(request)
        for delta in engine.step():
            if delta.usage is not None:
                assert delta.error is None, delta.error
                usages[delta.request_id] = delta.usage
        engine.check()
    return recorder.logits, usages


@cache
def plain(name):
    """Without a tier."""
    return answer(engine_of(name))[0]


def on_disk(path, **options):
    return {"disk_memory": 32 * MIB, "disk_path": str(path / "kv")} | options


def fill(name, path, **options):
    """An engine that answers all and leaves its prefixes on disk."""
    engine = engine_of(name, **on_disk(path), **options)
    answer(engine)
    engine.close()
    assert engine.stats().tier.stored_blocks
    return engine


def restored(engine):
    return engine.events.newest(["prefix_loaded"])


@pytest.mark.parametrize("name", ["llama_mha", "qwen3", "gemma2", "opt"])
def test_a_restarted_engine_finds_its_prefixes(name, tmp_path):
    fill(name, tmp_path)
    engine = engine_of(name, **on_disk(tmp_path))
    tier = engine.stats().tier

    logits, usages = answer(engine)

    assert tier.found_blocks > 60
    assert largest_difference(logits, plain(name)) <= 1e-4
    assert {event.request_id for event in restored(engine)} >= {"a", "b"}
    assert any(event.data["computed_tokens"] for event in restored(engine))
    assert usages["b"].cached_tokens >= 32
    stats = engine.stats().tier
    assert stats.loaded_tokens == sum(event.data["tokens"] for event in restored(engine))
    assert stats.loading_bytes == stats.num_discarded == stats.num_failed == 0
    engine.close()


@pytest.mark.parametrize(
    ("prefill", "read"), [(READ_SLOWLY, "none"), (BOTH, "some"), (READ_FAST, "all")]
)
def test_rates_decide_how_much_is_recomputed(prefill, read, tmp_path):
    fill("qwen3", tmp_path)
    engine = engine_of("qwen3", prefill=prefill, **on_disk(tmp_path))

    logits, usages = answer(engine, {"b": PROMPTS["b"]})

    assert largest_difference(logits, {"b": plain("qwen3")["b"]}) <= 1e-4
    if read == "all":
        assert not restored(engine)
        assert engine.stats().tier.num_declined
    else:
        [event] = restored(engine)
        assert event.data["tokens"] + event.data["computed_tokens"] == 148
        assert bool(event.data["computed_tokens"]) == (read == "some")
        assert usages["b"].cached_tokens == event.data["tokens"]
        [served] = engine.stats().served
        assert served.cached_tokens == event.data["tokens"]
    engine.close()


def test_an_engine_that_only_decodes_recomputes_nothing(tmp_path):
    fill("qwen3", tmp_path)
    engine = engine_of("qwen3", prefill=READ_FAST, kv_load="whole", **on_disk(tmp_path))

    logits, usages = answer(engine, {"b": PROMPTS["b"]})

    assert usages["b"].cached_tokens == 148
    assert largest_difference(logits, {"b": plain("qwen3")["b"]}) <= 1e-4
    engine.close()


def test_a_prefix_loaded_after_a_preemption_counts_as_cached(tmp_path):
    """The first load is aborted by the preemption; the second one loads all 148 tokens."""
    fill("qwen3", tmp_path)
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **on_disk(tmp_path))
    usages = {}
    engine.submit(GenerationRequest(PROMPTS["b"], greedy(NEW_TOKENS), request_id="b"))
    prefix_loader = engine.prefix_loader
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_loader.tier.transfer_worker, "urgent", lambda work: None)
        engine.step()
        [request] = engine.scheduler.running
        engine.scheduler.lifecycle.preempt(request, "test")
    while engine.has_work:
        usages |= {d.request_id: d.usage for d in engine.step() if d.usage is not None}

    assert usages["b"].preemptions == 1
    assert [event.data["tokens"] for event in restored(engine)] == [148]
    assert usages["b"].cached_tokens == 148
    assert engine.stats().served[0].cached_tokens == 148
    engine.close()


def test_recomputed_tokens_of_a_resumed_request_do_not_count_as_cached(tmp_path):
    engine = engine_of("qwen3", **on_disk(tmp_path))
    engine.submit(GenerationRequest(PROMPTS["b"], greedy(NEW_TOKENS), request_id="b"))
    usages = {}
    while not engine.scheduler.running or engine.scheduler.running[0].progress.num_computed < 100:
        engine.step()
    engine.scheduler.lifecycle.preempt(engine.scheduler.running[0], "test")
    while engine.has_work:
        usages |= {d.request_id: d.usage for d in engine.step() if d.usage is not None}

    assert engine.stats().cached_tokens
    assert usages["b"].cached_tokens == 0
    engine.close()


@pytest.mark.parametrize(
    ("changed", "found"), [({"summary": "Other words."}, True), ({"group": 16}, False)]
)
def test_stored_prefixes_depend_on_the_codec_and_not_on_its_help_text(changed, found, tmp_path):
    fill("qwen3", tmp_path)
    codecs = {
        name: replace(codec, **changed) if name == "float32" else codec
        for name, codec in codec_names.CODECS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_names, "CODECS", codecs)
        engine = engine_of("qwen3", **on_disk(tmp_path))

    assert bool(engine.stats().tier.found_blocks) == found
    engine.close()


def test_loaded_prefixes_are_shared(tmp_path):
    fill("qwen3", tmp_path)
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **on_disk(tmp_path))
    answer(engine, {"b": PROMPTS["b"]})

    logits, usages = answer(engine, {"x": PROMPTS["b"]})

    assert len(restored(engine)) == 1
    assert usages["x"].cached_tokens == 148
    assert largest_difference(logits, {"x": plain("qwen3")["b"]}) <= 1e-4
    engine.close()


def test_evicted_prefixes_are_loaded_from_the_tier(tmp_path):
    """Also prefixes of requests that were preempted and are recomputed."""
    reserve = {"admission": "optimistic", "preempt": "recompute"}
    engine = engine_of("qwen3", memory=160 << 10, schedule=reserve, **on_disk(tmp_path))

    for _ in range(3):
        logits, _ = answer(engine)
        engine.prefix_loader.tier.transfer_worker.drain()
        assert largest_difference(logits, plain("qwen3")) <= 1e-4

    assert restored(engine)
    assert engine.events.newest(["prefix_stored"])
    engine.close()


# ---- what happens to disks -----------------------------------------------------------------------


def test_an_entry_with_other_tokens_than_its_key_says_is_discarded(tmp_path):
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **on_disk(tmp_path))
    put = PrefixStore.put

    def put_others(self, keys, records):
        records[:, 0] ^= 1
        return put(self, keys, records)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixStore, "put", put_others)
        answer(engine)
        engine.close()
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **on_disk(tmp_path))
    logits, _ = answer(engine)

    assert engine.stats().tier.num_discarded
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    engine.close()


def test_a_full_disk_stores_nothing_and_fails_no_request(tmp_path, monkeypatch, caplog):
    engine = engine_of("qwen3", memory=160 << 10, **on_disk(tmp_path))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        logits, _ = answer(engine)
        engine.close()

    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    assert engine.stats().tier.num_failed > 1
    assert engine.stats().tier.stored_bytes == 0
    assert caplog.text.count("No space left") == 1


@pytest.mark.parametrize(
    "other",
    [
        {"codec": "int8"},
        {"page_tokens": 8},
        {"evict": "h2o:cap=64,every=8"},
        {"model": "llama_mha"},
    ],
)
def test_blocks_of_another_model_or_layout_are_never_loaded(other, tmp_path):
    fill("qwen3", tmp_path)
    name = other.pop("model", "qwen3")
    engine = engine_of(name, prefill=READ_SLOWLY, **on_disk(tmp_path), **other)
    answer(engine, {"b": PROMPTS["b"]})

    assert engine.stats().tier.found_blocks == 0
    assert not restored(engine)
    engine.close()


def test_tenants_find_their_own_prefixes_and_no_others(tmp_path):
    tenants = {"tenants": "red; blue"}
    engine = engine_of("qwen3", schedule=tenants, **on_disk(tmp_path))
    answer(engine, tenant="red")
    engine.close()

    engine = engine_of("qwen3", prefill=READ_SLOWLY, schedule=tenants, **on_disk(tmp_path))
    answer(engine, tenant="blue")
    assert not restored(engine)
    engine.scheduler.sequence_memory.drop_cached()
    logits, _ = answer(engine, tenant="red")
    assert restored(engine)
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    engine.close()


# ---- links ---------------------------------------------------------------------------------------


@pytest.fixture
def server():
    started = start_redis()
    yield started
    started.close()


def test_a_store_serves_several_engines(server):
    first = engine_of("qwen3", remote=server.url)
    second = engine_of("qwen3", prefill=READ_SLOWLY, remote=server.url)
    answer(first)
    first.close()

    logits, _ = answer(second)  # looks up what the first engine has written meanwhile

    assert {event.request_id for event in restored(second)} >= {"a", "b"}
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    second.close()


def test_prefixes_are_recomputed_if_the_link_stalls(server):
    """Two requests whose prefixes are there, one whose is not: all end before the link moves."""
    first = engine_of("qwen3", remote=server.url)
    answer(first, {name: PROMPTS[name] for name in "ab"})
    first.close()
    reading = PrefillRates(token_s=1e-4)
    options = {"remote": server.url, "remote_timeout_s": 20.0}
    engine = engine_of("qwen3", prefill=reading, token_s=1e-5, **options)
    server.pause()

    logits, _ = answer(engine)

    assert not restored(engine)
    assert engine.stats().tier.loading_bytes == 0
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    server.resume()
    engine.close()


def test_a_request_that_waits_for_its_pages_does_not_delay_others(tmp_path, monkeypatch):
    fill("qwen3", tmp_path)
    engine = engine_of("qwen3", prefill=READ_SLOWLY, token_s=100.0, **on_disk(tmp_path))
    gate, read = threading.Event(), PrefixStore.read

    def read_late(self, *arguments):
        assert gate.wait(30)
        read(self, *arguments)

    monkeypatch.setattr(PrefixStore, "read", read_late)
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
    while engine.has_work:
        engine.step()
        engine.check()
    assert len(restored(engine)) == 1
    engine.close()


@pytest.mark.parametrize("when", [2, 3, 5])
def test_cancellation_during_a_load_frees_all_pages(when, tmp_path, monkeypatch):
    fill("qwen3", tmp_path)
    read, moves = PrefixStore.read, random.Random(when)

    def read_late(self, *arguments):
        time.sleep(0.01 * moves.random())
        read(self, *arguments)

    monkeypatch.setattr(PrefixStore, "read", read_late)
    engine = engine_of("qwen3", **on_disk(tmp_path))
    logits, _ = answer(engine, cancel=[("b", when), ("a", when + 1)])

    others = {name: plain("qwen3")[name] for name in "cd"}
    assert largest_difference({name: logits[name] for name in "cd"}, others) <= 1e-4
    assert engine.stats().tier.loading_bytes == 0
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["llama_mha", "qwen3", "gemma2"])
def test_random_delays_and_damage_change_no_logits(name, seed, tmp_path, monkeypatch):
    rng = random.Random(seed)
    fill(name, tmp_path, memory=rng.choice([200 << 10, 4 * MIB]))
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
        assert largest_difference(logits, plain(name)) <= 1e-4
    engine.close()


# ---- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"disk_memory": "8MiB"}, ConfigError, "--disk-kv-path FOLDER too"),
        ({"disk_path": "x"}, ConfigError, "--disk-kv-memory SIZE too"),
        ({"cpu_memory": "900TiB"}, ConfigError, "lower --cpu-kv-memory"),
        ({"remote": "nowhere"}, ConfigError, "redis://HOST:PORT"),
        (
            {"remote": "redis://127.0.0.1:1", "require_tiers": True},
            ConfigError,
            "start without --require-tiers",
        ),
        ({"require_tiers": True}, ConfigError, "--require-tiers has no effect without a tier"),
        ({"remote": "file:///x"}, ConfigError, "give --remote-kv-memory SIZE too"),
        ({"remote_memory": "8MiB"}, ConfigError, "--remote-kv-memory has no effect alone"),
        ({"kv_write": "through"}, ConfigError, "--kv-write through has no effect without a tier"),
        ({"kv_load": "whole"}, ConfigError, "--kv-load whole has no effect without a tier"),
        (
            {"remote": "redis://a", "enable_prefix_caching": False},
            ConfigError,
            "--no-enable-prefix-caching",
        ),
        ({"disk_memory": "9B", "disk_path": "x"}, ConfigError, "65,536 B or more"),
        ({"disk_memory": "900TiB", "disk_path": "x"}, ConfigError, "lower --disk-kv-memory"),
    ],
)
def test_invalid_options_are_rejected_at_start(options, error, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=says):
        engine_of("qwen3", **options)


def test_two_engines_share_a_folder(tmp_path):
    first = engine_of("qwen3", **on_disk(tmp_path))
    second = engine_of("qwen3", prefill=READ_SLOWLY, remote=f"file://{tmp_path}/kv", **SHARED)
    answer(first)
    first.close()

    logits, _ = answer(second)

    assert {event.request_id for event in restored(second)} >= {"a", "b"}
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    second.close()


def test_an_engine_that_fails_to_start_releases_its_folder(tmp_path):
    """The folder is taken before the tenants of the scheduler are checked."""
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="lower guaranteed="):
        engine_of("qwen3", schedule={"tenants": "a:guaranteed=1GiB"}, **on_disk(tmp_path))
    assert threading.active_count() == threads
    secret = tmp_path / "kv" / "secret"
    secret.unlink()
    secret.mkdir()
    lock = tmp_path / "kv" / "lock"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ConfigError, match=r"Is a directory.*without --require-tiers"):
        engine_of("qwen3", **on_disk(tmp_path, require_tiers=True))
    assert threading.active_count() == threads
    lock.rmdir()

    engine_of("qwen3", **on_disk(tmp_path, require_tiers=True)).close()
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
    kept = {} if damage == "a file" else fill("qwen3", tmp_path)
    if damage == "a file":
        (tmp_path / "kv").write_text("a file")
    elif damage == "an earlier format":
        for name in ("blocks", "index"):
            (tmp_path / "kv" / name).touch()
    else:
        file_damage.damage_folder(tmp_path / "kv", damage)
    before = sorted(tmp_path.rglob("*.kv"))

    engine = engine_of("qwen3", **on_disk(tmp_path))
    logits, _ = answer(engine)
    engine.close()

    [level] = engine.stats().tier.levels
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    assert level.num_outages == 1
    assert caplog.text.count("is not used for now") == len(caplog.records) == 1
    assert sorted(tmp_path.rglob("*.kv")) == before  # nothing of another program is deleted
    assert bool(kept) == bool(before)
    with pytest.raises(ConfigError, match=f"({reason}).*without --require-tiers"):
        engine_of("qwen3", **on_disk(tmp_path, require_tiers=True))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled")
    fill("qwen3", folder)
    return folder / "kv"


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
    engine = engine_of("qwen3", prefill=READ_SLOWLY, **options) if at == "runtime" else None
    file_damage.damage_folder(tmp_path / "kv", damage, entry)

    engine = engine or engine_of("qwen3", prefill=READ_SLOWLY, **options)
    logits, _ = answer(engine)

    [level] = engine.stats().tier.levels
    assert largest_difference(logits, plain("qwen3")) <= 1e-4
    if at == "runtime":
        engine.close()
        assert "a KV transfer to or from a tier failed" not in caplog.text
        return
    assert restored(engine)
    assert level.found_blocks
    assert not level.num_outages, caplog.text
    assert bool(level.num_damaged) == bool(caplog.records)
    engine.close()


def test_prefixes_of_an_engine_that_was_not_closed_are_found(tmp_path):
    engine = engine_of("qwen3", **on_disk(tmp_path))
    answer(engine)
    assert isinstance(engine.prefix_loader, PrefixLoader)
    closing = engine._closing
    del engine
    closing()  # as the process does at its end

    engine = engine_of("qwen3", **on_disk(tmp_path))
    assert engine.stats().tier.found_blocks
    engine.close()
