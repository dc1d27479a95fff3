"""What a codec is: vectors in, planes out, and back. It knows neither pages nor sequences.

A codec has no state. A token is encoded once, when it is written, from numbers as the model made
them; what was decoded is never encoded again.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from quire.errors import ConfigError
from quire.layout.codecs import CodecSpec

Planes = Sequence[Shaped[Tensor, "*batch record width"]]
"""One tensor for each of `CodecSpec.planes`; `record` is the token, or one for a whole page."""

PER_HEAD_DIMS = 3  # of constants that each head of a layer has for itself, [head, 1, number]

DTYPES: Mapping[str, torch.dtype] = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class Codec(ABC):
    """Encodes vectors of `head_dim` numbers. Numbers that are finite decode to finite ones.

    Infinities, and what is beyond the largest float16, become the largest float16. NaN stays NaN,
    for its vector, or for the channel of its page: it is no number that could be stored quietly.

    Attributes:
        spec: planes and options.
        head_dim: numbers in a vector.
        constants: what was measured once for the layer, [head, 1, head_dim] or of its own shape.

    Raises:
        ConfigError: head_dim does not suit the codec.
    """

    spec: CodecSpec
    head_dim: int
    constants: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self.spec.planes(self.head_dim)

    @classmethod
    def why_not(cls, device: torch.device) -> str | None:
        """What this codec lacks on a device; None where it runs."""
        del device
        return None

    def of_heads(self, heads: Int[Tensor, "*place head"]) -> "Codec":
        """This codec for vectors of some heads, each with its own constants.

        Args:
            heads: which head of the layer stands where a batch of vectors [*place, head, token, _]
                has one.
        """
        if not self.constants:
            return self
        chosen = {n: c[heads] if c.dim() == PER_HEAD_DIMS else c for n, c in self.constants.items()}
        return replace(self, constants=chosen)

    @abstractmethod
    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        """Planes of vectors; where `spec.per_page` the tokens are those of a whole page."""

    @abstractmethod
    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        """Vectors of planes, float32."""

    def calibrated(self, vectors: Float[Tensor, "head token head_dim"]) -> "Codec":
        """This codec with constants measured on vectors of a layer."""
        return replace(self, constants=self.measure(vectors.float()))

    def measure(self, vectors: Float[Tensor, "head token head_dim"]) -> Mapping[str, Tensor]:
        """The constants that suit these vectors best; nothing where a codec needs none."""
        del vectors
        return {}

    def constant(self, name: str) -> Tensor:
        """One of the constants.

        Raises:
            ConfigError: it has not been measured.
        """
        if name not in self.constants:
            raise ConfigError(
                f"codec {self.spec.name!r} needs {name!r}, measured for each layer, and has none"
            )
        return self.constants[name]
