"""A tiny random model of any decoder type of Transformers, made from the type's config class.

The attributes of a default config name what a type has: sizes of the same meaning get the same
small value in all types. Matrices are drawn from N(0, 0.3): with Transformers' own initialisation
attention is nearly uniform, and equal tokens would prove nothing.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""All types that the installed Transformers has a causal language model for."""

STD = 0.3
VOCAB_SIZE, MAX_POSITIONS = 128, 512
WINDOW_TOKENS = 32
LAYERS_OF_A_KIND = 2

_SAME: Mapping[int, str] = {
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input",
    64: "hidden_size n_embd n_embed d_model word_embed_proj_dim local_attention lru_width "
    "attention_chunk_size floor_scale",
    96: "intermediate_size ffn_dim n_inner dff dim_ff intermediate_size_mlp "
    "dense_intermediate_size prefix_dense_intermediate_size",
    48: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "expert_ffn_hidden_size ffn_hidden_size",
    32: "kv_lora_rank sliding_window window_size sliding_window_size attention_window_size "
    "o_lora_rank",
    24: "q_lora_rank",
    16: "head_dim dim_head swa_head_dim v_head_dim qk_nope_head_dim index_topk index_head_dim "
    "index_n_heads hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim "
    "mamba_d_head mamba_head_dim attention_head_dim",
    8: "qk_rope_head_dim rotary_dim laurel_rank chunk_size mamba_chunk_size state_size "
    "mamba_d_state ssm_state_size time_step_rank index_block_size",
    4: "num_attention_heads n_head n_heads num_heads attention_heads swa_num_attention_heads "
    "num_local_experts num_experts n_routed_experts moe_num_experts linear_num_value_heads "
    "mamba_num_heads linear_conv_kernel_dim mamba_d_conv conv_kernel",
    2: "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_experts_per_tok "
    "num_experts_per_token moe_k moe_topk moe_top_k top_k_experts max_window_layers "
    "linear_num_key_heads zero_expert_num no_rope_layer_interval attn_layer_period n_groups "
    "mamba_n_groups mamba_ngroups",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group "
    "first_k_dense_replace moe_layer_start_index num_dense_layers attn_layer_offset",
    MAX_POSITIONS: "max_position_embeddings n_positions max_seq_len n_ctx seq_length "
    "max_sequence_length model_max_length",
}
SIZES: Mapping[str, int] = {name: value for value, names in _SAME.items() for name in names.split()}
"""Values of attributes, in all types."""

_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_KINDS = ("layer_types", "mlp_layer_types")
_NORMS = (
    *(f"{part}{norm}.weight" for part in "qk" for norm in ("_norm", "_layernorm")),
    "qk_norm.temp",
)
_LEFT_UNSET = frozenset(
    {
        *("sliding_window", "window_size", "q_lora_rank", "o_lora_rank", "kv_lora_rank"),
        *("v_head_dim", "index_topk", "n_inner", "chunk_size", "time_step_rank", "ffn_hidden_size"),
        *("local_attention", "attention_chunk_size"),
    }
)
"""Attributes that stay None where the type's default is None: then it does not have the feature."""

_ALTERNATING = ["sliding_attention", "full_attention"]
_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
_HYBRID: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
}
_MAMBA: Mapping[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_expand": 2}
OWN: Mapping[str, Mapping[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            "sliding_attention": {**_ROPE, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
        "layer_types": _ALTERNATING * 2,
        "num_hidden_layers": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4, **_MAMBA},
    "granitemoehybrid": {**_HYBRID, **_MAMBA},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
        "moe_shared_expert_intermediate_size": 48,
        "time_step_min": 1e-30,  # a bound in Transformers' scan, which its decode ignores
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "n_mamba_heads": 4,
        "adapter_rank": 8,
        "time_step_min": 1e-30,
    },
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 8,
    },
    "jamba": {"num_hidden_layers": 4, "mamba_dt_rank": 8},
    "zaya": {"num_hidden_layers": 4, "num_experts_per_tok": 1, "router_hidden_size": 16},
    "mamba2": {"num_heads": 4, "head_dim": 32, "chunk_size": 8},
    "kimi_linear": {**_HYBRID, "linear_num_heads": 4, "linear_head_dim": 16},
    "bailing_hybrid": {**_HYBRID, "n_group": 1, "topk_group": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0}},
    "falcon": {"new_decoder_architecture": True},
    "gemma3n_text": {
        "num_hidden_layers": 8,
        "layer_types": _ALTERNATING * 4,
        "num_kv_shared_layers": 4,
        "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 6,
    },
    "gemma4_text": {
        "num_hidden_layers": 8,
        "layer_types": _ALTERNATING * 4,
        "num_kv_shared_layers": 4,
        "global_head_dim": 32,
        "enable_moe_block": True,
    },
    "gemma4_unified_text": {
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
    },
    "glm_moe_dsa": {
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "laguna": {
        "num_hidden_layers": 4,
        "layer_types": _ALTERNATING * 2,
        "num_attention_heads_per_layer": [8, 4] * 2,
    },
    "llama4_text": {"num_hidden_layers": 4},
    "mimo_v2_flash": {"head_dim": 24},
    "persimmon": {"hidden_act": "gelu"},  # squares of its own would hide attention
    "smollm3": {"num_hidden_layers": 4},
}
"""Values of single types: layers that share, heads of unequal width, and lists by layer."""


def config_of(model_type: str) -> PreTrainedConfig:
    """The config of a tiny model, with at least two layers of each kind that the type has."""
    made = CONFIG_MAPPING[model_type]
    default = made()
    values = _small(default)
    fields = {name.removeprefix("_") for name in vars(default)} | values.keys()
    kinds = {name: _distinct(getattr(default, name, None)) for name in _KINDS if name in fields}
    num_layers = LAYERS_OF_A_KIND * max([1, *map(len, kinds.values())])
    if getattr(default, "use_sliding_window", None) is not None:
        values |= {"use_sliding_window": True, "sliding_window": WINDOW_TOKENS}
        num_layers = 2 * LAYERS_OF_A_KIND
        kinds.pop("layer_types", None)
    values |= {name: num_layers for name in _COUNTS if name in fields}
    values |= {"tie_word_embeddings": False}
    if values.get("kv_lora_rank"):  # latent attention: RoPE has the width of the rotated parts
        values |= {"head_dim": SIZES["qk_rope_head_dim"]} if "head_dim" in values else {}
        values |= {"num_key_value_heads": SIZES["num_attention_heads"]}
    own = OWN.get(model_type, {})
    if "no_rope_layer_interval" not in fields:
        for name, found in kinds.items():
            if len(found) > 1:
                values[name] = list(_spread(found, num_layers, turns=name == "layer_types"))
    return made(**values | dict(own))


def _small(default: PreTrainedConfig) -> dict[str, Any]:
    """Small values for the attributes that a config has; nested configs as dictionaries."""
    mapped = getattr(default, "attribute_map", {})
    values: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            values[name] = {**value.to_dict(), **_small(value)}
        elif name in SIZES and name not in mapped:
            if value is not None or name not in _LEFT_UNSET:
                values[name] = SIZES[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            values[name] = value if value < VOCAB_SIZE else 1
    return values


def _distinct(kinds: object) -> list[str]:
    return list(dict.fromkeys(kinds)) if isinstance(kinds, list | tuple) else []


def _spread(kinds: list[str], count: int, *, turns: bool) -> Iterator[str]:
    """Kinds in turn, full attention last; or one after the other, so that two lists combine."""
    ordered = sorted(kinds, key=lambda kind: kind == "full_attention")
    for layer in range(count):
        yield ordered[layer % len(kinds) if turns else layer * len(kinds) // count]


def build(model_type: str, seed: int = 0, *, max_positions: int | None = None) -> PreTrainedModel:
    """A tiny model in float32, in eval mode, with Transformers' eager attention."""
    config = copy.deepcopy(config_of(model_type))
    if max_positions is not None:
        config.max_position_embeddings = max_positions
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        draw(model)
    return model.eval()


@torch.no_grad()
def draw(model: PreTrainedModel) -> None:
    """Draw matrices; move vectors (biases, gains, sinks) from their neutral values.

    Normalized queries and keys get larger gains, or attention would be nearly uniform.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=STD)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=STD)
        if name.endswith(_NORMS):
            parameter.mul_(3)
