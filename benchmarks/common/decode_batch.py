"""The decode batch of a simulated step: rows of equal context through the layers of one model."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from quire.layout.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch(ABC):
    """A decode batch with its KV in host memory.

    Attributes:
        rows: number of sequences.
        context: number of tokens of each sequence.
        dtype: type of weights and plain KV.
    """

    rows: int
    context: int
    dtype: str = "bfloat16"

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """Shape of the model."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Display name of the model."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all rows."""
        return self.rows * self.context

    @property
    def value_bytes(self) -> int:
        """Bytes of a plain element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys and values in one layer."""
        return self.spec.kv_values_per_layer_token

    @property
    def kv_bytes(self) -> int:
        """Bytes of plain KV in all layers."""
        return self.tokens * self.kv_width * self.value_bytes * self.spec.num_layers

    @property
    def layer_weight_bytes(self) -> int:
        """Bytes of one layer's weights."""
        spec = self.spec
        attention = spec.hidden_size * (2 * spec.num_heads * spec.head_dim + self.kv_width)
        matrices = 3 if spec.gated_mlp else 2
        values = attention + matrices * spec.hidden_size * spec.intermediate_size
        return values * self.value_bytes

    @property
    def label(self) -> str:
        """Display name of the batch, such as `OPT-13B, 64 x 1,024`."""
        return f"{self.name}, {self.rows} x {self.context:,}"
