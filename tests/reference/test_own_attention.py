"""Attention inside modules, ALiBi, and latent attention: long prompts and evictions."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from quire.engine.core import Engine
from quire.hf.cache import retained_positions
from quire.models.adapter import TransformersDecoder
from quire.models.own_attention import alibi_slopes
from quire.models.verify import DenseAttention
from reference.test_equality import Forced
from support import zoo
from support.engines import NEW_TOKENS, Expected, answer, engine_for, expect, load, requests_of
from support.kv_options import kv_config

TOLERANCE = 1e-3
"""Relative to the largest logit. Transformers sums more than 300 positions in another order."""
LENGTH = 300  # Falcon rounds its ALiBi to bfloat16, which has every position up to 256
PROMPTS = [
    torch.randint(
        2, zoo.VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    for seed in range(3)
]
ALIBI = ("bloom", "mpt", "falcon_alibi")
RULES = ("h2o:recent=8", "snapkv:window=6", "tova:recent=0", "sinks:sinks=4")
RULES += ("expected_attention:sinks=4",)


@cache
def reference(name: str) -> list[Expected]:
    return expect(name, PROMPTS)


def forced_logits(engine: Engine, expected: list[Expected]) -> float:
    """The largest difference from Transformers' logits, relative to the largest logit."""
    forced = Forced(engine, expected)
    forced.submit(engine)
    while engine.has_work:
        engine.step()
    engine.check()
    return forced.worst / float(max(wanted.logits.abs().max() for wanted in expected))


@pytest.mark.parametrize("chunk_tokens", [7, 64])
@pytest.mark.parametrize("name", [*zoo.OWN_ATTENTION, *zoo.LATENT, *zoo.HYBRID])
def test_long_prompts_equal_transformers_in_a_small_memory(name, chunk_tokens):
    sizes = {"room": 1.96, "longest": LENGTH + NEW_TOKENS, "page_tokens": 4}
    engine = engine_for(load(name), chunk_tokens=chunk_tokens, **sizes)
    assert forced_logits(engine, reference(name)) <= TOLERANCE


def outputs(name: str, rule: str, attention: str) -> tuple[dict, list[object]]:
    """Tokens, and the positions that each layer retains after the prompt."""
    kv = {"memory": "8MiB", "page_tokens": 4, "evict": f"{rule},cap=64,every=8"}
    engine, retained = Engine(load(name), kv_config(**kv, attention=attention)), []

    def note(engine):
        for request in engine.scheduler.running:
            row, layers = request.memory.row, range(engine.model.spec.num_layers)
            retained.extend(retained_positions(engine.pool.kv, row, layer) for layer in layers)

    prompts = {str(i): prompt[:150] for i, prompt in enumerate(PROMPTS[:2])}
    return answer(engine, requests_of(prompts, 24), before_step=note).tokens, retained


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["bloom", "falcon_alibi"])
def test_evictions_with_alibi_equal_those_of_the_reference_backend(name, rule):
    expected = outputs(name, rule, "reference")
    assert outputs(name, rule, "auto") == expected
    assert outputs(name, rule, "gathered") == expected


class Reversed:
    def __init__(self, attention):
        self._attention = attention

    def attend(self, call, *vectors):
        alibi = replace(call.alibi, slopes=call.alibi.slopes.flip(0))
        return self._attention.attend(replace(call, alibi=alibi), *vectors)


@pytest.mark.parametrize("name", ALIBI)
def test_other_slopes_give_other_tokens(name):
    """The control of the tests above; a shift of all positions would change nothing."""
    decoder = TransformersDecoder(zoo.build(name))
    tokens, at = torch.tensor(PROMPTS[0]), torch.arange(LENGTH)
    batches = (DenseAttention().batch([0] * LENGTH, at.tolist()) for _ in range(2))
    right, wrong = (
        decoder.forward(tokens, at, at, attention)
        for attention in (next(batches), Reversed(next(batches)))
    )
    expected = decoder.reference_logits(tokens)

    torch.testing.assert_close(right, expected, atol=TOLERANCE * float(expected.max()), rtol=0)
    assert (right.argmax(dim=1) != wrong.argmax(dim=1)).float().mean() > 0.1


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 25, 40, 71, 112])
def test_slopes_are_those_of_transformers(num_heads):
    slopes = torch.tensor(alibi_slopes(num_heads))
    bloom = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)

    torch.testing.assert_close(slopes, bloom[:, 0, 1])
    if num_heads > 1:
        torch.testing.assert_close(-slopes, build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0])


def test_one_codec_applies_to_the_latents_of_an_engine():
    """16 codes, a scale of 2 B and 8 rotated elements of 4 B: 50 B for each of 4 tokens."""
    engine = Engine(load("deepseek_v3"), kv_config(memory="1MiB", page_tokens=4, codec="int8"))

    assert engine.pool.codec == "float32/int8"
    (group,) = engine.pool.kv.memory.layout.groups
    assert group.page_class.data_bytes == 4 * (16 + 2 + 8 * 4)
    loss = forced_logits(engine, reference("deepseek_v3")[:1])
    assert TOLERANCE < loss < 0.03  # the codes are read
