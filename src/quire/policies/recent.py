"""Sinks and the newest tokens (StreamingLLM, Xiao et al. 2023, section 3.2).

Differs from the paper: keys keep the rotary positions they were written with; distances between
the kept tokens are the true ones.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from quire.errors import ConfigError
from quire.policies.base import KVView, ScorePolicy
from quire.policies.registry import register


@register("recent")
@dataclass(frozen=True, slots=True)
class Recent(ScorePolicy):
    """Keep the first `sinks` tokens and the newest of the rest.

    Attributes:
        sinks: tokens at the start of the sequence that never leave.
    """

    sinks: int = 0

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ConfigError(f"expected sinks >= 0, got {self.sinks}")

    @property
    def least_cap(self) -> int:
        return self.sinks + 1

    def score(self, view: KVView) -> Float[Tensor, "lane slot"]:
        return view.positions.double()  # exact for every position

    def protected(self, view: KVView) -> Bool[Tensor, "lane slot"]:
        return view.live & (view.positions < self.sinks)
