"""Work of a step, and the rules of its layout: tokens by the location of their KV.

| recomputed from X | transferred KV | on the device | CPU attention |
  x                   kv               resident        host
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from quire.errors import ConfigError
from quire.offload.profiler import Sizes, Speeds
from quire.offload.split import OffloadRates, pipelined_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """Tokens of one batch in one layer, over all rows.

    A layer retains the union of the tokens that its KV heads retain: KV is computed for all heads.

    Attributes:
        rows: decoding rows, with one new token each.
        x: recomputed tokens.
        kv: tokens with transferred KV.
        resident: tokens whose KV is on the device.
        host: tokens with CPU attention.
        x_on_device: tokens of `x` whose activation needs no transfer: in the first layer, where it
            comes from the token ids, or if it is stored on the device.

    Raises:
        ConfigError: a negative number, or `x_on_device` above `x`.
    """

    rows: int
    x: int = 0
    kv: int = 0
    resident: int = 0
    host: int = 0
    x_on_device: int = 0

    def __post_init__(self) -> None:
        if (
            any(getattr(self, field.name) < 0 for field in fields(self))
            or self.x_on_device > self.x
        ):
            raise ConfigError(
                f"expected numbers of 0 or more, and x_on_device within x, got {self}"
            )

    @property
    def x_transferred(self) -> int:
        """Tokens whose activation is transferred."""
        return self.x - self.x_on_device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Input of a step's schedule.

    Attributes:
        layers: batches of each layer, equally many in every layer.
        sizes: bytes.
        speeds: durations.

    Raises:
        ConfigError: no layer, or layers with different numbers of batches.
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
        batches: batches of a layer.
        num_layers: number of layers.
        embedded: whether the first layer's activations come from the token ids, without a transfer.
    """
    first = tuple(
        BatchTokens(
            rows=batch.rows,
            x=batch.x,
            kv=batch.kv,
            resident=batch.resident,
            host=batch.host,
            x_on_device=batch.x if embedded else batch.x_on_device,
        )
        for batch in batches
    )
    return (first, *[tuple(batches)] * (num_layers - 1))


# Layout of a step: what is prefetched, in which chunks, and the size of staging.

_CALLS_OF_A_CHUNK = 10  # least duration of a chunk in fixed copy times, so overhead is at most 10 %
_MAX_CHUNKS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Layout rules of a step; the arms of a comparison differ in these.

    Attributes:
        slots: number of items that staging holds.
        x_chunks: number of chunks in which an item's X is transferred and recomputed.
        x_ring: X chunks that staging holds. KV chunks then alternate with X chunks, so that the
            link need not wait for free staging. 0: all of an item's X, transferred before its KV.
        prefetch: whether the link prefetches; otherwise an item's copies wait for the item before.
        serial: whether KV waits for recompute, and X for the item before it (ALISA).
        fine_weights: whether only W_K and W_V precede X and the others follow KV; otherwise all
            attention weights precede X.
        half_duplex: whether both directions share the link.

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
            raise ConfigError("expected no x_ring with serial: a ring alternates X and KV")


def staging_bytes(work: StepWork, rules: Rules) -> int | float:
    """Device bytes for staging a step's KV and X, without weights.

    Args:
        work: tokens and bytes; KV is staged in its transfer format.
        rules: slots of KV, and chunks or slots of X.
    """
    batches = [batch for layer in work.layers for batch in layer]
    kv = rules.slots * max(batch.x + batch.kv for batch in batches)
    whole = max(batch.x_transferred for batch in batches)
    x = rules.x_ring * -(-whole // rules.x_chunks) if rules.x_ring else rules.slots * whole
    return kv * work.sizes.kv_bytes + x * work.sizes.x_bytes


def ring_rules(
    rates: OffloadRates, tokens: int, x_tokens: int, *, call_s: int | float = 0.0
) -> Rules:
    """A layout with the smallest ring of X for which the link never waits.

    While the device runs attention and the rest of a layer, for `other_s`, it projects nothing: the
    ring holds the X that is transferred meanwhile, and two chunks more. If that is all of X, there
    is no ring.

    Args:
        rates: rates of a layer.
        tokens: tokens of all rows.
        x_tokens: recomputed tokens.
        call_s: fixed time of a copy of any size.
    """
    chunks = _MAX_CHUNKS
    if call_s:
        transfer_s = rates.x_s * x_tokens
        chunks = min(max(int(transfer_s / (_CALLS_OF_A_CHUNK * call_s)), 1), _MAX_CHUNKS)
    layer_s = pipelined_seconds(rates, tokens, x_tokens)
    ring = 2 + (math.ceil(chunks * rates.other_s / layer_s) if layer_s else 0)
    return Rules(x_chunks=chunks, x_ring=ring if ring < chunks else 0)
