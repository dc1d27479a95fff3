import json
import sys
from pathlib import Path

import pytest
import torch
import transformers as configs
from transformers import CodeGenConfig, CodeGenForCausalLM, GPTJConfig, GPTJForCausalLM

from quire import LLM, KVConfig
from quire.errors import UnsupportedModel
from quire.layout.limits import REFUSED, WITH_NEWER_TRANSFORMERS
from quire.models.adapter import TransformersDecoder
from quire.models.loader import load_model
from quire.models.support import refuse_class, refuse_config
from support import zoo
from support.engines import greedy


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refusal_names_the_reason_and_the_alternative(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))

    with pytest.raises(UnsupportedModel) as refusal:
        load_model(tmp_path)

    assert str(refusal.value).startswith(f"{model_type} is not supported: ")
    assert REFUSED[model_type].reason in str(refusal.value)
    assert REFUSED[model_type].instead in str(refusal.value)


_MSCALES = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "short_mscale": 1.1, "long_mscale": 1.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (configs.MptConfig(attn_config={"alibi": False}), "computes another model"),
        (configs.MptConfig(attn_config={"alibi_bias_max": 16}), "computes another model"),
        (configs.PhimoeConfig(rope_parameters=_MSCALES), "longest sequence of the batch"),
        (configs.HrmTextConfig(), "later tokens of the prompt"),
        (configs.T5Config(), "encoder"),
        (configs.Gemma3Config(), "images"),
        (configs.Gemma3TextConfig(use_bidirectional_attention=True), "attend to later tokens"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_configs_of_unsupported_families_are_refused(config, word):
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
def test_unknown_family_is_refused_by_config_properties(property_name, value, word):
    config = configs.LlamaConfig(**zoo._SHAPE)
    setattr(config, property_name, None)
    refuse_config(config)  # an empty property is not refused
    setattr(config, property_name, value)
    with pytest.raises(UnsupportedModel, match=word):
        refuse_config(config)


@pytest.mark.parametrize(
    ("name", "word"),
    [("RwkvForCausalLM", "attention interface"), ("BartForCausalLM", "position_ids")],
)
def test_class_without_the_interface_or_positions_is_refused(name, word):
    with pytest.raises(UnsupportedModel, match=word):
        refuse_class(getattr(configs, name))
    config = configs.RwkvConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(UnsupportedModel, match="rwkv is not supported"):
        TransformersDecoder(configs.RwkvForCausalLM(config))


PROMPTS = [[5, 9, 13, 17, 21, 25, 29], [40, 41, 42, 43] * 5]
CLASSES = {GPTJConfig: GPTJForCausalLM, CodeGenConfig: CodeGenForCausalLM}
NEW_TOKENS = 12


def generated(model, prompt):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **options
    )
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", CLASSES)
def test_outputs_equal_transformers(kind, tmp_path):
    if not hasattr(sys.modules[CLASSES[kind].__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip("this version of Transformers has no attention interface in this family")
    torch.manual_seed(3)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128}
    model = CLASSES[kind](kind(vocab_size=97, bos_token_id=0, eos_token_id=1, **shape)).eval()
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", kv=KVConfig(memory="64KiB"))

    outputs = llm.generate(PROMPTS, greedy(NEW_TOKENS))

    expected = [generated(model, prompt) for prompt in PROMPTS]
    assert [list(output.token_ids) for output in outputs] == expected


@pytest.mark.parametrize("model_class", CLASSES.values())
def test_an_older_transformers_is_named_in_the_error(model_class, monkeypatch):
    assert model_class.config_class.model_type in WITH_NEWER_TRANSFORMERS
    module = sys.modules[model_class.__module__]
    monkeypatch.delattr(module, "ALL_ATTENTION_FUNCTIONS", raising=False)
    with pytest.raises(UnsupportedModel, match=r"install transformers>=5\.24"):
        refuse_class(model_class)
