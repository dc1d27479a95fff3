import dataclasses
import json
import math
import struct
from copy import deepcopy
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from models.tiny import config_of
from quire.errors import ConfigError, ModelError, UnknownName, UnsupportedModel
from quire.layout.config import check_sizes, dtype_bytes, read_config
from quire.layout.model import LatentSpec, LayerSpec, ModelSpec
from quire.models.own_attention import tied_heads
from support import zoo
from support.model_specs import CACHE_KINDS, small_spec

LLAMA_8B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
LLAMA_8B |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"vocab_size": 128_256, "max_position_embeddings": 8192, "tie_word_embeddings": False}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
GPT2 |= {"n_ctx": 1024, "vocab_size": 50_257}
# as published with google/gemma-3-4b: the decoder is nested and omits most of its keys
GEMMA3 = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240}
GEMMA3 |= {"num_hidden_layers": 34, "sliding_window": 1024}
GEMMA3_4B = {"model_type": "gemma3", "text_config": GEMMA3}


_TOP = {"num_experts_per_tok": 2}


def without(config, *keys, **changes):
    return {key: value for key, value in config.items() if key not in keys} | changes


def built(config, kind=AutoModelForCausalLM):
    with torch.device("meta"):
        model = kind.from_config(config)
    return model, sum(parameter.numel() for parameter in model.parameters())


def written_of(config, kind=None):
    written = json.loads(config.to_json_string(use_diff=False))
    return {"model_type": kind} | written if kind else written


def windows(config):
    return [layer.window for layer in ModelSpec.from_config(config).layers]


def test_grouped_query_heads_and_a_derived_head_dim():
    model = ModelSpec.from_config(LLAMA_8B)

    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (32, 8, 128)
    assert model.max_positions == 8192
    assert model.kv_bytes_per_token(2) == 131_072
    assert windows(LLAMA_8B) == [None] * 32
    for query_heads in (
        without(LLAMA_8B, "num_key_value_heads"),
        LLAMA_8B | {"num_key_value_heads": None},
    ):
        assert ModelSpec.from_config(query_heads).num_kv_heads == 32
    assert ModelSpec.from_config(LLAMA_8B | {"head_dim": 256}).head_dim == 256


QWEN2 = {"model_type": "qwen2", "sliding_window": 128, "max_window_layers": 30}
MIXED = {"model_type": "x", "layer_types": ["sliding_attention", "full_attention"] * 16}
GPT_NEO = {"model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12}
GPT_NEO |= {"vocab_size": 50_257, "max_position_embeddings": 2048, "window_size": 256}
GPT_NEO |= {"attention_types": [[["global", "local"], 6]]}


WINDOWS = [
    (LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096}, [4096] * 32),
    (LLAMA_8B | {"model_type": "mistral", "sliding_window": None}, [None] * 32),
    (LLAMA_8B | {"sliding_window": 4096}, [None] * 32),
    (LLAMA_8B | QWEN2, [None] * 32),
    (LLAMA_8B | QWEN2 | {"use_sliding_window": False}, [None] * 32),
    (LLAMA_8B | QWEN2 | {"use_sliding_window": True}, [None] * 30 + [128] * 2),
    (LLAMA_8B | MIXED | {"sliding_window": 8}, [8, None] * 16),
    (GPT_NEO, [None, 256] * 6),
]


def test_windows_and_names_of_layers_are_read():
    for config, expected in WINDOWS:
        assert windows(config) == expected

    model = ModelSpec.from_config(GPT2)

    assert (model.num_layers, model.num_heads) == (model.num_layers, model.num_kv_heads) == (12, 12)
    assert model.head_dim == 64
    assert (model.hidden_size, model.intermediate_size, model.max_positions) == (768, 3072, 1024)
    assert model.tied_embeddings
    assert not model.gated_mlp
    assert ModelSpec.from_config(GPT2 | {"n_inner": 2000}).intermediate_size == 2000

    model = ModelSpec.from_config(GEMMA3_4B)
    assert model.architecture == "gemma3_text"
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (8, 4, 256)
    assert windows(GEMMA3_4B)[:7] == [1024] * 5 + [None, 1024]
    assert model.tied_embeddings


def test_shared_kv_heads_narrow_embeddings_and_packaged_models_are_counted():
    bigcode = GPT2 | {"model_type": "gpt_bigcode"}
    falcon = without(LLAMA_8B, "num_key_value_heads", "intermediate_size", model_type="falcon")

    assert ModelSpec.from_config(bigcode).num_kv_heads == 1
    assert ModelSpec.from_config(bigcode | {"multi_query": False}).num_kv_heads == 12
    assert ModelSpec.from_config(falcon | {"num_kv_heads": 32}).num_kv_heads == 1
    newer = falcon | {"num_kv_heads": 8, "new_decoder_architecture": True}
    assert ModelSpec.from_config(newer).num_kv_heads == 8

    # OPT-350M: embeddings of 512, hidden 1024. Published: 331 million parameters
    config = {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 512, "ffn_dim": 4096}
    config |= {"num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 50_272}
    model = ModelSpec.from_config(config | {"max_position_embeddings": 2048})
    assert model.num_parameters == pytest.approx(331_196_416, rel=0.01)

    folder = Path(str(resources.files("quire") / "assets" / "quire-tiny"))
    with (folder / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(length))
    stored = sum(math.prod(t["shape"]) for name, t in tensors.items() if name != "__metadata__")
    assert ModelSpec.from_config(read_config(folder)).num_parameters == stored


WINDOWED = (
    *("gemma2", "gemma3_text", "cohere2", "gpt_oss", "olmo3", "vaultgemma", "mistral", "qwen2"),
    *("gemma3n_text", "gemma4_text", "gemma4_unified_text", "mimo_v2_flash"),
)


@pytest.mark.parametrize("kind", WINDOWED)
def test_default_windows_equal_those_of_transformers(kind):
    reference = AutoConfig.for_model(kind)
    config = without(reference.to_dict(), "layer_types", "sliding_window")
    sliding, all_layers = "sliding_attention", reference.num_hidden_layers
    kinds = getattr(reference, "layer_types", None) or [sliding] * all_layers
    window = reference.sliding_window
    assert windows(config) == [window if kind == sliding else None for kind in kinds]


OMITTED = ("gemma3n_text", "gemma4_text", "gemma4_unified_text", "llama4_text", "mimo_v2_flash")


LATENTS = (
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3"),
    *("mistral4", "sarvam_mla", "youtu"),
)


@pytest.mark.parametrize("kind", [kind for kind in LATENTS if kind != "deepseek_v2"])
def test_every_missing_key_of_latent_attention_has_the_default_of_transformers(kind):
    config = AutoConfig.for_model(kind).to_dict()
    found = ModelSpec.from_config({"model_type": "whole", "text_config": {"model_type": kind}})

    assert found == ModelSpec.from_config(config)
    latent = found.heads[0].latent
    assert (found.head_dim, found.value_dim) == (config["qk_rope_head_dim"], config["kv_lora_rank"])
    dims = {"key_dim": config["qk_nope_head_dim"], "value_dim": config["v_head_dim"]}
    assert latent == LatentSpec(**dims, query_rank=config["q_lora_rank"])


def test_deepseek_v2_has_the_defaults_of_transformers_except_experts_per_token():
    config = AutoConfig.for_model("deepseek_v2").to_dict() | {"num_experts_per_tok": 6}

    found = ModelSpec.from_config({"model_type": "deepseek_v2", "num_experts_per_tok": 6})
    assert found == ModelSpec.from_config(config)
    with pytest.raises(ModelError, match="num_experts_per_tok"):
        ModelSpec.from_config({"model_type": "deepseek_v2"})


_SMALL_LATENT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48}
_SMALL_LATENT |= {"moe_intermediate_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
_SMALL_LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_SMALL_LATENT |= {"kv_lora_rank": 20, "q_lora_rank": 12, "qk_rope_head_dim": 6}
_SMALL_LATENT |= {"qk_nope_head_dim": 10, "v_head_dim": 14, "num_hidden_layers": 4}
_LONGCAT = {"ffn_hidden_size": 40, "expert_ffn_hidden_size": 8, "moe_topk": 2, "num_layers": 3}


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"q_lora_rank": None}])
@pytest.mark.parametrize("kind", LATENTS)
def test_latent_layers_and_parameters_equal_those_of_transformers(kind, changes):
    small = _SMALL_LATENT | changes
    if kind in ("minicpm3", "youtu"):
        small = without(small, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
    if "q_lora_rank" in changes and kind in ("axk1", "longcat_flash"):
        pytest.skip("queries are always compressed")
    if kind == "longcat_flash":
        small = without(small, "num_hidden_layers", **_LONGCAT)
    config = AutoConfig.for_model(kind, **deepcopy(small))
    model, num_parameters = built(config, AutoModel)
    found = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    written = written_of(config)
    check_sizes(written)
    spec = ModelSpec.from_config(written)

    assert spec == ModelSpec.from_config({**small, "model_type": kind})
    head = 0 if spec.tied_embeddings else spec.embedding_parameters
    assert spec.num_parameters - head == num_parameters
    assert [module.layer_idx for module in found] == list(range(spec.num_layers))
    assert len(model.layers) == spec.decoder_layers
    for module, heads in zip(found, spec.heads, strict=True):
        assert module.kv_a_proj_with_mqa.out_features == heads.values_per_token == 26
        assert module.o_proj.in_features == heads.query_heads * heads.projected_dims[1] == 4 * 14
        assert heads.latent is not None
        assert heads.latent.query_rank == module.q_lora_rank
        assert heads.projected_dims[0] == module.qk_head_dim


_INDEX = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
_INDEX |= {"index_topk": 7, "index_n_heads": 3, "index_head_dim": 10}
_INDEX |= {"max_position_embeddings": 512, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LISTED = {"indexer_types": ["full", "shared", "shared", "full"]}
_SLIDING = {"layer_types": ["sliding_attention", "indexed_attention"] * 2, "sliding_window": 9}


@pytest.mark.parametrize(
    "kind", ["axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"]
)
def test_missing_keys_of_an_index_have_the_defaults_of_transformers(kind):
    names = ("index_topk", "index_n_heads", "index_head_dim")
    small = without(_SMALL_LATENT | _INDEX | _SLIDING, *names)
    spec = ModelSpec.from_config({**small, "model_type": kind})
    index = next(heads.index for heads in spec.heads if heads.index)
    config = AutoConfig.for_model(kind)
    assert [index.topk, index.heads, index.dim] == [getattr(config, name) for name in names]


@pytest.mark.parametrize(
    ("kind", "changes", "is_exact"),
    [
        ("deepseek_v32", {}, True),
        ("deepseek_v32", {"attention_bias": True}, True),
        ("glm_moe_dsa", {}, True),
        ("glm_moe_dsa", _LISTED, True),
        ("glm_moe_dsa", {"index_topk_pattern": "FFSF"}, True),
        ("glm_moe_dsa", {"index_topk_freq": 3, "index_skip_topk_offset": 1}, True),
        ("axk2", {}, False),  # gates are not counted
        ("hy_v4", {}, False),
        ("hy_v4", _LISTED, False),
        ("dots3_note_text", _SLIDING | {"swa_kv_lora_rank": 24, "swa_head_dim": 16}, False),
    ],
)
def test_indexes_of_layers_equal_those_of_transformers(kind, changes, is_exact):
    """Each layer: 26 elements, 10 more with an index; the first of dots3 has a larger latent."""
    small = _SMALL_LATENT | _INDEX | changes
    if kind == "dots3_note_text":
        small |= {"swa_qk_nope_head_dim": 12}
    config = AutoConfig.for_model(kind, **deepcopy(small))
    model, num_parameters = built(config, AutoModel)
    spec = ModelSpec.from_config(written_of(config))

    if kind != "dots3_note_text":  # it stores what it derives from the keys of its windows
        assert spec == ModelSpec.from_config({**small, "model_type": kind})
    attentions = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    for module, heads, layer in zip(attentions, spec.heads, spec.layers, strict=True):
        assert heads.values_per_token - heads.index_dim == module.kv_a_proj_with_mqa.out_features
        assert heads.index_dim == (0 if module.indexer is None else module.indexer.head_dim)
        slides = getattr(module, "sliding_window", None)
        assert layer.window == slides
        assert (heads.index is None) == (slides is not None)
        assert heads.index is None or heads.index.topk == 7
    assert spec.num_parameters == num_parameters + spec.embedding_parameters or not is_exact


@pytest.mark.parametrize("kind", OMITTED)
def test_every_missing_key_has_the_default_of_transformers(kind):
    """A nested config is published without the keys that have the values of its class."""
    config = AutoConfig.for_model(kind)
    found = ModelSpec.from_config({"model_type": "whole", "text_config": {"model_type": kind}})

    assert found == ModelSpec.from_config(config.to_dict())
    kinds = {"sliding_attention": "window", "chunked_attention": "chunk"}
    for layer, kind_of_layer in zip(found.layers, config.layer_types, strict=True):
        own = kinds.get(kind_of_layer)
        assert (layer.window is not None) == (own == "window")
        assert (layer.chunk is not None) == (own == "chunk")


_GLOBAL = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
_SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
_LISTED_LLAMA = {"moe_layers": [1, 2, 7], "no_rope_layers": [1, 0] * 6, "attention_bias": True}
_LISTED_MIMO = {"mlp_layer_types": ["sparse", "dense"] * 6, "sliding_window_size": 7}
_LISTED_MIMO |= {"num_key_value_heads": 1, "attention_bias": True, "n_routed_experts": 6}
KINDS = {
    "gemma3n": ("gemma3n_text", {"num_kv_shared_layers": 4, "altup_num_inputs": 3}),
    "gemma3n_sizes": (
        "gemma3n_text",
        {"num_kv_shared_layers": 0, "intermediate_size": [40, 48] * 6, "attention_bias": True},
    ),
    "gemma4": ("gemma4_text", {"num_kv_shared_layers": 5, "use_double_wide_mlp": True}),
    "gemma4_one_projection": ("gemma4_text", {**_GLOBAL, "hidden_size_per_layer_input": 0}),
    "gemma4_ungated_heads": ("gemma4_text", _GLOBAL | {"attention_k_eq_v": False}),
    "gemma4_experts": ("gemma4_text", _EXPERTS | {"moe_intermediate_size": 8}),
    "gemma4_last_layer": ("gemma4_text", {"layer_types": ["sliding_attention"] * 12}),
    "gemma4_unified": ("gemma4_unified_text", {**_GLOBAL, "num_kv_shared_layers": 5}),
    "llama4": ("llama4_text", {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 80}),
    "llama4_listed": ("llama4_text", _LISTED_LLAMA | {"attention_chunk_size": 64}),
    "llama4_full": ("llama4_text", {"attention_chunk_size": None}),
    "mimo": ("mimo_v2_flash", {"v_head_dim": 8, "moe_intermediate_size": 8}),
    "mimo_listed": ("mimo_v2_flash", _LISTED_MIMO),
}


_PARTIAL = {"rope_type": "proportional", "rope_theta": 1e6}


@pytest.mark.parametrize(
    "rope",
    [
        None,  # of the family: a quarter
        *(_PARTIAL | {"partial_rotary_factor": factor} for factor in (0.25, 0.3, 0.02, 1.0)),
        _PARTIAL,
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    ],
)
@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_unified_text"])
def test_keys_of_values_are_stored_as_far_as_rope_rotates_them(kind, rope):
    """All of a key if RoPE rotates all of it, or nothing: it is then not a value times a weight."""
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    ropes = {} if rope is None else {"sliding_attention": sliding, "full_attention": rope}
    changes = {**_GLOBAL, "hidden_size_per_layer_input": 0}
    changes |= {"rope_parameters": ropes} if ropes else {}
    config = AutoConfig.for_model(kind, **deepcopy(_SMALL | changes))
    model = AutoModelForCausalLM.from_config(config)
    rotated = 2 * int(model.model.rotary_emb.full_attention_inv_freq.count_nonzero())
    found = ModelSpec.from_config(_SMALL | changes | {"model_type": kind})

    assert found == ModelSpec.from_config(config.to_dict())
    for layer, heads in enumerate(found.heads):
        if config.layer_types[layer] == "full_attention":
            is_joined = 0 < rotated < 32
            assert (heads.key_dim, heads.value_dim) == (rotated if is_joined else 32, 32)
            assert (heads.latent is not None) == is_joined
    elements = [layer for layer, heads in enumerate(found.heads) if heads.latent is not None]
    assert [*tied_heads(model)] == elements
    assert all(len(heads.rotated) == rotated for heads in tied_heads(model).values())


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_unequal_kinds_equal_those_of_transformers(name):
    """Heads, windows, chunks and sources of each layer, and the exact number of parameters."""
    kind, changes = KINDS[name]
    config = AutoConfig.for_model(kind, **deepcopy(_SMALL | changes))
    model, num_parameters = built(config)
    written = written_of(config, kind)
    check_sizes(written)
    spec = ModelSpec.from_config(written)

    assert spec.num_parameters == num_parameters
    assert spec == ModelSpec.from_config(_SMALL | changes | {"model_type": kind})
    modes = getattr(config, "kv_sharing_modes", [None] * 12)
    for layer, (found, heads) in enumerate(zip(spec.layers, spec.heads, strict=True)):
        attention = model.model.layers[layer].self_attn
        own, layer_type = config.per_layer_config[layer], config.layer_types[layer]
        twice = 2 if kind == "mimo_v2_flash" and layer_type == "sliding_attention" else 1
        key_dim = heads.projected_dims[0]
        counts = own.num_attention_heads, own.num_key_value_heads * twice
        assert (heads.query_heads, heads.kv_heads) == counts
        assert key_dim == own.head_dim
        assert heads.value_dim == getattr(own, "v_head_dim", own.head_dim)
        assert attention.q_proj.out_features == heads.query_heads * key_dim
        assert attention.o_proj.in_features == heads.query_heads * heads.value_dim
        if modes[layer] == "reuse":
            stores = [i for i, mode in enumerate(modes) if mode == "store"]
            assert found.source in [i for i in stores if config.layer_types[i] == layer_type]
        else:
            assert found.source is None
            assert attention.k_proj.out_features == heads.kv_heads * key_dim
        sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
        size = getattr(config, sizes[layer_type]) if layer_type in sizes else None
        assert (found.window or found.chunk) == size
        assert (found.chunk is not None) == (layer_type == "chunked_attention")
        assert found.keys_from_values == bool(
            getattr(config, "attention_k_eq_v", False) and layer_type == "full_attention"
        )
        if found.keys_from_values:  # a quarter of a key is rotated, and stored beside its value
            assert heads.values_per_token == heads.kv_heads * (own.head_dim + own.head_dim // 4)


def test_embeddings_of_layers_are_looked_up():
    """A row of 3 layers x 4 numbers for each of 50 tokens; the output embedding is a product."""
    config = _SMALL | {"model_type": "gemma4_text", "num_hidden_layers": 3, "global_head_dim": 16}
    config |= {"vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 4}
    model = ModelSpec.from_config(config)
    without_rows = ModelSpec.from_config(config | {"hidden_size_per_layer_input": 0})

    assert model.lookup_parameters == 50 * 3 * 4
    # two projections and a norm in each layer; one projection and a norm for all
    of_layers = 3 * (2 * 32 * 4 + 32) + 32 * 3 * 4 + 4
    assert model.num_parameters - without_rows.num_parameters == 50 * 3 * 4 + of_layers


HYBRIDS = (
    *("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "jamba", "kimi_linear", "lara_mini"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lfm2", "lfm2_moe"),
    *("lfm3", "bailing_hybrid", "mamba", "mamba2", "falcon_mamba", "zamba", "zamba2", "zaya"),
    "minimax",
)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_states_and_parameters_of_hybrids_equal_those_of_transformers(kind):
    config = config_of(kind)
    written = written_of(config, kind)
    check_sizes(written)
    spec, of_states = (
        ModelSpec.from_config(written),
        {"linear_attention", "conv", "mamba", "hybrid"},
    )

    assert spec.num_parameters == built(config)[1]
    for layer, of_layer in zip(spec.layers, config.layer_types, strict=True):
        assert (layer.state is not None) == (of_layer in of_states)
        attends = of_layer.endswith("attention") and of_layer != "linear_attention"
        assert layer.attends == (attends or of_layer == "hybrid")


def test_states_that_the_model_cannot_have_are_refused():
    for kind, keys, message in (
        ("qwen3_next", {"linear_num_value_heads": 33}, "=33 is not a multiple of linear_num_key"),
        ("mamba2", {"num_heads": 3}, "num_heads=3 of head_dim=.* channels, expected expand"),
    ):
        written = written_of(config_of(kind)) | {"model_type": kind}
        with pytest.raises(ConfigError, match=message):
            ModelSpec.from_config(written | keys)


@pytest.mark.parametrize("kind", ["zamba", "zamba2"])
def test_shared_blocks_count_once(kind):
    tiny = config_of(kind)
    keys = without(tiny.to_dict(), "layer_types", "hybrid_layer_ids", "model_type") | {
        "layers_block_type": [*tiny.layers_block_type, "hybrid"],
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "num_mem_blocks": 2 if kind == "zamba2" else 1,
    }
    config = AutoConfig.for_model(kind, **keys)
    assert ModelSpec.from_config(written_of(config)).num_parameters == built(config)[1]


@pytest.mark.parametrize(
    ("kind", "keys", "attending"),
    [
        ("qwen3_next", {"full_attention_interval": 3}, [2]),
        ("lfm2", {"full_attn_idxs": [0, 3]}, [0, 3]),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [2, 4]}}, [1, 3]),
        ("nemotron_h", {"hybrid_override_pattern": "M*E-"}, [1]),
    ],
)
def test_layers_of_published_hybrids_have_other_keys(kind, keys, attending):
    """Transformers turns these keys into `layer_types` when it reads a config."""
    written = written_of(config_of(kind))
    written = without(written, "layer_types", "layers_block_type", "mlp_layer_types", **keys)
    written |= {"model_type": kind, "num_hidden_layers": 4}
    spec = ModelSpec.from_config(written)
    assert [n for n, layer in enumerate(spec.layers) if layer.attends] == attending


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "gpt2", "opt", "gemma", "falcon"])
def test_default_tied_embeddings_equal_those_of_transformers(kind):
    config, key = AutoConfig.for_model(kind).to_dict(), "tie_word_embeddings"
    assert ModelSpec.from_config(without(config, key)).tied_embeddings == config[key]


FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "phi", "phi3", "phimoe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
    "gpt_oss", "opt", "bloom", "falcon", "mpt", "cohere", "cohere2", "stablelm", "starcoder2",
    "olmo2", "olmoe", "granite", "granitemoe", "smollm3", "ernie4_5_moe", "apertus1p5_text",
    "diffllama", "jetmoe",
)  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameter_count_is_within_one_percent_of_the_model(kind):
    config = AutoConfig.for_model(kind)
    layers = "num_layers" if kind == "gpt_neo" else "num_hidden_layers"
    if kind != "gpt_neo":  # fewer layers build faster; its layer list must have the full length
        setattr(config, layers, 4)
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:4]
    expected = pytest.approx(built(config)[1], rel=0.01)
    assert ModelSpec.from_config(config.to_dict()).num_parameters == expected


def test_parameter_counts_of_known_models_equal_the_published_ones():
    """Llama 3 8B: 8,030,261,248; 70B: 70,553,706,496; Mixtral 8x7B: 46.7e9, 12.9e9 active."""
    big = LLAMA_8B | {"hidden_size": 8192, "intermediate_size": 28_672}
    big |= {"num_hidden_layers": 80, "num_attention_heads": 64}
    mixtral = LLAMA_8B | {"model_type": "mixtral", "vocab_size": 32_000}
    mixtral |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    assert ModelSpec.from_config(LLAMA_8B).num_parameters == 8_030_261_248
    assert ModelSpec.from_config(big).num_parameters == 70_553_706_496
    assert ModelSpec.from_config(mixtral).num_parameters == 46_702_792_704
    assert ModelSpec.from_config(mixtral).num_active_parameters == pytest.approx(12.9e9, rel=0.01)


@pytest.mark.parametrize("name", [n for n in zoo.ARCHITECTURES if n not in zoo.REPEATED])
def test_parameter_count_includes_biases_and_norms(name):
    model = zoo.build(name)

    spec = ModelSpec.from_config(model.config.to_dict())

    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_experts_are_counted_in_sparse_layers_only():
    """Layers 1, 3 of 4 have 4 experts of width 10 and a shared part of 6; layers 0, 2 are dense.

    MLP values = 3 * 8 * (2 * (4 * 10 + 6) + 2 * 20) + 2 * 8 * 4 (router) = 24 * 132 + 64 = 3232.
    """
    config = {"model_type": "qwen2_moe", "hidden_size": 8, "intermediate_size": 20}
    config |= {"moe_intermediate_size": 10, "shared_expert_intermediate_size": 6, "vocab_size": 5}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
    config |= {"num_hidden_layers": 4, "num_attention_heads": 2, "max_position_embeddings": 16}
    model = ModelSpec.from_config(config)
    rest = 4 * (4 * 8 * 8 + 2 * 8 + 3 * 8) + 2 * 5 * 8 + 8  # attention, norms, QKV biases
    assert model.num_parameters == 3232 + rest
    assert model.num_parameters - model.num_active_parameters == 2 * 2 * (3 * 8 * 10)


def test_layers_hold_the_part_of_tokens_that_windows_and_chunks_see():
    """2 KV heads of 4, K and V, 2 bytes: 32 B per token and layer; 100 tokens: 100 + 10 + 100."""
    model = small_spec(None, 10, None, head_dim=4)
    assert model.kv_bytes(100, 2) == 32 * (100 + 10 + 100)
    assert model.kv_bytes(7, 2) == 7 * model.kv_bytes_per_token(2) == 7 * 96
    assert model.kv_bytes(3, 0.5) == 3 * 24
    assert model.kv_bytes(0, 2) == 0
    assert model.weight_bytes(2) == 2 * model.num_parameters
    with pytest.raises(ConfigError, match="0 or more, got -1"):
        model.kv_bytes(-1, 2)

    # tokens of the chunk; of the window; none, but a step reads them. 32 B a token and layer
    model = small_spec(
        *(LayerSpec(chunk=16), LayerSpec(window=10), None),
        *(LayerSpec(source=2), LayerSpec(window=10, source=1)),
        num_kv_heads=1,
    )

    assert model.kv_layers == 3
    assert model.kv_bytes(100, 2) == 32 * (4 + 10 + 100)
    assert model.kv_bytes(96, 2) == 32 * (16 + 10 + 96)
    assert model.kv_bytes(100, 2, read_in_step=True) == 32 * (4 + 10 + 100 + 100 + 10)
    assert model.kv_bytes_per_token(2) == 3 * 32

    # two layers of 40 elements; 16 tokens are selected, by index keys of 16 of the first one
    model = CACHE_KINDS["indexed"]
    assert model.kv_bytes(100, 2) == 2 * 100 * (40 + 16 + 40)
    assert model.kv_bytes(100, 2, read_in_step=True) == 2 * (16 * 40 + 100 * 16 + 16 * 40)
    assert model.kv_bytes(9, 2, read_in_step=True) == 2 * 9 * (40 + 16 + 40)


@pytest.mark.parametrize("key", [*LLAMA_8B][:5] + [*LLAMA_8B][6:8])
def test_missing_config_key_is_named(key):
    with pytest.raises(ModelError, match=key):
        ModelSpec.from_config(without(LLAMA_8B, key))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "4096"}, "'hidden_size' is '4096'"),
        ({"hidden_size": -1}, "'hidden_size' is -1"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads=5"),
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, "add 'head_dim'"),
        ({"layer_types": ["full_attention"]}, "1 layers, but the model has 32"),
        ({"layer_types": ["sliding_attention"] * 32}, "no 'sliding_window'"),
        (MIXED | {"sliding_window": 0}, "'sliding_window' is 0, expected an integer of 1 or more"),
        ({"num_local_experts": 8}, "no 'num_experts_per_tok'"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers=32, but layer 0"),
        ({"num_kv_shared_layers": 40}, "num_kv_shared_layers=40, but layer 0"),
        ({"mlp_layer_types": ["dense"], "num_experts": 8} | _TOP, "'mlp_layer_types' has 1 ent"),
        ({"moe_layers": [1.5], "num_experts": 8} | _TOP, "'moe_layers' is"),
        ({"intermediate_size": [64] * 31}, "'intermediate_size' is"),
        ({"intermediate_size": [0] * 32}, "'intermediate_size' is"),
        ({"per_layer_config": {"x": {}}}, "'per_layer_config' is"),
        ({"per_layer_config": {"3": 5}}, "'per_layer_config' is"),
        ({"per_layer_config": {"03": {"num_key_value_heads": 3}}}, "layer 3 has num_attention_"),
        ({"per_layer_config": {"3": {"head_dim": 0}}}, "'head_dim' is 0"),
        ({"attention_chunk_size": 64, "no_rope_layers": [1]}, "'no_rope_layers' has 1 entries"),
        ({"layer_types": ["chunked_attention"] * 32}, "no 'attention_chunk_size'"),
        ({"kv_lora_rank": 512}, "no 'qk_rope_head_dim'"),
    ],
)
def test_invalid_config_value_is_rejected_with_its_name(change, message):
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_config(LLAMA_8B | change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"type_vocab_size": 2}, "is an encoder"),
        ({"per_layer_config": {"1": {"skip": ["mlp"]}}}, "layer 1 has its own 'skip'"),
        ({"layer_types": ["linear_attention"] * 32}, "shape of their recurrent states"),
        ({"layer_types": ["lightning"] * 32}, "a layer of type 'lightning'"),
        (AutoConfig.for_model("bert").to_dict(), "is an encoder"),
        (AutoConfig.for_model("t5").to_dict(), "has an encoder"),
    ],
)
def test_models_without_plain_kv_are_rejected_with_the_reason(change, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        ModelSpec.from_config(LLAMA_8B | change)


def test_spec_folder_and_dtype_are_validated(tmp_path):
    good = ModelSpec.from_config(LLAMA_8B)
    fields = {f.name: getattr(good, f.name) for f in dataclasses.fields(good) if f.init}

    with pytest.raises(ConfigError, match="expected 32 layers, got 1"):
        ModelSpec(**(fields | {"layers": (LayerSpec(),)}))
    with pytest.raises(ConfigError, match="num_heads=32"):
        ModelSpec(**(fields | {"num_kv_heads": 5}))
    with pytest.raises(ModelError, match="no such folder"):
        read_config(tmp_path / "nowhere")

    assert dtype_bytes("float32") == 4
    assert dtype_bytes("torch.bfloat16") == 2
    with pytest.raises(UnknownName, match="did you mean"):
        dtype_bytes("floot16")
