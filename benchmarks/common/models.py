"""Models with random weights, for speed measurements only."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from quire.layout.model import ModelSpec
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel, make_decoder
from quire.models.weights import weight_bytes
from quire.offload.weights.placement import WithinBudget

_CPU = torch.device("cpu")
_SLACK_BYTES = 1 << 16


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


def llama(
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int = 8_192,
    **more: Any,
) -> LlamaConfig:
    """A Llama of this shape whose embeddings and head are not tied; `more`: further fields."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        **more,
    )


def _latent() -> DeepseekV3Config:
    """The 125M shape with latent attention in place of its 12 heads and 4 KV heads; no experts."""
    return DeepseekV3Config(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2_048,
        num_hidden_layers=12,
        first_k_dense_replace=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        kv_lora_rank=256,
        q_lora_rank=None,
        max_position_embeddings=8_192,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
    )


_OF_125M: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2_048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8_192,
    "tie_word_embeddings": False,
}


def _gated_delta_rule() -> Qwen3NextConfig:
    """The 125M shape with the gated delta rule in three of four layers; no experts."""
    return Qwen3NextConfig(
        **_OF_125M,
        head_dim=64,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        mlp_only_layers=list(range(12)),
    )


def _mamba_2() -> BambaConfig:
    """The 125M shape with Mamba 2 in three of four layers."""
    return BambaConfig(
        **_OF_125M,
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=128,
        attn_layer_indices=[3, 7, 11],
    )


SHAPES: Mapping[str, Callable[[], LlamaConfig]] = {
    # TinyLlama
    "1100m": partial(llama, 32_000, 2_048, 5_632, layers=22, heads=32, kv_heads=4),
    # the reference shape of the throughput benchmark
    "125m": partial(llama, 32_000, 768, 2_048, layers=12, heads=12, kv_heads=4),
    "15m": partial(llama, 16_000, 256, 1_024, layers=7, heads=4, kv_heads=2),
    # steps dominated by weight reads
    "wide": partial(llama, 4_000, 512, 2_048, layers=4, heads=8, kv_heads=2, context=16_384),
    # slow long prompts
    "small": partial(llama, 4_000, 256, 512, layers=4, heads=8, kv_heads=4),
    # quick trials
    "tiny": partial(llama, 500, 64, 128, layers=2, heads=4, kv_heads=2, context=1_024),
}
"""Shapes of models with random weights."""

ALL_SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    **SHAPES,
    "125m-latent": _latent,
    "125m-hybrid": _gated_delta_rule,
    "125m-mamba2": _mamba_2,
}
"""Also those of other families."""


def llama_of(spec: ModelSpec, context: int) -> LlamaConfig:
    """A Llama with the shape of a given model and a context of at least `context` tokens."""
    return llama(
        spec.vocab_size,
        spec.hidden_size,
        spec.intermediate_size,
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        context=max(context, spec.max_positions),
        head_dim=spec.head_dim,
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
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device = _CPU,
    impl: str = "transformers",
    codec: str = "auto",
    offloads: bool = False,
) -> LoadedModel:
    """A random model of this shape, without a tokenizer.

    Args:
        config: the shape.
        dtype: type of the weights.
        seed: seed of the weights.
        device: device of the model.
        impl: as in `load_model`.
        codec: as in `load_model`.
        offloads: whether the weights of all layers are offloaded.
    """
    model = random_weights(config, dtype=dtype, seed=seed, device=device)
    num_bytes, weights = weight_bytes(model), None
    if offloads:
        layers = model.model.layers
        layer_bytes = sum(p.numel() * p.element_size() for p in layers.parameters())
        slot_bytes = -(-2 * layer_bytes // len(layers)) + _SLACK_BYTES
        _, weights = WithinBudget(num_bytes - layer_bytes + slot_bytes).place(model, device)
    decoder = make_decoder(model, weights, impl=impl, codec=codec)
    return LoadedModel(
        decoder=decoder,
        tokenizer=None,
        generation=GenerationDefaults(),
        spec=decoder.spec,
        name="random weights",
        weight_bytes=num_bytes,
        weights=weights,
    )
