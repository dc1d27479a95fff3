"""Models whose decode steps are measured, and batches of them that fit this machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common.decode_batch import DecodeBatch
from benchmarks.offload.machines import MODELS
from quire.errors import UnknownName
from quire.layout.model import ModelSpec


def _toy(kv_heads: int) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 96,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
    }
    return ModelSpec.from_config(config)


SPECS: Mapping[str, ModelSpec] = {**MODELS, "toy": _toy(4), "toy-grouped": _toy(1)}
"""By name; the toys try the bench out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCase(DecodeBatch):
    """A batch of a model by its name.

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
        """The shape."""
        return SPECS[self.model]

    @property
    def name(self) -> str:
        """The model's."""
        return self.model
