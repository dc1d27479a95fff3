"""What a step has to do, and the rules by which it is laid out: tokens by where their KV is.

| recomputed from X | carried as KV | on the device | attended to on the host |
  x                   kv              resident        host
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from quire.errors import ConfigError
from quire.offload.profiler import Sizes, Speeds
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import pipelined_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """Tokens of one batch in one layer, all rows together.

    What a layer keeps is the union of what its lanes keep: a token's KV is made for all of them.

    Attributes:
        rows: that decode, one new token each.
        x: recomputed.
        kv: transferred.
        resident: on the device already.
        host: attended to on the host.
        x_here: of `x`, tokens whose activation needs no transfer: of the first layer, which come
            from the token ids, or held on the device.

    Raises:
        ConfigError: a negative number, or more of `x_here` than of `x`.
    """

    rows: int
    x: int = 0
    kv: int = 0
    resident: int = 0
    host: int = 0
    x_here: int = 0

    def __post_init__(self) -> None:
        if any(getattr(self, field.name) < 0 for field in fields(self)) or self.x_here > self.x:
            raise ConfigError(f"expected numbers of 0 or more, and x_here within x, got {self}")

    @property
    def x_transferred(self) -> int:
        """Tokens whose activation crosses the link."""
        return self.x - self.x_here


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """All that a step's schedule is made of.

    Attributes:
        layers: of each layer its batches; every layer has as many.
        sizes: bytes.
        speeds: seconds.

    Raises:
        ConfigError: no layer, or batches that differ in number.
    """

    layers: tuple[tuple[BatchTokens, ...], ...]
    sizes: Sizes
    speeds: Speeds

    def __post_init__(self) -> None:
        if not self.layers or len({len(batches) for batches in self.layers}) != 1:
            raise ConfigError("expected layers with the same number of batches each")

    @property
    def num_batches(self) -> int:
        """Batches that share a layer's weights."""
        return len(self.layers[0])


def even_layers(
    batches: Sequence[BatchTokens], num_layers: int, *, embedded: bool = True
) -> tuple[tuple[BatchTokens, ...], ...]:
    """The same batches in every layer.

    Args:
        batches: of a layer.
        num_layers: of the model.
        embedded: the first layer's activations come from the token ids, without a transfer.
    """
    first = tuple(
        BatchTokens(
            rows=batch.rows,
            x=batch.x,
            kv=batch.kv,
            resident=batch.resident,
            host=batch.host,
            x_here=batch.x if embedded else batch.x_here,
        )
        for batch in batches
    )
    return (first, *[tuple(batches)] * (num_layers - 1))


# ---- rules ---------------------------------------------------------------------------------------

# How a step is laid out: what is prefetched, in which pieces, and how much staging it takes.

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
        work: tokens and bytes; KV is staged in its transfer format.
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
    holds what the link transfers meanwhile, and two pieces more. If that is all of X, there is no
    ring.

    Args:
        rates: of a layer.
        tokens: of all rows.
        x_tokens: of these, recomputed.
        call_s: fixed time of a copy, for any size.
    """
    pieces = _MOST_PIECES
    if call_s:
        carried_s = rates.x_s * x_tokens
        pieces = min(max(int(carried_s / (_CALLS_OF_A_PIECE * call_s)), 1), _MOST_PIECES)
    layer_s = pipelined_seconds(rates, tokens, x_tokens)
    ring = 2 + (math.ceil(pieces * rates.other_s / layer_s) if layer_s else 0)
    return Rules(x_chunks=pieces, x_ring=ring if ring < pieces else 0)
