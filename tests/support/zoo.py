"""Tiny random models of many architectures, float32, built in milliseconds, no network.

Two layers (four if sliding windows and full attention alternate), hidden size 32 to 64, 128 tokens.
Weights are larger than a fresh model's, so that greedy tokens vary and attention is not uniform.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB_SIZE = 128
WINDOW_TOKENS = 8  # of every model here that has a sliding window
CHUNK_TOKENS = 16  # of the model with chunked attention
MAX_POSITIONS = 512
LONGROPE_SHORT_TOKENS = 24  # longest request of phi3_longrope that keeps the short frequencies

_SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48}
_SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_SHAPE |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_SHAPE |= {"max_position_embeddings": MAX_POSITIONS}


def _of(kind: str, shape: dict = _SHAPE, **options: object) -> Callable[[], PreTrainedConfig]:
    return lambda: AutoConfig.for_model(kind, **deepcopy(shape | options))


def _kinds(first: str, second: str = "full_attention", times: int = 1) -> dict[str, object]:
    return {"layer_types": [first, second] * times, "num_hidden_layers": 2 * times}


def _rope(kind: str = "default", **options: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


_SLIDING = {"sliding_window": WINDOW_TOKENS}
_UNTIED = {"tie_word_embeddings": False}


def _phi3_longrope(window: int | None = None) -> Callable[[], PreTrainedConfig]:
    """Rotary pairs of a head of 8."""
    original = {"original_max_position_embeddings": LONGROPE_SHORT_TOKENS}
    short, long = [1.0 + 0.1 * pair for pair in range(4)], [2.0 + pair for pair in range(4)]
    rope = _rope("longrope", short_factor=short, long_factor=long, **original)
    return _of("phi3", sliding_window=window, **original, **rope)


_PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}


def _windows(times: int, shared: int = 0) -> dict[str, object]:
    kinds = _kinds("sliding_attention", times=2 * times + shared // 2)
    return _SHAPE | kinds | _SLIDING | _UNTIED


def _gemma3n(times: int) -> PreTrainedConfig:
    """The last layer of each kind reads the keys and values of the one before."""
    sparsity = [0.5, *[0.0] * (4 * times + 1)]
    options = {"head_dim": 16, "laurel_rank": 16, "altup_num_inputs": 2}
    shape = _windows(times, shared=2) | _PER_LAYER | options | {"num_kv_shared_layers": 2}
    return _of("gemma3n_text", shape, activation_sparsity_pattern=sparsity)()


def _gemma4(times: int, *, shared: int = 2) -> PreTrainedConfig:
    """Heads of unequal dims; the last layer of each kind reads the layer before."""
    heads = {"head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": shared}
    return _of("gemma4_text", _windows(times, shared) | _PER_LAYER, **heads)()


def _gemma4_unified(times: int) -> PreTrainedConfig:
    """Unequal dims and KV heads; the values of full attention are its keys before their norm."""
    heads = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1}
    options = {"attention_k_eq_v": True, "final_logit_softcapping": 5.0}
    return _of("gemma4_unified_text", _windows(times), **heads, **options)()


def _llama4(times: int) -> PreTrainedConfig:
    """Chunks with RoPE, full attention without it, whose queries grow with their positions."""
    layers = {"num_hidden_layers": 4 * times, "no_rope_layers": [1, 0] * 2 * times}
    experts = {"moe_layers": list(range(1, 4 * times, 4)), "num_local_experts": 4}
    attention = {"attention_chunk_size": CHUNK_TOKENS, "floor_scale": 4, "attn_scale": 0.3}
    sizes = {"head_dim": 8, "intermediate_size_mlp": 48}
    return _of("llama4_text", **sizes, **layers, **experts, **attention)()


REPEATED: dict[str, Callable[[int], PreTrainedConfig]] = {
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "gemma4_apart": partial(_gemma4, shared=0),
    "gemma4_unified": _gemma4_unified,
    "llama4": _llama4,
}
"""Architectures whose configs list their layers: functions of how often these are repeated."""

_LATENT = _SHAPE | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}
_LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12}
_INDEX = {"index_topk": 8, "index_n_heads": 16, "index_head_dim": 12}  # fewer than prompts have
_TOP2 = {"num_experts_per_tok": 2}
_EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "first_k_dense_replace": 1, **_TOP2}
_EXPERTS |= {"n_group": 1, "topk_group": 1}
_SCALES = {"mscale": 1.0, "mscale_all_dim": 1.0}  # the factor of YaRN scales the products too
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=MAX_POSITIONS // 4, **_SCALES)
_V3 = _LATENT | _EXPERTS | _YARN
_DSA = _LATENT | _EXPERTS | _INDEX | {"indexer_types": ["full", "shared"]}
_LONGCAT = {name: size for name, size in _LATENT.items() if name != "num_hidden_layers"}
_LONGCAT |= {"moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "num_layers": 1}

# one latent per token and layer, for all heads
LATENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v3": _of("deepseek_v3", _V3),
    "deepseek_v3_halves": _of("deepseek_v3", _V3, rope_interleave=False, attention_bias=True),
    "deepseek_v2": _of("deepseek_v2", _LATENT | _EXPERTS, q_lora_rank=None),
    "minicpm3": _of("minicpm3", _LATENT),
    "youtu": _of("youtu", _LATENT),
    "longcat_flash": _of(
        "longcat_flash", _LONGCAT, head_dim=8, ffn_hidden_size=48, expert_ffn_hidden_size=16
    ),
    "deepseek_v32": _of("deepseek_v32", _LATENT | _EXPERTS | _INDEX),
    "glm_moe_dsa": _of("glm_moe_dsa", _DSA, mlp_layer_types=["dense", "sparse"]),
    "glm_moe_dsa_dense": _of("glm_moe_dsa", _DSA, mlp_layer_types=["dense", "dense"]),
}

_MAMBA = _SHAPE | {"mamba_d_state": 8, "mamba_d_conv": 4}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
_NEXT = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_QWEN3_5 = _SHAPE | _DELTA | {"linear_conv_kernel_dim": 4}

# layers with a recurrent state, and with attention: gated delta rule, convolution, Mamba 2 and 1
HYBRID: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_5": _of("qwen3_5_text", _QWEN3_5, **_kinds("linear_attention", times=2)),
    "qwen3_next": _of("qwen3_next", **_DELTA, **_NEXT, **_TOP2, **_kinds("linear_attention")),
    "lfm2": _of("lfm2", **_kinds("conv")),
    "bamba": _of("bamba", _MAMBA, mamba_n_heads=4, mamba_d_head=16, attn_layer_indices=[1]),
    "jamba": _of("jamba", _MAMBA, attn_layer_period=2, attn_layer_offset=1, num_experts=4),
}

_IDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}
_GPT2 = _IDS | _GPT | _UNTIED
_POSITIONS = {"max_position_embeddings": MAX_POSITIONS}
_OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "hidden_size": 32, **_POSITIONS, **_UNTIED}
_OPT |= {"num_hidden_layers": 2, "num_attention_heads": 4}
_NEOX = {name: value for name, value in _SHAPE.items() if name != "num_key_value_heads"}
_MAX_WINDOW = {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 4}
_SCALED = {"attention_multiplier": 0.2, "logits_scaling": 3.0, "residual_multiplier": 0.5}
_GEMMA = {"head_dim": 16, "num_hidden_layers": 4, **_SLIDING, **_UNTIED}
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
_OSS = {"head_dim": 16, "num_local_experts": 4, **_TOP2, **_SLIDING}
# keys of 48 elements, values of 32; windows with twice the KV heads, and with sinks
_MIMO = {"head_dim": 48, "v_head_dim": 32, "mlp_layer_types": ["sparse", "sparse"], **_SLIDING}
_MIMO |= {"moe_intermediate_size": 48, "n_routed_experts": 4, **_TOP2}

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _of("llama", **_rope()),
    "llama_mqa": _of("llama", num_key_value_heads=1, tie_word_embeddings=True),
    "llama_mha": _of("llama", num_key_value_heads=4, attention_bias=True),
    "mistral": _of("mistral", head_dim=8, **_SLIDING),
    "qwen2": _of("qwen2"),
    "qwen2_window": _of("qwen2", **_MAX_WINDOW, **_SLIDING),
    "qwen3": _of("qwen3", head_dim=16),
    "phi3": _of("phi3", sliding_window=None),
    "phi3_longrope": _phi3_longrope(),
    "gemma2": _of("gemma2", **_GEMMA, **_CAPS, query_pre_attn_scalar=12),
    "gemma3": _of(
        "gemma3_text",
        _SHAPE | _GEMMA,
        query_pre_attn_scalar=16,
        **_kinds("sliding_attention", times=2),
    ),
    "opt": _of("opt", _IDS | _OPT, pad_token_id=None),
    "gpt2": _of("gpt2", _GPT2),
    "gpt_neox": _of("gpt_neox", _NEOX, **_rope(partial_rotary_factor=0.25)),
    "olmo2": _of("olmo2"),
    "granite": _of("granite", **_SCALED, embedding_multiplier=2.0),
    "stablelm": _of("stablelm"),
    "mixtral": _of("mixtral", num_local_experts=4, sliding_window=None, **_TOP2),
    "gpt_oss": _of(
        *("gpt_oss", _SHAPE | _OSS | _kinds("sliding_attention")),
        **_rope("yarn", factor=32.0, original_max_position_embeddings=MAX_POSITIONS // 32),
    ),
    "mimo_v2_flash": _of(
        *("mimo_v2_flash", _SHAPE | _MIMO), layer_types=["full_attention", "sliding_attention"]
    ),
    **{name: partial(REPEATED[name], 1) for name in REPEATED if name != "gemma4_apart"},
    "deepseek_v3": LATENT["deepseek_v3"],
}

_WIDE = _SHAPE | {"hidden_size": 64, "intermediate_size": 80, "num_key_value_heads": 1}
_WIDE_WINDOW = _WIDE | _MAX_WINDOW | _SLIDING | {"num_key_value_heads": 2}
# vectors of 16 elements: the native decoder supports them
NATIVE: dict[str, Callable[[], PreTrainedConfig]] = {
    "wide_llama": _of("llama", _WIDE),
    "wide_llama_tied": _of("llama", _WIDE, attention_bias=True, tie_word_embeddings=True),
    "wide_mistral": _of("mistral", _WIDE, head_dim=32, **_SLIDING),
    "wide_qwen2": _of("qwen2", _WIDE_WINDOW),
    "wide_qwen3": _of("qwen3", _WIDE, head_dim=16),
    "wide_phi3": _of(
        *("phi3", _WIDE | {"hidden_size": 128}),
        **_rope(partial_rotary_factor=0.5),
        sliding_window=None,
    ),
}

_OLD = _IDS | {"pad_token_id": None}
_SIZES = _OLD | {"hidden_size": 32, "num_hidden_layers": 2} | _POSITIONS
_FALCON = _SIZES | {"new_decoder_architecture": True, "multi_query": True, "alibi": False}
_ALIBI = _SIZES | {"new_decoder_architecture": False, "multi_query": False, "alibi": True}
_MPT = {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": MAX_POSITIONS}
_CLIPPED = {"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3}, "use_cache": True}
_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": WINDOW_TOKENS}
_NEO |= {"attention_types": [[["global", "local"], 1]], **_POSITIONS}
_XGLM = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, **_POSITIONS}
_JET = {"num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 48}
# attention inside the modules of the model; six heads have slopes that are no powers of one number
OWN_ATTENTION: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": _of("bloom", _OLD, hidden_size=48, n_layer=2, n_head=6, seq_length=MAX_POSITIONS),
    "mpt": _of("mpt", _OLD | _MPT | _CLIPPED),
    "falcon": _of("falcon", _FALCON, hidden_size=64, num_attention_heads=4, num_kv_heads=2),
    "falcon_alibi": _of("falcon", _ALIBI, hidden_size=48, num_attention_heads=6, num_kv_heads=6),
    "gpt_neo": _of("gpt_neo", _OLD | _NEO),
    "gpt_neox_japanese": _of("gpt_neox_japanese", _SIZES, num_attention_heads=4),
    "openai_gpt": _of("openai-gpt", _OLD | _GPT),
    "xglm": _of("xglm", _OLD | _XGLM),
    "ctrl": _of("ctrl", _OLD | _GPT, dff=48),
    "diffllama": _of("diffllama"),
    "jetmoe": _of("jetmoe", _SIZES | _JET, num_local_experts=4),
    "phimoe": _of("phimoe", num_local_experts=4),
}

# further forms of architectures above
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2_scale_by_layer": _of("gpt2", _GPT2, scale_attn_by_inverse_layer_idx=True),
    "phi3_longrope_window": _phi3_longrope(WINDOW_TOKENS),
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
        # Falcon's eager attention adds ALiBi twice
        options = {"attn_implementation": "sdpa" if name == "falcon_alibi" else "eager"}
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
        _draw_weights(model)
    return model.to(dtype).eval()


def save(name: str, folder: str | Path, seed: int = 0, **options: object) -> Path:
    build(name, seed).save_pretrained(folder, **options)
    return Path(folder)


def tiny_llama(*, tied: bool, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A Llama with biases and weights as Transformers draws them, in half precision."""
    shape = _SHAPE | {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80}
    shape = {name: size for name, size in shape.items() if name.endswith("_size") or "num" in name}
    config = LlamaConfig(**shape, attention_bias=True, tie_word_embeddings=tied)
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
