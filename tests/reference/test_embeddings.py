"""Embeddings equal the pooled hidden states of Transformers, in one batch and under pressure."""

import itertools
from functools import cache
from itertools import cycle

import numpy as np
import pytest
import torch
from transformers import LlamaModel

from quire.api.llm import LLM
from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.core import Engine
from quire.errors import RequestError
from quire.scheduler.schedule_config import ScheduleConfig
from support import zoo
from support.engines import answer, engine_for, greedy, load, make_prompts
from support.kv_options import kv_config

TOLERANCE = 2e-5
POOLINGS = ("last", "mean")


@cache
def hidden_states(architecture):
    model = zoo.build(architecture)
    base = model.model if model.base_model is model else model.base_model
    prompts = make_prompts(12, 40, seed=3)
    with torch.inference_mode():
        found = [base(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in prompts]
    return prompts, found


def expected(architecture, pooling):
    prompts, states = hidden_states(architecture)
    return prompts, [(s[-1] if pooling == "last" else s.mean(0)).numpy() for s in states]


def embed(engine, prompts, pooling, *, others_after=0):
    """The embeddings of prompts, and their usages; after some steps more urgent texts come."""
    params, steps = SamplingParams(max_tokens=0, pooling=pooling), itertools.count()
    names = [f"r{i}" for i in range(len(prompts))]
    requests = [
        GenerationRequest(prompt, params, request_id=name)
        for name, prompt in zip(names, prompts, strict=True)
    ]

    def submit_others(engine):
        if next(steps) == others_after:
            for prompt in prompts[:4]:
                engine.submit(GenerationRequest(prompt, greedy(), priority=-1))

    deltas = answer(engine, requests, before_step=submit_others).deltas
    last = {delta.request_id: delta for delta in deltas if delta.is_last}
    assert [last.pop(n).finish_reason for n in [*last] if n not in names] == ["length"] * 4
    return [np.array(last[n].embedding) for n in names], [last[n].usage for n in names]


def engine_of(model, *, room=40.0, **options):
    return engine_for(model, room=room, longest=48, page_tokens=4, **options)


def assert_equal(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert np.abs(ours - theirs).max() <= TOLERANCE * max(1, np.abs(theirs).max())


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [*zip((*zoo.ARCHITECTURES, *zoo.NATIVE), cycle(POOLINGS), strict=False)],
)
def test_embeddings_of_every_architecture_equal_pooled_hidden_states(architecture, pooling):
    prompts, wanted = expected(architecture, pooling)

    found, usages = embed(engine_of(load(architecture)), prompts, pooling)

    assert_equal(found, wanted)
    assert sum(usage.completion_tokens for usage in usages) == 0


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("architecture", ["llama", "wide_llama"])
def test_embeddings_of_preempted_prompts_in_small_chunks_are_equal(architecture, pooling):
    prompts, wanted = expected(architecture, pooling)
    engine = engine_of(load(architecture), room=1.2, chunk_tokens=3)

    found, usages = embed(engine, prompts, pooling, others_after=2)

    assert_equal(found, wanted)
    assert sum(usage.preemptions for usage in usages) > 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_repeated_prompts_use_the_prefix_cache_only_for_the_last_token(pooling):
    prompts, wanted = expected("llama", pooling)
    engine = engine_of(load("llama"), enable_prefix_caching=True)
    embed(engine, prompts, "last")

    found, usages = embed(engine, prompts, pooling)

    assert_equal(found, wanted)
    assert (sum(usage.cached_tokens for usage in usages) > 0) == (pooling == "last")


def test_embeddings_of_a_batch_of_fixed_rows_are_equal():
    prompts, wanted = expected("llama", "mean")
    schedule = ScheduleConfig(batch_invariant=True, max_num_batched_tokens=16)
    engine = Engine(load("llama"), kv_config(memory="1MiB"), schedule)
    assert_equal(embed(engine, prompts, "mean")[0], wanted)


def test_a_normalized_embedding_of_the_python_api_has_norm_one():
    llm = LLM(load("llama"), kv=kv_config(memory="1MiB"))
    prompts, wanted = expected("llama", "last")

    outputs = llm.embed(prompts)
    plain = llm.embed(prompts[0], normalize=False, pooling="mean")

    for output, states in zip(outputs, wanted, strict=True):
        assert np.allclose(output.embedding, states / np.linalg.norm(states), atol=1e-5)
    assert np.allclose(plain[0].embedding, expected("llama", "mean")[1][0], atol=1e-4)


class Plain(torch.nn.Module):
    """A base model that is no model of Transformers."""

    forward = LlamaModel.forward


def test_what_cannot_be_pooled_is_refused_with_the_reason():
    model = load("llama", impl="transformers")
    model.decoder.model.model.__class__ = Plain
    request = GenerationRequest([1, 2], SamplingParams(max_tokens=0, pooling="last"))
    with pytest.raises(RequestError, match="LlamaForCausalLM has no base model"):
        Engine(model, kv_config(memory="1MiB")).submit(request)
    for options, message in (
        ({"pooling": "last"}, "set max_tokens=0 and n=1"),
        ({"pooling": "last", "max_tokens": 0, "n": 2}, "set max_tokens=0 and n=1"),
        ({"pooling": "cls", "max_tokens": 0}, '"last" or "mean"'),
    ):
        with pytest.raises(RequestError, match=message) as refused:
            SamplingParams(**options)
        assert refused.value.param == "pooling"
