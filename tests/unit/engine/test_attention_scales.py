"""Rules compute attention with the scale of each layer, as the model's own attention does."""

import pytest
import torch

from quire.config.generation_request import GenerationRequest
from quire.engine.core import Engine
from quire.hf import QuireCache
from quire.hf.cache import retained_positions
from quire.models.base import attention_math
from support import zoo
from support.engines import greedy, load
from support.kv_options import kv_config

LAYERS = 4
WINDOW, CAP = 8, 24
PROMPT = [3 + i * i % 60 for i in range(60)]
RULES = {
    "snapkv": f"snapkv:window={WINDOW},kernel=1",
    "tova": "tova:scope=lane",
    "kvcrush": f"kvcrush:base=(snapkv:window={WINDOW},kernel=1),share=0,sets=head",
}


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("llama", [8**-0.5] * LAYERS),
        ("gemma3", [16**-0.5] * 2 * LAYERS),
        ("granite", [0.2] * LAYERS),
        ("gemma4", [1.0] * 10),
        ("gpt2", [8**-0.5] * LAYERS),
        ("gpt2_scale_by_layer", [8**-0.5 / n for n in (1, 2, 3, 4)]),
        ("wide_llama", [16**-0.5] * LAYERS),
    ],
)
def test_scales_are_those_of_the_calls_of_each_layer(name, scales):
    model = load(name, times=2)
    assert [math.scale for math in attention_math(model.decoder)] == pytest.approx(scales)


@pytest.fixture(scope="module", params=["gpt2", "gpt2_scale_by_layer", "bloom"])
def name(request):
    return request.param


@torch.inference_mode()
def attended_most(name, rule):
    """For each layer and head, the CAP tokens with most attention from the last queries."""
    model = zoo.build(name, times=2)
    window = 1 if rule == "tova" else WINDOW
    kept = []
    for [weights] in model(torch.tensor([PROMPT]), output_attentions=True).attentions:
        sums = weights[:, -window:].sum(dim=1)
        if rule != "tova":
            sums[:, -window:] = torch.inf
        kept.append([sorted(head.topk(CAP).indices.tolist()) for head in sums])
    return kept


def kept_by_engine(engine, rule):
    """Cached positions after the prompt."""
    engine.submit(GenerationRequest(PROMPT, greedy(3)))
    while engine.has_work:
        engine.step()
        for request in engine.scheduler.running:
            if len(request.output_token_ids) == 2:
                row = request.memory.row
                kept = [retained_positions(engine.pool.kv, row, i) for i in range(LAYERS)]
                return [[[p for p in head if p < len(PROMPT)] for head in of] for of in kept]
    raise AssertionError("the request has no output")


def options(rule):
    evict = f"{RULES[rule]},cap={CAP},when=prefill_end"
    return {"memory": "4MiB", "page_tokens": 4, "evict": evict}


@pytest.mark.parametrize("rule", RULES)
def test_engine_retains_the_tokens_that_the_model_attends_to(name, rule):
    engine = Engine(load(name, times=2), kv_config(**options(rule)))
    assert kept_by_engine(engine, rule) == attended_most(name, rule)


@pytest.mark.parametrize("rule", RULES)
def test_engine_with_a_restored_prefix_retains_the_same_tokens(name, rule, tmp_path):
    disk = {"disk_memory": "32MiB", "kv_load": "whole", "disk_path": str(tmp_path / "kv")}
    for _ in range(2):
        engine = Engine(load(name, times=2), kv_config(**options(rule), **disk))
        kept = kept_by_engine(engine, rule)
        restored = engine.events.newest(["prefix_loaded"])
        engine.close()

    assert restored
    assert kept == attended_most(name, rule)


@pytest.mark.parametrize("rule", RULES)
def test_cache_retains_the_tokens_that_the_model_attends_to(name, rule):
    model = zoo.build(name, times=2)
    with QuireCache(model, RULES[rule], CAP, when="prefill_end") as cache:
        model(torch.tensor([PROMPT]), past_key_values=cache)
        kept = [cache.retained_positions(0, layer) for layer in range(LAYERS)]
    assert kept == attended_most(name, rule)
