"""RoPE scaling variants that depend on the request length: selected per request, not per batch."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quire.errors import InvariantError, UnsupportedModel
from quire.models.adapter import TransformersDecoder
from quire.models.rope import RopeVariants
from support import zoo
from support.flat import flat_logits, sequences

SHORT = zoo.LONGROPE_SHORT_TOKENS


def reference_logits(prompt: Tensor) -> Tensor:
    with torch.inference_mode():
        return zoo.build("phi3_longrope")(prompt.unsqueeze(0)).logits[0]


@pytest.fixture
def decoder() -> TransformersDecoder:
    return TransformersDecoder(zoo.build("phi3_longrope"))


def test_long_variant_starts_beyond_the_original_training_length(
    decoder: TransformersDecoder,
) -> None:
    assert decoder.num_rope_variants == 2
    assert [decoder.rope_variant(tokens) for tokens in (1, SHORT, SHORT + 1)] == [0, 0, 1]


def test_models_without_longrope_have_one_variant() -> None:
    decoder = TransformersDecoder(zoo.build("llama"))

    assert decoder.num_rope_variants == 1
    assert decoder.rope_variant(10**6) == 0
    with pytest.raises(InvariantError, match="below 1, got 1"):
        flat_logits(
            decoder, sequences(2, vocab_size=zoo.VOCAB_SIZE), chunk_tokens=[2], rope_variant=1
        )


@pytest.mark.parametrize("chunk_tokens", [[7, 1, 64], [64]])
def test_each_variant_gives_transformers_logits(
    decoder: TransformersDecoder, chunk_tokens: list[int]
) -> None:
    short, long = sequences(SHORT, 2 * SHORT, vocab_size=zoo.VOCAB_SIZE)

    for prompt, variant in ((short, 0), (long, 1), (short, 0)):
        (actual,) = flat_logits(decoder, [prompt], chunk_tokens=chunk_tokens, rope_variant=variant)
        torch.testing.assert_close(actual, reference_logits(prompt), atol=1e-4, rtol=0)


def test_variant_is_independent_of_the_positions_in_the_batch(
    decoder: TransformersDecoder,
) -> None:
    (long,) = sequences(2 * SHORT, vocab_size=zoo.VOCAB_SIZE)

    (as_short,) = flat_logits(decoder, [long], chunk_tokens=[64], rope_variant=0)
    (as_long,) = flat_logits(decoder, [long[:SHORT]], chunk_tokens=[64], rope_variant=1)

    torch.testing.assert_close(as_short[:SHORT], reference_logits(long[:SHORT]), atol=1e-4, rtol=0)
    torch.testing.assert_close(as_long, reference_logits(long)[:SHORT], atol=1e-4, rtol=0)
    assert (as_short[:SHORT] - as_long).abs().max() > 0.1


def test_dynamic_rope_scaling_is_refused() -> None:
    config = LlamaConfig(
        **zoo._SHAPE,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )

    with pytest.raises(UnsupportedModel, match="'dynamic' changes its frequencies"):
        TransformersDecoder(LlamaForCausalLM(config))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_static_rope_scaling_gives_transformers_logits(parameters: dict[str, object]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        **zoo._SHAPE,
        rope_parameters={"rope_theta": 10000.0, **parameters},
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    (prompt,) = sequences(100, vocab_size=zoo.VOCAB_SIZE)
    with torch.inference_mode():
        expected = model(prompt.unsqueeze(0)).logits[0]

    (actual,) = flat_logits(TransformersDecoder(model), [prompt], chunk_tokens=[50])

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

    variants.release()

    assert (rotary.rope_type, rotary.attention_scaling) == before
    assert torch.equal(rotary.inv_freq, frequencies)
    got = [model(ids.unsqueeze(0)).logits for ids in (short, long)]
    assert all(map(torch.equal, got, expected))


def test_variant_can_be_selected_again_after_release() -> None:
    model = zoo.build("phi3_longrope")
    variants = RopeVariants(model)
    variants.select(1)
    long = model.model.rotary_emb.inv_freq
    variants.release()

    variants.select(1)

    assert model.model.rotary_emb.inv_freq is long
