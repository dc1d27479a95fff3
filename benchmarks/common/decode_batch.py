"""The batch that decodes in a simulated step: rows of equal context through one model's layers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from quire.layout.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch(ABC):
    """A batch that decodes with its KV on the host.

    Attributes:
        rows: sequences.
        context: tokens of each.
        dtype: of weights and plain KV.
    """

    rows: int
    context: int
    dtype: str = "bfloat16"

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """The model's shape."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The model's, for people."""

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
        return f"{self.name}, {self.rows} x {self.context:,}"
