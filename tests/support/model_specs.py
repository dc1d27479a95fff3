"""Model specs of a few small layers, and configs in the shape of public models."""

from typing import Any

from quire.layout.model import HeadShape, IndexSpec, LatentSpec, LayerSpec, ModelSpec, StateSpec


def small_spec(*layers: int | LayerSpec | None, **shape: Any) -> ModelSpec:
    """A spec of these layers; a number is a window in tokens, None is full attention.

    Args:
        layers: attention of each layer.
        shape: fields of the spec that differ from 4 query heads and 2 KV heads of 8 elements.
    """
    defaults: dict[str, Any] = {
        "architecture": "llama",
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "vocab_size": 128,
        "max_positions": 1000,
        "tied_embeddings": False,
        "gated_mlp": True,
    }
    specs = tuple(x if isinstance(x, LayerSpec) else LayerSpec(window=x) for x in layers)
    return ModelSpec(num_layers=len(specs), layers=specs, **defaults | shape)


def _indexed(**index: int) -> HeadShape:
    """Latents of 32 + 8 elements, of which an index selects 16."""
    own = IndexSpec(topk=16, **index)
    latent = LatentSpec(key_dim=12, value_dim=16, query_rank=24, index=own)
    return HeadShape(query_heads=4, kv_heads=1, key_dim=8, value_dim=32, latent=latent)


_WIDE = HeadShape(query_heads=4, kv_heads=1, key_dim=32, value_dim=32)
_OF_VALUES = HeadShape(
    query_heads=4,
    kv_heads=2,
    key_dim=8,
    value_dim=32,
    latent=LatentSpec(key_dim=24, value_dim=32, is_value=True),
)
_STATE = StateSpec(conv=(8, 3), recurrent=(2, 4, 4), parameters=100)
CACHE_KINDS: dict[str, ModelSpec] = {
    "unequal": small_spec(None, 8, None, value_dim=4),
    "by_layer": small_spec(8, 8, LayerSpec(heads=_WIDE)),
    "shared": small_spec(
        *(8, None, LayerSpec(heads=_WIDE), LayerSpec(window=8, source=0)),
        *(LayerSpec(source=1), LayerSpec(source=1), LayerSpec(source=2, heads=_WIDE)),
    ),
    "keys_of_values": small_spec(
        8, LayerSpec(heads=_OF_VALUES, keys_from_values=True), LayerSpec(attends=False)
    ),
    "state": small_spec(None, LayerSpec(attends=False, state=_STATE), LayerSpec(state=_STATE)),
    "state_alone": small_spec(*[LayerSpec(attends=False, state=_STATE)] * 2),
    "chunked": small_spec(LayerSpec(chunk=32), LayerSpec(chunk=32), None),
    "latent": small_spec(
        *(None, None),
        num_kv_heads=1,
        head_dim=8,
        value_dim=32,
        latent=LatentSpec(key_dim=12, value_dim=16, query_rank=24),
    ),
    "indexed": small_spec(
        *(LayerSpec(heads=_indexed(heads=2, dim=16)), LayerSpec(heads=_indexed())),
        num_kv_heads=1,
        head_dim=8,
        value_dim=32,
        latent=LatentSpec(key_dim=12, value_dim=16, query_rank=24),
    ),
}
"""Small specs with the kinds of caches that ordinary models do not have."""

PUBLIC_SHAPES: dict[str, dict[str, Any]] = {
    # 4 sliding layers and one with full attention, of wider heads; the last 20 read KV
    "gemma-4-e2b": {
        "model_type": "gemma4",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
    },
    # layers with full attention have fewer and wider heads, and one projection of keys and values
    "gemma-4-31b": {
        "model_type": "gemma4",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262_144,
            "sliding_window": 1024,
        },
    },
    # chunks of 8,192 tokens, every fourth layer has full attention without RoPE
    "llama-4-scout": {
        "model_type": "llama4",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "llama4_text",
            "interleave_moe_layer_step": 1,
            "max_position_embeddings": 10_485_760,
            "no_rope_layers": [],
        },
    },
    # one latent of 512 and a rotated part of 64 for 128 heads of 192 (keys) and 128 (values)
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163_840,
        "tie_word_embeddings": False,
    },
    "deepseek-v3.2": {},
    # keys of 192 and values of 128; windows have 8 KV heads, full attention 4
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash",
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
}
"""config.json of models whose layers differ, as published or shorter."""
# the same with an index key of 128, whose 64 queries select 2,048 tokens
PUBLIC_SHAPES["deepseek-v3.2"] |= PUBLIC_SHAPES["deepseek-v3"] | {
    "model_type": "deepseek_v32",
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
