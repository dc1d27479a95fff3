import random
from dataclasses import replace

import psutil
import pytest
import torch

from quire import AsyncLLM, GenerationRequest, KVConfig, ScheduleConfig
from quire.engine.core import Engine
from quire.engine.shared_pool import SharedPool
from quire.errors import ConfigError, NeverFits
from quire.kernels.paging import move_slots
from support import engines

KIB = 1024
KV = KVConfig(page_tokens=4)
PAIR = ("llama_mqa", "gpt2")  # pages of 512 and 2,048 bytes


@pytest.fixture(scope="module")
def models():
    return {name: engines.load(name) for name in PAIR}


@pytest.fixture(scope="module")
def expected():
    return {
        name: engines.expect(name, engines.make_prompts(12, 40, seed))
        for seed, name in enumerate(PAIR)
    }


def make_engines(models, total="96KiB", guaranteed=("20KiB", "72KiB"), **options):
    pool = SharedPool(total, slab_bytes=4 * KIB)
    schedule, kv = ScheduleConfig(max_num_seqs=12, chunk_tokens=16), replace(KV, **options)
    return pool, {
        name: Engine(models[name], kv, schedule, pool=pool.join(name, guaranteed=size))
        for name, size in zip(PAIR, guaranteed, strict=True)
    }


def submit(engine, expected):
    ids = [engine.submit(GenerationRequest(e.prompt, engines.greedy())) for e in expected]
    return dict(zip(ids, expected, strict=True))


def check_outputs(expected, found):
    assert all(one.agrees(found[name], 1e-4) for name, one in expected.items())


def step(pool, engine, outputs):
    for delta in engine.step():
        outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert delta.finish_reason in (None, "length")
    pool.check()
    engine.check()


def run(pool, members, outputs, steps=None, all_members=None):
    rounds = 0
    while any(engine.has_work for engine in members.values()) and rounds != steps:
        for name, engine in members.items():
            if engine.has_work:
                step(pool, engine, outputs[name])
                held = held_bytes(pool, all_members or members)
                assert held + pool.free_bytes == pool.total_bytes
        rounds += 1


def held_bytes(pool, members):
    held = 0
    for name, engine in members.items():
        memory = engine.pool.kv.memory
        assert memory.used_bytes + memory.free_bytes == memory.total_bytes
        in_slabs = memory.used_bytes + sum(p.free_bytes for p in memory.pools.values())
        assert in_slabs == pool.held_bytes(name)
        held += in_slabs
    return held


@pytest.mark.parametrize("total", ["92KiB", "128KiB"])
def test_two_models_in_one_pool_have_the_outputs_of_separate_pools(models, expected, total):
    pool, members = make_engines(models, total, ("16KiB", "72KiB"))
    submitted = {name: submit(engine, expected[name]) for name, engine in members.items()}
    outputs = {name: {} for name in PAIR}

    run(pool, members, outputs)

    for name in PAIR:
        assert len(outputs[name]) == 12
        check_outputs(submitted[name], outputs[name])
    assert sum(engine.scheduler.num_preemptions for engine in members.values()) > 0


@pytest.mark.parametrize("swap_space", ["0", "64KiB"])
def test_random_step_order_and_cancellations_do_not_change_outputs(models, expected, swap_space):
    (pool, members), rng = make_engines(models, swap_space=swap_space), random.Random(7)
    submitted = {name: submit(engine, expected[name]) for name, engine in members.items()}
    outputs = {name: {} for name in PAIR}

    while any(engine.has_work for engine in members.values()):
        name = rng.choice(PAIR)
        if rng.random() < 0.05 and submitted[name]:
            cancelled = rng.choice(sorted(submitted[name]))
            del submitted[name][cancelled]
            members[name].cancel(cancelled)
        for delta in members[name].step():
            outputs[name].setdefault(delta.request_id, []).extend(delta.token_ids)
        pool.check()
        members[name].check()
        assert held_bytes(pool, members) + pool.free_bytes == pool.total_bytes

    assert sum(engine.scheduler.num_preemptions for engine in members.values()) > 0
    for name in PAIR:
        check_outputs(submitted[name], outputs[name])


def test_member_above_its_guarantee_is_preempted_for_the_guarantee_of_another(models, expected):
    """gpt2 holds most of the pool; llama gets its guarantee without a step of gpt2."""
    pool, members = make_engines(models)
    owner, over_guarantee = members["llama_mqa"], members["gpt2"]
    outputs = {name: {} for name in PAIR}
    submitted = submit(over_guarantee, expected["gpt2"])
    run(pool, {"gpt2": over_guarantee}, outputs, steps=6)
    assert pool.held_bytes("gpt2") > 76 * KIB
    steps_before, ran_before = over_guarantee.num_steps, len(over_guarantee.scheduler.running)

    first = submit(owner, expected["llama_mqa"][:1])
    step(pool, owner, outputs["llama_mqa"])

    assert owner.stats().num_running == 1
    assert owner.num_processed_tokens > 0
    assert over_guarantee.num_steps == steps_before
    assert 0 < over_guarantee.scheduler.num_preemptions <= ran_before
    run(pool, members, outputs)
    check_outputs(submitted, outputs["gpt2"])
    check_outputs(first, outputs["llama_mqa"])


def test_idle_member_above_its_guarantee_frees_memory_too(models, expected):
    """All its requests are cancelled, none is stepped again: its memory can still be freed."""
    pool, members = make_engines(models)
    outputs = {name: {} for name in PAIR}
    ids = submit(members["gpt2"], expected["gpt2"])
    run(pool, {"gpt2": members["gpt2"]}, outputs, steps=6)
    for request_id in ids:
        members["gpt2"].cancel(request_id)

    submitted = submit(members["llama_mqa"], expected["llama_mqa"])
    run(pool, {"llama_mqa": members["llama_mqa"]}, outputs, all_members=members)

    check_outputs(submitted, outputs["llama_mqa"])


def test_cached_prefixes_above_the_guarantee_are_evicted(models, expected):
    pool, members = make_engines(models)
    outputs = {name: {} for name in PAIR}
    submit(members["gpt2"], expected["gpt2"])
    run(pool, {"gpt2": members["gpt2"]}, outputs)
    cached_slabs = pool.held_bytes("gpt2") // (4 * KIB)
    assert cached_slabs > 18  # more than its guarantee, and no request runs

    allocate_slab = members["llama_mqa"].pool.kv.memory.arena.allocate_slab
    for _ in range(5):
        allocate_slab()  # its whole guarantee

    assert members["gpt2"].stats().cached_bytes < cached_slabs * 4 * KIB
    assert pool.held_bytes("gpt2") <= pool.total_bytes - 20 * KIB
    pool.check()


def test_guarantees_and_pools_that_do_not_fit_are_rejected_with_the_sizes():
    pool = SharedPool("64KiB", slab_bytes=4 * KIB)
    pool.join("a", guaranteed="48KiB")

    with pytest.raises(ConfigError, match=r"32,768 B, but 49,152 B of 65,536 B are guaranteed to "):
        pool.join("b", guaranteed="32KiB")
    with pytest.raises(ConfigError, match="two members"):
        pool.join("a", guaranteed=KIB)
    with pytest.raises(ConfigError, match="expected a member name"):
        pool.join("a b", guaranteed=KIB)
    pool.leave("a")  # a member without an engine
    pool.join("b", guaranteed="64KiB")
    with pytest.raises(ConfigError, match="exceeds the"):
        SharedPool(2 * psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("kv", "slab_bytes", "guaranteed", "error", "message"),
    [
        (KVConfig(memory="1MiB"), 8 * KIB, "32KiB", ConfigError, "conflicts with a shared pool"),
        (KVConfig(page_tokens=64), 8 * KIB, "32KiB", ConfigError, "do not fit into slabs"),
        (KVConfig(page_tokens=16), 4 * KIB, "4KiB", ConfigError, "cannot hold one token"),
    ],
)
def test_engine_that_cannot_join_is_rejected_and_releases_its_guarantee(
    models, kv, slab_bytes, guaranteed, error, message
):
    pool = SharedPool("128KiB", slab_bytes=slab_bytes)
    member = pool.join("gpt2", guaranteed=guaranteed)

    with pytest.raises(error, match=message):
        Engine(models["gpt2"], kv, pool=member)

    assert not pool.arena.members
    pool.join("gpt2", guaranteed="128KiB")  # the guarantee is released
    with pytest.raises(ConfigError, match="two members"):
        pool.join("gpt2", guaranteed="4KiB")


def test_engine_that_fails_after_joining_releases_its_guarantee(models):
    pool = SharedPool("128KiB", slab_bytes=4 * KIB)
    member = pool.join("gpt2", guaranteed="128KiB")

    with pytest.raises(ConfigError, match="guarantees add up"):
        Engine(models["gpt2"], KV, ScheduleConfig(tenants="a:guaranteed=1GiB"), pool=member)
    with pytest.raises(ConfigError, match="'gpt2' has left; join the shared pool again"):
        Engine(models["gpt2"], KV, pool=member)

    member = pool.join("gpt2", guaranteed="128KiB")
    engine = Engine(models["gpt2"], KV, pool=member)
    with pytest.raises(ConfigError, match="two members"):
        Engine(models["gpt2"], KV, pool=member)
    assert engine.pool.kv.memory.total_bytes == 128 * KIB


def test_leaving_member_drops_its_cache_and_releases_its_guarantee(models, expected):
    pool, members = make_engines(models)
    outputs = {name: {} for name in PAIR}
    submit(members["gpt2"], expected["gpt2"])
    run(pool, {"gpt2": members["gpt2"]}, outputs, all_members=members)
    assert pool.held_bytes("gpt2") > 0  # cached

    pool.leave("gpt2")

    assert pool.free_bytes == pool.total_bytes
    pool.check()
    assert members["llama_mqa"].pool.kv.memory.total_bytes == pool.total_bytes
    with pytest.raises(NeverFits):
        members["gpt2"].submit(GenerationRequest([2, 3], engines.greedy(1)))
    Engine(models["gpt2"], KV, pool=pool.join("gpt2", guaranteed="76KiB"))


def test_members_with_requests_stay_and_other_devices_and_threads_are_rejected(models, expected):
    pool, members = make_engines(models)
    ids = submit(members["gpt2"], expected["gpt2"])
    with pytest.raises(ConfigError, match=r"0 requests .*hold 0 B, 12 are waiting"):
        pool.leave("gpt2")
    members["gpt2"].step()

    with pytest.raises(ConfigError, match=r"'gpt2' cannot leave: [1-9]\d* requests .*; step the"):
        pool.leave("gpt2")
    with pytest.raises(ConfigError, match=r"named 'gpt3'; members: llama_mqa, gpt2$"):
        pool.leave("gpt3")

    for request_id in ids:
        members["gpt2"].cancel(request_id)
    pool.leave("gpt2")

    _, members = make_engines(models, "160KiB", ("16KiB", "72KiB"))
    layout = members["gpt2"].pool.kv.memory.layout
    member = SharedPool("128KiB").join("gpt2", guaranteed="64KiB")

    with pytest.raises(ConfigError, match="the model is on meta, the shared pool on cpu"):
        member.make_memory(layout, 1, torch.device("meta"), move_slots)
    with pytest.raises(ConfigError, match="stepped in one thread"):
        AsyncLLM(members["gpt2"])
    with pytest.raises(NeverFits, match=r"KV memory has 16,384 B.* raise guaranteed= to \d+KiB"):
        members["llama_mqa"].submit(GenerationRequest(list(range(2, 120)), engines.greedy(200)))
