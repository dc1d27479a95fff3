"""How a step is laid out: what is prefetched, in which pieces, and how much staging it takes."""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.offload.schedule.work import StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a step is laid out; each arm of a comparison is another set of these.

    Attributes:
        slots: items that staging holds.
        x_chunks: pieces in which an item's X arrives and is recomputed.
        x_ring: pieces of X that staging holds; pieces of KV then come between them, so that the
            link need not wait for room. 0: all of an item's X, and before its KV.
        prefetch: the link works ahead; else an item's copies wait for the item before it.
        serial: KV waits for the recomputation, and X for the item before (ALISA).
        fine_weights: W_K and W_V come before X, the others behind KV; else all of attention's come
            before X.
        half_duplex: both directions share the wire.

    Raises:
        ConfigError: no slot, or no chunk.
    """

    slots: int = 2
    x_chunks: int = 4
    x_ring: int = 0
    prefetch: bool = True
    serial: bool = False
    fine_weights: bool = True
    half_duplex: bool = False

    def __post_init__(self) -> None:
        if min(self.slots, self.x_chunks) < 1 or self.x_ring < 0:
            raise ConfigError(f"expected slots and chunks of 1 or more, got {self}")
        if self.x_ring and self.serial:
            raise ConfigError("a ring of X brings KV between its pieces, which serial forbids")


def staging_bytes(work: StepWork, rules: Rules) -> float:
    """Bytes on the device that a step's KV and X pass through, weights left out.

    Args:
        work: tokens and bytes; KV is staged as it is carried.
        rules: slots of KV, and pieces or slots of X.
    """
    batches = [batch for layer in work.layers for batch in layer]
    kv = rules.slots * max(batch.x + batch.kv for batch in batches)
    whole = max(batch.x_carried for batch in batches)
    x = rules.x_ring * -(-whole // rules.x_chunks) if rules.x_ring else rules.slots * whole
    return kv * work.sizes.kv_bytes + x * work.sizes.x_bytes
