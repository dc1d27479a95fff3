"""Model specs of a few small layers."""

from typing import Any

from quire.layout.model import LayerSpec, ModelSpec


def small_spec(*windows: int | None, **shape: Any) -> ModelSpec:
    """A spec with one layer for each window; None: full attention.

    Args:
        windows: window of each layer, in tokens.
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
    layers = tuple(LayerSpec(window=window) for window in windows)
    return ModelSpec(num_layers=len(layers), layers=layers, **defaults | shape)
