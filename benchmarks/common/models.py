"""Models with random weights, for speed measurements only."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from quire.layout.model import ModelSpec
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel
from quire.models.native.select import make_decoder
from quire.models.weights import weight_bytes

_CPU = torch.device("cpu")


def _spec(model_type: str, hidden: int, layers: int, heads: int, **more: Any) -> ModelSpec:
    return ModelSpec.from_config(
        {
            "model_type": model_type,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            **more,
        }
    )


OPT_6_7B = _spec(
    "opt", 4096, 32, 32, ffn_dim=16_384, vocab_size=50_272, max_position_embeddings=2048
)
LLAMA_3_8B = _spec(
    "llama",
    4096,
    32,
    32,
    num_key_value_heads=8,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_position_embeddings=8192,
)


def llama_125m() -> LlamaConfig:
    """The reference shape of the throughput bench: 12 layers of 768, 12 heads over 4 KV heads."""
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
    )


def llama_15m() -> LlamaConfig:
    """A shape of 15M parameters: 7 layers of 256, 4 heads over 2 KV heads."""
    return LlamaConfig(
        vocab_size=16_000,
        hidden_size=256,
        intermediate_size=1_024,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
    )


def llama_1100m() -> LlamaConfig:
    """The shape of TinyLlama, 1.1B parameters: 22 layers of 2,048, 32 heads over 4 KV heads."""
    return LlamaConfig(
        vocab_size=32_000,
        hidden_size=2_048,
        intermediate_size=5_632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
    )


def llama_tiny() -> LlamaConfig:
    """A shape for quick trials: 2 layers of 64, 4 heads over 2 KV heads."""
    return LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1_024,
        tie_word_embeddings=False,
    )


def llama_small() -> LlamaConfig:
    """A shape with slow long prompts: 4 layers of 256, 8 heads over 4 KV heads."""
    return LlamaConfig(
        vocab_size=4_000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=8_192,
        tie_word_embeddings=False,
    )


def llama_wide() -> LlamaConfig:
    """A shape with steps dominated by weight reads: 4 layers of 512, 8 heads over 2 KV heads."""
    return LlamaConfig(
        vocab_size=4_000,
        hidden_size=512,
        intermediate_size=2_048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
    )


def llama_of(spec: ModelSpec, context: int) -> LlamaConfig:
    """A Llama with the shape of a given model and a context of at least `context` tokens."""
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=max(context, spec.max_positions),
        tie_word_embeddings=False,
    )


def random_weights(
    config: PreTrainedConfig, *, dtype: torch.dtype, seed: int = 0, device: torch.device = _CPU
) -> PreTrainedModel:
    """A Transformers model of this shape; the same seed, dtype and device give the same weights."""
    seeded = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=seeded), device:
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="sdpa"
        )
    torch.nn.Module.eval(model)
    return model


def random_model(
    config: LlamaConfig,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device = _CPU,
    impl: str = "transformers",
    codec: str = "auto",
) -> LoadedModel:
    """A random model of this shape, without a tokenizer; `impl` and `codec` as in `load_model`."""
    model = random_weights(config, dtype=dtype, seed=seed, device=device)
    decoder = make_decoder(model, None, impl=impl, codec=codec)
    return LoadedModel(
        decoder=decoder,
        tokenizer=None,
        generation=GenerationDefaults(),
        spec=decoder.spec,
        name="random llama",
        weight_bytes=weight_bytes(model),
    )
