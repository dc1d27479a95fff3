import random

import psutil
import pytest
import torch

from quire.api.async_llm import AsyncLLM
from quire.config.generation_request import GenerationRequest
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.engine.shared_pool import SharedPool
from quire.errors import ConfigError, NeverFits, UnsoundCombination
from quire.kernels.paging import move_slots
from quire.scheduler.schedule_config import ScheduleConfig
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


def together(models, total, **guaranteed):
    """A pool, and an engine of each model in it."""
    pool = SharedPool(total, slab_bytes=4 * KIB)
    schedule = ScheduleConfig(max_num_seqs=12, chunk_tokens=16)
    return pool, {
        name: Engine(models[name], KV, schedule, pool=pool.join(name, guaranteed=guaranteed[name]))
        for name in PAIR
    }


def submit(engine, expected):
    ids = [engine.submit(GenerationRequest(e.prompt, engines.greedy())) for e in expected]
    return dict(zip(ids, expected, strict=True))


def step(pool, engine, answers):
    for delta in engine.step():
        answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        assert delta.finish_reason in (None, "length")
    pool.check()
    engine.check()


def run(pool, parties, answers, steps=None, holders=None):
    """Step the engines in turn, and prove after every step that every byte is somebody's."""
    turns = 0
    while any(engine.has_work for engine in parties.values()) and turns != steps:
        for name, engine in parties.items():
            if engine.has_work:
                step(pool, engine, answers[name])
                assert held_bytes(pool, holders or parties) + pool.free_bytes == pool.total_bytes
        turns += 1


def held_bytes(pool, parties):
    held = 0
    for name, engine in parties.items():
        memory = engine.pool.kv.memory
        assert memory.used_bytes + memory.free_bytes == memory.total_bytes
        in_slabs = memory.used_bytes + sum(p.free_bytes for p in memory.pools.values())
        assert in_slabs == pool.held_bytes(name)
        held += in_slabs
    return held


@pytest.mark.parametrize("total", ["92KiB", "128KiB"])
def test_two_models_in_one_pool_answer_as_each_would_alone(models, expected, total):
    pool, parties = together(models, total, llama_mqa="16KiB", gpt2="72KiB")
    wanted = {name: submit(engine, expected[name]) for name, engine in parties.items()}
    answers = {name: {} for name in PAIR}

    run(pool, parties, answers)

    for name in PAIR:
        assert len(answers[name]) == 12
        for request_id, e in wanted[name].items():
            assert e.agrees(answers[name][request_id], 1e-4)
    assert sum(engine.scheduler.num_preemptions for engine in parties.values()) > 0


@pytest.mark.parametrize("swap_space", ["0", "64KiB"])
def test_random_turns_and_cancellations_change_no_answer(models, expected, swap_space):
    pool, rng = SharedPool("96KiB", slab_bytes=4 * KIB), random.Random(7)
    kv = KVConfig(page_tokens=4, swap_space=swap_space)
    schedule = ScheduleConfig(max_num_seqs=12, chunk_tokens=16)
    parties = {
        name: Engine(models[name], kv, schedule, pool=pool.join(name, guaranteed=guaranteed))
        for name, guaranteed in zip(PAIR, ("20KiB", "72KiB"), strict=True)
    }
    wanted = {name: submit(engine, expected[name]) for name, engine in parties.items()}
    answers = {name: {} for name in PAIR}

    while any(engine.has_work for engine in parties.values()):
        name = rng.choice(PAIR)
        if rng.random() < 0.05 and wanted[name]:
            cancelled = rng.choice(sorted(wanted[name]))
            del wanted[name][cancelled]
            parties[name].cancel(cancelled)
        for delta in parties[name].step():
            answers[name].setdefault(delta.request_id, []).extend(delta.token_ids)
        pool.check()
        parties[name].check()
        assert held_bytes(pool, parties) + pool.free_bytes == pool.total_bytes

    assert sum(engine.scheduler.num_preemptions for engine in parties.values()) > 0
    for name in PAIR:
        for request_id, e in wanted[name].items():
            assert e.agrees(answers[name][request_id], 1e-4)


def test_a_borrower_gives_back_what_an_owner_is_guaranteed_at_once(models, expected):
    """gpt2 borrows most of the pool; llama gets what it needs without a step of gpt2 in between."""
    pool, parties = together(models, "96KiB", llama_mqa="20KiB", gpt2="72KiB")
    owner, borrower = parties["llama_mqa"], parties["gpt2"]
    answers = {name: {} for name in PAIR}
    wanted = submit(borrower, expected["gpt2"])
    run(pool, {"gpt2": borrower}, answers, steps=6)
    assert pool.held_bytes("gpt2") > 76 * KIB
    steps_before, ran_before = borrower.num_steps, len(borrower.scheduler.running)

    first = submit(owner, expected["llama_mqa"][:1])
    step(pool, owner, answers["llama_mqa"])

    assert owner.stats().num_running == 1
    assert owner.num_processed_tokens > 0
    assert borrower.num_steps == steps_before
    assert 0 < borrower.scheduler.num_preemptions <= ran_before
    run(pool, parties, answers)
    for request_id, e in wanted.items():
        assert e.agrees(answers["gpt2"][request_id], 1e-4)
    assert all(e.agrees(answers["llama_mqa"][i], 1e-4) for i, e in first.items())


def test_a_borrower_that_is_idle_gives_back_too(models, expected):
    """Its requests wait, none runs on: cancelled ones leave nothing that nobody could free."""
    pool, parties = together(models, "96KiB", llama_mqa="20KiB", gpt2="72KiB")
    answers = {name: {} for name in PAIR}
    ids = submit(parties["gpt2"], expected["gpt2"])
    run(pool, {"gpt2": parties["gpt2"]}, answers, steps=6)
    for request_id in ids:
        parties["gpt2"].cancel(request_id)

    wanted = submit(parties["llama_mqa"], expected["llama_mqa"])
    run(pool, {"llama_mqa": parties["llama_mqa"]}, answers, holders=parties)

    for request_id, e in wanted.items():
        assert e.agrees(answers["llama_mqa"][request_id], 1e-4)


def test_cached_prefixes_in_borrowed_slabs_are_given_back(models, expected):
    pool, parties = together(models, "96KiB", llama_mqa="20KiB", gpt2="72KiB")
    answers = {name: {} for name in PAIR}
    submit(parties["gpt2"], expected["gpt2"])
    run(pool, {"gpt2": parties["gpt2"]}, answers)
    cached_slabs = pool.held_bytes("gpt2") // (4 * KIB)
    assert cached_slabs > 18  # more than its guarantee, and nobody runs

    take = parties["llama_mqa"].pool.kv.memory.arena.take_slab
    for _ in range(5):
        take()  # its whole guarantee

    assert parties["gpt2"].stats().cached_bytes < cached_slabs * 4 * KIB
    assert pool.held_bytes("gpt2") <= pool.total_bytes - 20 * KIB
    pool.check()


def test_a_request_must_fit_what_its_engine_is_sure_of(models):
    _, parties = together(models, "160KiB", llama_mqa="16KiB", gpt2="72KiB")

    with pytest.raises(NeverFits, match=r"KV memory has 16,384 B.* raise guaranteed= to \d+KiB"):
        parties["llama_mqa"].submit(GenerationRequest(list(range(2, 120)), engines.greedy(200)))


def test_guarantees_over_the_pool_are_refused_with_the_numbers():
    pool = SharedPool("64KiB", slab_bytes=4 * KIB)
    pool.join("a", guaranteed="48KiB")

    with pytest.raises(
        ConfigError, match=r"32,768 B, but 49,152 B of 65,536 B are guaranteed to a;"
    ):
        pool.join("b", guaranteed="32KiB")
    with pytest.raises(ConfigError, match="two members"):
        pool.join("a", guaranteed=KIB)
    with pytest.raises(ConfigError, match="expected a member name"):
        pool.join("a b", guaranteed=KIB)


def test_a_pool_larger_than_what_is_free_is_refused():
    with pytest.raises(ConfigError, match="exceeds the"):
        SharedPool(2 * psutil.virtual_memory().total)


@pytest.mark.parametrize(
    ("kv", "slab_bytes", "guaranteed", "error", "message"),
    [
        (KVConfig(memory="1MiB"), 8 * KIB, "32KiB", ConfigError, "conflicts with a shared pool"),
        (
            KVConfig(store="contiguous_growing"),
            8 * KIB,
            "32KiB",
            UnsoundCombination,
            "single slabs",
        ),
        (KVConfig(page_tokens=64), 8 * KIB, "32KiB", ConfigError, "do not fit into slabs"),
        (KVConfig(page_tokens=16), 4 * KIB, "4KiB", ConfigError, "cannot hold one token"),
    ],
)
def test_an_engine_that_cannot_join_is_refused_and_leaves_its_place(
    models, kv, slab_bytes, guaranteed, error, message
):
    pool = SharedPool("128KiB", slab_bytes=slab_bytes)
    member = pool.join("gpt2", guaranteed=guaranteed)

    with pytest.raises(error, match=message):
        Engine(models["gpt2"], kv, pool=member)

    assert not pool.arena.members
    pool.join("gpt2", guaranteed="128KiB")  # nothing is promised any more
    with pytest.raises(ConfigError, match="two members"):
        pool.join("gpt2", guaranteed="4KiB")


def test_an_engine_that_fails_after_it_has_joined_gives_its_place_back(models):
    pool = SharedPool("128KiB", slab_bytes=4 * KIB)
    member = pool.join("gpt2", guaranteed="128KiB")

    with pytest.raises(ConfigError, match="guarantees add up"):
        Engine(models["gpt2"], KV, ScheduleConfig(tenants="a:guaranteed=1GiB"), pool=member)
    with pytest.raises(ConfigError, match="'gpt2' has left; join the shared pool again"):
        Engine(models["gpt2"], KV, pool=member)

    engine = Engine(models["gpt2"], KV, pool=pool.join("gpt2", guaranteed="128KiB"))
    assert engine.pool.kv.memory.total_bytes == 128 * KIB


def test_a_member_that_leaves_drops_its_cache_and_frees_its_guarantee(models, expected):
    pool, parties = together(models, "96KiB", llama_mqa="20KiB", gpt2="72KiB")
    answers = {name: {} for name in PAIR}
    submit(parties["gpt2"], expected["gpt2"])
    run(pool, {"gpt2": parties["gpt2"]}, answers, holders=parties)
    assert pool.held_bytes("gpt2") > 0  # cached

    pool.leave("gpt2")

    assert pool.free_bytes == pool.total_bytes
    pool.check()
    assert parties["llama_mqa"].pool.kv.memory.total_bytes == pool.total_bytes
    with pytest.raises(NeverFits):
        parties["gpt2"].submit(GenerationRequest([2, 3], engines.greedy(1)))
    Engine(models["gpt2"], KV, pool=pool.join("gpt2", guaranteed="76KiB"))


def test_a_member_with_requests_cannot_leave(models, expected):
    pool, parties = together(models, "96KiB", llama_mqa="20KiB", gpt2="72KiB")
    ids = submit(parties["gpt2"], expected["gpt2"])
    with pytest.raises(ConfigError, match=r"0 requests .*hold 0 B, 12 are waiting"):
        pool.leave("gpt2")
    parties["gpt2"].step()

    with pytest.raises(
        ConfigError, match=r"'gpt2' cannot leave: [1-9]\d* requests .*; step the engine"
    ):
        pool.leave("gpt2")
    with pytest.raises(ConfigError, match=r"named 'gpt3'; members: llama_mqa, gpt2$"):
        pool.leave("gpt3")

    for request_id in ids:
        parties["gpt2"].cancel(request_id)
    pool.leave("gpt2")


def test_a_place_without_an_engine_is_given_back():
    pool = SharedPool("64KiB", slab_bytes=4 * KIB)
    pool.join("a", guaranteed="64KiB")

    pool.leave("a")

    pool.join("b", guaranteed="64KiB")


def test_a_place_is_taken_once(models):
    pool = SharedPool("128KiB", slab_bytes=4 * KIB)
    member = pool.join("gpt2", guaranteed="64KiB")
    Engine(models["gpt2"], KV, pool=member)

    with pytest.raises(ConfigError, match="two members"):
        Engine(models["gpt2"], KV, pool=member)


def test_a_pool_lies_where_its_models_lie(models):
    _, parties = together(models, "160KiB", llama_mqa="16KiB", gpt2="72KiB")
    layout = parties["gpt2"].pool.kv.memory.layout
    member = SharedPool("128KiB").join("gpt2", guaranteed="64KiB")

    with pytest.raises(ConfigError, match="the model is on meta, the shared pool on cpu"):
        member.make_memory(layout, 1, torch.device("meta"), move_slots)


def test_an_engine_of_a_shared_pool_has_no_thread_of_its_own(models):
    _, parties = together(models, "160KiB", llama_mqa="16KiB", gpt2="72KiB")

    with pytest.raises(ConfigError, match="stepped in one thread"):
        AsyncLLM(parties["gpt2"])
