"""Tokens drawn by lot: the control that a rule must beat.

The lot of a token is a hash of the seed, its layer and its position: a token that lost once would
lose again.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from quire.policies.base import LAYER, SinksAndRecent
from quire.policies.lots import lots_of
from quire.policies.registry import register
from quire.policies.view import KVView


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
    def scores_heads(self) -> bool:
        return False

    @property
    def scope(self) -> str:
        return LAYER

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        lots = lots_of(self.seed, view.lane_layers[:, None], view.positions)
        return lots.double()  # 53 bits: exact
