"""Beam search equals Transformers': the same sequences and scores, forked, preempted or evicted."""

import random
from functools import cache
from itertools import product

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.sampling.outputs import OutputBuilder
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
