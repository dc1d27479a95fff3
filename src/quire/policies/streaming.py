"""StreamingLLM as published (Xiao et al. 2023, section 3.2): sinks with re-rotated positions.

The retained tokens are those of `sinks`. Keys are stored before RoPE and rotated at every
attention: the token at index i of a lane gets position i, and a query gets its own index. With
`when=prefill_and_decode` no position reaches the cap at any length, so a sequence may exceed the
model's context.

    positions in the text     0 1 2 3 | 60 61 62 63 64      (cap 9, sinks 4)
    positions in attention    0 1 2 3 |  4  5  6  7  8

Keys before RoPE are stored in a separate kind of page: all requests of an engine re-rotate
positions, or none does.

Differs from the paper: `every` tokens are evicted at a time instead of one per step, and a prompt
is prefilled in chunks between evictions. Layers with a sliding window are numbered from the oldest
token of their window; RoPE depends on distances only.
"""

from dataclasses import dataclass

from quire.policies.registry import register
from quire.policies.sinks import Sinks


@register("streaming")
@dataclass(frozen=True, slots=True)
class Streaming(Sinks):
    """Retain the first tokens and the newest of the rest, at consecutive positions.

    Attributes:
        sinks: tokens at the start of the sequence that are never evicted.
    """

    cost = "keys are rotated at every attention; portable attention backend"

    @property
    def rerotates_keys(self) -> bool:
        return True
