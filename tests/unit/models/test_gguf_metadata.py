"""RoPE scaling and end tokens in the metadata of GGUF files."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from quire.models.gguf import GgufMetadata

SHAPE = {"max_position_embeddings": 128, "rope_parameters": {"rope_theta": 10_000.0}}


def metadata(values: dict[str, object], **more: list[float]) -> GgufMetadata:
    """Metadata of a Llama with these values below `llama.rope`."""
    keys = {f"llama.rope.{name}": value for name, value in values.items()}
    tensors = {f"{name}.weight": divisors for name, divisors in more.items()}
    return GgufMetadata(Path("m.gguf"), {"general.architecture": "llama"} | keys, tensors, "")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"scaling.type": "none", "scaling.factor": 2.0}, {}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 16.0},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_rope_metadata(values: dict[str, object], expected: dict[str, object]) -> None:
    config = LlamaConfig(**SHAPE)

    metadata(values).set_rope(config)

    assert config.rope_parameters == ({"rope_theta": 10_000.0, "rope_type": "default"} | expected)


def test_end_tokens_are_those_of_a_text_a_turn_and_a_message() -> None:
    keys = {"eos_token_id": 2, "eot_token_id": 7, "eom_token_id": 8, "bos_token_id": 1}
    values = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}

    assert GgufMetadata(Path("m.gguf"), values, {}, "").end_token_ids == [2, 7, 8]
    assert GgufMetadata(Path("m.gguf"), {}, {}, "").end_token_ids == []


def test_two_sets_of_divisors_are_longrope() -> None:
    config = LlamaConfig(**SHAPE)
    values = {"scaling.original_context_length": 64, "scaling.attn_factor": 1.2}

    metadata(values, rope_factors_short=[1.0] * 8, rope_factors_long=[2.0] * 8).set_rope(config)

    assert config.rope_parameters == {
        "rope_theta": 10_000.0,
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
    }


def test_layers_with_a_sliding_window_keep_their_rope() -> None:
    config = LlamaConfig(**SHAPE)
    local = {"rope_theta": 10_000.0, "rope_type": "default"}
    config.rope_parameters = {
        "sliding_attention": local,
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
    }

    metadata({"scaling.type": "linear", "scaling.factor": 8.0}).set_rope(config)

    assert config.rope_parameters == {
        "sliding_attention": local,
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
    }
