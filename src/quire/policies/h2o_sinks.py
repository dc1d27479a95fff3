"""Heavy hitters (H2O, Zhang et al. 2023) beside attention sinks (Xiao et al. 2023).

Differs from the papers: as `h2o`; and the first four tokens stay whatever they score, out of the
half that is not the newest tokens'.
"""

from dataclasses import dataclass

from quire.policies.h2o import H2O
from quire.policies.registry import register


@register("h2o_sinks")
@dataclass(frozen=True, slots=True)
class H2OSinks(H2O):
    """Keep the first four tokens, the newest, and those that got the most attention in sum.

    Attributes:
        sinks: tokens at the start of the sequence that never leave.
        recent: so many of the newest cached tokens do not leave; -1: half of what is kept.
        heads: how the query heads of a KV head are reduced: mean, max or sum.
        power: 1 sums weights, 2 their squares.
    """

    sinks: int = 4
