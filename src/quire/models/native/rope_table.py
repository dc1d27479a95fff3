"""Cosines and sines of positions, computed once."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

FIRST_POSITIONS = 1024  # positions of the first table
MOST_POSITIONS = 32768  # positions of the largest table; those beyond are computed in every step


class RopeTable:
    """Rows of cosines and sines of a rotary module.

    The module takes some fifteen operations for each batch. Its result depends on the position
    alone while its frequencies are the same, so it is stored. The table grows with the largest
    position.

    Args:
        rotary: a rotary module of Transformers.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary: Any = rotary
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by id of the frequencies

    def at(
        self, positions: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, "row rotary_dim"], Float[Tensor, "row rotary_dim"]]:
        """Return cosines and sines of positions, float32."""
        needed = int(positions.max()) + 1
        if needed > MOST_POSITIONS:
            return self._computed(positions)
        frequencies = self._rotary.inv_freq
        _, cosine, sine = self._tables.get(id(frequencies), (None, None, None))
        if cosine is None or sine is None or len(cosine) < needed:
            size = max(FIRST_POSITIONS, 1 << (needed - 1).bit_length())
            cosine, sine = self._computed(torch.arange(size))
            self._tables[id(frequencies)] = frequencies, cosine, sine  # the id stays in use
        return cosine.index_select(0, positions), sine.index_select(0, positions)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = self._rotary(torch.empty(1), positions[None])
        return cosine[0].float().contiguous(), sine[0].float().contiguous()
