"""Which layers' weights stay on the device within a budget, and which are brought in every pass.

    device    | embeddings, norm, head | layers that stay | slot | slot |   device_bytes <= budget
    host      | layers that are brought, one behind the other |             host_bytes

While a layer computes, the next of those that are brought is on its way to the other slot. Layers
that stay lie evenly between those that are brought, so the link has their time too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.errors import ConfigError
from quire.layout.model import ModelSpec
from quire.layout.sizes import format_size
from quire.plan.offload.rates import OffloadRates
from quire.plan.offload.split import pipelined_seconds, pipelined_split

# ---- weights -------------------------------------------------------------------------------------

# Weights on the link too: batch after batch through all layers, or layer by layer for all batches.
#
#     row by row         every batch loads every layer:      w = W
#     column by column   n batches share a loaded layer:     w = W / n
#
# With w on the link of each batch the pipelined split holds as it stands, so weights that are
# loaded raise it: the link has more to carry, and the device more time to recompute. Column by
# column needs the KV of n batches on the host and hidden states between layers, row by row neither.

Order = Literal["row", "column"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Seconds of a layer's weights on the link, by what waits for them.

    Attributes:
        kv_s: of W_K and W_V, which recomputing needs.
        qo_s: of W_Q and W_O.
        mlp_s: of the MLP.
    """

    kv_s: int | float
    qo_s: int | float
    mlp_s: int | float

    @property
    def total_s(self) -> int | float:
        """W: of the whole layer."""
        return self.kv_s + self.qo_s + self.mlp_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One way to run batches through a model.

    Attributes:
        order: of batches and layers.
        batches: that share a loaded layer.
        rows: of each batch.
        x_tokens: recomputed of each batch.
        tokens_per_s: generated, all batches, in the steady state.
    """

    order: Order
    batches: int
    rows: int
    x_tokens: int
    tokens_per_s: float


def with_weights(rates: OffloadRates, weights_s: int | float, batches: int = 1) -> OffloadRates:
    """Rates of a batch that pays its part of a layer's weights.

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
    """The best split of one way, and what it generates.

    Args:
        rates: of one batch, without weights.
        order: by row every batch loads the weights itself.
        weights_s: of a layer on the link; 0 where they are on the device.
        batches: how many.
        rows: of each batch.
        tokens: of all rows of a batch.
        num_layers: of the model.
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
    """The way that generates most; of equal ones the first."""
    return max(passes, key=lambda found: found.tokens_per_s)


# ---- resident ------------------------------------------------------------------------------------

SLOTS = 2
"""One layer computes, one is on its way."""

MOST_BATCHES = 8
"""Of one step that share brought layers, at most: the hidden states of all are kept meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlacement:
    """Where the weights of a model lie.

    Attributes:
        other_bytes: of all that is no layer's own: embeddings, norms, head, buffers.
        layer_bytes: of each layer.
        offloaded_layers: numbers of the layers that are brought in every pass; none where all stay.
    """

    other_bytes: int
    layer_bytes: tuple[int, ...]
    offloaded_layers: tuple[int, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Of one slot: the largest layer that is brought."""
        return max((self.layer_bytes[layer] for layer in self.offloaded_layers), default=0)

    @property
    def host_bytes(self) -> int:
        """Outside of the device, and brought in every pass."""
        return sum(self.layer_bytes[layer] for layer in self.offloaded_layers)

    @property
    def total_bytes(self) -> int:
        """Of the whole model."""
        return self.other_bytes + sum(self.layer_bytes)

    @property
    def device_bytes(self) -> int:
        """On the device, slots included."""
        return self.total_bytes - self.host_bytes + SLOTS * self.slot_bytes

    @property
    def text(self) -> str:
        """One line for people."""
        if not self.offloaded_layers:
            return f"weights: all {format_size(self.total_bytes)} on the device"
        return (
            f"weights: {format_size(self.device_bytes)} of {format_size(self.total_bytes)} on the "
            f"device, {len(self.offloaded_layers)} of {len(self.layer_bytes)} layers brought "
            f"through {SLOTS} slots of {format_size(self.slot_bytes)}"
        )


def place_weights(
    layer_bytes: Sequence[int], other_bytes: int, budget_bytes: int | None = None
) -> WeightsPlacement:
    """Keep as many layers on the device as fit beside the slots.

    Args:
        layer_bytes: of each layer.
        other_bytes: of all else, which stays.
        budget_bytes: on the device; None: as many as there are.

    Raises:
        ConfigError: not even two slots fit beside what must stay; names the least budget.
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
        f"weights memory of {budget_bytes:,} B is too small for this model: what is no layer's "
        f"({other_bytes:,} B) and {SLOTS} slots for its {len(layer_bytes)} layers take {least:,} B "
        f"({format_size(least)}) at least, all weights {all_stay.total_bytes:,} B; raise "
        "--weights-memory"
    )


def planned_weights(
    model: ModelSpec, bytes_per_value: int | float, budget_bytes: int | None
) -> WeightsPlacement:
    """Where weights would lie, by a model's shape; its layers are taken as equally large.

    Raises:
        ConfigError: see `place_weights`.
    """
    total_bytes = model.weight_bytes(bytes_per_value)
    each_bytes = int(model.layer_parameters * bytes_per_value) // model.num_layers
    other_bytes = total_bytes - model.num_layers * each_bytes
    return place_weights([each_bytes] * model.num_layers, other_bytes, budget_bytes)


def best_pass(*, copy_s: float, batch_s: float, batch_tokens: int, most_batches: int) -> Pass:
    """The way to run full batches that processes most tokens a second; of equal ones the smallest.

    Args:
        copy_s: of all weights that are brought in a pass.
        batch_s: the device's work on one full batch, all layers.
        batch_tokens: of one.
        most_batches: that may share a pass.
    """
    rates = OffloadRates(kv_s=1.0, x_s=1.0, recompute_s=0.0, other_s=batch_s)  # KV is where it is
    ways = [
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
    return faster_pass(*ways)
