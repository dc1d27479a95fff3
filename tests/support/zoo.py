"""Tiny random models of many architectures, float32, built in milliseconds, no network.

Two layers (four if sliding windows and full attention alternate), hidden size 32 to 64, 128 tokens.
Weights are larger than a fresh model's, so that greedy tokens vary and attention is not uniform.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    CTRLConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    DiffLlamaConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GPTNeoXJapaneseConfig,
    GptOssConfig,
    GraniteConfig,
    JambaConfig,
    JetMoeConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OpenAIGPTConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    StableLmConfig,
    XGLMConfig,
    YoutuConfig,
)

VOCAB_SIZE = 128
WINDOW_TOKENS = 8  # of every model here that has a sliding window
CHUNK_TOKENS = 16  # of the model with chunked attention
MAX_POSITIONS = 512
LONGROPE_SHORT_TOKENS = 24  # longest request of phi3_longrope that keeps the short frequencies

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def _llama() -> PreTrainedConfig:
    return LlamaConfig(**_SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def _llama_mqa() -> PreTrainedConfig:
    return LlamaConfig(**_SHAPE | {"num_key_value_heads": 1}, tie_word_embeddings=True)


def _llama_mha() -> PreTrainedConfig:
    return LlamaConfig(**_SHAPE | {"num_key_value_heads": 4}, attention_bias=True)


def _mistral() -> PreTrainedConfig:
    return MistralConfig(**_SHAPE, head_dim=8, sliding_window=WINDOW_TOKENS)


def _qwen2() -> PreTrainedConfig:
    return Qwen2Config(**_SHAPE)


def _qwen2_window() -> PreTrainedConfig:
    return Qwen2Config(
        **_SHAPE | {"num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=WINDOW_TOKENS,
        max_window_layers=2,
    )


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(**_SHAPE, head_dim=16)


def _phi3() -> PreTrainedConfig:
    return Phi3Config(**_SHAPE, sliding_window=None)


def _phi3_longrope(window: int | None = None) -> PreTrainedConfig:
    half = 4  # rotary pairs of a head of 8
    return Phi3Config(
        **_SHAPE,
        sliding_window=window,
        original_max_position_embeddings=LONGROPE_SHORT_TOKENS,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * pair for pair in range(half)],
            "long_factor": [2.0 + pair for pair in range(half)],
            "original_max_position_embeddings": LONGROPE_SHORT_TOKENS,
        },
    )


def _gemma2() -> PreTrainedConfig:
    return Gemma2Config(
        **_SHAPE | {"num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=WINDOW_TOKENS,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
        tie_word_embeddings=False,
    )


def _gemma3() -> PreTrainedConfig:
    return Gemma3TextConfig(
        **_SHAPE | {"num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
    )


def _opt() -> PreTrainedConfig:
    return OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        word_embed_proj_dim=32,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        tie_word_embeddings=False,
    )


def _gpt2(*, scale_by_layer: bool = False) -> PreTrainedConfig:
    return GPT2Config(
        scale_attn_by_inverse_layer_idx=scale_by_layer,
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=MAX_POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )


def _gpt_neox() -> PreTrainedConfig:
    shape = {name: value for name, value in _SHAPE.items() if name != "num_key_value_heads"}
    return GPTNeoXConfig(
        **shape,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    )


def _olmo2() -> PreTrainedConfig:
    return Olmo2Config(**_SHAPE)


def _granite() -> PreTrainedConfig:
    return GraniteConfig(
        **_SHAPE,
        attention_multiplier=0.2,
        logits_scaling=3.0,
        residual_multiplier=0.5,
        embedding_multiplier=2.0,
    )


def _stablelm() -> PreTrainedConfig:
    return StableLmConfig(**_SHAPE)


def _mixtral() -> PreTrainedConfig:
    return MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(
        **_SHAPE,
        head_dim=16,
        sliding_window=WINDOW_TOKENS,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "original_max_position_embeddings": MAX_POSITIONS // 32,
        },
    )


_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}


def _kinds(times: int, shared: int = 0) -> dict[str, object]:
    kinds = ["sliding_attention", "full_attention"] * (2 * times + shared // 2)
    return _SHAPE | {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": WINDOW_TOKENS,
        "tie_word_embeddings": False,
    }


def _gemma3n(times: int) -> PreTrainedConfig:
    """The last layer of each kind reads the keys and values of the one before."""
    return Gemma3nTextConfig(
        **_kinds(times, shared=2),
        **_PER_LAYER,
        head_dim=16,
        num_kv_shared_layers=2,
        laurel_rank=16,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.5, *[0.0] * (4 * times + 1)],
    )


def _gemma4(times: int, *, shared: int = 2) -> PreTrainedConfig:
    """Heads of unequal dims; the last layer of each kind reads the layer before."""
    return Gemma4TextConfig(
        **_kinds(times, shared),
        **_PER_LAYER,
        head_dim=8,
        global_head_dim=16,
        num_kv_shared_layers=shared,
    )


def _gemma4_unified(times: int) -> PreTrainedConfig:
    """Unequal dims and KV heads; the values of full attention are its keys before their norm."""
    return Gemma4UnifiedTextConfig(
        **_kinds(times),
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=5.0,
    )


def _llama4(times: int) -> PreTrainedConfig:
    """Chunks with RoPE, full attention without it, whose queries grow with their positions."""
    return Llama4TextConfig(
        **_SHAPE | {"num_hidden_layers": 4 * times},
        head_dim=8,
        intermediate_size_mlp=48,
        attention_chunk_size=CHUNK_TOKENS,
        no_rope_layers=[1, 0] * 2 * times,
        floor_scale=4,
        attn_scale=0.3,
        moe_layers=list(range(1, 4 * times, 4)),
        num_local_experts=4,
    )


REPEATED: dict[str, Callable[[int], PreTrainedConfig]] = {
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_apart": partial(_gemma4, shared=0),
    "gemma4_unified": _gemma4_unified,
    "llama4": _llama4,
}
"""Architectures whose configs list their layers: functions of how often these are repeated."""


def _mimo_v2_flash() -> PreTrainedConfig:
    """Keys of 48 elements, values of 32; windows with twice the KV heads, and with sinks."""
    return MiMoV2FlashConfig(
        **_SHAPE,
        head_dim=48,
        v_head_dim=32,
        sliding_window=WINDOW_TOKENS,
        layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "sparse"],
        moe_intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )


_LATENT = _SHAPE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
}
_INDEX = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 12}  # fewer than prompts have
_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _deepseek_v3(**options: object) -> PreTrainedConfig:
    """YaRN whose factor scales the products too."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    yarn |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": MAX_POSITIONS // 4}
    return DeepseekV3Config(**_LATENT | _EXPERTS | {"rope_parameters": yarn} | options)


def _glm_moe_dsa(mlp: str) -> PreTrainedConfig:
    types = {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", mlp]}
    return GlmMoeDsaConfig(**_LATENT | _EXPERTS | _INDEX | types)


def _longcat_flash() -> PreTrainedConfig:
    experts = {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2}
    shape = {name: size for name, size in _LATENT.items() if name != "num_hidden_layers"}
    return LongcatFlashConfig(
        **shape | experts,
        num_layers=1,
        head_dim=_LATENT["qk_rope_head_dim"],
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
    )


def _qwen3_5() -> PreTrainedConfig:
    """Half of the layers are recurrent: a gated delta rule after a convolution."""
    state = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4}
    state |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = ["linear_attention", "full_attention"] * 2
    shape = _SHAPE | {"num_hidden_layers": 4, "head_dim": 16}
    return Qwen3_5TextConfig(**shape, **state, layer_types=kinds)


# one latent per token and layer, for all heads
LATENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3_halves": lambda: _deepseek_v3(rope_interleave=False, attention_bias=True),
    "deepseek_v2": lambda: DeepseekV2Config(**_LATENT | _EXPERTS | {"q_lora_rank": None}),
    "minicpm3": lambda: MiniCPM3Config(**_LATENT),
    "youtu": lambda: YoutuConfig(**_LATENT),
    "longcat_flash": _longcat_flash,
    "deepseek_v32": lambda: DeepseekV32Config(**_LATENT | _EXPERTS | _INDEX),
    "glm_moe_dsa": lambda: _glm_moe_dsa("sparse"),
    "glm_moe_dsa_dense": lambda: _glm_moe_dsa("dense"),
}

_MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# layers with a recurrent state, and with attention: gated delta rule, convolution, Mamba 2 and 1
HYBRID: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_5": _qwen3_5,
    "qwen3_next": lambda: Qwen3NextConfig(
        **_SHAPE | _DELTA,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "lfm2": lambda: Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention"]),
    "bamba": lambda: BambaConfig(
        **_SHAPE | _MAMBA, mamba_n_heads=4, mamba_d_head=16, attn_layer_indices=[1]
    ),
    "jamba": lambda: JambaConfig(
        **_SHAPE | _MAMBA, attn_layer_period=2, attn_layer_offset=1, num_experts=4
    ),
}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "llama_mqa": _llama_mqa,
    "llama_mha": _llama_mha,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2_window": _qwen2_window,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "phi3_longrope": _phi3_longrope,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "olmo2": _olmo2,
    "granite": _granite,
    "stablelm": _stablelm,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "mimo_v2_flash": _mimo_v2_flash,
    **{name: partial(REPEATED[name], 1) for name in REPEATED if name != "gemma4_apart"},
    "deepseek_v3": _deepseek_v3,
}


_WIDE = _SHAPE | {"hidden_size": 64, "intermediate_size": 80, "num_key_value_heads": 1}


def _wide_llama() -> PreTrainedConfig:
    return LlamaConfig(**_WIDE)


def _wide_llama_tied() -> PreTrainedConfig:
    return LlamaConfig(**_WIDE, attention_bias=True, tie_word_embeddings=True)


def _wide_mistral() -> PreTrainedConfig:
    return MistralConfig(**_WIDE, head_dim=32, sliding_window=WINDOW_TOKENS)


def _wide_qwen2() -> PreTrainedConfig:
    return Qwen2Config(
        **_WIDE | {"num_hidden_layers": 4, "num_key_value_heads": 2},
        use_sliding_window=True,
        sliding_window=WINDOW_TOKENS,
        max_window_layers=2,
    )


def _wide_qwen3() -> PreTrainedConfig:
    return Qwen3Config(**_WIDE, head_dim=16)


def _wide_phi3() -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Phi3Config(**_WIDE | {"hidden_size": 128}, sliding_window=None, rope_parameters=rope)


# vectors of 16 elements: the native decoder supports them
NATIVE: dict[str, Callable[[], PreTrainedConfig]] = {
    "wide_llama": _wide_llama,
    "wide_llama_tied": _wide_llama_tied,
    "wide_mistral": _wide_mistral,
    "wide_qwen2": _wide_qwen2,
    "wide_qwen3": _wide_qwen3,
    "wide_phi3": _wide_phi3,
}


def _old(kind: type[PreTrainedConfig], **options: object) -> PreTrainedConfig:
    """A config of a family whose attention is computed inside its modules."""
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    return kind(**{"vocab_size": VOCAB_SIZE, **ids, **options})


def _falcon(*, alibi: bool) -> PreTrainedConfig:
    return _old(
        FalconConfig,
        hidden_size=48 if alibi else 64,
        num_hidden_layers=2,
        num_attention_heads=6 if alibi else 4,
        num_kv_heads=6 if alibi else 2,
        alibi=alibi,
        new_decoder_architecture=not alibi,
        multi_query=not alibi,
        max_position_embeddings=MAX_POSITIONS,
    )


_POSITIONS = {"max_position_embeddings": MAX_POSITIONS}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}
# attention inside the modules of the model; six heads have slopes that are no powers of one number
OWN_ATTENTION: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": lambda: _old(
        BloomConfig, hidden_size=48, n_layer=2, n_head=6, seq_length=MAX_POSITIONS
    ),
    "mpt": lambda: _old(
        MptConfig,
        d_model=64,
        n_layers=2,
        n_heads=4,
        max_seq_len=MAX_POSITIONS,
        attn_config={"clip_qkv": 0.7, "softmax_scale": 0.3},
        use_cache=True,
    ),
    "falcon": lambda: _falcon(alibi=False),
    "falcon_alibi": lambda: _falcon(alibi=True),
    "gpt_neo": lambda: _old(
        GPTNeoConfig,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW_TOKENS,
        **_POSITIONS,
    ),
    "gpt_neox_japanese": lambda: _old(
        GPTNeoXJapaneseConfig,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        **_POSITIONS,
    ),
    "openai_gpt": lambda: _old(OpenAIGPTConfig, **_GPT),
    "xglm": lambda: _old(
        XGLMConfig, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, **_POSITIONS
    ),
    "ctrl": lambda: _old(CTRLConfig, dff=48, **_GPT),
    "diffllama": lambda: DiffLlamaConfig(**_SHAPE),
    "jetmoe": lambda: _old(
        JetMoeConfig,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        kv_channels=8,
        intermediate_size=48,
        num_local_experts=4,
        **_POSITIONS,
    ),
    "phimoe": lambda: PhimoeConfig(**_SHAPE, num_local_experts=4),
}


# further forms of architectures above
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2_scale_by_layer": lambda: _gpt2(scale_by_layer=True),
    "phi3_longrope_window": lambda: _phi3_longrope(WINDOW_TOKENS),
}


def build(
    name: str, seed: int = 0, *, times: int = 1, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build a tiny model from a seed, in eval mode, with Transformers' eager attention.

    Its layers are repeated `times` times.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in REPEATED:
            config = REPEATED[name](times)
        else:
            config = (ARCHITECTURES | LATENT | HYBRID | NATIVE | OWN_ATTENTION | OTHERS)[name]()
            config.num_hidden_layers *= times
            for kinds in ("layer_types", "mlp_layer_types", "indexer_types"):
                if vars(config).get(kinds):  # a property follows from other keys
                    setattr(config, kinds, list(getattr(config, kinds)) * times)
        model = AutoModelForCausalLM.from_config(
            # Falcon's eager attention adds ALiBi twice
            config,
            attn_implementation="sdpa" if name == "falcon_alibi" else "eager",
            dtype=torch.float32,
        )
        _draw_weights(model)
    return model.to(dtype).eval()


def save(name: str, folder: str | Path, seed: int = 0, **options: object) -> Path:
    """Write `build(name, seed)` in Hugging Face format; options go to save_pretrained."""
    build(name, seed).save_pretrained(folder, **options)
    return Path(folder)


def tiny_llama(*, tied: bool, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A Llama with biases and weights as Transformers draws them, in half precision."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@torch.no_grad()
def _draw_weights(model: PreTrainedModel) -> None:
    # Matrices keep the size of their input (std 1.5 / sqrt(fan_in)); embeddings are small, or the
    # residual stream would repeat the last token for ever; vectors (biases, sinks, gains) move away
    # from their neutral values, so that dropping one of them would be seen.
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is not head_weight(model):
            module.weight.mul_(0.3)


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """The weight of the LM head, [vocab, hidden]."""
    return model.get_output_embeddings().weight
