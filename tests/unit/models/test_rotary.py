"""RoPE taken off queries again, and what it does on average, for every architecture of the zoo."""

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from quire.layout.statistics import AttentionSum, QueryMoments, QueryRing
from quire.models.adapter import TransformersDecoder
from quire.models.base import MeanRotations
from quire.models.rotary import Rotary
from support import zoo
from support.flat import sequences

POSITIONS = torch.tensor([3, 0, 40, 7, 8])


class Seen:
    """Answers nothing; keeps queries and rotations."""

    def __init__(self):
        self.calls, self.queries, self.keys = {}, {}, {}

    def attend(self, call, query, key, value):
        self.calls[call.layer], self.queries[call.layer] = call, query.clone()
        self.keys[call.layer] = key.clone()
        return torch.zeros_like(query)


def seen_by(decoder, rope_variant=0):
    (tokens,) = sequences(len(POSITIONS), vocab_size=zoo.VOCAB_SIZE)
    seen = Seen()
    decoder.forward(tokens, POSITIONS, POSITIONS[:0], seen, rope_variant=rope_variant)
    return seen


def full_layers(decoder):
    return [i for i, layer in enumerate(decoder.spec.layers) if layer.window is None]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_family_of_the_zoo_turns_as_its_rotary_says(name):
    """One token at all positions: without RoPE its queries are one query."""
    decoder = TransformersDecoder(zoo.build(name))
    assert decoder.prepare(QueryMoments()) is None
    seen = Seen()
    token = torch.full_like(POSITIONS, 9)
    decoder.forward(token, POSITIONS, POSITIONS[:0], seen)
    if name in ("gpt2", "opt"):
        assert all(seen.calls[layer].rotary.module is None for layer in full_layers(decoder))
        return  # positions are in the hidden states: queries differ

    for layer in full_layers(decoder):
        rotary, query = seen.calls[layer].rotary, seen.queries[layer]
        assert rotary.module is not None
        bare = rotary.unrotate(query, POSITIONS)
        torch.testing.assert_close(bare, bare[:1].expand_as(bare), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rotary.rotate(bare, POSITIONS), query, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(query, query[:1].expand_as(query), atol=1e-2)


@pytest.mark.parametrize(
    ("name", "projection"),
    [("llama", "q_proj"), ("qwen3", "q_norm"), ("stablelm", "q_proj"), ("granite", "q_proj")],
)
def test_queries_before_rope_are_what_the_projection_gave(name, projection):
    model, given = zoo.build(name), {}
    decoder = TransformersDecoder(model)
    decoder.prepare(QueryMoments())
    for layer, block in enumerate(model.model.layers):
        getattr(block.self_attn, projection).register_forward_hook(
            lambda module, args, out, layer=layer: given.__setitem__(layer, out)
        )
    seen = seen_by(decoder)

    for layer, query in seen.queries.items():
        bare = seen.calls[layer].rotary.unrotate(query, POSITIONS)
        torch.testing.assert_close(bare, given[layer].view(bare.shape), atol=1e-4, rtol=1e-4)


def test_frequencies_are_those_of_the_forward():
    """A long request's queries turn by the long frequencies."""
    decoder = TransformersDecoder(zoo.build("phi3_longrope"))
    decoder.prepare(QueryMoments())
    rotations = [decoder.rotations(variant).mean_rotation(0, 5, 1) for variant in (0, 1)]

    for variant, rotation in enumerate(rotations):
        seen = seen_by(decoder, variant)
        bare = Seen()
        token = sequences(len(POSITIONS), vocab_size=zoo.VOCAB_SIZE)[0][:1]
        decoder.forward(token, torch.tensor([0]), POSITIONS[:0], bare, rope_variant=variant)
        at_five = Seen()
        decoder.forward(token, torch.tensor([5]), POSITIONS[:0], at_five, rope_variant=variant)
        scaled = bare.queries[0][0] @ rotation.T / rotation[:, 0].norm()
        expected = at_five.queries[0][0]
        torch.testing.assert_close(
            scaled / scaled.norm(), expected / expected.norm(), atol=1e-4, rtol=1e-4
        )
        assert seen.calls[0].rotary is at_five.calls[0].rotary
    assert not torch.allclose(*rotations, atol=1e-2)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt_oss", "gpt2"])
def test_a_mean_rotation_is_the_mean_of_rotated_queries(name):
    decoder = TransformersDecoder(zoo.build(name))
    rotations = decoder.rotations()
    assert isinstance(rotations, MeanRotations)
    rotary = seen_by(decoder).calls[layer := full_layers(decoder)[-1]].rotary
    query = torch.randn(1, 1, decoder.spec.head_dim, generator=torch.Generator().manual_seed(0))

    turned = rotary.rotate(query.expand(12, -1, -1), torch.arange(30, 42))
    found = rotations.mean_rotation(layer, 30, 12) @ query[0, 0]
    torch.testing.assert_close(found, turned.mean(dim=0)[0], atol=1e-5, rtol=1e-5)


def test_nothing_is_looked_for_before_somebody_asks():
    decoder = TransformersDecoder(zoo.build("llama"))
    assert decoder.prepare(AttentionSum()) is decoder.prepare(QueryRing()) is None

    assert seen_by(decoder).calls[0].rotary is None


@pytest.mark.parametrize("name", sorted({*zoo.ARCHITECTURES} - {"gpt2", "opt"}))
def test_queries_and_keys_of_position_0_are_moved_to_where_they_would_stand(name):
    """In every layer, those with windows among them, and with every frequency."""
    decoder = TransformersDecoder(zoo.build(name))
    assert decoder.prepare_pre_rope() is None
    token = torch.full_like(POSITIONS, 9)
    for variant in range(decoder.num_rope_variants):
        still, turned = Seen(), Seen()
        for seen, places in ((still, torch.zeros_like(POSITIONS)), (turned, POSITIONS)):
            decoder.forward(token, places, POSITIONS[:0], seen, rope_variant=variant)

        assert still.calls.keys() == set(range(decoder.spec.num_layers))
        for layer, call in still.calls.items():
            for at_zero, expected in (
                (still.queries[layer], turned.queries[layer]),
                (still.keys[layer], turned.keys[layer]),
            ):
                moved = call.rotary.move(at_zero, POSITIONS)
                torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)
                assert not torch.allclose(at_zero, expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_of_position_0_are_the_projections_own_numbers(dtype):
    """Bit for bit: what is stored before RoPE has not been rounded on the way."""
    model, given = zoo.build("llama").to(dtype), {}
    decoder = TransformersDecoder(model)
    for layer, block in enumerate(model.model.layers):
        block.self_attn.k_proj.register_forward_hook(
            lambda module, args, out, layer=layer: given.__setitem__(layer, out)
        )
    (tokens,), seen = sequences(5, vocab_size=zoo.VOCAB_SIZE), Seen()
    decoder.forward(tokens, torch.zeros_like(tokens), POSITIONS[:0], seen)

    assert all(torch.equal(key, given[layer].view(key.shape)) for layer, key in seen.keys.items())


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_cannot_be_taken_off(name):
    decoder = TransformersDecoder(zoo.build(name))

    assert "adds learned positions" in decoder.prepare_pre_rope()


def test_a_family_that_turns_neighbours_is_refused_by_name():
    """Cohere turns numbers 2 i and 2 i + 1 together."""
    config = CohereConfig(
        vocab_size=zoo.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    decoder = TransformersDecoder(CohereForCausalLM(config).eval())

    assert "CohereForCausalLM rotates" in decoder.prepare(QueryMoments())
    assert "layer 0 of CohereForCausalLM rotates" in decoder.prepare_pre_rope()
    assert decoder.rotations() is None
    assert seen_by(decoder).calls[0].rotary is None


def test_a_layer_without_rope_leaves_queries_alone():
    rotary, query = Rotary(None), torch.randn(3, 2, 8)

    assert torch.equal(rotary.unrotate(query, torch.arange(3)), query)
    assert torch.equal(rotary.mean_rotation(8, 5, 3, torch.device("cpu")), torch.eye(8))
