"""Runs of an engine with `batch_invariant`, compared with those of each request alone."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from models import tiny
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.adapter import TransformersDecoder
from quire.models.loader import LoadedModel
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from quire.scheduler.step import StepPlan
from support import zoo
from support.engines import loaded
from support.kv_options import kv_config

NEW_TOKENS = 24
LENGTHS = (1, 5, 30, 33, 64, 100)
PROMPTS = [
    [random.Random(length).randrange(2, zoo.VOCAB_SIZE) for _ in range(length)]
    for length in (*LENGTHS, 33, 64)
]


@cache
def model_of(architecture: str, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    in_zoo = zoo.ARCHITECTURES | zoo.LATENT | zoo.HYBRID | zoo.OWN_ATTENTION | zoo.OTHERS
    build = zoo.build if architecture in in_zoo else tiny.build
    return loaded(TransformersDecoder(build(architecture).to(dtype)), architecture)


@dataclass
class Run:
    """Output tokens of requests, and the logits of each position."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)  # preemptions, swaps, cached tokens


def params_of(number: int) -> SamplingParams:
    drawn = {"temperature": 0.0 if number % 2 else 0.9, "top_p": 0.95, "seed": number}
    return SamplingParams(max_tokens=NEW_TOKENS, logprobs=3, ignore_eos=True, **drawn)


FOLLOWED_BY = [7, 8, 9, 10, 11]


def run(
    model: LoadedModel, numbers: list[int], kv: dict | None = None, *, turns: int = 1, **schedule
) -> Run:
    """Run requests together, and then their later turns, each after prompt and output."""
    config = kv_config(**{"memory": "16MiB", "enable_prefix_caching": False, **(kv or {})})
    engine = Engine(model, config, ScheduleConfig(**{"batch_invariant": True, **schedule}))
    done, runner = Run(), engine.runner

    class Spy:
        def run(self, plan: StepPlan) -> list:
            results = runner.run(plan)
            for result in results:
                name = result.request.request_id
                for i, row in enumerate(result.logits):
                    done.logits.setdefault((name, result.first_position + i), []).append(row)
            return results

    engine.runner = Spy()
    prompts = {str(number): (number, PROMPTS[number]) for number in numbers}
    for _ in range(turns):
        for name, (number, prompt) in prompts.items():
            engine.submit(GenerationRequest(prompt, params_of(number), request_id=name))
        while engine.has_work:
            for delta in engine.step():
                assert not delta.error
                done.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                for scores in delta.logprobs or ():
                    done.logprobs.setdefault(delta.request_id, []).append(scores.logprob)
        prompts = {
            f"{name}+": (number, [*prompt, *done.tokens[name], *FOLLOWED_BY])
            for name, (number, prompt) in prompts.items()
        }
    engine.check()
    stats = engine.stats()
    for what in ("num_preemptions", "num_swaps", "cached_tokens"):
        done.seen[what] = getattr(stats, what)
    return done


def alone(
    model: LoadedModel,
    kv: dict | None = None,
    numbers: Sequence[int] = range(len(PROMPTS)),
    turns: int = 1,
) -> Run:
    whole = Run()
    for number in numbers:
        one = run(model, [number], kv, turns=turns)
        whole.tokens |= one.tokens
        whole.logits |= one.logits
        whole.logprobs |= one.logprobs
    return whole


def memory_for(model: LoadedModel, room: float, kv: dict | None = None, turns: int = 1) -> int:
    """Bytes for this number of the largest requests, at least for one."""
    probe = Engine(model, kv_config(**{"memory": "16MiB", **(kv or {})}), ScheduleConfig())
    longest = max(LENGTHS) + NEW_TOKENS + (turns - 1) * (NEW_TOKENS + len(FOLLOWED_BY))
    need, peaks = Need(longest, eviction=probe.pool.eviction.spec), probe.scheduler.peaks
    return max(int(room * peaks.peak_bytes(need)), peaks.fitting_bytes(need))


def drawn(model: LoadedModel, rng: random.Random, kv: dict | None = None) -> tuple[dict, list[int]]:
    """Options and requests of a run, with memory for one to three of the largest requests."""
    memory = memory_for(model, rng.choice((1.4, 1.8, 2.5)), kv)
    memory = 1 << 24 if rng.random() < 0.3 else memory
    preempt = rng.choice(("recompute", "recompute", "swap", "auto"))
    requested = {"memory": memory, "swap_space": 0 if preempt == "recompute" else "1MiB"}
    requested["enable_prefix_caching"] = rng.random() < 0.5
    schedule = {"kv": {**requested, **(kv or {})}, "preempt": preempt}
    schedule["chunk_tokens"] = rng.choice((2, 7, 16, 40, 2048))
    schedule["max_num_batched_tokens"] = rng.choice((16, 50, 2048))
    schedule["max_num_seqs"] = rng.choice((3, 8, 16))
    return schedule, rng.sample(range(len(PROMPTS)), rng.randint(5, len(PROMPTS)))


def check_equal(found: Run, expected: Run) -> None:
    """Compare outputs, log-probabilities and logits, bit for bit."""
    for name, tokens in found.tokens.items():
        assert tokens == expected.tokens[name], name
        assert found.logprobs[name] == expected.logprobs[name], name
    for place, rows in found.logits.items():
        for row in rows:
            assert torch.equal(row, expected.logits[place][0]), place


def check(model: LoadedModel, seeds: range, kv: dict | None = None) -> int:
    """Compare drawn runs with those of each request alone; return the number of preemptions."""
    expected, preemptions = alone(model, kv), 0
    for seed in seeds:
        options, numbers = drawn(model, random.Random(seed), kv)
        found = run(model, numbers, **options)
        check_equal(found, expected)
        preemptions += found.seen["num_preemptions"]
    return preemptions
