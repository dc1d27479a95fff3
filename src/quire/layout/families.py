"""Defaults that a `model_type` implies for keys missing in its config.json. Data only.

The values are those of the configuration classes of Transformers; a test compares both.
"""

from collections.abc import Mapping

_GEMMA3: Mapping[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}

DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "bloom": {"seq_length": 2048},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"max_position_embeddings": 2048, "multi_query": True},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt_bigcode": {"multi_query": True},
    "gpt_neo": {"window_size": 256},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {"use_sliding_window": False},
    "smollm3": {"use_sliding_window": False},
    "vaultgemma": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
}
"""Values of missing keys, by model type."""

TIED_BY_DEFAULT = frozenset(
    {
        "biogpt", "bloom", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon", "gemma",
        "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neo", "granite_swa", "mpt",
        "openai-gpt", "opt", "smollm3", "starcoder2", "vaultgemma", "xglm",
    }
)  # fmt: skip
"""Families whose `tie_word_embeddings` is true by default."""

UNGATED = frozenset(
    {
        "apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "fuyu", "gpt2", "gpt_bigcode",
        "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "jais2", "mpt", "nanochat", "nemotron",
        "openai-gpt", "opt", "persimmon", "phi", "starcoder2", "xglm",
    }
)  # fmt: skip
"""Families whose MLP has no gate; the default of its width is 4 * hidden size."""

LEARNED_POSITIONS: Mapping[str, int] = {
    "biogpt": 2,
    "gpt2": 0,
    "gpt_bigcode": 0,
    "gpt_neo": 0,
    "openai-gpt": 0,
    "opt": 2,
}
"""Families with learned position embeddings, and the rows of the table beyond the context."""

WINDOW_IGNORED = frozenset({"llama"})
"""Families whose attention ignores `sliding_window`."""

REFUSED: Mapping[str, str] = {
    "kv_lora_rank": "its attention caches a latent, not keys and values per head",
    "v_head_dim": "its keys and values have different head dims",
    "global_head_dim": "its layers have different head dims",
    "num_global_key_value_heads": "its layers have different head counts",
    "per_layer_config": "its layers have different shapes",
    "num_kv_shared_layers": "some of its layers use the keys and values of other layers",
    "cross_attention_layers": "it has cross-attention layers",
    "attention_chunk_size": "its attention is chunked, which is not a sliding window",
    "is_encoder_decoder": "it has an encoder",
    "type_vocab_size": "it is an encoder",
    "conv_L_cache": "it mixes attention with convolutions",
    "block_configs": "its layers have different head counts",
    "layers_block_type": "it mixes attention with recurrent layers",
    "hybrid_override_pattern": "it mixes attention with recurrent layers",
    "attn_layer_period": "it mixes attention with recurrent layers",
    "mamba_d_state": "it mixes attention with recurrent layers",
    "linear_num_key_heads": "it mixes attention with recurrent layers",
    "state_size": "it is recurrent and has no keys and values",
}
"""Keys that, if set, mean that KV is not layers x heads x tokens, with the reason."""
