"""Models of the measured decode steps, and batches of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common.decode_batch import DecodeBatch
from benchmarks.offload.machines import MODELS
from quire.errors import UnknownName
from quire.layout.model import ModelSpec


def _toy(kv_heads: int, num_layers: int = 3) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 96,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
    }
    return ModelSpec.from_config(config)


SPECS: Mapping[str, ModelSpec] = {
    **MODELS,
    "toy": _toy(4),
    "toy-grouped": _toy(1),
    "toy-deep": _toy(4, 8),
}
"""Model specs by name; the toys are for quick trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase(DecodeBatch):
    """A decode batch of a model that is given by name.

    Attributes:
        model: name in `SPECS`.

    Raises:
        UnknownName: no such model.
    """

    model: str

    def __post_init__(self) -> None:
        if self.model not in SPECS:
            raise UnknownName("model", self.model, SPECS)

    @property
    def spec(self) -> ModelSpec:
        """Model spec of the case."""
        return SPECS[self.model]

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model
