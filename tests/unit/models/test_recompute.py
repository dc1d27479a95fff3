"""Keys and values recomputed from attention inputs equal the stored ones in every architecture."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import OPTForCausalLM

from quire.models.adapter import TransformersDecoder
from support import zoo
from support.exact_products import use_exact_products
from support.flat import Recorder, distance

TOKENS = 23
SCALED = {"phi3_longrope", "gpt_oss"}  # have a factor on cosines and sines, divided out of keys
FUSED = {"phi3", "phi3_longrope", "gpt2", "gpt_neox"}
UNKNOWN_ROPE = ("llama4",)
COMPLEX = "deepseek_v2"
LATENT = (COMPLEX, "deepseek_v32", "glm_moe_dsa")
RECOMPUTED = [*(name for name in zoo.ARCHITECTURES if name not in UNKNOWN_ROPE), *LATENT]


class Storing(Recorder):
    """Records keys, values and index keys, with the attention inputs of each layer."""

    _index = None

    def attend(self, call, query, key, value):
        assert call.layer in self.inputs
        out = super().attend(call, query, key, value)
        if call.index is not self._index:  # not that of an earlier layer
            self._index = call.index
            self.stored[call.layer] += (call.index.key.clone(),)
        return out

    def own(self, decoder):
        """What was stored, of the layers that have keys and values of their own."""
        layers = decoder.spec.layers
        return [(n, stored) for n, stored in self.stored.items() if layers[n].source is None]


def run(decoder, variant=0):
    """Prepare, and prefill a sequence; return its tokens and the recording attention."""
    assert decoder.prepare_recomputation() is None
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, zoo.VOCAB_SIZE, (TOKENS,), generator=generator)
    storing = Storing(range(TOKENS))
    last = torch.tensor([TOKENS - 1])
    decoder.forward(tokens, torch.arange(TOKENS), last, storing, rope_variant=variant)
    return tokens, storing


def post_norm_opt():
    """OPT with post-norm as in OPT-350m: X is the input of the layer."""
    config = zoo.ARCHITECTURES["opt"]()
    config.do_layer_norm_before = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OPTForCausalLM(config).eval()


@pytest.mark.parametrize("name", [*RECOMPUTED, "opt_post_norm"])
def test_recomputed_keys_and_values_are_the_stored_ones(name, monkeypatch):
    """Eleven tokens in reverse order with gaps; with exact products, their codes are equal too.

    Rounding by 1e-6 can give another code near its border.
    """
    exact = name not in (*SCALED, COMPLEX)
    if exact:
        use_exact_products(monkeypatch)
    decoder = TransformersDecoder(post_norm_opt() if name == "opt_post_norm" else zoo.build(name))
    tokens, storing = run(decoder)
    subset = torch.arange(TOKENS - 1, 0, -2)

    assert sorted(storing.stored) == list(range(decoder.spec.num_layers))
    found = {0: decoder.first_layer(tokens[subset], subset)}
    for layer, stored in storing.own(decoder):
        recomputed = decoder.keys_and_values(layer, storing.inputs[layer][subset], subset)
        recomputed = *recomputed, *found.get(layer, ())
        expected = stored * (2 if layer in found else 1)
        for vectors, numbers in zip(recomputed, expected, strict=True):
            torch.testing.assert_close(vectors, numbers[subset], atol=2e-5, rtol=1e-4)
            assert torch.equal(vectors, numbers[subset]) or not exact


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "opt"])
def test_recomputed_half_precision_differs_by_rounding_only(name):
    decoder = TransformersDecoder(zoo.build(name).bfloat16())
    _, storing = run(decoder)

    for layer, (key, value) in storing.stored.items():
        found = decoder.keys_and_values(layer, storing.inputs[layer], torch.arange(TOKENS))
        assert [x.dtype for x in found] == [torch.bfloat16] * 2
        for recomputed, stored in zip(found, (key, value), strict=True):
            assert distance(recomputed, stored.float()) < 2**-7


@pytest.mark.parametrize("variant", [0, 1])
def test_recomputed_keys_use_the_rope_variant_of_their_request(variant):
    decoder = TransformersDecoder(zoo.build("phi3_longrope"))
    _, storing = run(decoder, variant)
    inputs, positions = storing.inputs[1], torch.arange(TOKENS)

    same = decoder.keys_and_values(1, inputs, positions, rope_variant=variant)[0]
    other = decoder.keys_and_values(1, inputs, positions, rope_variant=1 - variant)[0]

    torch.testing.assert_close(same, storing.stored[1][0], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(other, same, atol=1e-3)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recompute_skips_separate_query_projections(name):
    model = zoo.build(name)
    decoder = TransformersDecoder(model)
    _, storing = run(decoder)
    decoder.keys_and_values(1, storing.inputs[1], torch.arange(TOKENS))
    projected, forwards = [], []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    for part, module in model.named_modules():
        if part.endswith(("q_proj", "q_b_proj", "wq_b")):
            module.register_forward_hook(lambda *_: projected.append(1))

    decoder.keys_and_values(1, storing.inputs[1], torch.arange(TOKENS))

    assert not projected
    assert not forwards  # of the whole model
    assert decoder._observing.recomputation.leaves_queries_out == (name not in FUSED)
    run(decoder)
    assert bool(projected) == (name not in FUSED)


def test_inputs_are_recorded_only_if_attention_wants_them():
    decoder = TransformersDecoder(zoo.build("llama"))
    decoder.prepare_recomputation()
    decoder.prepare_recomputation()
    recorder = Recorder(range(3), wants=False)

    decoder.forward(torch.tensor([5, 6, 7]), torch.arange(3), torch.tensor([2]), recorder)

    assert recorder.inputs == {}


def test_preparing_recomputation_holds_the_forward_lock():
    """During preparation the layers end at a bridge of no request."""
    model = zoo.build("llama")
    decoder = TransformersDecoder(model)
    could_run = []

    def try_to_run() -> bool:
        got = decoder._forward_lock._lock.acquire(blocking=False)
        if got:
            decoder._forward_lock._lock.release()
        return got

    def try_in_thread(*_) -> None:
        with ThreadPoolExecutor(1) as other:
            could_run.append(other.submit(try_to_run).result())

    handles = [
        module.register_forward_hook(try_in_thread)
        for part, module in model.named_modules()
        if part.endswith("k_proj")
    ]
    decoder.prepare_recomputation()
    for handle in handles:
        handle.remove()

    assert could_run
    assert not any(could_run)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(try_to_run).result()
