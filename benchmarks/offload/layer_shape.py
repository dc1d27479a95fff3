"""The layer of a simulated machine: small, with the ratios of a large layer.

Gains depend on ratios only, so the link is throttled to the ratios of a large machine:

    xi = hidden / kv_width         rho = time to recompute / time to transfer KV
"""

from dataclasses import dataclass

from benchmarks.common.decode_batch import DecodeBatch
from quire.layout.model import LayerSpec, ModelSpec
from quire.offload.profiler import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Shape of a step.

    Attributes:
        hidden: width of activations.
        x_ratio: xi; keys and values of a token have hidden / xi elements, for one head.
        tokens: tokens of all rows in each layer.
        rows: rows that decode.
        num_layers: layers of the model.
    """

    hidden: int = 256
    x_ratio: float = 0.5
    tokens: int = 2048
    rows: int = 4
    num_layers: int = 24

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys and values."""
        return 2 * max(1, round(self.hidden / self.x_ratio / 2))

    def sizes(self, *, coded: bool = False) -> Sizes:
        """Bytes on the link, in float32; codes have half the bytes."""
        value = 2 if coded else 4
        return Sizes(
            kv_bytes=self.kv_width * value,
            x_bytes=self.hidden * value,
            new_kv_bytes=self.kv_width * 4,
        )

    @property
    def spec(self) -> ModelSpec:
        """One attention head over one KV head, and an MLP of four times the width."""
        return ModelSpec(
            architecture="llama",
            num_layers=self.num_layers,
            num_heads=1,
            num_kv_heads=1,
            head_dim=self.kv_width // 2,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            vocab_size=1,
            max_positions=self.tokens,
            tied_embeddings=True,
            gated_mlp=False,
            layers=(LayerSpec(),) * self.num_layers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBatch(DecodeBatch):
    """Decode batch of a shape.

    Attributes:
        shape: shape of the layers.
    """

    shape: LayerShape

    @classmethod
    def of(cls, shape: LayerShape) -> "LayerBatch":
        """All tokens of a shape, divided equally among rows."""
        context = shape.tokens // shape.rows
        return cls(shape=shape, rows=shape.rows, context=context, dtype="float32")

    @property
    def spec(self) -> ModelSpec:
        """Model spec of the shape."""
        return self.shape.spec

    @property
    def name(self) -> str:
        """Display name of the layers, with their ratio."""
        return f"layers of {self.shape.hidden}, xi {self.shape.x_ratio}"
