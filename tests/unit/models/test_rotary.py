"""Inverse RoPE of queries, mean rotations and pre-RoPE keys, for every test architecture."""

import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from quire.layout.statistics import AttentionSum, QueryMoments, QueryRing
from quire.models.adapter import TransformersDecoder
from quire.models.rotary import Rotary
from quire.policies.view import Rotation
from support import zoo
from support.exact_products import exact_rotation
from support.flat import sequences

POSITIONS = torch.tensor([3, 0, 40, 7, 8])


class Recorder:
    """Attention stub that records calls, queries and keys."""

    def __init__(self):
        self.calls, self.queries, self.keys = {}, {}, {}

    def attend(self, call, query, key, value):
        self.calls[call.layer], self.queries[call.layer] = call, query.clone()
        self.keys[call.layer] = key.clone()
        value_dim = value.shape[2] if call.latent is None else call.latent.value_dim
        return query.new_zeros(*query.shape[:2], value_dim)


def record(decoder, rope_variant=0):
    (tokens,) = sequences(len(POSITIONS), vocab_size=zoo.VOCAB_SIZE)
    recorder = Recorder()
    decoder.forward(tokens, POSITIONS, POSITIONS[:0], recorder, rope_variant=rope_variant)
    return recorder


def full_layers(decoder):
    return [i for i, layer in enumerate(decoder.spec.layers) if layer.window is None]


def rotated_part(decoder, call, query):
    """The elements of queries that keys store: all; of latents, the last ones."""
    if call.latent is None:
        return query
    latent = decoder.spec.latent
    return call.latent.stored(query) if latent is None else query[..., latent.key_dim :]


KNOWN = {*zoo.ARCHITECTURES, "deepseek_v2"} - {"llama4"}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_inverse_rope_of_one_token_is_independent_of_its_position(name):
    """One token at all positions: its pre-RoPE queries are equal; in latents, their last part."""
    decoder = TransformersDecoder(zoo.build(name))
    assert (decoder.prepare(QueryMoments()) is None) == (not decoder.spec.joins_keys)
    assert decoder.prepare_pre_rope() is None or name in ("gpt2", "opt")
    recorder = Recorder()
    token = torch.full_like(POSITIONS, 9)
    decoder.forward(token, POSITIONS, POSITIONS[:0], recorder)
    if name in ("gpt2", "opt"):
        assert all(recorder.calls[layer].rotary.module is None for layer in full_layers(decoder))
        return  # positions are in the hidden states: queries differ

    for layer in full_layers(decoder):
        rotary, query = recorder.calls[layer].rotary, recorder.queries[layer]
        query = rotated_part(decoder, recorder.calls[layer], query)
        assert rotary.module is not None
        pre_rope = rotary.unrotate(query, POSITIONS)
        torch.testing.assert_close(pre_rope, pre_rope[:1].expand_as(pre_rope), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(rotary.rotate(pre_rope, POSITIONS), query, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(query, query[:1].expand_as(query), atol=1e-2)


@pytest.mark.parametrize(
    ("name", "projection"),
    [("llama", "q_proj"), ("qwen3", "q_norm"), ("stablelm", "q_proj"), ("granite", "q_proj")],
)
def test_inverse_rope_gives_the_projected_queries(name, projection):
    model, projected = zoo.build(name), {}
    decoder = TransformersDecoder(model)
    decoder.prepare(QueryMoments())
    for layer, block in enumerate(model.model.layers):
        getattr(block.self_attn, projection).register_forward_hook(
            lambda module, args, out, layer=layer: projected.__setitem__(layer, out)
        )
    recorder = record(decoder)

    for layer, query in recorder.queries.items():
        pre_rope = recorder.calls[layer].rotary.unrotate(query, POSITIONS)
        torch.testing.assert_close(
            pre_rope, projected[layer].view(pre_rope.shape), atol=1e-4, rtol=1e-4
        )


def test_rotations_use_the_rope_variant_of_the_forward():
    """Queries of a long request are rotated by the long frequencies."""
    decoder = TransformersDecoder(zoo.build("phi3_longrope"))
    decoder.prepare(QueryMoments())
    rotations = [decoder.rotations(variant).mean_rotation(0, [5]) for variant in (0, 1)]

    for variant, rotation in enumerate(rotations):
        recorder = record(decoder, variant)
        pre_rope = Recorder()
        token = sequences(len(POSITIONS), vocab_size=zoo.VOCAB_SIZE)[0][:1]
        decoder.forward(token, torch.tensor([0]), POSITIONS[:0], pre_rope, rope_variant=variant)
        at_five = Recorder()
        decoder.forward(token, torch.tensor([5]), POSITIONS[:0], at_five, rope_variant=variant)
        scaled = pre_rope.queries[0][0] @ rotation.T / rotation[:, 0].norm()
        expected = at_five.queries[0][0]
        torch.testing.assert_close(
            scaled / scaled.norm(), expected / expected.norm(), atol=1e-4, rtol=1e-4
        )
        assert recorder.calls[0].rotary is at_five.calls[0].rotary
    assert not torch.allclose(*rotations, atol=1e-2)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt_oss", "gpt2"])
def test_mean_rotation_is_the_mean_of_rotated_queries(name):
    decoder = TransformersDecoder(zoo.build(name))
    rotations = decoder.rotations()
    assert isinstance(rotations, Rotation)
    rotary = record(decoder).calls[layer := full_layers(decoder)[-1]].rotary
    query = torch.randn(1, 1, decoder.spec.head_dim, generator=torch.Generator().manual_seed(0))

    rotated = rotary.rotate(query.expand(12, -1, -1), torch.arange(30, 42))
    found = rotations.mean_rotation(layer, range(30, 42)) @ query[0, 0]
    torch.testing.assert_close(found, rotated.mean(dim=0)[0], atol=1e-5, rtol=1e-5)
    # the elements that rotate together, as triattention finds them: their norm stays
    together = (rotations.mean_rotation(layer, [1]) != 0).float()
    norms = rotated[:, 0].square() @ together
    torch.testing.assert_close(norms, norms[:1].expand(12, -1), atol=1e-4, rtol=1e-4)
    assert together.sum(dim=0).max() == (1 if name == "gpt2" else 2)


def test_an_unknown_rope_is_a_reason_not_to_unrotate():
    """Pairs of neighbours, and queries without RoPE that are scaled by their positions."""
    decoder = TransformersDecoder(zoo.build("llama4"))

    for reason in (decoder.prepare(QueryMoments()), decoder.prepare_pre_rope()):
        assert reason is not None
        assert "Llama4ForCausalLM rotates its queries" in reason.replace("layer 0 of ", "")


def test_rotary_is_not_detected_if_no_statistic_needs_it():
    decoder = TransformersDecoder(zoo.build("llama"))
    assert decoder.prepare(AttentionSum()) is decoder.prepare(QueryRing()) is None

    assert record(decoder).calls[0].rotary is None


@pytest.mark.parametrize("name", sorted(KNOWN - {"gpt2", "opt"}))
def test_queries_and_keys_at_position_0_can_be_rotated_to_any_position(name):
    """In every layer, including sliding windows, and with every RoPE variant."""
    decoder = TransformersDecoder(zoo.build(name))
    assert decoder.prepare_pre_rope() is None
    token = torch.full_like(POSITIONS, 9)
    for variant in range(decoder.num_rope_variants):
        at_zero, rotated = Recorder(), Recorder()
        for recorder, positions in ((at_zero, torch.zeros_like(POSITIONS)), (rotated, POSITIONS)):
            decoder.forward(token, positions, POSITIONS[:0], recorder, rope_variant=variant)

        assert at_zero.calls.keys() == set(range(decoder.spec.num_layers))
        for layer, call in at_zero.calls.items():
            queries = (
                rotated_part(decoder, call, one.queries[layer]) for one in (at_zero, rotated)
            )
            for vectors, expected in (
                tuple(queries),
                (at_zero.keys[layer], rotated.keys[layer]),
            ):
                moved = call.rotary.rotate_pre_rope(vectors, POSITIONS)
                torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)
                wide = exact_rotation(Rotary.rotate_pre_rope)(call.rotary, vectors, POSITIONS)
                torch.testing.assert_close(wide, expected.double(), atol=1e-4, rtol=1e-4)
                assert not torch.allclose(vectors, expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_at_position_0_equal_the_projection(dtype):
    """Bitwise: pre-RoPE keys are stored without rounding."""
    model, projected = zoo.build("llama").to(dtype), {}
    decoder = TransformersDecoder(model)
    for layer, block in enumerate(model.model.layers):
        block.self_attn.k_proj.register_forward_hook(
            lambda module, args, out, layer=layer: projected.__setitem__(layer, out)
        )
    (tokens,), recorder = sequences(5, vocab_size=zoo.VOCAB_SIZE), Recorder()
    decoder.forward(tokens, torch.zeros_like(tokens), POSITIONS[:0], recorder)

    assert all(
        torch.equal(key, projected[layer].view(key.shape)) for layer, key in recorder.keys.items()
    )


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_cannot_be_removed(name):
    decoder = TransformersDecoder(zoo.build(name))

    assert "adds learned positions" in decoder.prepare_pre_rope()


def test_interleaved_rope_is_refused_by_name():
    """Cohere rotates elements 2 i and 2 i + 1 as a pair."""
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
    assert record(decoder).calls[0].rotary is None


def test_layer_without_rope_does_not_change_queries():
    rotary, query = Rotary(None), torch.randn(3, 2, 8)

    assert torch.equal(rotary.unrotate(query, torch.arange(3)), query)
    assert torch.equal(rotary.mean_rotation(8, [5, 6, 7], torch.device("cpu")), torch.eye(8))
