"""Beam search equals Transformers': the same sequences and scores, forked, preempted or evicted."""

import random
from functools import cache

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.sampling.outputs import OutputBuilder, RequestOutput
from support import engines, zoo

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


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(11)
    return [tuple(rng.randrange(14, zoo.VOCAB_SIZE) for _ in range(n)) for n in (5, 19)]


@cache
def reference_model(architecture: str):
    return zoo.build(architecture)


@cache
@torch.inference_mode()
def transformers_beams(
    architecture, prompt: tuple[int, ...], width, penalty, early, *, ends
) -> list:
    """Transformers' beams, best first: tokens without padding, and scores."""
    model = reference_model(architecture)
    model.generation_config.eos_token_id = None
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=penalty,
        early_stopping=early,
        eos_token_id=END_TOKENS if ends else None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = out.sequences_scores.tolist()
    cut = [_until_end(row, ends=ends) for row in out.sequences[:, len(prompt) :].tolist()]
    return list(zip(cut, scores, strict=True))


def _until_end(tokens: list[int], *, ends: bool) -> list[int]:
    for place, token in enumerate(tokens):
        if ends and token in END_TOKENS:
            return tokens[: place + 1]
    return tokens


def options(width, penalty, early, *, ends, **more) -> SamplingParams:
    return SamplingParams(
        n=width,
        use_beam_search=True,
        length_penalty=penalty,
        early_stopping=early,
        max_tokens=NEW_TOKENS,
        stop_token_ids=END_TOKENS if ends else (),
        ignore_eos=True,
        **more,
    )


def search_all(engine: Engine, requested) -> list[RequestOutput]:
    builders, answers = {}, {}
    for prompt, params in requested:
        request_id = engine.submit(GenerationRequest([*prompt], params))
        builders[request_id] = OutputBuilder(request_id, prompt)
    while engine.has_work:
        for delta in engine.step():
            whole = builders[delta.request_id].add(delta)
            if whole is not None:
                answers[delta.request_id] = whole
    engine.check()
    return [answers[request_id] for request_id in builders]


def check(answer: RequestOutput, expected) -> None:
    for choice, (tokens, score) in zip(answer.choices, expected, strict=True):
        assert choice.score == pytest.approx(score, abs=TOLERANCE)
        assert list(choice.token_ids) == tokens


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
    requested = [(prompt, case) for prompt in prompts() for case in cases]

    answers = search_all(engine, [(p, options(*case, ends=ends)) for p, case in requested])

    for (prompt, case), answer in zip(requested, answers, strict=True):
        check(answer, transformers_beams(architecture, prompt, *case, ends=ends))
    reasons = {choice.finish_reason for answer in answers for choice in answer.choices}
    assert ("stop" in reasons) == ends


@pytest.mark.parametrize(
    "architecture",
    [
        *ARCHITECTURES[:3],
        *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES[3:]),
    ],
)
def test_preempted_and_recomputed_beams_are_equal(architecture):
    engine = engines.engine_for(
        engines.load(architecture),
        room=4.6 if architecture in zoo.HYBRID else 3.4,  # each beam has a state of its own
        longest=30,
        page_tokens=4,
        enable_prefix_caching=False,
    )
    requested = [(prompt, case) for prompt in prompts() for case in CASES[::5]]

    answers = search_all(engine, [(p, options(*case, ends=True)) for p, case in requested])

    assert engine.scheduler.num_preemptions > 0
    for (prompt, case), answer in zip(requested, answers, strict=True):
        check(answer, transformers_beams(architecture, prompt, *case, ends=True))
