"""Model specs of a few small layers, and configs in the shape of public models."""

from typing import Any

from quire.layout.model import HeadShape, IndexSpec, LatentSpec, LayerSpec, ModelSpec, StateSpec


def small_spec(*layers: int | LayerSpec | None, **shape: Any) -> ModelSpec:
    """A spec of these layers (a number is a window) with 4 query and 2 KV heads of 8 elements."""
    defaults: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    defaults |= {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
    defaults |= {"architecture": "llama", "max_positions": 1000}
    defaults |= {"tied_embeddings": False, "gated_mlp": True}
    specs = tuple(x if isinstance(x, LayerSpec) else LayerSpec(window=x) for x in layers)
    return ModelSpec(num_layers=len(specs), layers=specs, **defaults | shape)


def _indexed(**index: int) -> LayerSpec:
    """Latents of 32 + 8 elements, of which an index selects 16."""
    own = IndexSpec(topk=16, **index)
    latent = LatentSpec(key_dim=12, value_dim=16, query_rank=24, index=own)
    shape = HeadShape(query_heads=4, kv_heads=1, key_dim=8, value_dim=32, latent=latent)
    return LayerSpec(heads=shape)


_WIDE = HeadShape(query_heads=4, kv_heads=1, key_dim=32, value_dim=32)
_VALUES = LatentSpec(key_dim=24, value_dim=32, is_value=True)
_OF_VALUES = HeadShape(query_heads=4, kv_heads=2, key_dim=8, value_dim=32, latent=_VALUES)
_STATE = StateSpec(conv=(8, 3), recurrent=(2, 4, 4), parameters=100)
_LATENT: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 8, "value_dim": 32}
_LATENT["latent"] = LatentSpec(key_dim=12, value_dim=16, query_rank=24)
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
    "latent": small_spec(None, None, **_LATENT),
    "indexed": small_spec(_indexed(heads=2, dim=16), _indexed(), **_LATENT),
}
"""Small specs with the kinds of caches that ordinary models do not have."""

_GEMMA_4 = {"model_type": "gemma4_text"}
_SMALL_GEMMA = _GEMMA_4 | {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35}
_SMALL_GEMMA |= {"num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True}
_SMALL_GEMMA |= {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7}
_LARGE_GEMMA = _GEMMA_4 | {
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_hidden_layers": 60,
}
_LARGE_GEMMA |= {"num_attention_heads": 32, "num_key_value_heads": 16, "sliding_window": 1024}
_LARGE_GEMMA |= {"num_global_key_value_heads": 4, "global_head_dim": 512, "attention_k_eq_v": True}
_LARGE_GEMMA |= {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144}
_SCOUT = {"model_type": "llama4_text", "interleave_moe_layer_step": 1, "no_rope_layers": []}
_V3 = {"vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432}
_V3 |= {"moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128}
_V3 |= {"num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256}
_V3 |= {"num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1}
_V3 |= {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
_V3 |= {"v_head_dim": 128, "num_nextn_predict_layers": 1, "max_position_embeddings": 163_840}
_V3 |= {"torch_dtype": "bfloat16", "tie_word_embeddings": False}
_MIMO = {"hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64}
_MIMO |= {"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "sliding_window": 128}
_MIMO |= {"sliding_window_size": 128, "n_routed_experts": 256, "num_experts_per_tok": 8}


def _with_text(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": model_type, "torch_dtype": "bfloat16", "text_config": text}


PUBLIC_SHAPES: dict[str, dict[str, Any]] = {
    # 4 sliding layers and one with full attention, of wider heads; the last 20 read KV
    "gemma-4-e2b": _with_text("gemma4", _SMALL_GEMMA),
    # layers with full attention have fewer and wider heads, and one projection of keys and values
    "gemma-4-31b": _with_text("gemma4", _LARGE_GEMMA),
    # chunks of 8,192 tokens, every fourth layer has full attention without RoPE
    "llama-4-scout": _with_text("llama4", _SCOUT | {"max_position_embeddings": 10_485_760}),
    # one latent of 512 and a rotated part of 64 for 128 heads of 192 (keys) and 128 (values)
    "deepseek-v3": {"model_type": "deepseek_v3", **_V3},
    # the same with an index key of 128, whose 64 queries select 2,048 tokens
    "deepseek-v3.2": _V3
    | {
        "model_type": "deepseek_v32",
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
    },
    # keys of 192 and values of 128; windows have 8 KV heads, full attention 4
    "mimo-v2-flash": {"model_type": "mimo_v2_flash", "torch_dtype": "bfloat16", **_MIMO},
}
"""config.json of models whose layers differ, as published or shorter."""
