"""How a step is laid out: what is prefetched, in which pieces, and how much staging it takes."""

import math
from dataclasses import dataclass

from quire.errors import ConfigError
from quire.offload.schedule.work import StepWork
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import pipelined_seconds

_CALLS_OF_A_PIECE = 10  # a piece takes as long at least, so that calls cost a tenth at most
_MOST_PIECES = 24


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


def staging_bytes(work: StepWork, rules: Rules) -> int | float:
    """Bytes on the device that a step's KV and X pass through, weights left out.

    Args:
        work: tokens and bytes; KV is staged as it is carried.
        rules: slots of KV, and pieces or slots of X.
    """
    batches = [batch for layer in work.layers for batch in layer]
    kv = rules.slots * max(batch.x + batch.kv for batch in batches)
    whole = max(batch.x_transferred for batch in batches)
    x = rules.x_ring * -(-whole // rules.x_chunks) if rules.x_ring else rules.slots * whole
    return kv * work.sizes.kv_bytes + x * work.sizes.x_bytes


def ring_rules(
    rates: OffloadRates, tokens: int, x_tokens: int, *, call_s: int | float = 0.0
) -> Rules:
    """A layout whose ring of X is as small as it can be without the link ever waiting for it.

    While the device attends and finishes a layer, for `other_s`, it projects nothing: the ring
    takes what the link brings meanwhile, and two pieces more. Where that would be all of X there
    is no ring.

    Args:
        rates: of a layer.
        tokens: of all rows.
        x_tokens: of these, recomputed.
        call_s: of a copy, whatever its size.
    """
    pieces = _MOST_PIECES
    if call_s:
        carried_s = rates.x_s * x_tokens
        pieces = min(max(int(carried_s / (_CALLS_OF_A_PIECE * call_s)), 1), _MOST_PIECES)
    layer_s = pipelined_seconds(rates, tokens, x_tokens)
    ring = 2 + (math.ceil(pieces * rates.other_s / layer_s) if layer_s else 0)
    return Rules(x_chunks=pieces, x_ring=ring if ring < pieces else 0)
