"""Engines over tiny random models, runs of them, and Transformers' outputs for the same prompts."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.base import Decoder
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel, make_decoder
from quire.sampling.outputs import OutputDelta, Usage
from quire.sampling.sampler import Sampler
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.kv_options import kv_config

NEW_TOKENS = 8


@dataclass(frozen=True)
class Expected:
    """Transformers' greedy output for a prompt; logits [len(tokens), vocab] of a plain forward."""

    prompt: list[int]
    tokens: list[int]
    logits: Tensor

    def agrees(self, tokens: list[int], tolerance: float) -> bool:
        """Whether tokens are equal up to the first step whose two top logits nearly tie."""
        for i, (ours, theirs) in enumerate(zip(tokens, self.tokens, strict=False)):
            if ours != theirs:
                top = self.logits[i].topk(2).values
                return bool(top[0] - top[1] <= tolerance)
        return len(tokens) == len(self.tokens)


def loaded(decoder: Decoder, name: str = "zoo", **options: Any) -> LoadedModel:
    """A model without a tokenizer."""
    plain = {"tokenizer": None, "generation": GenerationDefaults(), "weight_bytes": 0}
    return LoadedModel(decoder=decoder, spec=decoder.spec, name=name, **plain | options)


def load(
    architecture: str, device: str = "cpu", *, times: int = 1, impl: str = "auto"
) -> LoadedModel:
    """A zoo model in float32 with the decoder of `load_model`; layers repeated `times` times."""
    model = zoo.build(architecture, times=times).to(device)
    return loaded(make_decoder(model, None, impl=impl, codec="auto"), architecture)


def make_prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Ragged prompts of 1 to `longest` random tokens."""
    rng = random.Random(seed)
    return [
        [rng.randrange(2, zoo.VOCAB_SIZE) for _ in range(rng.randint(1, longest))]
        for _ in range(count)
    ]


@torch.inference_mode()
def expect(architecture: str, prompts: list[list[int]]) -> list[Expected]:
    """Generate with Transformers, prompt by prompt."""
    model, expected = zoo.build(architecture), []
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        logits = model(out, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected.append(Expected(prompt, out[0, len(prompt) :].tolist(), logits.clone()))
    return expected


def engine_for(
    model: LoadedModel,
    *,
    room: float,
    longest: int,
    page_tokens: int,
    chunk_tokens: int = 2048,
    max_num_seqs: int = 64,
    **kv: object,
) -> Engine:
    """An engine whose arena holds the peak KV of `room` requests of `longest` tokens.

    Requests are admitted while their known tokens fit, so that a small arena preempts.
    """
    schedule = ScheduleConfig(
        max_num_seqs=max_num_seqs, chunk_tokens=chunk_tokens, admission="optimistic"
    )
    probe = Engine(model, kv_config(memory="1MiB", page_tokens=page_tokens, **kv), schedule)
    need = Need(longest, eviction=probe.pool.eviction.spec)
    peak_bytes = probe.scheduler.peaks.peak_bytes(need)
    memory = max(peak_bytes, int(room * peak_bytes))
    return Engine(model, kv_config(memory=memory, page_tokens=page_tokens, **kv), schedule)


def greedy(max_tokens: int = NEW_TOKENS) -> SamplingParams:
    """Greedy, never stopping early."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


class Recorder(Sampler):
    """Wrapper of a sampler that records the logits of every step of every request."""

    def __init__(self, sampler):
        vars(self).update(vars(sampler))
        self.sampler = sampler
        self.logits: dict[str, list[Tensor]] = {}

    def sample(self, logits, rows):
        for row_logits, request in zip(logits, rows, strict=True):
            self.logits.setdefault(request.request_id, []).append(row_logits.clone())
        return self.sampler.sample(logits, rows)


def largest_difference(ours, theirs) -> float:
    """Of the logits of two runs."""
    assert ours.keys() == theirs.keys()
    pairs = (pair for key in ours for pair in zip(ours[key], theirs[key], strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs)


@dataclass
class Answers:
    """Results of requests: logits and usages by id, tokens by id and index of the output."""

    logits: dict[str, list[Tensor]] = field(default_factory=dict)
    usages: dict[str, Usage] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    deltas: list[OutputDelta] = field(default_factory=list)


def answer(
    engine: Engine,
    requests: Iterable[GenerationRequest] = (),
    *,
    cancel: Iterable[tuple[str, int]] = (),
    before_step: Callable[[Engine], object] = lambda engine: None,
) -> Answers:
    """Run requests together to the end, with the engine's checks after each step; none fails.

    Args:
        cancel: ids of requests, and the steps, from 1 on, before which they are cancelled.
    """
    sampler, steps = engine.sampling_step.sampler, 0
    recorder = engine.sampling_step.sampler = Recorder(sampler)
    found = Answers(recorder.logits)
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        steps += 1
        assert steps < 20_000, "no progress"
        for name, at in cancel:
            if steps == at:
                engine.cancel(name)
        before_step(engine)
        for delta in engine.step():
            assert delta.error is None, delta.error
            found.deltas.append(delta)
            found.tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            if delta.usage is not None:
                found.usages[delta.request_id] = delta.usage
        engine.check()
    engine.sampling_step.sampler = sampler
    return found


def requests_of(prompts: dict[str, list[int]], new_tokens: int, **options) -> list:
    """Greedy requests with these ids."""
    return [
        GenerationRequest(prompt, greedy(new_tokens), request_id=name, **options)
        for name, prompt in prompts.items()
    ]
