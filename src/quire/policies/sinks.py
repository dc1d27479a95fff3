"""Attention sinks (StreamingLLM, Xiao et al. 2023, section 3.2): `recent` with four sinks.

Differs from the paper: keys keep the rotary positions they were written with, so the distance to
the sinks grows with the sequence. The paper re-rotates the retained keys to new positions, which
keeps positions below the cap at any length; the policy `streaming` does this.
"""

from dataclasses import dataclass

from quire.policies.recent import Recent
from quire.policies.registry import register


@register("sinks")
@dataclass(frozen=True, slots=True)
class Sinks(Recent):
    """Retain the first four tokens and the newest of the rest.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
    """

    sinks: int = 4
