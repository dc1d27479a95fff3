"""Engines over tiny random models, and outputs of Transformers for the same prompts."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.models.base import Decoder
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel, make_decoder
from quire.scheduler.peaks import Need
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.kv_options import kv_config

NEW_TOKENS = 8


@dataclass(frozen=True)
class Expected:
    """Transformers' greedy output for one prompt.

    Attributes:
        prompt, tokens: token ids.
        logits: [len(tokens), vocab] from one plain forward over prompt and tokens.
    """

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


def load(
    architecture: str, device: str = "cpu", *, times: int = 1, impl: str = "auto"
) -> LoadedModel:
    """A zoo model in float32, with the decoder that `load_model` would use.

    Its layers are repeated `times` times.
    """
    model = zoo.build(architecture, times=times).to(device)
    return loaded(make_decoder(model, None, impl=impl, codec="auto"), architecture)


def loaded(decoder: Decoder, name: str = "zoo") -> LoadedModel:
    """A decoder as a model without a tokenizer."""
    return LoadedModel(
        decoder=decoder,
        tokenizer=None,
        generation=GenerationDefaults(),
        spec=decoder.spec,
        name=name,
        weight_bytes=0,
    )


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
    model = zoo.build(architecture)
    model.generation_config.eos_token_id = None
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        tokens = out[0, len(prompt) :].tolist()
        logits = model(out, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected.append(Expected(prompt, tokens, logits.clone()))
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
