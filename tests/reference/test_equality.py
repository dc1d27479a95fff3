"""The engine equals Transformers: every architecture, page size, chunk size, with preemption."""

import random
from collections import defaultdict
from functools import cache

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.models.loader import LoadedModel
from quire.sampling.sampler import SampledToken
from support import zoo
from support.engines import NEW_TOKENS, Expected, engine_for, expect, greedy, load, make_prompts

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

    def __init__(self, expected: dict[str, Expected]) -> None:
        self.expected = expected
        self.worst = 0.0

    def sample(self, logits, rows):
        tokens = []
        for row_logits, request in zip(logits, rows, strict=True):
            step = len(request.output_token_ids)
            wanted = self.expected[request.request_id]
            self.worst = max(
                self.worst, float((row_logits.cpu() - wanted.logits[step]).abs().max())
            )
            tokens.append(SampledToken(wanted.tokens[step]))
        return tokens


def drive(engine: Engine, expected: list[Expected], seed: int) -> tuple[dict[str, list[int]], int]:
    """Submit at random steps, cancel a few; return outputs and the number of cancelled requests."""
    rng = random.Random(seed)
    waiting = list(enumerate(expected))
    rng.shuffle(waiting)
    doomed = {f"r{i}" for i, _ in waiting[::13]}
    answers: dict[str, list[int]] = defaultdict(list)
    ended = {}
    while waiting or engine.has_work:
        for _ in range(rng.randint(0, 12)):
            if waiting:
                i, wanted = waiting.pop()
                engine.submit(
                    GenerationRequest(wanted.prompt, greedy(), request_id=f"r{i}", priority=i % 3)
                )
        for delta in engine.step():
            answers[delta.request_id] += delta.token_ids
            if delta.finish_reason:
                ended[delta.request_id] = delta
            elif delta.request_id in doomed and rng.random() < 0.5:
                engine.cancel(delta.request_id)
    engine.check()
    assert len(ended) == len(expected)
    aborted = {key for key, delta in ended.items() if delta.finish_reason == "abort"}
    for key in aborted:
        del answers[key]
    return answers, len(aborted)


def engine_of(
    model: LoadedModel, page_tokens: int, chunk_tokens: int, arena: str, attention: str = "auto"
) -> Engine:
    return engine_for(
        model,
        room=ARENAS[arena],
        longest=LONGEST + NEW_TOKENS,
        page_tokens=page_tokens,
        chunk_tokens=chunk_tokens,
        attention=attention,
    )


CASES = [(page, chunk, arena) for page in PAGE_TOKENS for chunk in CHUNK_TOKENS for arena in ARENAS]
# every page size, chunk size and arena, and every pair of them over seven architectures; each has
# a case that preempts, which chunks of one token do not
QUICK = [
    [(1, 1, "tight"), (4, 2048, "tight")],
    [(1, 7, "ample"), (16, 64, "tight")],
    [(4, 1, "ample"), (16, 7, "tight")],
    [(1, 2048, "ample"), (4, 64, "tight")],
    [(16, 1, "scarce"), (4, 7, "scarce")],
    [(16, 64, "ample"), (1, 64, "scarce")],
    [(16, 2048, "scarce"), (4, 7, "tight")],
]


def quick_cases(architecture: str, attention: str) -> list[tuple[int, int, str]]:
    """Different cases for each kind of attention, four for an architecture with both."""
    names = [*zoo.NATIVE, *zoo.OWN_ATTENTION, *zoo.ARCHITECTURES]
    place = names.index(architecture) + 3 * (attention == "auto")
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
        forced = Forced({f"r{i}": wanted for i, wanted in enumerate(expected)})
        engine.sampling_step.sampler = forced
        _, cancelled = drive(engine, expected, seed=page_tokens * 100 + chunk_tokens)

        assert forced.worst <= TOLERANCE, (page_tokens, chunk_tokens, arena)
        assert cancelled > 0
        preemptions += engine.scheduler.num_preemptions
    assert preemptions > 0


GATHERED = ("llama", "mistral", "gemma2", "opt", "gpt_oss", "bloom", "falcon_alibi")
"""Architectures that ask attention for different things; the others are slow tests there."""


def cases() -> list:
    """Each architecture with attention in C, if it is built, and some without."""
    names = [*zoo.NATIVE, *zoo.OWN_ATTENTION, *zoo.ARCHITECTURES]
    found = [pytest.param(name, "auto", id=f"{name}-auto") for name in names]
    for name in names:
        marks = [] if name in GATHERED else [pytest.mark.slow]
        found.append(pytest.param(name, "gathered", id=f"{name}-gathered", marks=marks))
    return found


@pytest.mark.parametrize(("architecture", "attention"), cases())
def test_logits_equal_transformers_with_its_tokens_forced(architecture, attention):
    """`auto` is native attention where the C extension is built."""
    check_forced_logits(architecture, quick_cases(architecture, attention), attention)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["gathered", "auto"])
@pytest.mark.parametrize("architecture", [*zoo.ARCHITECTURES, *zoo.NATIVE, *zoo.OWN_ATTENTION])
def test_logits_equal_transformers_in_every_combination(architecture, attention):
    check_forced_logits(architecture, CASES, attention)


SAMPLED = (
    *(*GATHERED, "qwen2_window", "phi3_longrope", "gpt2", "mixtral"),
    *("wide_llama", "wide_qwen2", "wide_phi3"),
)
"""Architectures whose tokens are compared too; every other one has its logits compared above."""


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in SAMPLED else [pytest.mark.slow])
        for name in (*zoo.ARCHITECTURES, *zoo.NATIVE, *zoo.OWN_ATTENTION)
    ],
)
def test_greedy_tokens_equal_generate_up_to_ties(architecture):
    case = random.Random(architecture).choice(CASES)
    model, expected = load(architecture), reference(architecture, FEW_PROMPTS)
    engine = engine_of(model, *case)
    answers, _ = drive(engine, expected, seed=3)

    different = 0
    for key, tokens in answers.items():
        wanted = expected[int(key[1:])]
        if crosses_longrope(architecture, wanted):
            continue
        assert wanted.agrees(tokens, TOLERANCE), key
        different += tokens != wanted.tokens
    assert different <= 2  # steps where two logits tie are rare


def crosses_longrope(architecture: str, wanted: Expected) -> bool:
    """Transformers changes the RoPE frequencies during such an output; Quire does not."""
    length = len(wanted.prompt)
    limit = zoo.LONGROPE_SHORT_TOKENS
    return architecture == "phi3_longrope" and length <= limit < length + NEW_TOKENS


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", zoo.ARCHITECTURES)
def test_logits_equal_transformers_on_cuda(architecture):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, expected = load(architecture, "cuda"), reference(architecture)
    engine = engine_of(model, 16, 64, "scarce")
    forced = Forced({f"r{i}": wanted for i, wanted in enumerate(expected)})
    engine.sampling_step.sampler = forced
    drive(engine, expected, seed=1)

    assert forced.worst <= 1e-3
