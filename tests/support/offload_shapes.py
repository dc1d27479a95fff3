"""Shapes of the models used in offloading examples, from their public configurations."""

from quire.layout.model import ModelSpec


def opt(hidden: int, layers: int, heads: int) -> ModelSpec:
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes = {"ffn_dim": 4 * hidden, "vocab_size": 50_272, "max_position_embeddings": 2048}
    return ModelSpec.from_config({"model_type": "opt", **shape, **sizes})


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, kind: str = "llama"
) -> ModelSpec:
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": 14_336}
    sizes = {"vocab_size": 128_256, "max_position_embeddings": 131_072}
    return ModelSpec.from_config({"model_type": kind, **shape, **sizes})


OPT_6_7B, OPT_13B, OPT_30B = opt(4096, 32, 32), opt(5120, 40, 40), opt(7168, 48, 56)
LLAMA_2_7B = llama(4096, 32, 32, 32, 128)
LLAMA_3_8B = llama(4096, 32, 32, 8, 128)
LLAMA_3_2_1B = llama(2048, 16, 32, 8, 64)
QWEN_3_0_6B = llama(1024, 28, 16, 8, 128, kind="qwen3")
QWEN_3_1_7B = llama(2048, 28, 16, 8, 128, kind="qwen3")
QWEN_2_5_0_5B = llama(896, 24, 14, 2, 64, kind="qwen2")
PHI_3_MINI = llama(3072, 32, 32, 32, 96)
