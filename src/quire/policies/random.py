"""Random tokens: the control that a rule must beat.

The score of a token is a hash of the seed, its layer and its position, so it never changes. With
`scope=lane` it also depends on the KV head.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from quire.errors import UnknownName
from quire.policies.base import LANE, LAYER, SinksAndRecent
from quire.policies.lots import lots_of
from quire.policies.registry import register
from quire.policies.view import KVView

_HEAD_BITS = 32  # the number of a layer is below 2 ** 32


@register("random")
@dataclass(frozen=True, slots=True)
class Random(SinksAndRecent):
    """Retain random tokens, independently for each layer.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted.
        seed: seed of the hash.
        scope: layer, or lane for a separate retained set per KV head.
    """

    cost = "none: positions only"
    reads_vectors = False

    seed: int = 0
    scope: str = LAYER

    def __post_init__(self) -> None:
        SinksAndRecent.__post_init__(self)
        if self.scope not in (LANE, LAYER):
            raise UnknownName("scope of a retained set", self.scope, (LANE, LAYER))

    @property
    def scores_heads(self) -> bool:
        return False

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        drawn_for = view.lane_layers
        if self.scope == LANE:
            lanes = torch.arange(len(drawn_for), device=drawn_for.device)
            head = lanes % view.heads_per_layer
            drawn_for = drawn_for + (head << _HEAD_BITS)
        lots = lots_of(self.seed, drawn_for[:, None], view.positions)
        return lots.double()  # 53 bits: exact
