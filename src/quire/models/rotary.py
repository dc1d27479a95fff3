"""RoPE of one layer: put on queries, taken off again, and its mean over positions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """RoPE of a layer: numbers i and i + half of a head's first numbers turn together.

    Attributes:
        module: gives cosines and sines for positions; None for a layer that does not rotate.
        layer_type: what the module is told to tell kinds of layers apart, or None.
        halves: whether the module gives one number for a pair, or the same for both.
    """

    module: nn.Module | None
    layer_type: str | None = None
    halves: bool = False

    def rotate(
        self, x: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """What the layer makes of queries or keys at these positions, float32."""
        if self.module is None:
            return x.float()
        cosine, sine = self._turns(positions)
        return _turned(x.float(), cosine, sine)

    def unrotate(
        self, rotated: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """What they were before, float32; a factor on cosines and sines is taken off too."""
        if self.module is None:
            return rotated.float()
        cosine, sine = self._turns(positions)
        square = cosine.square() + sine.square()
        return _turned(rotated.float(), cosine / square, -sine / square)

    def move(
        self, still: Float[Tensor, "token head head_dim"], positions: Int[Tensor, " token"]
    ) -> Float[Tensor, "token head head_dim"]:
        """What queries or keys that the layer made at position 0 are at others, float32.

        At position 0 nothing turns; a factor on cosines and sines is in them already.
        """
        if self.module is None:
            return still.float()
        cosine, sine = self._turns(positions)
        factor, _ = self._turns(positions.new_zeros(1))
        return _turned(still.float(), cosine / factor, sine / factor)

    def mean_rotation(
        self, head_dim: int, start: int, tokens: int, device: torch.device
    ) -> Float[Tensor, "head_dim head_dim"]:
        """R for which R @ q is the mean of q rotated to `tokens` positions from `start` on."""
        basis = torch.eye(head_dim, device=device)
        if self.module is None:
            return basis
        turns = self._turns(torch.arange(start, start + tokens, device=device))
        cosine, sine = (turn.mean(dim=0, keepdim=True) for turn in turns)
        return _turned(basis[:, None], cosine, sine)[:, 0].T

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, 1, numbers that turn]."""
        assert self.module is not None, "a layer that rotates"
        kind = () if self.layer_type is None else (self.layer_type,)
        like = torch.empty(1, device=positions.device)
        cosine, sine = self.module(like, positions[None], *kind)
        times = 2 if self.halves else 1
        return cosine[0].repeat(1, times)[:, None], sine[0].repeat(1, times)[:, None]


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    turning, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
    first, second = turning.chunk(2, dim=-1)
    turned = turning * cosine + torch.cat([-second, first], dim=-1) * sine
    return torch.cat([turned, rest], dim=-1)
