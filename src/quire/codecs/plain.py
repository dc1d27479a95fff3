"""Unquantized numbers, as `--kv-codec none` stores them."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from quire.codecs.base import DTYPES, Codec, Planes
from quire.codecs.registry import register


@register("float32", "bfloat16", "float16")
@dataclass(frozen=True, slots=True)
class Plain(Codec):
    """Codec that only casts."""

    def encode(self, vectors: Float[Tensor, "*batch token head_dim"]) -> tuple[Tensor, ...]:
        return (vectors.to(DTYPES[self.spec.codes]),)

    def decode(self, planes: Planes) -> Float[Tensor, "*batch token head_dim"]:
        (numbers,) = planes
        return numbers.float()
