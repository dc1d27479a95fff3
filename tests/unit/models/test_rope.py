import pytest
import torch
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM, LlamaConfig, LlamaForCausalLM

from quire.errors import InvariantError, UnsupportedModel
from quire.layout.statistics import AttentionSum, QueryMoments, QueryRing
from quire.models.adapter import TransformersDecoder
from quire.models.native import decoder as native_decoder
from quire.models.native.decoder import RopeTable
from quire.models.rope import RopeVariants
from quire.models.rotary import Rotary
from quire.policies.view import Rotation
from support import zoo
from support.exact_products import exact_rotation
from support.flat import flat_logits, plain_logits, sequences

SHORT = zoo.LONGROPE_SHORT_TOKENS


def plain(prompt: Tensor) -> Tensor:
    return plain_logits(zoo.build("phi3_longrope"), prompt)[0]


@pytest.fixture
def decoder() -> TransformersDecoder:
    return TransformersDecoder(zoo.build("phi3_longrope"))


def test_variant_follows_from_the_length_if_a_model_has_several(decoder) -> None:
    assert decoder.num_rope_variants == 2  # the long one is for requests beyond this length:
    assert [decoder.rope_variant(tokens) for tokens in (1, SHORT, SHORT + 1)] == [0, 0, 1]
    decoder = TransformersDecoder(zoo.build("llama"))

    assert decoder.num_rope_variants == 1
    assert decoder.rope_variant(10**6) == 0
    prompts = sequences(2, vocab_size=zoo.VOCAB_SIZE)
    with pytest.raises(InvariantError, match="below 1, got 1"):
        flat_logits(decoder, prompts, chunk_tokens=[2], rope_variant=1)


@pytest.mark.parametrize("chunk_tokens", [[7, 1, 64], [64]])
def test_each_variant_gives_transformers_logits_for_all_positions(decoder, chunk_tokens):
    short, long = sequences(SHORT, 2 * SHORT, vocab_size=zoo.VOCAB_SIZE)
    for prompt, variant in ((short, 0), (long, 1), (short, 0)):
        (actual,) = flat_logits(decoder, [prompt], chunk_tokens=chunk_tokens, rope_variant=variant)
        torch.testing.assert_close(actual, plain(prompt), atol=1e-4, rtol=0)

    (as_short,) = flat_logits(decoder, [long], chunk_tokens=[64], rope_variant=0)
    (as_long,) = flat_logits(decoder, [long[:SHORT]], chunk_tokens=[64], rope_variant=1)

    torch.testing.assert_close(as_short[:SHORT], plain(long[:SHORT]), atol=1e-4, rtol=0)
    torch.testing.assert_close(as_long, plain(long)[:SHORT], atol=1e-4, rtol=0)
    assert (as_short[:SHORT] - as_long).abs().max() > 0.1


def test_dynamic_and_interleaved_ropes_are_refused_and_unknown_not_unrotated():
    config = LlamaConfig(
        **zoo._SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    )
    with pytest.raises(UnsupportedModel, match="'dynamic' changes its frequencies"):
        TransformersDecoder(LlamaForCausalLM(config))
    # pairs of neighbours, and queries without RoPE that are scaled by their positions
    decoder = TransformersDecoder(zoo.build("llama4"))
    for reason in (decoder.prepare(QueryMoments()), decoder.prepare_pre_rope()):
        assert reason is not None
        assert "Llama4ForCausalLM rotates its queries" in reason.replace("layer 0 of ", "")

    # cohere rotates elements 2 i and 2 i + 1 as a pair
    torch.manual_seed(0)
    decoder = TransformersDecoder(CohereForCausalLM(CohereConfig(**zoo._SHAPE)).eval())
    assert "CohereForCausalLM rotates" in decoder.prepare(QueryMoments())
    assert "layer 0 of CohereForCausalLM rotates" in decoder.prepare_pre_rope()
    assert decoder.rotations() is None
    assert record(decoder).calls[0].rotary is None


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
        | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_static_rope_scaling_gives_transformers_logits(parameters: dict[str, object]) -> None:
    torch.manual_seed(0)
    rope = {"rope_theta": 10000.0, **parameters}
    config = LlamaConfig(**zoo._SHAPE, rope_parameters=rope, attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    prompts = sequences(100, vocab_size=zoo.VOCAB_SIZE)
    expected = plain_logits(model, *prompts)

    actual = flat_logits(TransformersDecoder(model), prompts, chunk_tokens=[50])

    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_released_modules_select_their_own_variant_again() -> None:
    model = zoo.build("phi3_longrope")
    rotary = model.model.rotary_emb
    short, long = sequences(SHORT, 2 * SHORT, vocab_size=zoo.VOCAB_SIZE)
    expected = [model(ids.unsqueeze(0)).logits for ids in (short, long)]
    before = (rotary.rope_type, rotary.attention_scaling)
    frequencies = rotary.inv_freq.clone()  # of the last call, before Transformers 5.18
    variants = RopeVariants(model)
    variants.select(1)
    assert rotary.rope_type != before[0]
    frequencies_of_long = rotary.inv_freq

    variants.release()

    assert (rotary.rope_type, rotary.attention_scaling) == before
    assert torch.equal(rotary.inv_freq, frequencies)
    got = [model(ids.unsqueeze(0)).logits for ids in (short, long)]
    assert all(map(torch.equal, got, expected))
    variants.select(1)
    assert rotary.inv_freq is frequencies_of_long


POSITIONS = torch.tensor([3, 0, 40, 7, 8])


class Recorder:
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


def outputs_of(model, part):
    """Outputs of a part of attention, by layer, filled by the next forward."""
    found = {}
    for layer, block in enumerate(model.model.layers):
        getattr(block.self_attn, part).register_forward_hook(
            lambda module, args, out, layer=layer: found.__setitem__(layer, out)
        )
    return found


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
        assert "adds learned positions" in decoder.prepare_pre_rope()
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
    model = zoo.build(name)
    decoder, projected = TransformersDecoder(model), outputs_of(model, projection)
    decoder.prepare(QueryMoments())
    recorder = record(decoder)

    for layer, query in recorder.queries.items():
        pre_rope = recorder.calls[layer].rotary.unrotate(query, POSITIONS)
        expected = projected[layer].view(pre_rope.shape)
        torch.testing.assert_close(pre_rope, expected, atol=1e-4, rtol=1e-4)


def test_rotations_use_the_rope_variant_of_the_forward():
    decoder = TransformersDecoder(zoo.build("phi3_longrope"))
    decoder.prepare(QueryMoments())
    rotations = [decoder.rotations(variant).mean_rotation(0, [5]) for variant in (0, 1)]

    token = sequences(1, vocab_size=zoo.VOCAB_SIZE)[0]
    for variant, rotation in enumerate(rotations):
        recorder, pre_rope, at_five = record(decoder, variant), Recorder(), Recorder()
        for position, into in ((0, pre_rope), (5, at_five)):
            at = torch.tensor([position])
            decoder.forward(token, at, POSITIONS[:0], into, rope_variant=variant)
        scaled = pre_rope.queries[0][0] @ rotation.T / rotation[:, 0].norm()
        found, expected = (x / x.norm() for x in (scaled, at_five.queries[0][0]))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
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
            both = at_zero, rotated
            queries = [rotated_part(decoder, call, one.queries[layer]) for one in both]
            for vectors, expected in (queries, [one.keys[layer] for one in both]):
                moved = call.rotary.rotate_pre_rope(vectors, POSITIONS)
                torch.testing.assert_close(moved, expected, atol=1e-4, rtol=1e-4)
                wide = exact_rotation(Rotary.rotate_pre_rope)(call.rotary, vectors, POSITIONS)
                torch.testing.assert_close(wide, expected.double(), atol=1e-4, rtol=1e-4)
                assert not torch.allclose(vectors, expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_at_position_0_equal_the_projection(dtype):
    """Bitwise: pre-RoPE keys are stored without rounding."""
    model = zoo.build("llama").to(dtype)
    decoder, projected = TransformersDecoder(model), outputs_of(model, "k_proj")
    (tokens,), recorder = sequences(5, vocab_size=zoo.VOCAB_SIZE), Recorder()
    decoder.forward(tokens, torch.zeros_like(tokens), POSITIONS[:0], recorder)
    assert all(
        torch.equal(key, projected[layer].view(key.shape)) for layer, key in recorder.keys.items()
    )


def test_layer_without_rope_does_not_change_queries():
    rotary, query = Rotary(None), torch.randn(3, 2, 8)

    assert torch.equal(rotary.unrotate(query, torch.arange(3)), query)
    assert torch.equal(rotary.mean_rotation(8, [5, 6, 7], torch.device("cpu")), torch.eye(8))
    decoder = TransformersDecoder(zoo.build("llama"))  # no statistic needs its RoPE
    assert decoder.prepare(AttentionSum()) is decoder.prepare(QueryRing()) is None
    assert record(decoder).calls[0].rotary is None


@pytest.fixture
def rotary():
    return zoo.build("wide_llama").model.rotary_emb


def assert_at(table, rotary, positions):
    for found, expected in zip(
        table.at(positions), rotary(torch.empty(1), positions[None]), strict=True
    ):
        torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-6)


def test_rows_are_those_of_the_module_while_the_table_grows(rotary, monkeypatch):
    monkeypatch.setattr(native_decoder, "FIRST_POSITIONS", 4)
    monkeypatch.setattr(native_decoder, "MAX_POSITIONS", 64)
    table = RopeTable(rotary)

    for positions in ([0], [3, 0, 3], [40, 2], [1], [63], [64, 5], [1000]):
        assert_at(table, rotary, torch.tensor(positions))
    first = rotary.inv_freq  # each set of frequencies has its own table
    for frequencies in (first, first / 3, first):
        rotary.inv_freq = frequencies
        assert_at(table, rotary, torch.tensor([7, 1]))
