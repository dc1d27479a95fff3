"""Placement of layers' weights: resident within a budget, or offloaded and prefetched each pass.

    device    | embeddings, norm, head | resident layers | slot | slot |    device_bytes <= budget
    host      | offloaded layers, contiguous |                              host_bytes

While a layer computes, the next offloaded layer is transferred to the other slot. Resident layers
are spread evenly between offloaded ones, so that transfers overlap their computation too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.layout.sizes import format_size
from quire.plan.offload.split import OffloadRates, pipelined_seconds, pipelined_split

# Stored data that allows the split to change: X of the first tokens, KV of the last, both between.


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRange:
    """Range of splits that the stored data allows.

    Attributes:
        kv_from: l_min: first token with stored KV.
        x_until: l_max: token after the last stored activation.

    Raises:
        ConfigError: some tokens have neither X nor KV.
    """

    kv_from: int
    x_until: int

    def __post_init__(self) -> None:
        if not 0 <= self.kv_from <= self.x_until:
            raise ConfigError(
                f"expected kv_from between 0 and x_until, got kv_from={self.kv_from} and "
                f"x_until={self.x_until}"
            )

    def host_bytes(self, tokens: int, *, kv_bytes: int | float, x_bytes: int | float) -> float:
        """Bytes of CPU memory for one layer of a sequence.

        Args:
            tokens: length of the sequence.
            kv_bytes: bytes of a token's KV.
            x_bytes: bytes of a token's activation.
        """
        kept = max(0, tokens - self.kv_from)
        return kv_bytes * kept + x_bytes * min(self.x_until, tokens)

    def nearest(self, x_tokens: int, tokens: int) -> int:
        """The nearest split that the stored data allows."""
        return min(max(x_tokens, self.kv_from), self.x_until, tokens)


def activation_range(
    rates: OffloadRates, prompt_tokens: int, most_tokens: int, *, margin: float = 0.1
) -> ActivationRange:
    """Data to store for a sequence whose split grows with its length, with a margin for rates.

    Args:
        rates: rates of a layer.
        prompt_tokens: tokens at the start of decode.
        most_tokens: most tokens of the sequence.
        margin: fraction of the split, in both directions.
    """
    low = pipelined_split(rates, prompt_tokens) * (1 - margin)
    high = pipelined_split(rates, most_tokens) * (1 + margin)
    return ActivationRange(kv_from=int(low), x_until=min(most_tokens, -int(-high // 1)))


# ---- gate ----------------------------------------------------------------------------------------

# Whether the transfer of a model's activations pays.


@dataclass(frozen=True, slots=True)
class Gate:
    """Result of the comparison.

    Attributes:
        pays: whether an activation is smaller than the KV computed from it.
        x_ratio: its bytes over those of the KV.
        reason: explanation for messages.
    """

    pays: bool
    x_ratio: float
    reason: str


def activation_gate(
    model: ModelSpec, *, kv_value_bytes: int | float = 2, x_value_bytes: int | float = 2
) -> Gate:
    """Compare bytes: hidden * p_x with 2 * kv_heads * head_dim * p_kv.

    Fewer KV heads than query heads shrink the KV but not the activation, so mostly multi-head
    models gain. `head_dim` may be larger than hidden / heads.

    Args:
        model: its dimensions.
        kv_value_bytes: bytes of a KV element on the link, including codec metadata.
        x_value_bytes: bytes of an activation element, including codec metadata.
    """
    x_bytes = model.hidden_size * x_value_bytes
    ratio = x_bytes / (model.kv_values_per_layer_token * kv_value_bytes)
    words = f"activations are {_shown(ratio)}x the KV of this model"
    if ratio < 1:
        return Gate(True, ratio, f"{words}: part of its KV is recomputed from them")
    return Gate(False, ratio, f"{words}: KV alone is transferred")


def _shown(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"


# ---- weights -------------------------------------------------------------------------------------

# Offloaded weights: each batch through all layers, or each layer for all batches.
#
#     row by row         every batch loads every layer:      w = W
#     column by column   n batches share a loaded layer:     w = W / n
#
# The pipelined split holds with w on the link of each batch. So offloaded weights raise the split:
# the link transfers more, and the device has more time to recompute. Column by column needs KV of n
# batches in CPU memory and hidden states between layers; row by row needs neither.

Order = Literal["row", "column"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Transfer seconds of a layer's weights, by their use.

    Attributes:
        kv_s: W_K and W_V, which recompute needs.
        qo_s: W_Q and W_O.
        mlp_s: weights of the MLP.
    """

    kv_s: int | float
    qo_s: int | float
    mlp_s: int | float

    @property
    def total_s(self) -> int | float:
        """W: transfer of the whole layer."""
        return self.kv_s + self.qo_s + self.mlp_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A schedule of batches through a model.

    Attributes:
        order: order of batches and layers.
        batches: number of batches that share a loaded layer.
        rows: number of rows of each batch.
        x_tokens: recomputed tokens of each batch.
        tokens_per_s: tokens that all batches generate per second in the steady state.
    """

    order: Order
    batches: int
    rows: int
    x_tokens: int
    tokens_per_s: float


def with_weights(rates: OffloadRates, weights_s: int | float, batches: int = 1) -> OffloadRates:
    """Add a batch's share of a layer's weight transfer to its rates.

    Raises:
        ConfigError: no batch.
    """
    if batches < 1:
        raise ConfigError(f"expected 1 batch or more, got {batches}")
    return replace(rates, link_s=rates.link_s + weights_s / batches)


def run_pass(
    rates: OffloadRates,
    *,
    order: Order,
    weights_s: int | float,
    batches: int,
    rows: int,
    tokens: int,
    num_layers: int,
) -> Pass:
    """Compute the best split of a schedule and its throughput.

    Args:
        rates: rates of one batch, without weights.
        order: order of batches and layers; with "row" every batch loads the weights.
        weights_s: transfer of a layer's weights; 0 if they are on the device.
        batches: number of batches.
        rows: number of rows of each batch.
        tokens: tokens of all rows of a batch.
        num_layers: number of layers of the model.
    """
    shared = batches if order == "column" else 1
    loaded = with_weights(rates, weights_s, shared)
    split = pipelined_split(loaded, tokens)
    layer_s = pipelined_seconds(loaded, tokens, split)
    return Pass(
        order=order,
        batches=shared,
        rows=rows,
        x_tokens=split,
        tokens_per_s=rows / (num_layers * layer_s),
    )


def faster_pass(*passes: Pass) -> Pass:
    """The schedule with the highest throughput; the first of equal ones."""
    return max(passes, key=lambda found: found.tokens_per_s)


# ---- placement -----------------------------------------------------------------------------------

SLOTS = 2
"""One slot for the layer that computes, one for the layer in transfer."""

MAX_BATCHES = 8
"""Most batches of one step that share offloaded layers: the hidden states of all are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlacement:
    """Placement of a model's weights.

    Attributes:
        other_bytes: bytes of weights outside of layers: embeddings, norms, head, buffers.
        layer_bytes: bytes of each layer.
        offloaded_layers: indices of the layers that are prefetched in every pass.
    """

    other_bytes: int
    layer_bytes: tuple[int, ...]
    offloaded_layers: tuple[int, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Size of one slot: the largest offloaded layer."""
        return max((self.layer_bytes[layer] for layer in self.offloaded_layers), default=0)

    @property
    def host_bytes(self) -> int:
        """Bytes outside of the device, transferred in every pass."""
        return sum(self.layer_bytes[layer] for layer in self.offloaded_layers)

    @property
    def mean_layer_bytes(self) -> int:
        """Mean bytes that are transferred for a layer of a pass."""
        return self.host_bytes // len(self.layer_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole model."""
        return self.other_bytes + sum(self.layer_bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, slots included."""
        return self.total_bytes - self.host_bytes + SLOTS * self.slot_bytes

    @property
    def text(self) -> str:
        """One-line summary."""
        if not self.offloaded_layers:
            return f"weights: all {format_size(self.total_bytes)} on the device"
        return (
            f"weights: {format_size(self.device_bytes)} of {format_size(self.total_bytes)} on the "
            f"device, {len(self.offloaded_layers)} of {len(self.layer_bytes)} layers offloaded "
            f"through {SLOTS} slots of {format_size(self.slot_bytes)}"
        )


def place_weights(
    layer_bytes: Sequence[int], other_bytes: int, budget_bytes: int | None = None
) -> WeightsPlacement:
    """Keep as many layers on the device as fit in addition to the slots.

    Args:
        layer_bytes: bytes of each layer.
        other_bytes: bytes of weights outside of layers, which are resident.
        budget_bytes: limit of weights on the device; None: no limit.

    Raises:
        ConfigError: the budget is too small for other weights and two slots; states the minimum.
    """
    all_stay = WeightsPlacement(other_bytes=other_bytes, layer_bytes=tuple(layer_bytes))
    if budget_bytes is None or all_stay.total_bytes <= budget_bytes:
        return all_stay
    found = [all_stay]
    for count in range(SLOTS + 1, len(layer_bytes) + 1):
        place = WeightsPlacement(
            other_bytes=other_bytes,
            layer_bytes=all_stay.layer_bytes,
            offloaded_layers=tuple(len(layer_bytes) * i // count for i in range(count)),
        )
        if place.device_bytes <= budget_bytes:
            return place
        found.append(place)
    least = min(place.device_bytes for place in found)
    raise ConfigError(
        f"weights memory of {budget_bytes:,} B is too small: the model's weights outside of layers "
        f"({other_bytes:,} B) and {SLOTS} slots for its {len(layer_bytes)} layers need at least "
        f"{least:,} B ({format_size(least)}), all weights {all_stay.total_bytes:,} B; raise "
        "--weights-memory"
    )


def planned_weights(
    model: ModelSpec, bytes_per_value: int | float, budget_bytes: int | None
) -> WeightsPlacement:
    """Place weights by a model's dimensions, with layers of equal size.

    Raises:
        ConfigError: see `place_weights`.
    """
    total_bytes = model.weight_bytes(bytes_per_value)
    each_bytes = int(model.layer_parameters * bytes_per_value) // model.num_layers
    other_bytes = total_bytes - model.num_layers * each_bytes
    return place_weights([each_bytes] * model.num_layers, other_bytes, budget_bytes)


def best_pass(*, copy_s: float, batch_s: float, batch_tokens: int, most_batches: int) -> Pass:
    """The schedule of full batches that processes most tokens per second; the smallest of equals.

    Args:
        copy_s: transfer of all offloaded weights of a pass.
        batch_s: the device's work on one full batch, all layers.
        batch_tokens: tokens of a batch.
        most_batches: most batches that share a pass.
    """
    rates = OffloadRates(kv_s=1.0, x_s=1.0, recompute_s=0.0, other_s=batch_s)  # no offloaded KV
    passes = [
        run_pass(
            rates,
            order="row" if batches == 1 else "column",
            weights_s=copy_s,
            batches=batches,
            rows=batch_tokens,
            tokens=0,
            num_layers=1,
        )
        for batches in range(1, most_batches + 1)
    ]
    return faster_pass(*passes)
