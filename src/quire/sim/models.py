"""Shapes of public models by name, for simulations: no weights, no folder."""

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from quire.errors import UnknownName
from quire.layout.config import read_config
from quire.layout.model import ModelSpec
from quire.layout.packaged import PACKAGED_MODEL

_LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
_LONG = {"max_position_embeddings": 131072}
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": _LLAMA3,
    "llama-3.1-8b": _LLAMA3 | _LONG,
    "llama-3.1-70b": _LLAMA3
    | _LONG
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "llama-3.2-1b": _LLAMA3
    | _LONG
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 131072,
    },
    "opt-6.7b": {
        "model_type": "opt",
        "hidden_size": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 4096,
    },
}
"""Keys of the models' published config.json files that determine shapes."""


def model_shape(name: str) -> ModelSpec:
    """The shape of a name of CONFIGS, of quire-tiny, or of a folder with a config.json."""
    if name in CONFIGS:
        return ModelSpec.from_config(CONFIGS[name])
    folder = Path(name)
    if name == PACKAGED_MODEL and not folder.is_dir():
        folder = Path(str(resources.files("quire") / "assets" / PACKAGED_MODEL))
    if not folder.is_dir():
        raise UnknownName(
            "model shape", name, (*CONFIGS, PACKAGED_MODEL, "a folder with config.json")
        )
    return ModelSpec.from_config(read_config(folder))
