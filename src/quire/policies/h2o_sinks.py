"""Heavy hitters (H2O, Zhang et al. 2023) with attention sinks (Xiao et al. 2023).

Differs from the papers: as `h2o`; in addition, the first four tokens are retained regardless of
score, as part of the half that is not reserved for the newest tokens.
"""

from dataclasses import dataclass

from quire.policies.h2o import H2O
from quire.policies.registry import register


@register("h2o_sinks")
@dataclass(frozen=True, slots=True)
class H2OSinks(H2O):
    """Retain the first four tokens, the newest, and those with the largest attention sums.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
        recent: number of newest cached tokens that are never evicted; -1: half of the retained
            tokens.
        heads: reduction over the query heads of a KV head: mean, max or sum.
        power: 1 sums weights, 2 their squares.
    """

    sinks: int = 4
