"""Random tokens: the control that a rule must beat.

The score of a token is a hash of the seed, its layer and its position, so it never changes.
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
    """Retain random tokens, independently for each layer.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
        seed: seed of the hash.
    """

    cost = "none: positions only"

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
