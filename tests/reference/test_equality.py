"""The engine equals Transformers: every architecture, page size, chunk size, swapped, preempted."""

import random
from collections import defaultdict
from functools import cache

import pytest

from quire.config.generation_request import GenerationRequest
from quire.engine import kv_memory
from quire.engine.core import Engine
from quire.kv.swap import append_tail, can_split, swap_in, swap_out
from quire.models.loader import LoadedModel
from quire.offload.swap.host_pool import HostPool
from quire.offload.swap.host_store import host_copies
from quire.sampling.sampler import SampledToken
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import NEW_TOKENS, Expected, engine_for, expect, greedy, load, make_prompts
from support.kv_options import kv_config
from support.lazy_copies import LazyWorker

TOLERANCE = 1e-4
NUM_PROMPTS, LONGEST = 32, 40
FEW_PROMPTS = 12  # of quick cases, except with large pages in small arenas: they preempt rarely
PAGE_TOKENS = (1, 4, 16)
CHUNK_TOKENS = (1, 7, 64, 2048)
# room in units of the longest request
ARENAS = {"ample": 40.0, "scarce": 3.0, "tight": 1.6}


@cache
def reference(architecture: str, num_prompts: int = NUM_PROMPTS) -> list[Expected]:
    return expect(architecture, make_prompts(num_prompts, LONGEST, seed=7))


class Forced:
    """A sampler that records the logits and returns the tokens of Transformers."""

    def __init__(self, engine: Engine, expected: list[Expected]) -> None:
        self.expected = {f"r{i}": wanted for i, wanted in enumerate(expected)}
        self.worst, engine.sampling_step.sampler = 0.0, self

    def submit(self, engine: Engine) -> None:
        for name, wanted in self.expected.items():
            engine.submit(GenerationRequest(wanted.prompt, greedy(), request_id=name))

    def sample(self, logits, rows):
        tokens = []
        for row_logits, request in zip(logits, rows, strict=True):
            step, wanted = len(request.output_token_ids), self.expected[request.request_id]
            difference = float((row_logits.cpu() - wanted.logits[step]).abs().max())
            self.worst = max(self.worst, difference)
            tokens.append(SampledToken(wanted.tokens[step]))
        return tokens


def drive(engine: Engine, expected: list[Expected], seed: int) -> tuple[dict[str, list[int]], int]:
    """Submit at random steps, cancel a few; return outputs and the number of cancelled requests."""
    rng, waiting = random.Random(seed), list(enumerate(expected))
    rng.shuffle(waiting)
    doomed, answers, ended = {f"r{i}" for i, _ in waiting[::13]}, defaultdict(list), {}
    while waiting or engine.has_work:
        for _ in range(rng.randint(0, 12)):
            if waiting:
                i, wanted = waiting.pop()
                own = {"request_id": f"r{i}", "priority": i % 3}
                engine.submit(GenerationRequest(wanted.prompt, greedy(), **own))
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                ended[delta.request_id] = delta
            elif delta.request_id in doomed and rng.random() < 0.5:
                engine.cancel(delta.request_id)
    engine.check()
    assert len(ended) == len(expected)
    aborted = {key for key, delta in ended.items() if delta.finish_reason == "abort"}
    return {key: answers[key] for key in answers if key not in aborted}, len(aborted)


def engine_of(
    model: LoadedModel, page_tokens: int, chunk_tokens: int, arena: str, attention: str = "auto"
) -> Engine:
    sizes = {"page_tokens": page_tokens, "chunk_tokens": chunk_tokens, "room": ARENAS[arena]}
    return engine_for(model, longest=LONGEST + NEW_TOKENS, attention=attention, **sizes)


CASES = [(page, chunk, arena) for page in PAGE_TOKENS for chunk in CHUNK_TOKENS for arena in ARENAS]
# every page size, chunk size and arena, and every pair of them over seven architectures; each has
# a case that preempts, which chunks of one token do not
QUICK = [
    *([(1, 1, "tight"), (4, 2048, "tight")], [(1, 7, "ample"), (16, 64, "tight")]),
    *([(4, 1, "ample"), (16, 7, "tight")], [(1, 2048, "ample"), (4, 64, "tight")]),
    *([(16, 1, "scarce"), (4, 7, "scarce")], [(16, 64, "ample"), (1, 64, "scarce")]),
    [(16, 2048, "scarce"), (4, 7, "tight")],
]


NAMES = [*zoo.NATIVE, *zoo.OWN_ATTENTION, *zoo.ARCHITECTURES]


def quick_cases(architecture: str, attention: str) -> list[tuple[int, int, str]]:
    """Different cases for each kind of attention, four for an architecture with both."""
    place = NAMES.index(architecture) + 3 * (attention == "auto")
    return QUICK[place % len(QUICK)]


def test_the_quick_cases_hold_every_pair():
    for attention in ("gathered", "auto"):
        met = [case for name in zoo.ARCHITECTURES for case in quick_cases(name, attention)]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            pairs = {(case[one], case[other]) for case in CASES}
            assert {(case[one], case[other]) for case in met} == pairs


def check_forced_logits(
    architecture: str, cases: list[tuple[int, int, str]], attention: str
) -> None:
    model, preemptions = load(architecture), 0
    for page_tokens, chunk_tokens, arena in cases:
        is_long = cases is CASES or (page_tokens, arena) == (16, "tight")
        expected = reference(architecture, NUM_PROMPTS if is_long else FEW_PROMPTS)
        engine = engine_of(model, page_tokens, chunk_tokens, arena, attention)
        forced = Forced(engine, expected)
        _, cancelled = drive(engine, expected, seed=page_tokens * 100 + chunk_tokens)

        assert forced.worst <= TOLERANCE, (page_tokens, chunk_tokens, arena)
        assert cancelled > 0
        preemptions += engine.scheduler.num_preemptions
    assert preemptions > 0


GATHERED = ("llama", "mistral", "gemma2", "opt", "gpt_oss", "bloom", "falcon_alibi")
"""Architectures that ask attention for different things; the others are slow tests there."""


def cases() -> list:
    """Each architecture with attention in C, if it is built, and some without."""
    found = [pytest.param(name, "auto", id=f"{name}-auto") for name in NAMES]
    for name in NAMES:
        marks = [pytest.mark.slow] * (name not in GATHERED)
        found.append(pytest.param(name, "gathered", id=f"{name}-gathered", marks=marks))
    return found


@pytest.mark.parametrize(("architecture", "attention"), cases())
def test_logits_equal_transformers_with_its_tokens_forced(architecture, attention):
    """`auto` is native attention where the C extension is built."""
    check_forced_logits(architecture, quick_cases(architecture, attention), attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gathered", "auto"])
@pytest.mark.parametrize("architecture", NAMES)
def test_logits_equal_transformers_in_every_combination(architecture, attention):
    check_forced_logits(architecture, CASES, attention)


SAMPLED = (
    *(*GATHERED, "qwen2_window", "phi3_longrope", "gpt2", "mixtral"),
    *("wide_llama", "wide_qwen2", "wide_phi3"),
)
"""Architectures whose tokens are compared too; every other one has its logits compared above."""


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in SAMPLED)) for name in NAMES],
)
def test_greedy_tokens_equal_generate_up_to_ties(architecture):
    case = random.Random(architecture).choice(CASES)
    model, expected = load(architecture), reference(architecture, FEW_PROMPTS)
    engine = engine_of(model, *case)
    answers, _ = drive(engine, expected, seed=3)

    different = 0
    for key, tokens in answers.items():
        wanted = expected[int(key[1:])]
        short = len(wanted.prompt) <= zoo.LONGROPE_SHORT_TOKENS < len(wanted.prompt) + NEW_TOKENS
        if architecture == "phi3_longrope" and short:
            continue  # Transformers changes the RoPE frequencies during the output; Quire does not
        assert wanted.agrees(tokens, TOLERANCE), key
        different += tokens != wanted.tokens
    assert different <= 2  # steps where two logits tie are rare


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", zoo.ARCHITECTURES)
def test_logits_equal_transformers_on_cuda(architecture):
    model, expected = load(architecture, "cuda"), reference(architecture)
    engine = engine_of(model, 16, 64, "scarce")
    forced = Forced(engine, expected)
    drive(engine, expected, seed=1)
    assert forced.worst <= 1e-3


# ---- swapped between any two steps ---------------------------------------------------------------

LONG_PROMPT = 60
# full attention, windows, shared or unequal lanes, chunks, ALiBi, widths, latents, states
SWAPPED = (
    *("llama", "gemma2", "mistral", "gemma4", "llama4", "falcon_alibi", "mimo_v2_flash"),
    *("deepseek_v3", "qwen3_next", "jamba"),
)


def without_cached_prefixes(architecture: str, room: float, device: str = "cpu") -> Engine:
    """An engine whose free pages may be poisoned: no cached prefix holds any."""
    options = {"page_tokens": 4, "chunk_tokens": 16, "attention": "auto"}
    longest = LONG_PROMPT + NEW_TOKENS
    model = load(architecture, device)
    return engine_for(model, room=room, longest=longest, enable_prefix_caching=False, **options)


def swapped_between_steps(architecture: str, device: str = "cpu") -> float:
    """The worst difference of logits from Transformers'."""
    rng, expected = random.Random(architecture), expect(architecture, make_prompts(12, 60, seed=5))
    engine = without_cached_prefixes(architecture, 20.0, device)
    forced, memory, store = Forced(engine, expected), engine.pool.kv.memory, engine.pool.kv.store
    largest = max(page_class.page_bytes for page_class in memory.layout.page_classes)
    pool = HostPool(memory.total_bytes, host_copies(store, memory.total_bytes, largest))
    forced.submit(engine)
    swaps = poisoned = 0
    while engine.has_work:
        engine.step()
        running = engine.scheduler.running
        away = rng.sample(running, rng.randint(0, len(running)))
        gone = [(request, swap_out(memory, [request.memory.row], pool)) for request in away]
        swaps += len(gone)
        if not memory.used_bytes:
            store.arena.fill_(0xFF)  # NaN in every page: what is read next came from the host
            poisoned += 1
        rng.shuffle(gone)
        for request, swapped in gone:
            [request.memory.row] = swap_in(memory, swapped)
        pool.check()
        memory.check()
    assert pool.used_bytes == 0
    assert poisoned
    assert swaps > 20
    return forced.worst


@pytest.mark.parametrize("architecture", SWAPPED)
def test_logits_equal_transformers_whenever_sequences_are_swapped(architecture):
    assert swapped_between_steps(architecture) <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", SWAPPED)
def test_logits_equal_transformers_when_swapped_to_pinned_memory(architecture):
    assert swapped_between_steps(architecture, "cuda") <= 1e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logits_equal_transformers_when_a_head_is_recomputed_before_its_tail(architecture):
    """Of about 50 tokens the first 16, one chunk, are recomputed; later pages are swapped in."""
    engine = without_cached_prefixes(architecture, 2.0)
    forced = Forced(engine, expect(architecture, [list(range(3, 48))]))
    memory, splits = engine.pool.kv.memory, 0
    forced.submit(engine)
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            length = int(memory.lengths[request.memory.row])
            if request.num_uncomputed > 1 or not can_split(memory, request.memory.row, 16):
                continue
            swapped = swap_out(memory, [request.memory.row], keep_from=16)
            engine.pool.kv.store.arena.fill_(0xFF)
            request.memory.row, request.progress.num_computed = memory.start(), 0
            engine.step()
            assert request.progress.num_computed == 16
            append_tail(memory, request.memory.row, swapped)
            request.progress.num_computed = length
            splits += 1
            memory.check()
    assert forced.worst <= TOLERANCE
    assert splits == NEW_TOKENS - 1


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_logits_equal_transformers_when_swap_copies_run_as_late_as_they_may(
    monkeypatch, prefix_caching
):
    """The copies stand in for those of a stream next to the computation."""
    worker = LazyWorker()
    monkeypatch.setattr(kv_memory, "swap_worker", lambda device: worker)
    kv = {"memory": "48KiB", "page_tokens": 4, "attention": "auto", "swap_space": "4MiB"}
    schedule = {"max_num_seqs": 8, "chunk_tokens": 16, "admission": "optimistic"}
    config = kv_config(**kv, enable_prefix_caching=prefix_caching)
    engine = Engine(load("llama"), config, ScheduleConfig(**schedule, preempt="swap"))
    forced = Forced(engine, expect("llama", make_prompts(8, LONG_PROMPT, seed=5)))
    forced.submit(engine)
    late = steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps % 3 == 0 and engine.scheduler.running:
            engine.scheduler.preempt_one()
        late = max(late, worker.num_waiting)
        engine.check()

    assert forced.worst <= TOLERANCE
    assert len(worker.queued) > 4
    assert late > 0  # a step ran before the copies of the pages it did not use
    assert engine.pool.host.used_bytes == 0
