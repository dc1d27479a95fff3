"""Models whose decode steps are measured, and batches of them that fit this machine."""

from collections.abc import Mapping
from dataclasses import dataclass

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
class DecodeCase:
    """A batch that decodes with its KV on the host.

    Attributes:
        model: name in `SPECS`.
        rows: sequences.
        context: tokens of each.
        dtype: of weights and plain KV.

    Raises:
        UnknownName: no such model.
    """

    model: str
    rows: int
    context: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.model not in SPECS:
            raise UnknownName("model", self.model, SPECS)

    @property
    def spec(self) -> ModelSpec:
        """The shape."""
        return SPECS[self.model]

    @property
    def tokens(self) -> int:
        """Of all rows."""
        return self.rows * self.context

    @property
    def value_bytes(self) -> int:
        """Of a plain number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys and values in a layer."""
        return self.spec.kv_values_per_layer_token

    @property
    def kv_bytes(self) -> int:
        """Plain KV of all layers."""
        return self.tokens * self.kv_width * self.value_bytes * self.spec.num_layers

    @property
    def layer_weight_bytes(self) -> int:
        """Weights of a layer."""
        spec = self.spec
        attention = spec.hidden_size * (2 * spec.num_heads * spec.head_dim + self.kv_width)
        matrices = 3 if spec.gated_mlp else 2
        values = attention + matrices * spec.hidden_size * spec.intermediate_size
        return values * self.value_bytes

    @property
    def label(self) -> str:
        """For people: `OPT-13B, 64 x 1,024`."""
        return f"{self.model}, {self.rows} x {self.context:,}"
