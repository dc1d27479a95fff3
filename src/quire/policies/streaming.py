"""StreamingLLM as it was published (Xiao et al. 2023, section 3.2): sinks, renumbered.

What stays is what `sinks` keeps. Keys are stored before RoPE; whenever they are attended, the token
at place i of those a lane holds stands at position i, and a query at its own place. So with
`when=prefill_and_decode` no position reaches the cap however long a stream runs: it may be longer
than the model's context.

    positions in the text    0 1 2 3 | 60 61 62 63 64      (cap 9, sinks 4)
    as attention sees them   0 1 2 3 |  4  5  6  7  8

Keys before RoPE lie in pages of their own kind: all requests of an engine renumber, or none does.

Differs from the paper: `every` tokens leave at a time instead of one for one, and a prompt is read
in blocks behind such evictions. Layers with a sliding window are numbered from the oldest token of
their window on; RoPE knows distances only.
"""

from dataclasses import dataclass

from quire.policies.registry import register
from quire.policies.sinks import Sinks


@register("streaming")
@dataclass(frozen=True, slots=True)
class Streaming(Sinks):
    """Keep the first tokens and the newest of the rest, and number them anew.

    Attributes:
        sinks: tokens at the start of the sequence that never leave.
    """

    cost = "keys are turned at each look; portable attention"

    @property
    def rerotates_keys(self) -> bool:
        return True
