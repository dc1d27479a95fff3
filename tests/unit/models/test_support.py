"""Unsupported models are refused by name or config, before weights are read."""

import json
from pathlib import Path

import pytest
import transformers
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    HrmTextConfig,
    LlamaConfig,
    MptConfig,
    PhimoeConfig,
    Qwen3Config,
    RwkvConfig,
    T5Config,
)

from quire.errors import UnsupportedModel
from quire.layout.limits import REFUSED
from quire.models.adapter import TransformersDecoder
from quire.models.loader import load_model
from quire.models.support import refuse_class, refuse_config
from support import zoo


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refusal_names_the_reason_and_the_alternative(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    with pytest.raises(UnsupportedModel) as refusal:
        load_model(tmp_path)

    assert str(refusal.value).startswith(f"{model_type} is not supported: ")
    assert REFUSED[model_type].reason in str(refusal.value)
    assert REFUSED[model_type].instead in str(refusal.value)


_MSCALES = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 64,
    "long_factor": [2.0] * 64,
    "original_max_position_embeddings": 64,
    "short_mscale": 1.1,
    "long_mscale": 1.2,
}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (MptConfig(attn_config={"alibi": False}), "computes another model"),
        (MptConfig(attn_config={"alibi_bias_max": 16}), "computes another model"),
        (PhimoeConfig(rope_parameters=_MSCALES), "longest sequence of the batch"),
        (HrmTextConfig(), "later tokens of the prompt"),
        (T5Config(), "encoder"),
        (Gemma3Config(), "images"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_configs_of_unsupported_families_are_refused(
    config: transformers.PreTrainedConfig, word: str
) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        refuse_config(config)


@pytest.mark.parametrize(
    ("property_name", "value", "word"),
    [
        ("attention_chunk_size", 64, "chunked"),
        ("num_kv_shared_layers", 1, "other layers"),
        ("index_topk", 8, "indexer"),
        ("layer_types", ["full_attention", "recurrent"], "recurrent layers are of a kind"),
        ("layer_types", ["full_attention", "chunked_attention"], "chunked"),
    ],
)
def test_unknown_family_is_refused_by_config_properties(
    property_name: str, value: object, word: str
) -> None:
    config = LlamaConfig(**zoo._SHAPE)
    setattr(config, property_name, value)

    with pytest.raises(UnsupportedModel, match=word):
        refuse_config(config)


def test_bidirectional_attention_is_refused() -> None:
    config = Gemma3TextConfig(use_bidirectional_attention=True)

    with pytest.raises(UnsupportedModel, match="attend to later tokens"):
        refuse_config(config)


def test_class_without_the_attention_interface_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="attention interface"):
        refuse_class(transformers.RwkvForCausalLM)


def test_class_without_position_ids_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="position_ids"):
        refuse_class(transformers.BartForCausalLM)


def test_decoder_refuses_unsupported_models() -> None:
    config = RwkvConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2)

    with pytest.raises(UnsupportedModel, match="rwkv is not supported"):
        TransformersDecoder(transformers.RwkvForCausalLM(config))


def test_empty_config_property_is_not_refused() -> None:
    config = Qwen3Config(**zoo._SHAPE)
    config.kv_lora_rank = None

    refuse_config(config)
