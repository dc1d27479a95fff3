"""Keys and values made again from what attention was given: those that were stored, everywhere."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import OPTForCausalLM

from quire.models.adapter import TransformersDecoder
from quire.models.verify import DenseAttention
from support import zoo

TOKENS = 23
FUSED = {"phi3", "phi3_longrope", "gpt2", "gpt_neox"}


class Storing:
    """Dense attention that notes what it was given, and what it was made of."""

    def __init__(self, positions):
        self._batch = DenseAttention().batch([0] * len(positions), positions)
        self.wants_inputs, self.inputs, self.stored = True, {}, {}

    def attend(self, call, query, key, value):
        assert call.layer in self.inputs
        self.stored[call.layer] = key.clone(), value.clone()
        return self._batch.attend(call, query, key, value)

    def note_input(self, layer, inputs):
        assert layer not in self.stored
        self.inputs[layer] = inputs.clone()


def run(decoder, variant=0):
    """A sequence that has been read, and its tokens."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(2, zoo.VOCAB_SIZE, (TOKENS,), generator=generator)
    storing = Storing(range(TOKENS))
    none = torch.tensor([TOKENS - 1])
    decoder.forward(tokens, torch.arange(TOKENS), none, storing, rope_variant=variant)
    return tokens, storing


def post_norm_opt():
    """As OPT-350m: norms come behind attention, so X is what the layer was given."""
    config = zoo.ARCHITECTURES["opt"]()
    config.do_layer_norm_before = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return OPTForCausalLM(config).eval()


@pytest.mark.parametrize("name", [*zoo.ARCHITECTURES, "opt_post_norm"])
def test_what_was_stored_is_made_again_wherever_it_stands(name):
    """Any tokens in any order: eleven of them, backwards, with holes."""
    decoder = TransformersDecoder(post_norm_opt() if name == "opt_post_norm" else zoo.build(name))
    assert decoder.prepare_recomputation() is None
    tokens, storing = run(decoder)
    some = torch.arange(TOKENS - 1, 0, -2)

    assert sorted(storing.stored) == list(range(decoder.spec.num_layers))
    for layer, (key, value) in storing.stored.items():
        found = decoder.keys_and_values(layer, storing.inputs[layer][some], some)
        torch.testing.assert_close(found[0], key[some], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(found[1], value[some], atol=2e-5, rtol=1e-4)
    first = decoder.first_layer(tokens[some], some)
    for found, stored in zip(first, storing.stored[0], strict=True):
        torch.testing.assert_close(found, stored[some], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "opt"])
def test_half_precision_is_off_by_its_last_bits_only(name):
    decoder = TransformersDecoder(zoo.build(name).bfloat16())
    decoder.prepare_recomputation()
    _, storing = run(decoder)

    for layer, (key, value) in storing.stored.items():
        found = decoder.keys_and_values(layer, storing.inputs[layer], torch.arange(TOKENS))
        assert [x.dtype for x in found] == [torch.bfloat16] * 2
        for made, stored in zip(found, (key, value), strict=True):
            error = (made.float() - stored.float()).norm() / stored.float().norm()
            assert error < 2**-7


@pytest.mark.parametrize("variant", [0, 1])
def test_keys_turn_with_the_frequencies_of_their_request(variant):
    decoder = TransformersDecoder(zoo.build("phi3_longrope"))
    decoder.prepare_recomputation()
    _, storing = run(decoder, variant)
    inputs, positions = storing.inputs[1], torch.arange(TOKENS)

    own = decoder.keys_and_values(1, inputs, positions, rope_variant=variant)[0]
    other = decoder.keys_and_values(1, inputs, positions, rope_variant=1 - variant)[0]

    torch.testing.assert_close(own, storing.stored[1][0], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(other, own, atol=1e-3)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_queries_are_not_computed_where_they_stand_alone(name):
    model = zoo.build(name)
    decoder = TransformersDecoder(model)
    decoder.prepare_recomputation()
    _, storing = run(decoder)
    decoder.keys_and_values(1, storing.inputs[1], torch.arange(TOKENS))
    requested = []
    for part, module in model.named_modules():
        if part.endswith("q_proj"):
            module.register_forward_hook(lambda *_: requested.append(1))

    decoder.keys_and_values(1, storing.inputs[1], torch.arange(TOKENS))

    assert not requested
    assert decoder._observing.recomputation.leaves_queries_out == (name not in FUSED)
    run(decoder)
    assert bool(requested) == (name not in FUSED)


def test_an_attention_that_does_not_want_inputs_is_not_shown_any():
    decoder = TransformersDecoder(zoo.build("llama"))
    decoder.prepare_recomputation()
    decoder.prepare_recomputation()
    storing = Storing(range(3))
    storing.wants_inputs = False
    storing.inputs = dict.fromkeys(range(2))

    decoder.forward(torch.tensor([5, 6, 7]), torch.arange(3), torch.tensor([2]), storing)

    assert storing.inputs == dict.fromkeys(range(2))


def test_nobody_else_runs_the_model_while_it_gets_ready():
    """Its layers end at a bridge that belongs to no request then."""
    model = zoo.build("llama")
    decoder = TransformersDecoder(model)
    could_run = []

    def try_to_run() -> bool:
        got = decoder._forward_lock.acquire(blocking=False)
        if got:
            decoder._forward_lock.release()
        return got

    def ask(*_) -> None:
        with ThreadPoolExecutor(1) as other:
            could_run.append(other.submit(try_to_run).result())

    handles = [
        module.register_forward_hook(ask)
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


def test_what_is_ready_runs_one_layer_and_no_more():
    model = zoo.build("llama")
    decoder = TransformersDecoder(model)
    decoder.prepare_recomputation()
    _, storing = run(decoder)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))

    decoder.keys_and_values(1, storing.inputs[1], torch.arange(TOKENS))

    assert not forwards
