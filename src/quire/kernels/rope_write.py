"""RoPE in one kernel with the write of new keys and values, for backends that have one."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.kernels.backend import NewSlots


@dataclass(frozen=True, slots=True, eq=False)
class CosSin:
    """Cosines and sines of a batch, which rotate elements i and i + half of a head as a pair.

    Attributes:
        cosine, sine: float32, contiguous; the second half of a row repeats the first.
    """

    cosine: Float[Tensor, "num_tokens rotary_dim"]
    sine: Float[Tensor, "num_tokens rotary_dim"]

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that are rotated."""
        return self.cosine.shape[1]

    def rotate(
        self, heads: Float[Tensor, "num_tokens head head_dim"]
    ) -> Float[Tensor, "num_tokens head head_dim"]:
        """Return rotated queries or keys, computed in float32 and rounded to their type."""
        rotating = heads[..., : self.rotary_dim].float()
        first, second = rotating.chunk(2, dim=-1)
        half = self.rotary_dim // 2
        cosine, sine = self.cosine[:, None, :half], self.sine[:, None, :half]
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        parts = [part.to(heads.dtype) for part in turned]
        return torch.cat([*parts, heads[..., self.rotary_dim :]], dim=-1)


@runtime_checkable
class RopeWriter(Protocol):
    """A backend that rotates queries and keys and writes keys and values in one kernel."""

    def rotate_and_write(
        self,
        slots: NewSlots,
        query: Float[Tensor, "num_tokens num_heads head_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads head_dim"],
        rope: CosSin,
        source: Int[Tensor, " num_tokens"] | None = None,
    ) -> bool:
        """Rotate queries in place, and write rotated keys and values to their slots.

        Keys of plain pages are rotated in place too.

        Args:
            slots: slots of the new tokens.
            query: queries of the flat batch before RoPE.
            key: keys before RoPE.
            value: values.
            rope: cosines and sines of the batch.
            source: tokens of which this is not the own index are padding and left out.

        Returns:
            Whether that was done; else nothing is changed.
        """
        ...


def rotated_and_written(
    backend: object,
    slots: NewSlots,
    heads: tuple[Tensor, Tensor, Tensor],
    rope: CosSin,
    source: Tensor | None = None,
) -> bool:
    """Rotate and write with one kernel, if the backend has one for these pages.

    Args:
        backend: of the step.
        slots: slots of the new tokens.
        heads: queries, keys and values.
        rope: cosines and sines of the batch.
        source: see `RopeWriter.rotate_and_write`.
    """
    return isinstance(backend, RopeWriter) and backend.rotate_and_write(slots, *heads, rope, source)
