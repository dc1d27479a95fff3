"""Embeddings equal the pooled hidden states of Transformers, in one batch and under pressure."""

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
from support.engines import engine_for, greedy, load, make_prompts
from support.kv_options import kv_config

TOLERANCE = 2e-5
POOLINGS = ("last", "mean")


@cache
def hidden_states(architecture):
    """Prompts, and the last hidden states of Transformers of each."""
    model = zoo.build(architecture)
    base = model.model if model.base_model is model else model.base_model
    prompts = make_prompts(12, 40, seed=3)
    with torch.inference_mode():
        found = [base(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in prompts]
    return prompts, found


def expected(architecture, pooling):
    prompts, states = hidden_states(architecture)
    pooled = [one[-1] if pooling == "last" else one.mean(0) for one in states]
    return prompts, [one.numpy() for one in pooled]


def embed(engine, prompts, pooling, *, others_after=0):
    """The embeddings of prompts that are submitted at once, beside more urgent texts.

    The texts are submitted after some steps.
    """
    params = SamplingParams(max_tokens=0, pooling=pooling)
    ids = [engine.submit(GenerationRequest(prompt, params)) for prompt in prompts]
    others, found, steps = [], {}, 0
    while engine.has_work:
        if steps == others_after:
            texts = (GenerationRequest(prompt, greedy(), priority=-1) for prompt in prompts[:4])
            others = [engine.submit(text) for text in texts]
        for delta in engine.step():
            if delta.is_last:
                found[delta.request_id] = delta
        steps += 1
    engine.check()
    assert all(found[other].finish_reason == "length" for other in others)
    return [np.array(found[one].embedding) for one in ids], [found[one].usage for one in ids]


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

    found, _ = embed(engine, prompts, "mean")

    assert_equal(found, wanted)


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


def test_a_model_without_a_base_model_is_refused_with_the_reason():
    model = load("llama", impl="transformers")
    model.decoder.model.model.__class__ = Plain
    engine = Engine(model, kv_config(memory="1MiB"))

    with pytest.raises(RequestError, match="LlamaForCausalLM has no base model"):
        engine.submit(GenerationRequest([1, 2], SamplingParams(max_tokens=0, pooling="last")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "last"}, "set max_tokens=0 and n=1"),
        ({"pooling": "last", "max_tokens": 0, "n": 2}, "set max_tokens=0 and n=1"),
        ({"pooling": "cls", "max_tokens": 0}, '"last" or "mean"'),
    ],
)
def test_invalid_pooling_is_refused(options, message):
    with pytest.raises(RequestError, match=message) as refused:
        SamplingParams(**options)

    assert refused.value.param == "pooling"
