"""Tokens drawn by lot: the control that a rule must beat.

The lot of a token is a hash of the seed, its layer and its position (the mixing function of
SplitMix64, Steele et al. 2014). So it needs no state, and is the same whatever runs beside it, in
whatever order slots lie, and each time it is asked: a token that lost once would lose again.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.policies.base import LAYER, SinksAndRecent
from quire.policies.registry import register
from quire.policies.view import KVView

_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # int64 wraps around as uint64 does
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


@register("random")
@dataclass(frozen=True, slots=True)
class Random(SinksAndRecent):
    """Keep tokens drawn by lot, for each layer its own.

    Attributes:
        sinks: tokens at the start of the sequence that never leave.
        recent: so many of the newest cached tokens do not leave.
        seed: another seed is another draw.
    """

    cost = "none: positions alone"

    seed: int = 0

    @property
    def grain(self) -> str:
        return LAYER

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        seed = torch.tensor(self.seed % (1 << 63), device=view.positions.device)
        of_layer = _scrambled(_scrambled(seed) + view.lane_layers)
        lots = _scrambled(of_layer[:, None] + view.positions)
        return _shifted(lots, 11).double()  # 53 bits: exact


def _scrambled(numbers: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    numbers = numbers + _STEP
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """To the right, zeros coming in: int64's own shift would copy the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
