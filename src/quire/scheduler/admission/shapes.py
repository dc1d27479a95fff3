"""How small a step can be made for a sequence that fits no other way.

2 staging slots   prefill chunks of 2048, 1024, ... 1 token, whose KV is in the arena whole
1 staging slot    the same chunks; a layer's offloaded pages wait for the layer before it
"""

from dataclasses import dataclass

from quire.layout.offloadable import SLOTS


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the pages of one sequence depend on besides its tokens.

    Attributes:
        chunk_tokens: of its largest prefill chunk.
        staging_slots: layers of its offloaded pages that the arena holds at a time.
    """

    chunk_tokens: int
    staging_slots: int = SLOTS


def step_shapes(chunk_tokens: int) -> tuple[StepShape, ...]:
    """The shapes of steps, the preferred one first and the one of the fewest pages last.

    Args:
        chunk_tokens: largest prefill chunk that the schedule allows.
    """
    chunks = [chunk_tokens]
    while chunks[-1] > 1:
        chunks.append(-(-chunks[-1] // 2))
    return tuple(StepShape(chunk, slots) for slots in (SLOTS, 1) for chunk in chunks)
