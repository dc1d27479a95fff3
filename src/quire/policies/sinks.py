"""Attention sinks (StreamingLLM, Xiao et al. 2023, section 3.2): `recent` with four sinks.

Differs from the paper: keys keep the rotary positions they were written with, so the distance to
the sinks grows with the sequence. The paper numbers the kept tokens anew, which keeps positions
below the cap however long a stream runs: that is the rule `streaming`.
"""

from dataclasses import dataclass

from quire.policies.recent import Recent
from quire.policies.registry import register


@register("sinks")
@dataclass(frozen=True, slots=True)
class Sinks(Recent):
    """Keep the first four tokens and the newest of the rest.

    Attributes:
        sinks: tokens at the start of the sequence that never leave.
    """

    sinks: int = 4
