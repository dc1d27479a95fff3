"""Sinks and the newest tokens (StreamingLLM, Xiao et al. 2023, section 3.2).

Differs from the paper: keys keep their original RoPE positions, so distances between retained
tokens do not change.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from quire.policies.base import LAYER, ScorePolicy
from quire.policies.options import check_at_least
from quire.policies.registry import register
from quire.policies.view import KVView


@register("recent")
@dataclass(frozen=True, slots=True)
class Recent(ScorePolicy):
    """Retain the first `sinks` tokens and the newest of the rest.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
    """

    cost = "none: positions only"
    reads_vectors = False

    sinks: int = 0

    def __post_init__(self) -> None:
        check_at_least(0, sinks=self.sinks)

    @property
    def scores_heads(self) -> bool:
        return False

    @property
    def scope(self) -> str:
        return LAYER

    @property
    def min_cap(self) -> int:
        return self.sinks + 1

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return view.positions.double()  # exact for every position

    def protected(self, view: KVView, keep: Int[Tensor, " lane"]) -> Bool[Tensor, "lane slot"]:
        del keep
        return view.oldest_positions(self.sinks)
