"""RoPE of one layer: its application, its inverse, and its mean over positions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """RoPE of a layer: two of a head's rotary elements rotate as a pair.

    Attributes:
        module: computes cosines and sines of positions; None for a layer without RoPE.
        layer_type: argument of the module that selects the kind of layer, or None.
        halves: whether the module returns one value for each pair (True) or for each element.
        neighbours: whether elements 2 i and 2 i + 1 are a pair, and the module returns one complex
            number for each pair; else i and i + half are.
        elements: the elements of a head that heads here have; None: all.
    """

    module: nn.Module | None
    layer_type: str | None = None
    halves: bool = False
    neighbours: bool = False
    elements: Int[Tensor, " element"] | None = None

    def rotate(
        self, x: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """Rotate queries or keys to these positions, float32."""
        if self.module is None:
            return x.float()
        cosine, sine = self._cos_sin(positions)
        return self._rotated(x.float(), cosine, sine)

    def unrotate(
        self, rotated: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """Undo `rotate`, float32; a factor on cosines and sines is removed too."""
        if self.module is None:
            return rotated.float()
        cosine, sine = self._cos_sin(positions)
        square = cosine.square() + sine.square()
        return self._rotated(rotated.float(), cosine / square, -sine / square)

    def rotate_pre_rope(
        self, pre_rope: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """Rotate queries or keys before RoPE to positions, float32.

        The input is not rotated, but includes a factor on cosines and sines, if there is one.
        """
        if self.module is None:
            return pre_rope.float()
        cosine, sine = self._cos_sin(positions)
        factor, _ = self._cos_sin(positions.new_zeros(1))
        return self._rotated(pre_rope.float(), cosine / factor, sine / factor)

    def mean_rotation(
        self, head_dim: int, positions: Sequence[int], device: torch.device
    ) -> Float[Tensor, "head_dim head_dim"]:
        """Matrix R: R @ q is the mean of q rotated to some positions."""
        basis = torch.eye(head_dim, device=device)
        if self.module is None:
            return basis
        cos_sin = self._cos_sin(torch.tensor(positions, device=device))
        cosine, sine = (numbers.mean(dim=0, keepdim=True) for numbers in cos_sin)
        return self._rotated(basis[:, None], cosine, sine)[:, 0].T

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, 1, rotary elements]."""
        assert self.module is not None, "only called for layers with RoPE"
        kind = () if self.layer_type is None else (self.layer_type,)
        like = torch.empty(1, device=positions.device)
        found = self.module(like, positions[None], *kind)
        cosine, sine = (found.real, found.imag) if self.neighbours else found
        times = 2 if self.halves else 1
        each = (
            (x[0].repeat_interleave(2, dim=1) if self.neighbours else x[0].repeat(1, times))[
                :, None
            ]
            for x in (cosine, sine)
        )
        cosine, sine = each if self.elements is None else (x[..., self.elements] for x in each)
        return cosine, sine

    def _rotated(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        rotating, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
        if self.neighbours:
            first, second = rotating[..., ::2], rotating[..., 1::2]
            turned = torch.stack([-second, first], dim=-1).flatten(-2)
        else:
            first, second = rotating.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
        return torch.cat([rotating * cosine + turned * sine, rest], dim=-1)
