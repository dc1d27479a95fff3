"""Attention as part of a chain: calls that a backend prepares and a decoder makes with its own.

The calls of a decode step are short. Without Python between them, all layers take one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.backend import AttentionMath, LayerPages, NewSlots


@dataclass(frozen=True, slots=True, eq=False)
class HeadBuffers:
    """Contiguous memory of a batch that its layers reuse, each [tokens, heads, head_dim].

    Attributes:
        query, key, value: input of attention.
        out: output of attention.
    """

    query: Float[Tensor, "num_tokens num_heads head_dim"]
    key: Float[Tensor, "num_tokens num_kv_heads head_dim"]
    value: Float[Tensor, "num_tokens num_kv_heads head_dim"]
    out: Float[Tensor, "num_tokens num_heads head_dim"]

    def first(self, num_tokens: int) -> "HeadBuffers":
        """Return the memory of the first tokens."""
        buffers = (self.query, self.key, self.value, self.out)
        return HeadBuffers(*(buffer[:num_tokens] for buffer in buffers))


@runtime_checkable
class ChainBackend(Protocol):
    """A backend whose calls can be part of a chain of C calls that runs all layers."""

    def chain(
        self,
        plan: object,
        layers: Sequence[tuple[LayerPages, NewSlots, AttentionMath]],
        heads: HeadBuffers,
    ) -> Sequence[object] | None:
        """Prepare writing and attention of the layers of a plan.

        Args:
            plan: result of `AttentionBackend.plan`.
            layers: pages, new slots and operations of each layer; they differ in their lanes and
                in numbers only.
            heads: input and output of every layer.

        Returns:
            The calls of each layer; None if the backend cannot compute the step in this way.
        """
        ...

    def advance(self, plan: object, slots: NDArray[np.int32]) -> bool:
        """Change the live slots of a plan of decode rows in place, if its calls stay right.

        Args:
            plan: result of `AttentionBackend.plan`; its arrays were given to no other plan.
            slots: [rows, lanes] live slots, including the step's tokens.

        Returns:
            Whether the plan has these slots now; else it is unchanged, and a new plan is needed.
        """
        ...
