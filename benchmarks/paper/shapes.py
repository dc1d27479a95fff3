"""Shapes of the papers' models: arithmetic, random weights, and recognition of a loaded model."""

from collections.abc import Mapping
from types import MappingProxyType

from quire.layout.model import ModelSpec

RANDOM = "random:"
"""Prefix of `--model` for random weights in one of these shapes."""


def _llama(hidden: int, layers: int, heads: int, mlp: int, **changes: object) -> dict[str, object]:
    config: dict[str, object] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": mlp,
        "vocab_size": 32_000,
        "max_position_embeddings": 4_096,
    }
    return config | changes


def _llama_3(hidden: int, layers: int, heads: int, mlp: int) -> dict[str, object]:
    return _llama(
        hidden,
        layers,
        heads,
        mlp,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
    )


def _opt(hidden: int, layers: int, heads: int) -> dict[str, object]:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50_272,
        "max_position_embeddings": 2_048,
        "word_embed_proj_dim": hidden,
    }


_PHI_3 = _llama(3_072, 32, 32, 8_192, vocab_size=32_064)
CONFIGS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "llama-2-7b": _llama(4_096, 32, 32, 11_008),
        "llama-2-13b": _llama(5_120, 40, 40, 13_824),
        "llama-3-8b": _llama_3(4_096, 32, 32, 14_336),
        "llama-3-70b": _llama_3(8_192, 80, 64, 28_672),
        "llama-3-405b": _llama_3(16_384, 126, 128, 53_248),
        "mistral-7b": _llama(
            4_096, 32, 32, 14_336, num_key_value_heads=8, max_position_embeddings=32_768
        ),
        "phi-3-mini": _PHI_3,
        "phi-3.5-mini": _PHI_3 | {"max_position_embeddings": 131_072},
        "opt-6.7b": _opt(4_096, 32, 32),
        "opt-13b": _opt(5_120, 40, 40),
        "opt-30b": _opt(7_168, 48, 56),
    }
)
"""Keys of config.json by name. Phi-3's fused products have the shape of a Llama's."""


def shape(name: str, layers: int = 0) -> ModelSpec:
    """Model spec of a named shape.

    Args:
        name: a name in CONFIGS.
        layers: number of layers; 0: all.

    Raises:
        UnknownName: no such shape.
    """
    return ModelSpec.from_config(config_of(name, layers))


def config_of(name: str, layers: int = 0) -> dict[str, object]:
    """The config of a named shape; see `shape`."""
    from quire.errors import ConfigError, UnknownName

    if name not in CONFIGS:
        raise UnknownName("model shape", name, CONFIGS)
    config = dict(CONFIGS[name])
    whole = config["num_hidden_layers"]
    assert isinstance(whole, int), "every config has a number of layers"
    if not 0 <= layers <= whole:
        raise ConfigError(f"expected --layers from 1 to {whole} for {name}, got {layers}")
    return config | {"num_hidden_layers": layers or whole}


def is_shape(spec: ModelSpec, name: str) -> bool:
    """Whether a model has the dimensions of a named shape."""
    return _dimensions(spec) == _dimensions(shape(name))


def _dimensions(spec: ModelSpec) -> tuple[int, ...]:
    return (
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.intermediate_size,
        spec.vocab_size,
    )
