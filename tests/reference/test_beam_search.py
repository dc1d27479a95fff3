"""Beam search equals Transformers', forked, preempted or evicted, also without free pages."""

import random
from functools import cache
from itertools import product

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import NeverFits, OutOfPages
from quire.sampling.outputs import OutputBuilder
from quire.scheduler.forks import NO_PAGES
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.sequence_memory import SequenceMemory
from support import engines, zoo
from support.engines import answer, load
from support.kv_options import kv_config

TOLERANCE = 1e-4
NEW_TOKENS = 10
ARCHITECTURES = ("llama", "qwen2_window", "gpt2", "gemma3", "mixtral", "gemma4", "llama4", "bamba")
WIDTHS = (2, 3, 4)
LENGTH_PENALTIES = (0.5, 1.0, 2.0)
EARLY = (False, True, "never")
CASES = [(w, p, e) for w in WIDTHS for p in LENGTH_PENALTIES for e in EARLY]
# every two of the three options together
PAIRS = [
    (WIDTHS[(i + j) % 3], penalty, early)
    for i, penalty in enumerate(LENGTH_PENALTIES)
    for j, early in enumerate(EARLY)
]
END_TOKENS = list(range(2, 14))  # enough that random weights reach one


_RNG = random.Random(11)
PROMPTS = [tuple(_RNG.randrange(14, zoo.VOCAB_SIZE) for _ in range(n)) for n in (5, 19)]


reference_model = cache(zoo.build)


@cache
@torch.inference_mode()
def transformers_beams(architecture, prompt: tuple[int, ...], width, penalty, early, ends) -> list:
    """Transformers' beams, best first: tokens without padding, and scores."""
    model = reference_model(architecture)
    model.generation_config.eos_token_id = None
    beams = {"num_beams": width, "num_return_sequences": width, "length_penalty": penalty}
    beams |= {"early_stopping": early, "eos_token_id": END_TOKENS if ends else None}
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **beams,
    )
    cut = []
    for tokens in out.sequences[:, len(prompt) :].tolist():
        places = [place for place, token in enumerate(tokens) if ends and token in END_TOKENS]
        cut.append(tokens[: places[0] + 1] if places else tokens)
    return list(zip(cut, out.sequences_scores.tolist(), strict=True))


def compare_all(engine: Engine, architecture: str, cases, *, ends: bool) -> set[str | None]:
    requests, builders, found = {}, {}, {}
    for number, (prompt, case) in enumerate(product(PROMPTS, cases)):
        name, (width, penalty, early) = f"r{number}", case
        beams = {"use_beam_search": True, "n": width, "length_penalty": penalty}
        beams |= {"early_stopping": early, "stop_token_ids": END_TOKENS if ends else ()}
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **beams)
        requests[name] = GenerationRequest([*prompt], params, request_id=name)
        builders[name] = OutputBuilder(name, prompt), (prompt, *case)
    for delta in engines.answer(engine, requests.values()).deltas:
        found[delta.request_id] = builders[delta.request_id][0].add(delta)
    for name, (_, case) in builders.items():
        expected = transformers_beams(architecture, *case, ends)
        for choice, (tokens, score) in zip(found[name].choices, expected, strict=True):
            assert choice.score == pytest.approx(score, abs=TOLERANCE)
            assert list(choice.token_ids) == tokens
    return {choice.finish_reason for output in found.values() for choice in output.choices}


@pytest.mark.parametrize(
    ("architecture", "ends", "cases"),
    [
        pytest.param(ARCHITECTURES[0], False, PAIRS, id=f"{ARCHITECTURES[0]}-False-pairs"),
        *(pytest.param(name, True, PAIRS, id=f"{name}-True-pairs") for name in ARCHITECTURES),
        *(
            pytest.param(name, ends, CASES, id=f"{name}-{ends}-all", marks=pytest.mark.slow)
            for name in ARCHITECTURES
            for ends in (True, False)
        ),
    ],
)
def test_beams_equal_transformers(architecture, ends, cases):
    """All widths, length penalties and kinds of early stopping, at once in one engine."""
    engine = engines.engine_for(engines.load(architecture), room=40.0, longest=30, page_tokens=4)
    assert ("stop" in compare_all(engine, architecture, cases, ends=ends)) == ends


@pytest.mark.parametrize(
    "architecture",
    [*ARCHITECTURES[:3], *(pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES[3:])],
)
def test_preempted_and_recomputed_beams_are_equal(architecture):
    room = 4.6 if architecture in zoo.HYBRID else 3.4  # each beam has a state of its own
    options = {"longest": 30, "page_tokens": 4, "enable_prefix_caching": False}
    engine = engines.engine_for(engines.load(architecture), room=room, **options)
    compare_all(engine, architecture, CASES[::5], ends=True)
    assert engine.scheduler.num_preemptions > 0


# ---- forks without pages -------------------------------------------------------------------------


LENGTHS = (30, 44, 58)  # of the prompts
NO_LOSS = 128  # a cap over every length: statistics are kept, no token leaves
DRAWS, BEST = {"n": 3}, {"n": 2, "best_of": 4}
BEAMS = {"use_beam_search": True, "beam_width": 3}
# rule, codec, sampling options, prefix cache, memory in peaks of the longest sequence
FORK_CASES = [
    *(("h2o", "none", DRAWS, True, 1.9), ("h2o", "int8", DRAWS, False, 2.0)),
    *(("h2o", "int8", BEAMS, False, 1.9), ("average", "none", BEST, False, 1.9)),
    ("average", "none", BEAMS, True, 1.7),
    ("keydiff", "int4+sinks=4+residual=16", BEAMS, True, 2.4),
]


model = cache(lambda: load("llama"))
_FORK_RNG = random.Random(5)
FORK_PROMPTS = [[_FORK_RNG.randrange(2, zoo.VOCAB_SIZE) for _ in range(count)] for count in LENGTHS]


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
    for number, prompt in enumerate(FORK_PROMPTS):
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


@pytest.mark.parametrize(("rule", "codec", "kind", "prefix_cache", "room"), FORK_CASES)
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
