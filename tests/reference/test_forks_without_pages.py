"""Forks without free pages for their statistics: no exception, no lost request, equal tokens."""

import random
from functools import cache

import pytest

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits, OutOfPages
from quire.scheduler.forks import NO_PAGES
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory
from support import zoo
from support.engines import answer, load
from support.kv_options import kv_config

NEW_TOKENS = 10
LENGTHS = (30, 44, 58)  # of the prompts
NO_LOSS = 128  # a cap over every length: statistics are kept, no token leaves
DRAWS, BEST = {"n": 3}, {"n": 2, "best_of": 4}
BEAMS = {"use_beam_search": True, "beam_width": 3}
# rule, codec, sampling options, prefix cache, memory in peaks of the longest sequence
CASES = [
    *(("h2o", "none", DRAWS, True, 1.9), ("h2o", "int8", DRAWS, False, 2.0)),
    *(("h2o", "int8", BEAMS, False, 1.9), ("average", "none", BEST, False, 1.9)),
    ("average", "none", BEAMS, True, 1.7),
    ("keydiff", "int4+sinks=4+residual=16", BEAMS, True, 2.4),
]


model = cache(lambda: load("llama"))
_RNG = random.Random(5)
PROMPTS = [[_RNG.randrange(2, zoo.VOCAB_SIZE) for _ in range(count)] for count in LENGTHS]


def make_engine(memory: int, rule: str, codec: str, cap: int, **options: object) -> Engine:
    own = {"swap_space": 0, "enable_prefix_caching": True, "codec": codec}
    kv = {name: options.pop(name, value) for name, value in own.items()}
    evict = f"{rule}:cap={cap},every=4,when=pressure"
    config = kv_config(memory=memory, page_tokens=4, evict=evict, **kv)
    schedule = {"admission": "optimistic"} | options  # other rules leave pages for forks
    return Engine(model(), config, ScheduleConfig(max_num_seqs=8, chunk_tokens=16, **schedule))


def peak_bytes(rule: str, codec: str) -> int:
    engine = make_engine(1 << 22, rule, codec, NO_LOSS)
    need = Need(LENGTHS[-1] + NEW_TOKENS, LENGTHS[-1], engine.pool.eviction.spec)
    return engine.scheduler.peaks.peak_bytes(need)


def run(engine: Engine, kind: dict[str, object]) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Submit the requests that fit, run to the end and check the accounts.

    Returns:
        Tokens by request and index; how many forks found no pages.
    """
    failed: list[object] = []
    engine.events.subscribe(
        lambda event: failed.append(event) if event.data.get("reason") == NO_PAGES else None
    )
    for number, prompt in enumerate(PROMPTS):
        drawn = {} if kind is BEAMS else {"temperature": 1.0, "seed": number}
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **kind, **drawn)
        try:
            engine.submit(GenerationRequest(prompt, params, request_id=f"r{number}"))
        except NeverFits:
            assert kind is BEAMS  # which cannot run apart
    grouped = [request for request in engine.requests() if request.group is not None]
    tokens, memory = answer(engine).tokens, engine.pool.kv.memory
    assert memory.used_bytes + memory.free_bytes == memory.total_bytes
    failed += [request for request in grouped if request.split_from is not None]
    return tokens, len(failed)


@pytest.mark.parametrize(("rule", "codec", "kind", "prefix_cache", "room"), CASES)
def test_a_fork_without_pages_never_raises(rule, codec, kind, prefix_cache, room):
    size = int(room * peak_bytes(rule, codec))
    engine = make_engine(size, rule, codec, 16, enable_prefix_caching=prefix_cache)

    tokens, failed = run(engine, kind)

    assert all(len(ids) == NEW_TOKENS for ids in tokens.values())
    assert failed > 0


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize(("rule", "kind"), [("h2o", DRAWS), ("average", BEST), ("h2o", BEAMS)])
def test_failed_forks_change_no_token(rule, kind, preempt, monkeypatch):
    """Every third fork after all known tokens fails; no token is evicted under this cap."""
    ample, _ = run(make_engine(1 << 22, rule, "none", NO_LOSS), kind)
    rng, fork = random.Random(3), SequenceMemory.fork

    def fail_often(sequence_memory, parent, child):
        if parent.num_uncomputed == 0 and rng.random() < 1 / 3:
            raise OutOfPages("as if there were none")
        fork(sequence_memory, parent, child)

    monkeypatch.setattr(SequenceMemory, "fork", fail_often)
    size = int(2.5 * peak_bytes(rule, "none"))
    options = {"preempt": preempt, "swap_space": 4 * size if preempt == "swap" else 0}

    tokens, failed = run(make_engine(size, rule, "none", NO_LOSS, **options), kind)

    assert tokens == ample
    assert failed > 0
