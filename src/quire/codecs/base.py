"""Interface of a codec: encodes vectors to planes and decodes them, without pages or sequences.

A codec has no state. A token is encoded once, when it is written, from full-precision numbers.
Decoded numbers are never encoded again, except in pages of shared scales whose tokens are replaced
(`Codec.encode_again`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from quire.errors import ConfigError
from quire.layout.codecs import CodecSpec

Planes = Sequence[Shaped[Tensor, "*batch record width"]]
"""One tensor for each of `CodecSpec.planes`; a `record` is a token, or a whole page."""

PER_HEAD_DIMS = 3  # dimensions of constants per head of a layer, [head, 1, number]

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
    """Encodes vectors of `head_dim` elements. Finite numbers decode to finite numbers.

    Infinities, and numbers beyond the largest float16, become the largest float16. NaN stays NaN
    for its vector, or for the channel of its page, so that it is never hidden.

    Attributes:
        spec: planes and options.
        head_dim: elements of a vector.
        constants: constants measured once for the layer, [head, 1, head_dim] or of another shape.

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
        """Return why this codec cannot run on a device; None if it can."""
        del device
        return None

    def of_heads(self, heads: Int[Tensor, "*place head"]) -> "Codec":
        """Return this codec with the constants of `heads`.

        Args:
            heads: head of the layer for each index of a batch of vectors [*place, head, token, _].
        """
        if not self.constants:
            return self
        chosen = {n: c[heads] if c.dim() == PER_HEAD_DIMS else c for n, c in self.constants.items()}
        return replace(self, constants=chosen)

    @abstractmethod
    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        """Encode vectors to planes; if `spec.per_page`, the tokens are those of a whole page."""

    def encode_again(
        self,
        vectors: Float[Tensor, "*batch token head_dim"],
        planes: Planes,
        keeps: Bool[Tensor, "*batch"],
    ) -> tuple[Tensor, ...]:
        """Encode a page after some of its tokens were replaced; only for codecs of whole pages.

        Args:
            vectors: the tokens of the page; those that were in it before are decoded.
            planes: the page's planes before.
            keeps: whether the page keeps some of its tokens in their slots.
        """
        del planes, keeps
        return self.encode(vectors)

    @abstractmethod
    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        """Decode planes to vectors, float32."""

    def calibrated(self, vectors: Float[Tensor, "head token head_dim"]) -> "Codec":
        """Return this codec with constants measured on vectors of a layer."""
        return replace(self, constants=self.measure(vectors.float()))

    def measure(self, vectors: Float[Tensor, "head token head_dim"]) -> Mapping[str, Tensor]:
        """Return the best constants for these vectors; empty for codecs without constants."""
        del vectors
        return {}

    def constant(self, name: str) -> Tensor:
        """Return one of the constants.

        Raises:
            ConfigError: the constant has not been measured.
        """
        if name not in self.constants:
            raise ConfigError(
                f"codec {self.spec.name!r} needs the constant {name!r}, measured for each layer"
            )
        return self.constants[name]
